"""Trained models as files: weights and all that is needed to use them, in one safetensors file that cannot run code."""

import hashlib
import json
import math
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
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

from raytraced.errors import printable
from raytraced.experts import MLPExperts
from raytraced.files import DamagedFileError as DamagedFileError
from raytraced.files import write_file
from raytraced.io.finding import PRETRAINED as PRETRAINED
from raytraced.io.finding import find_model_file
from raytraced.models.card import ModelCard, check_card, read_card
from raytraced.models.output import Model
from raytraced.models.registry import build, find_model
from raytraced.plugins import missing_plugins
from raytraced.store.experts import StoredExperts, expert_numbers
from raytraced.store.headers import read_format
from raytraced.store.index import is_index
from raytraced.store.layout import SHARD_FORMAT, STORE_FORMAT, GridShape, StoreFile, open_store, write_store
from raytraced.store.pool import ExpertPool, LimitError
from raytraced.store.reader import ExpertReader, parse_size

MODEL_FORMAT = "raytraced-model-2"
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format


def save(model: Model, path: str | Path, *, store: bool = False, max_shard_size: int | str | None = None) -> None:
    """Write a model's weights and its card to one file; a crash leaves the old file or the new one, never a part.

    Args:
        model: A model made by `raytraced.build` or `raytraced.load`; others have no card.
        path: The file to write, for example "model.safetensors". Equal models give equal bytes.
        store: Whether to write a store, in which each expert is one aligned run of bytes: `load(path, memory="2 GB")` then
            keeps a part of the experts in memory and reads the others when they are needed.
        max_shard_size: Of a store: the most bytes of one file, such as "5 GB"; a larger store is written as several files,
            "model-00001-of-00003.safetensors" and so on, and an index, "model.safetensors.index.json". Everything but the
            experts is in the first file, each file holds at least one expert. `load` still takes `path`. Default: one file.
    """
    card = known_card(model, "saved")
    if any(isinstance(module, StoredExperts) for module in model.modules()):
        raise ValueError(f"{model.name}: its experts are in a store, which is a file already; copy that file")
    if store:
        save_store(Path(path), model, card, max_shard_size)
    elif max_shard_size is not None:
        raise ValueError(f"max_shard_size={max_shard_size}: is for stores; give store=True too")
    else:
        save_tensors(Path(path), model.state_dict(), card)


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
    text = card_text(card)
    path.parent.mkdir(exist_ok=True)
    write_tensors(path, tensors, MODEL_FORMAT, "card", text)


def save_store(path: Path, model: Model, card: ModelCard, max_shard_size: int | str | None) -> None:
    """Write a model as a store: its experts apart, everything else as one part."""
    max_bytes = None if max_shard_size is None else parse_size("max_shard_size", max_shard_size)
    grids = {name: module for name, module in model.named_modules() if isinstance(module, MLPExperts)}
    if not grids:
        raise ValueError(f"{model.name}: has no experts, so a store has nothing to read; save it without store=True")
    sizes = {grid.num_parameters for grid in grids.values()}
    if len(sizes) > 1:
        raise ValueError(
            f"{model.name}: its experts have several sizes ({sorted(sizes)}); a store holds experts of one"
        )
    tensors = {name: value for name, value in model.state_dict().items() if not _is_within(name, grids)}
    shapes = {name: GridShape(grid.num_layers, grid.num_experts) for name, grid in grids.items()}
    text = card_text(card)
    path.parent.mkdir(exist_ok=True)
    write_store(path, tensors, shapes, lambda name, *place: expert_numbers(grids[name], *place), text, max_bytes)


def _is_within(name: str, modules: Iterable[str]) -> bool:
    """Whether a tensor's name is that of a parameter inside one of some modules."""
    return any(name.startswith(f"{module}.") for module in modules)


def card_text(card: ModelCard) -> str:
    """A card as the text that is written into a file; a ValueError if a file cannot hold it."""
    try:
        check_card(card)
        # Models that need no plugin are written as before there were any.
        return json.dumps({name: value for name, value in asdict(card).items() if name != "plugins" or value})
    except TypeError as error:
        raise ValueError(f"{card.model}: its card holds more than plain values, a file cannot: {error}") from error
    except ValueError as error:
        raise ValueError(f"{card.model}: cannot be saved: {error}") from error


def load(source: str | Path, *, memory: int | str | None = None, direct: bool | None = None) -> Model:
    """Load a trained model, ready to evaluate.

    Args:
        source: A model.safetensors file, a run folder, the name of a run in the folder `runs`, or a shipped model's name.
        memory: Of a store (`raytraced store`): the most memory that its experts may take, as bytes or as text such as
            "2 GB". Everything else is in memory besides. Default: as much as all experts take.
        direct: Of a store: whether experts are read past the operating system's page cache. Default: where the file system
            is able to.

    Returns:
        The model in evaluation mode. It takes inputs as they are stored (bytes), and `model.card` describes its options,
        its data and its training.
    """
    path = find_model_file(source)
    stated = stated_format(path)
    if stated == STORE_FORMAT:
        limit = None if memory is None else parse_size("memory", memory)
        file = open_store(path)
        return load_model(path, file.text, lambda card: rebuild_stored(card, file, limit, direct))
    if stated == SHARD_FORMAT:
        raise ValueError(f"{path}: is one of several files of a store; load its index, which ends in .index.json")
    if memory is not None or direct is not None:
        option = f"memory={memory}" if memory is not None else f"direct={direct}"
        raise ValueError(f"{option}: {path} is not a store; `raytraced store {source} FILE` writes one, load that")
    tensors, text = read_tensors(path, MODEL_FORMAT, "card")
    return load_model(path, text, lambda card: rebuild(card, tensors))


def stated_format(path: Path) -> str | None:
    """The format that a model's file states; an index is that of a store."""
    return STORE_FORMAT if is_index(path) else read_format(path)


def is_store(source: str | Path) -> bool:
    """Whether a model is in a store, whose experts are read when they are needed.

    Args:
        source: As for `load`.

    Returns:
        Whether it is.
    """
    return stated_format(find_model_file(source)) == STORE_FORMAT


def has_finite_weights(model: Model) -> bool:
    """Whether no parameter or buffer of a model in memory is NaN or infinite."""
    return all(bool(values.isfinite().all()) for values in model.state_dict().values())


def load_model(path: Path, text: str, make: Callable[[ModelCard], Model]) -> Model:
    """The model that a file's card describes; `make` builds it."""
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
        if card.plugins:
            needs = missing_plugins(card.plugins)
            raise ValueError(f"{path}: {printable(card.model)!r} is not a known model; {needs}") from error
        remedy = "install its package, give its file with --plugin, or update raytraced"
        raise ValueError(f"{path}: {error}; if it is a custom model, {remedy}") from error
    try:
        return make(card)
    except LimitError:
        raise
    except (ValueError, TypeError, RuntimeError) as error:
        raise DamagedFileError(f"{path}: {' '.join(str(error).split())}") from error


def rebuild(card: ModelCard, tensors: Mapping[str, Tensor]) -> Model:
    """Build a model from its card and its tensors, in evaluation mode."""
    model = build_empty(card, len(tensors), sum(tensor.numel() for tensor in tensors.values()))
    return fill(model, card, tensors, {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()})


def rebuild_stored(card: ModelCard, file: StoreFile, memory: int | None, direct: bool | None) -> Model:
    """Build a model from its card, with the experts of a store; without gradients, in evaluation mode."""
    num_numbers = sum(tensor.numel() for tensor in file.tensors.values()) + len(file.runs) * file.num_numbers
    model = build_empty(card, len(file.tensors) + len(file.runs), num_numbers)
    grids = {name: module for name, module in model.named_modules() if isinstance(module, MLPExperts)}
    found = {name: (*shape, file.num_numbers) for name, shape in file.grids.items()}
    expected = {name: (grid.num_layers, grid.num_experts, grid.num_parameters) for name, grid in grids.items()}
    if found != expected:
        raise ValueError(f"its experts do not fit model {card.model!r}: found {found}, expected {expected}")
    pool = ExpertPool(ExpertReader(file, direct), memory)
    for name, grid in grids.items():
        model.set_submodule(name, StoredExperts(pool, file.first(name), grid))
    dtypes = {tensor.dtype for tensor in file.tensors.values() if tensor.is_floating_point()}
    return fill(model, card, file.tensors, dtypes).requires_grad_(False)


def build_empty(card: ModelCard, num_tensors: int, num_numbers: int) -> Model:
    """The model of a card, without memory for its parameters; refuses one of far more tensors than a file holds."""
    check_size(card, num_numbers)
    # On "meta" nothing is allocated: a card may claim more than its tensors hold.
    with torch.device("meta"), limit_tensors(num_tensors):
        return build(card.model, **card.spec, **card.options)


def fill(model: Model, card: ModelCard, tensors: Mapping[str, Tensor], precisions: set[torch.dtype]) -> Model:
    """Give a model its tensors, which must be those that it expects."""
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
