"""Trained models as files: weights and all that is needed to use them, in one safetensors file that cannot run code."""

import hashlib
import json
import math
import stat
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as decode
from safetensors.torch import save as encode
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from raytraced.files import write_file
from raytraced.io.finding import PRETRAINED as PRETRAINED
from raytraced.io.finding import find_model_file
from raytraced.models.card import ModelCard, check_card, read_card
from raytraced.models.output import Model
from raytraced.models.registry import build, find_model

MODEL_FORMAT = "raytraced-model-2"
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format


class DamagedFileError(ValueError):
    """A file whose content is cut, altered or of another format; the message names the file and the reason."""


def save(model: Model, path: str | Path) -> None:
    """Write a model's weights and its card to one file; a crash leaves the old file or the new one, never a part.

    Args:
        model: A model made by `raytraced.build` or `raytraced.load`; others have no card.
        path: The file to write, for example "model.safetensors". Equal models give equal bytes.
    """
    save_tensors(Path(path), model.state_dict(), known_card(model, "saved"))


def known_card(model: Model, done: str) -> ModelCard:
    """The card of a model; a ValueError says that a model without one cannot be `done` ("saved", "shared")."""
    card: ModelCard | None = getattr(model, "card", None)  # a module that is not a Model has no card
    if card is None or not card.model:
        problem = "its card has no model name" if card and card.spec else "has no card"
        raise ValueError(
            f"{type(model).__name__}: {problem}; only a model made by raytraced.build or load can be {done}"
        )
    return card


def save_tensors(path: Path, tensors: Mapping[str, Tensor], card: ModelCard) -> None:
    """As `save`, for the tensors of a state dict that was gathered elsewhere."""
    try:
        check_card(card)
        text = json.dumps(asdict(card))
    except TypeError as error:
        raise ValueError(f"{card.model}: its card holds more than plain values, a file cannot: {error}") from error
    except ValueError as error:
        raise ValueError(f"{card.model}: cannot be saved: {error}") from error
    path.parent.mkdir(exist_ok=True)
    write_tensors(path, tensors, MODEL_FORMAT, "card", text)


def load(source: str | Path) -> Model:
    """Load a trained model, ready to evaluate.

    Args:
        source: A model.safetensors file, a run folder, the name of a run in the folder `runs`, or a shipped model's name.

    Returns:
        The model in evaluation mode. It takes inputs as they are stored (bytes), and `model.card` describes its options,
        its data and its training.
    """
    path = find_model_file(source)
    tensors, text = read_tensors(path, MODEL_FORMAT, "card")
    try:
        card = read_card(json.loads(text))
    except json.JSONDecodeError as error:
        raise DamagedFileError(f"{path}: its card is not JSON ({error})") from error
    except RecursionError as error:
        raise DamagedFileError(f"{path}: its card is not JSON of a card: it is nested too deeply") from error
    except ValueError as error:
        raise DamagedFileError(f"{path}: {error}") from error
    try:
        find_model(card.model)
    except ValueError as error:  # a whole file, of a router or a version that is not installed
        remedy = "import the module that registers it first, or update raytraced"
        raise ValueError(f"{path}: {error}; if it is a custom model, {remedy}") from error
    try:
        return rebuild(card, tensors)
    except (ValueError, TypeError, RuntimeError) as error:
        raise DamagedFileError(f"{path}: {' '.join(str(error).split())}") from error


def rebuild(card: ModelCard, tensors: Mapping[str, Tensor]) -> Model:
    """Build a model from its card and its tensors, in evaluation mode."""
    check_size(card, sum(tensor.numel() for tensor in tensors.values()))
    # On "meta" nothing is allocated: a card may claim more than its tensors hold.
    with torch.device("meta"), limit_tensors(len(tensors)):
        model = build(card.model, **card.spec, **card.options)
    precisions = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    if len(precisions) == 1:  # as it was saved, in half or double precision too
        model.to(precisions.pop())
    expected = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in model.state_dict().items()}
    found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    for name in (*expected, *found):
        if found.get(name) != expected.get(name):
            difference = f"{name}: found {found.get(name, 'none')}, expected {expected.get(name, 'none')}"
            raise ValueError(f"its tensors do not fit model {card.model!r} of this version ({difference})")
    model.load_state_dict({name: tensor.clone() for name, tensor in tensors.items()}, assign=True)
    model.card = card
    return model.eval()


def check_size(card: ModelCard, num_held: int) -> None:
    """Refuse a card that claims more parts than its file holds numbers, before they are built one by one."""
    parts = (value for name, value in card.options.items() if name.startswith("num_") and isinstance(value, int))
    sizes = (value for value in card.spec.values() if isinstance(value, int))
    claimed = max([math.prod(max(1, part) for part in parts), *sizes])
    if claimed > num_held:
        raise ValueError(f"its card claims {claimed} parts, but the file holds {num_held} numbers in all")


@contextmanager
def limit_tensors(num_tensors: int) -> Iterator[None]:
    """Stop a model that this thread builds once it has far more parameters and buffers than a state dict of this size."""
    # A parameter may be registered by a module that lends it to another, so a model may register each of them twice.
    remaining, thread = 100 + 4 * num_tensors, threading.get_ident()

    def count(module: nn.Module, name: str, value: Any) -> None:
        nonlocal remaining
        remaining -= threading.get_ident() == thread
        if remaining < 0:
            raise ValueError(f"it describes a model of many more tensors than {num_tensors}; make the model smaller")

    hooks = [register_module_parameter_registration_hook(count), register_module_buffer_registration_hook(count)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def write_tensors(path: Path, tensors: Mapping[str, Tensor], file_format: str, entry: str, text: str) -> None:
    """Write tensors, a text under the name `entry`, and the checksum of both, to a file, whole or not at all."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    metadata = {"format": file_format, entry: text, "sha256": checksum(tensors, text)}
    write_file(path, sort_metadata(encode(tensors, metadata)))


def sort_metadata(content: bytes) -> bytes:
    """The same safetensors file with its metadata in alphabetical order; safetensors writes it in a random order."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # tensors start at a multiple of eight bytes
    return b"".join((len(encoded).to_bytes(8, "little"), encoded, memoryview(content)[end:]))


def read_tensors(path: Path, file_format: str, entry: str) -> tuple[dict[str, Tensor], str]:
    """The tensors of a file that `write_tensors` wrote, and the text under the name `entry`, verified by their checksum."""
    content = read_content(path)
    end = 8 + int.from_bytes(content[:8], "little")
    try:
        metadata = json.loads(content[8:end]).get("__metadata__") or {}
        tensors = decode(content)
    except RecursionError as error:
        raise DamagedFileError(f"{path}: altered: its header is nested too deeply") from error
    except (ValueError, SafetensorError) as error:
        raise DamagedFileError(f"{path}: cut or altered: {error}") from error
    if metadata.get("format") != file_format or entry not in metadata:
        raise DamagedFileError(f"{path}: foreign: has {metadata.get('format', 'no format')}, not {file_format}")
    if checksum(tensors, metadata[entry]) != metadata.get("sha256"):
        raise DamagedFileError(f"{path}: altered: its content does not match its checksum")
    return tensors, metadata[entry]


def read_content(path: Path) -> bytes:
    """The content of a safetensors file; what is not a regular file, or has no such header, is not read at all."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # a pipe would block, a device may never end
        raise DamagedFileError(f"{path}: foreign: is a pipe, a device or a folder; must be a regular file")
    with path.open("rb") as stream:
        start = stream.read(9)
        length = int.from_bytes(start[:8], "little")
        if start[8:] != b"{" or length > MAX_HEADER_BYTES:
            raise DamagedFileError(f"{path}: foreign: is not a safetensors file")
        if status.st_size < 8 + length:
            raise DamagedFileError(f"{path}: cut: ends inside its header, at byte {status.st_size}")
        return start + stream.read()


def checksum(tensors: Mapping[str, Tensor], text: str) -> str:
    """SHA-256 over a text and every tensor's name, type, shape and bytes."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
