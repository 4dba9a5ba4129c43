"""Trained models as files: weights and all that is needed to use them, in one safetensors file that cannot run code."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as decode
from safetensors.torch import save as encode
from torch import Tensor

from raytraced.files import write_file
from raytraced.models.card import ModelCard, read_card
from raytraced.models.output import Model
from raytraced.models.table import build

MODEL_FORMAT = "raytraced-model-2"
PRETRAINED = Path(__file__).parent / "pretrained"


class DamagedFileError(ValueError):
    """A file that is not, or no longer, what it should be; the text says which file and why."""


def save(model: Model, path: str | Path) -> None:
    """Write a model, its card and all, to a file, whole or not at all."""
    save_tensors(Path(path), model.state_dict(), known_card(model, "saved"))


def known_card(model: Model, done: str) -> ModelCard:
    """The card of a model with which something is to be done that needs one."""
    card: ModelCard | None = getattr(model, "card", None)  # a module that is none of ours has no such thing
    if card is None or not card.model:
        problem = "its card has no model name" if card and card.spec else "has no card"
        raise ValueError(
            f"{type(model).__name__}: {problem}; only a model made by raytraced.build or load can be {done}"
        )
    return card


def save_tensors(path: Path, tensors: Mapping[str, Tensor], card: ModelCard) -> None:
    """As `save`, for tensors gathered elsewhere."""
    try:
        text = json.dumps(asdict(card))
    except TypeError as error:
        raise ValueError(f"{card.model}: its card holds more than plain values, a file cannot: {error}") from error
    path.parent.mkdir(exist_ok=True)
    write_tensors(path, tensors, MODEL_FORMAT, "card", text)


def load(source: str | Path) -> Model:
    """The trained model of a run folder, a model.safetensors file or a shipped model's name, ready to evaluate.

    It takes inputs as they are, and `model.card` tells what it is: its options, its data, its training.
    """
    path = find_model_file(source)
    tensors, text = read_tensors(path, MODEL_FORMAT, "card")
    try:
        return rebuild(read_card(json.loads(text)), tensors)
    except (json.JSONDecodeError, RecursionError) as error:
        raise DamagedFileError(f"{path}: its card is not JSON ({error})") from error
    except (ValueError, TypeError, RuntimeError) as error:
        raise DamagedFileError(f"{path}: {' '.join(str(error).split())}") from error


def rebuild(card: ModelCard, tensors: Mapping[str, Tensor]) -> Model:
    """A model from its card and its tensors, ready to evaluate."""
    check_size(card, sum(tensor.numel() for tensor in tensors.values()))
    with torch.device("meta"):  # nothing is allocated for a card that claims what the tensors do not hold
        model = build(card.model, **card.spec, **card.options)
    precisions = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    if len(precisions) == 1:  # as it was saved, half or double too
        model.to(precisions.pop())
    fitting = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in model.state_dict().items()}
    found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    for name in (*fitting, *found):
        if found.get(name) != fitting.get(name):
            told = f"{name}: found {found.get(name, 'none')}, expected {fitting.get(name, 'none')}"
            raise ValueError(f"its tensors do not fit model {card.model!r} of this version ({told})")
    model.load_state_dict({name: tensor.clone() for name, tensor in tensors.items()}, assign=True)
    model.card = card
    return model.eval()


def check_size(card: ModelCard, num_held: int) -> None:
    """Refuse a card that claims more parts than its file holds numbers, before they are made one by one."""
    parts = (value for name, value in card.options.items() if name.startswith("num_") and type(value) is int)
    sizes = (value for value in card.spec.values() if type(value) is int)
    claimed = max([math.prod(max(1, part) for part in parts), *sizes])
    if claimed > num_held:
        raise ValueError(f"its card claims {claimed} parts, but the file holds {num_held} numbers in all")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], file_format: str, entry: str, text: str) -> None:
    """Write tensors and a text beside them, and the checksum of both, to a file, whole or not at all."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_file(path, encode(tensors, {"format": file_format, entry: text, "sha256": checksum(tensors, text)}))


def read_tensors(path: Path, file_format: str, entry: str) -> tuple[dict[str, Tensor], str]:
    """The tensors of one of our files and one entry of its metadata, verified by the checksum over both."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or content[8:9] != b"{":
        raise DamagedFileError(f"{path}: foreign: is not a safetensors file")
    if len(content) < 8 + length:
        raise DamagedFileError(f"{path}: cut: ends inside its header, at byte {len(content)}")
    try:
        metadata = json.loads(content[8 : 8 + length]).get("__metadata__") or {}
        tensors = decode(content)
    except (ValueError, SafetensorError) as error:
        raise DamagedFileError(f"{path}: cut or altered: {error}") from error
    if metadata.get("format") != file_format or entry not in metadata:
        raise DamagedFileError(f"{path}: foreign: has {metadata.get('format', 'no format')}, not {file_format}")
    if checksum(tensors, metadata[entry]) != metadata.get("sha256"):
        raise DamagedFileError(f"{path}: altered: its content does not match its checksum")
    return tensors, metadata[entry]


def checksum(tensors: Mapping[str, Tensor], text: str) -> str:
    """SHA-256 over a text and every tensor's name, type, shape and bytes."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def find_model_file(source: str | Path) -> Path:
    """The file that a run folder, a path or a shipped model's name leads to."""
    path = Path(source)
    if path.is_dir():
        if (path / "model.safetensors").exists():
            return path / "model.safetensors"
        unfinished = (path / "config.yaml").exists()
        remedy = f"; the run is not over: `raytraced resume {path}`" if unfinished else ""
        raise ValueError(f"{path}: holds no model.safetensors{remedy}")
    if path.is_file():
        return path
    shipped = PRETRAINED / f"{source}.safetensors"
    if shipped.is_file():
        return shipped
    names = ", ".join(sorted(file.stem for file in PRETRAINED.glob("*.safetensors")))
    raise ValueError(f"{source}: is neither a run folder, a file{f', nor a shipped model ({names})' if names else ''}")
