"""Random requests, valid and malformed, drawn with a seed."""

import base64
import io
import json
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

TEXT_PATHS = ("/api/generate", "/v1/completions")
WORDS = ("Once upon", "a", "", "\n", "Ünïcödé", "def f(x):\n", "0123456789" * 3, "\U0001f600")
NASTY: list[Any] = [
    None, True, False, -1, 0, 1, 1.5, -0.0, 1e308, 10**30, 2**63, "", "x", "0", "NaN", "\x00", "\ud800", [], [[]], {}, [None],
    {"a": {}}, [[1, 2], [3]], "9" * 400, -(10**15), 0.1, [0] * 300, "../../etc/passwd", "%s%n", "<script>", [[[[[1]]]]],
]  # fmt: skip


class ServedModel(NamedTuple):
    """A model as `/api/models` describes it."""

    name: str
    image_shape: tuple[int, int, int] | None
    vocab_size: int | None
    context: int | None
    along_the_way: bool


class RandomRequest(NamedTuple):
    """A request: its path and body; `raw` is the whole of one that is not HTTP."""

    path: str
    body: bytes = b""
    content_type: str = "application/json"
    raw: bytes | None = None


def read_models(listed: Sequence[dict[str, Any]]) -> list[ServedModel]:
    """The models of a server, from its answer to /api/models."""
    return [
        ServedModel(
            one["name"],
            tuple(one["image_shape"]) if "image_shape" in one else None,
            one.get("vocab_size"),
            one.get("context"),
            one["answers_along_the_way"],
        )
        for one in listed
    ]


def draw_file(rng: random.Random, shape: tuple[int, int, int]) -> bytes:
    """An image file of any size and format that the server takes."""
    numbers = np.random.default_rng(rng.randrange(2**32))
    height, width = (rng.choice((size, rng.randrange(1, 50))) for size in shape[1:])
    pixels = numbers.integers(0, 256, (height, width, 3), dtype=np.uint8)
    image = Image.fromarray(pixels if rng.random() < 0.5 else pixels[..., 0])
    file = io.BytesIO()
    image.save(file, rng.choice(("PNG", "JPEG", "WEBP", "GIF")))
    return file.getvalue()


def draw_image(rng: random.Random, shape: tuple[int, int, int]) -> Any:
    """An image of a request: a file in base64, or nested lists."""
    if rng.random() < 0.5:
        return base64.b64encode(draw_file(rng, shape)).decode()
    pixels = np.random.default_rng(rng.randrange(2**32)).integers(0, 256, shape)
    return (pixels[0] if shape[0] == 1 and rng.random() < 0.5 else pixels).tolist()


def some(rng: random.Random, **options: Callable[[], Any]) -> dict[str, Any]:
    """Some of the options, each with a value that is drawn."""
    return {name: draw() for name, draw in options.items() if rng.random() < 0.4}


def draw_valid_fields(rng: random.Random, model: ServedModel) -> tuple[str, dict[str, Any]]:
    """The path and the fields of a request that must be answered with 200."""
    budget = {"max_experts": lambda: rng.randrange(6)} if model.along_the_way else {}
    seed = {"seed": lambda: rng.randrange(2**53)}
    if model.image_shape is None:
        path = rng.choice(TEXT_PATHS)
        shared = {"temperature": lambda: rng.choice((0, 0.7, 2.0)), "top_p": lambda: rng.choice((0.1, 0.9, 1.0))}
        options = some(rng, **budget, **seed, **shared)
        if path == "/api/generate":
            return path, options | {"model": model.name, "text": rng.choice(WORDS), "length": rng.randrange(1, 9)}
        options |= some(
            rng, n=lambda: rng.randrange(1, 4), stream=lambda: rng.random() < 0.5, echo=lambda: rng.random() < 0.5,
            logprobs=lambda: rng.randrange(6), stop=lambda: rng.choice(("e", ["\n", "th"])),
        )  # fmt: skip
        assert model.vocab_size is not None
        tokens = [rng.randrange(model.vocab_size) for _ in range(rng.randrange(1, 9))]
        prompt = rng.choice((rng.choice(WORDS), tokens, [tokens, tokens[:1]], list(WORDS[:2])))
        return path, options | {"model": model.name, "prompt": prompt, "max_tokens": rng.randrange(9)}
    path = rng.choice(("/api/predict", "/api/stream"))
    shape = model.image_shape
    options = some(rng, **budget, **seed, confidence=lambda: rng.random(), max_ms=lambda: rng.uniform(9999, 99999))
    if model.along_the_way and rng.random() < 0.3:
        options["select"] = "greedy"
    options["model"] = model.name
    if path == "/api/predict" and rng.random() < 0.4:
        options["images"] = [draw_image(rng, shape) for _ in range(rng.randrange(1, 5))]
        options["trace"] = rng.random() < 0.3
    else:
        options["image"] = draw_image(rng, shape)
    return path, options


def draw_valid(rng: random.Random, models: Sequence[ServedModel]) -> RandomRequest:
    """A request that must be answered with 200."""
    path, fields = draw_valid_fields(rng, rng.choice(models))
    return RandomRequest(path, json.dumps(fields).encode())


def draw_malformed(rng: random.Random, models: Sequence[ServedModel]) -> RandomRequest:
    """A valid request that is damaged in some way, or no request at all; some damage does no harm."""
    path, fields = draw_valid_fields(rng, rng.choice(models))
    damage = rng.choice(
        (
            damage_field,
            damage_field,
            damage_bytes,
            cut_body,
            add_field,
            nest,
            other_path,
            other_type,
            raw_bytes,
            damage_file,
        )
    )
    return damage(rng, path, fields)


def damage_field(rng: random.Random, path: str, fields: dict[str, Any]) -> RandomRequest:
    """Some fields have any value."""
    for name in rng.sample(sorted(fields), rng.randrange(1, len(fields) + 1)):
        if rng.random() < 0.2:
            del fields[name]
        else:
            fields[name] = rng.choice(NASTY)
    return RandomRequest(path, json.dumps(fields).encode())


def damage_bytes(rng: random.Random, path: str, fields: dict[str, Any]) -> RandomRequest:
    """Some bytes of the JSON are others."""
    body = bytearray(json.dumps(fields).encode())
    for _ in range(rng.randrange(1, 5)):
        body[rng.randrange(len(body))] = rng.randrange(256)
    return RandomRequest(path, bytes(body))


def cut_body(rng: random.Random, path: str, fields: dict[str, Any]) -> RandomRequest:
    """The JSON ends too early."""
    body = json.dumps(fields).encode()
    return RandomRequest(path, body[: rng.randrange(len(body))])


def add_field(rng: random.Random, path: str, fields: dict[str, Any]) -> RandomRequest:
    """There is a field that no request has, or one of another path."""
    name = rng.choice(
        ("__class__", "files", "trace", "length", "stop", "prompt", "id", "\ud800", "a" * 3000, "best_of")
    )
    return RandomRequest(path, json.dumps(fields | {name: rng.choice(NASTY)}).encode())


def nest(rng: random.Random, path: str, fields: dict[str, Any]) -> RandomRequest:
    """A value is nested deeply, or is a very long list; some bodies are larger than the limit."""
    name = rng.choice(sorted(fields))
    depth = rng.choice((10, 1000, 100_000))
    value = rng.choice(
        ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth, str([7] * rng.choice((10**4, 10**6))))
    )
    rest = json.dumps({other: one for other, one in fields.items() if other != name})
    return RandomRequest(path, f'{{"{name}": {value}, {rest[1:]}'.encode())


def other_path(rng: random.Random, path: str, fields: dict[str, Any]) -> RandomRequest:
    """The body belongs to another path, or the path to no one."""
    others = [
        "/api/predict",
        "/api/stream",
        "/api/upload",
        *TEXT_PATHS,
        "/v1/models",
        "/metrics",
        "/healthz",
        "/%2e%2e/",
    ]
    others += [
        "/v2/models/mre-digits/infer",
        "/v2/models/x/infer",
        "/" + "a" * 5000,
        "/api/predict?x=1",
        "//",
        "/\u00ff",
    ]
    return RandomRequest(rng.choice(others), json.dumps(fields).encode())


def other_type(rng: random.Random, path: str, fields: dict[str, Any]) -> RandomRequest:
    """The body is declared as something else, or is a broken form."""
    kinds = [
        "text/plain",
        "",
        "multipart/form-data",
        "multipart/form-data; boundary=x",
        "application/json; charset=utf-16",
    ]
    body = rng.choice(
        (json.dumps(fields).encode(), b"--x\r\n\r\n\r\n--x--", b"--x\r\nContent-Disposition: form-data\r\n")
    )
    return RandomRequest(rng.choice((path, "/api/upload")), body, rng.choice(kinds))


def raw_bytes(rng: random.Random, path: str, fields: dict[str, Any]) -> RandomRequest:
    """Not HTTP, or HTTP that contradicts itself."""
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    chunked = head + "Transfer-Encoding: chunked\r\n"
    found = [
        rng.randbytes(rng.randrange(1, 200)) + b"\r\n\r\n", b"\r\n\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n",
        f"{head}Content-Length: -5\r\n\r\n{{}}".encode(), f"{head}Content-Length: 5\r\nContent-Length: 6\r\n\r\n{{}}".encode(),
        f"{head}Content-Length: 99999999999999\r\n\r\n{{}}".encode(), f"{chunked}\r\nzz\r\n{{}}\r\n0\r\n\r\n".encode(),
        f"{chunked}\r\n2\r\n{{}}\r\n0\r\n\r\n".encode(),
        f"{head}Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{{}}".encode(),
        head.encode() + b"X: " + b"a" * 100_000 + b"\r\n\r\n", head.replace("127.0.0.1", "evil").encode() + b"\r\n",
        f"{head}Origin: http://evil\r\nContent-Length: 2\r\n\r\n{{}}".encode(),
        b"PUT /api/predict HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    ]  # fmt: skip
    return RandomRequest(path, raw=rng.choice(found))


def damage_file(rng: random.Random, path: str, fields: dict[str, Any]) -> RandomRequest:
    """An image file with other bytes, cut short, or with something behind it."""
    content = bytearray(draw_file(rng, (1, 8, 8)))
    for _ in range(rng.randrange(20)):
        content[rng.randrange(len(content))] = rng.randrange(256)
    damaged = bytes(content[: rng.choice((None, rng.randrange(len(content))))]) + rng.choice((b"", b"\0" * 50))
    kept = {name: one for name, one in fields.items() if name in ("model", "max_experts", "confidence", "seed")}
    return RandomRequest("/api/predict", json.dumps(kept | {"image": base64.b64encode(damaged).decode()}).encode())
