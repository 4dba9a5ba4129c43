"""A server of small models in a thread, and images to send to it."""

import base64
import io
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
import uvicorn
from PIL import Image

import raytraced
from raytraced.cli.serve import open_socket
from raytraced.serve.app import Server
from raytraced.serve.limits import Limits
from raytraced.serve.models import serve_model

SHIPPED = ("mre-digits", "mre-mnist", "mre-cifar10", "mre-paper-fashion-mnist")
GRID = {"hidden": 8, "num_experts": 3}


@pytest.fixture(scope="session")
def files(tmp_path_factory) -> Path:
    """Small models beside the shipped ones: a router without an order, a model of many exits, language models."""
    folder = tmp_path_factory.mktemp("served")
    torch.manual_seed(0)
    for name in ("top-k", "multi-exit"):
        grid = {"num_layers": 3} if name == "multi-exit" else GRID | {"num_layers": 2}
        model = raytraced.build(name, image_shape=(1, 8, 8), num_classes=3, dim=6, **grid)
        model.card = raytraced.models.card.ModelCard(name, model.card.spec, model.card.options, task="images")
        raytraced.save(model, folder / f"{name}.safetensors")
    for name in ("gpt-mre", "gpt-top-k"):
        model = raytraced.build(name, dim=16, num_heads=2, context=16, **GRID)
        raytraced.save(model, folder / f"{name}.safetensors")
    return folder


@pytest.fixture(scope="session")
def models(files):
    return [serve_model(str(source)) for source in (*SHIPPED, *sorted(files.glob("*.safetensors")))]


def running(server: Server) -> Iterator[str]:
    """The address of a server that runs in a thread until the end of the fixture, which no request can delay for long."""
    listening = open_socket("127.0.0.1", 0)
    process = uvicorn.Server(server.uvicorn_config(grace=5))
    thread = threading.Thread(target=process.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        process.should_exit = True
        thread.join(60)
        listening.close()
        server.engine.decoders.end()
        assert not thread.is_alive(), "the server did not end"


@pytest.fixture(scope="session")
def server(models) -> Server:
    return Server(models)


@pytest.fixture(scope="session")
def address(server) -> Iterator[str]:
    yield from running(server)


@pytest.fixture(scope="session")
def client(address) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=address, timeout=30) as client:
        yield client


@pytest.fixture
def small(models) -> Iterator[tuple[Server, str]]:
    """A server with narrow limits."""
    server = Server(models, Limits(body=20_000, in_progress=1, body_seconds=0.2, decoders=1))
    for address in running(server):
        yield server, address


def png(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    """An array (H, W) or (H, W, C) as a file."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def in_base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def some_images(shape: tuple[int, int, int], num: int) -> torch.Tensor:
    """Images (num, C, H, W) from dark to bright, with and without edges."""
    generator = np.random.default_rng(0)
    noise = generator.integers(0, 256, (num, *shape))
    bright = generator.random((num, 1, 1, 1))
    edges = np.where(np.arange(shape[2]) % (2 + np.arange(num)[:, None] % 5) == 0, 1.0, 0.2)[:, None, None, :]
    return torch.from_numpy((noise * bright * edges).astype(np.uint8))


def generated(model, prompt: bytes, num: int, **options) -> bytes:
    """The bytes that the library generates."""
    seed = options.pop("seed", 0)
    tokens = model.generate(torch.tensor([list(prompt)]), num, generator=torch.Generator().manual_seed(seed), **options)
    return bytes(int(drawn.tokens) for drawn in tokens)
