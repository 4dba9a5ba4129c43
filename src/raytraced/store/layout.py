"""The store: one safetensors file in which every expert is one aligned run of bytes, so that it can be read by itself.

    header          padded with spaces: the data begins at a multiple of ALIGNMENT
    other tensors   everything but the experts, read when the file is opened
    experts         one tensor of P numbers each, sorted by grid, layer and expert; each begins at a multiple of ALIGNMENT

The format of safetensors has no holes between tensors: tensors named "padding.0", "padding.1", … fill them. The content of a
file is not trusted. Lengths, types, offsets and overlaps are checked before anything else is read, the other tensors by a
checksum, and each expert by a checksum of its own when it is first read.
"""

import hashlib
import json
import os
import stat
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from raytraced.files import DamagedFileError, replacing_file

STORE_FORMAT = "raytraced-store-1"
ALIGNMENT = 4096  # of reads that bypass the page cache
MAX_STORE_HEADER = 100_000_000  # the limit of the safetensors format
_LARGEST = 2**48  # bytes of a file; offsets beyond it are not read as numbers of any use
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_EXPERT_DTYPES = ("F64", "F32", "F16", "BF16")


class GridShape(NamedTuple):
    """How many layers a grid of experts has, and how many experts each layer has."""

    num_layers: int
    num_experts: int


class ExpertRun(NamedTuple):
    """Where an expert is in the file, and the checksum of its numbers."""

    name: str
    offset: int
    crc32: int


@dataclass(frozen=True)
class StoreFile:
    """A store that was opened and checked.

    Args:
        path: The file.
        text: The text that was stored with the tensors: the model's card.
        tensors: Everything but the experts.
        grids: The shape of every grid of experts, by the name of its module.
        runs: The experts of all grids, in the order of `grids`, then by layer and expert.
        dtype: Type of the experts' numbers.
        num_numbers: How many numbers an expert has.
        identity: Device, inode and size of the file: what is opened later must be the same file.
    """

    path: Path
    text: str
    tensors: dict[str, Tensor]
    grids: dict[str, GridShape]
    runs: tuple[ExpertRun, ...]
    dtype: torch.dtype
    num_numbers: int
    identity: tuple[int, int, int]

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert."""
        return self.num_numbers * self.dtype.itemsize

    @property
    def run_bytes(self) -> int:
        """Bytes of one expert with its padding: what one read reads."""
        return self.expert_bytes + -self.expert_bytes % ALIGNMENT

    def first(self, grid: str) -> int:
        """The number of a grid's first expert among those of all grids."""
        before = list(self.grids)[: list(self.grids).index(grid)]
        return sum(prod(self.grids[name]) for name in before)


def identify(status: os.stat_result) -> tuple[int, int, int]:
    """What tells one file from another: its device, its inode and its size."""
    return status.st_dev, status.st_ino, status.st_size


def write_store(
    path: Path,
    tensors: Mapping[str, Tensor],
    grids: Mapping[str, GridShape],
    expert: Callable[[str, int, int], Tensor],
    text: str,
) -> None:
    """Write a store, whole or not at all.

    Args:
        path: The file to write.
        tensors: Everything but the experts.
        grids: The shape of every grid of experts, by the name of its module.
        expert: Called with a grid's name, a layer and an expert: the numbers of that expert (P,), as many for each.
        text: A text to keep with the tensors.
    """
    others = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    places = [(name, *place) for name, shape in grids.items() for place in _places(shape)]
    like = expert(*places[0])
    size = like.numel() * like.itemsize
    table, end, num_paddings = {}, 0, 0

    def add(name: str, dtype: str, shape: list[int], num_bytes: int) -> None:
        nonlocal end
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + num_bytes]}
        end += num_bytes

    def pad() -> None:
        nonlocal num_paddings
        if end % ALIGNMENT:
            add(f"padding.{num_paddings}", "U8", [-end % ALIGNMENT], -end % ALIGNMENT)
            num_paddings += 1

    for name, tensor in others.items():
        add(name, _NAMES[tensor.dtype], list(tensor.shape), tensor.nbytes)
    pad()
    for grid, layer, number in places:
        add(f"{grid}.{layer}.{number}", _NAMES[like.dtype], [like.numel()], size)
        pad()
    sums = "".join([f"{zlib.crc32(_content(expert(*place))):08x}" for place in places])
    shapes = json.dumps({name: list(shape) for name, shape in grids.items()})
    metadata = {"card": text, "crc32": sums, "format": STORE_FORMAT, "grids": shapes}
    metadata["sha256"] = _digest(others, metadata)
    header = json.dumps({"__metadata__": metadata, **table}, separators=(",", ":")).encode()
    header += b" " * (-(8 + len(header)) % ALIGNMENT)
    if len(header) > MAX_STORE_HEADER:
        raise ValueError(
            f"{path}: {len(places)} experts need a header of {len(header)} bytes; the format allows 100 MB"
        )
    with replacing_file(path) as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        for tensor in others.values():
            stream.write(_content(tensor))
        _write_padding(stream)
        for place in places:
            stream.write(_content(expert(*place)))
            _write_padding(stream)


def _write_padding(stream: BinaryIO) -> None:
    stream.write(bytes(-stream.tell() % ALIGNMENT))


def _places(shape: GridShape) -> list[tuple[int, int]]:
    return [(layer, expert) for layer in range(shape.num_layers) for expert in range(shape.num_experts)]


def _content(tensor: Tensor) -> Any:
    """The bytes of a tensor."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """SHA-256 over the metadata and the name, type, shape and bytes of every tensor that is not an expert."""
    digest = hashlib.sha256()
    for name in ("format", "card", "grids", "crc32"):
        digest.update(metadata[name].encode() + b"\0")
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        digest.update(_content(tensors[name]))
    return digest.hexdigest()


class _Entry(NamedTuple):
    """A tensor of the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_format(path: Path) -> str | None:
    """The format that a safetensors file states in its metadata; None where that cannot be read."""
    try:
        with path.open("rb") as stream:
            return _read_header(path, stream)[0].get("format")
    except (DamagedFileError, OSError):
        return None


def open_store(path: Path) -> StoreFile:
    """Open a store and check everything but the experts' own numbers.

    Args:
        path: A file that `write_store` wrote.

    Returns:
        The store; its experts are not read.

    Raises:
        DamagedFileError: The file is not a store, is cut short, or was altered.
    """
    with path.open("rb") as stream:
        metadata, table, start = _read_header(path, stream)
        if metadata.get("format") != STORE_FORMAT:
            raise DamagedFileError(f"{path}: foreign: has {metadata.get('format', 'no format')}, not {STORE_FORMAT}")
        status = os.fstat(stream.fileno())
        try:
            entries = _check_table(table, status.st_size - start)
            grids, runs = _find_experts(metadata, entries, start)
        except ValueError as error:
            raise DamagedFileError(f"{path}: {error}") from error
        expert = entries[runs[0].name]
        names = {run.name for run in runs}
        tensors = {}
        for name, entry in entries.items():
            if name not in names and not name.startswith("padding."):
                stream.seek(start + entry.begin)
                content = bytearray(stream.read(entry.end - entry.begin))
                if len(content) < entry.end - entry.begin:
                    raise DamagedFileError(f"{path}: cut: ends inside {name}")
                flat = torch.frombuffer(content, dtype=DTYPES[entry.dtype]) if content else torch.empty(0)
                tensors[name] = flat.to(DTYPES[entry.dtype]).reshape(entry.shape)
    if _digest(tensors, metadata) != metadata.get("sha256"):
        raise DamagedFileError(f"{path}: altered: its content does not match its checksum")
    dtype, numbers = DTYPES[expert.dtype], expert.shape[0]
    return StoreFile(path, metadata["card"], tensors, grids, runs, dtype, numbers, identify(status))


def _read_header(path: Path, stream: BinaryIO) -> tuple[dict[str, str], dict[str, Any], int]:
    """The metadata, the table of tensors, and where the data begins."""
    status = os.fstat(stream.fileno())
    if not stat.S_ISREG(status.st_mode):  # a pipe would block, a device may never end
        raise DamagedFileError(f"{path}: foreign: is a pipe, a device or a folder; must be a regular file")
    begin = stream.read(8)
    length = int.from_bytes(begin, "little")
    if len(begin) < 8 or not 2 <= length <= MAX_STORE_HEADER:
        raise DamagedFileError(f"{path}: foreign: is not a safetensors file")
    if status.st_size < 8 + length:
        raise DamagedFileError(f"{path}: cut: ends inside its header, at byte {status.st_size}")
    try:
        table = json.loads(stream.read(length))
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"{path}: altered: its header is not the JSON of a safetensors file") from error
    metadata = table.pop("__metadata__", {}) if isinstance(table, dict) else None
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise DamagedFileError(f"{path}: altered: its header has no metadata of a safetensors file")
    return metadata, table, 8 + length


def _check_table(table: dict[str, Any], num_bytes: int) -> dict[str, _Entry]:
    """The tensors of a header, sorted by where they begin; a ValueError for any that the file cannot hold."""
    entries = {name: _check_entry(name, values) for name, values in table.items()}
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)))
    end = 0
    for name, entry in ordered.items():
        if entry.begin != end:
            kind = "overlaps the tensor before it" if entry.begin < end else "leaves a hole before it"
            raise ValueError(
                f"altered: {name} begins at byte {entry.begin} of the data and {kind}, which ends at {end}"
            )
        end = entry.end
    if end != num_bytes:
        kind = "cut" if num_bytes < end else "altered"
        raise ValueError(f"{kind}: its tensors need {end} bytes, the file has {num_bytes} after its header")
    return ordered


def _check_entry(name: str, values: Any) -> _Entry:
    """One tensor of a header."""
    fields: dict[str, Any] = values if isinstance(values, dict) else {}
    dtype: Any = fields.get("dtype")
    shape: Any = fields.get("shape")
    offsets: Any = fields.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"altered: {name} has type {dtype!r:.40}; must be one of {', '.join(DTYPES)}")
    numbers = [*shape, *offsets] if isinstance(shape, list) and isinstance(offsets, list) else [None]
    fits = all(type(number) is int and 0 <= number <= _LARGEST for number in numbers)
    if not fits or len(offsets) != 2 or len(shape) > 16:
        raise ValueError(f"altered: {name} has a shape or offsets that are not whole numbers within a file's size")
    num_bytes = prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != num_bytes:
        raise ValueError(f"altered: {name} needs {num_bytes} bytes, its offsets are {offsets[0]} and {offsets[1]}")
    return _Entry(dtype, tuple(shape), *offsets)


def _find_experts(
    metadata: dict[str, str], entries: dict[str, _Entry], start: int
) -> tuple[dict[str, GridShape], tuple[ExpertRun, ...]]:
    """The grids that the metadata states, and where their experts are; a ValueError if the file does not hold them."""
    try:
        stated = json.loads(metadata["grids"])
        sums = bytes.fromhex(metadata["crc32"])
        grids = {name: GridShape(*shape) for name, shape in stated.items()}
        counts = [prod(shape) for shape in grids.values()]
        fits = all(type(size) is int and size >= 1 for shape in grids.values() for size in shape)
        total = sum(counts)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise ValueError("altered: its metadata does not describe grids of experts") from error
    if not fits or not total or total > len(entries) or len(sums) != 4 * total or "card" not in metadata:
        raise ValueError(f"altered: its metadata describes {total} experts, the file holds {len(entries)} tensors")
    runs: list[ExpertRun] = []
    for grid, shape in grids.items():
        for layer, number in _places(shape):
            name = f"{grid}.{layer}.{number}"
            if name not in entries:
                raise ValueError(f"altered: expert {name} is missing")
            crc = int.from_bytes(sums[4 * len(runs) : 4 * len(runs) + 4], "big")
            runs.append(ExpertRun(name, start + entries[name].begin, crc))
    first = entries[runs[0].name]
    if first.dtype not in _EXPERT_DTYPES or len(first.shape) != 1 or not first.shape[0]:
        raise ValueError(
            f"altered: expert {runs[0].name} is {first.dtype} {list(first.shape)}; must be a list of numbers"
        )
    run_bytes = first.end - first.begin
    run_bytes += -run_bytes % ALIGNMENT
    data_end = start + max(entry.end for entry in entries.values())
    for run in runs:
        entry = entries[run.name]
        if entry[:2] != first[:2]:
            raise ValueError(f"altered: expert {run.name} is {entry.dtype} {list(entry.shape)}, others are not")
        if run.offset % ALIGNMENT or run.offset + run_bytes > data_end:
            raise ValueError(f"altered: expert {run.name} begins at byte {run.offset}; must be aligned to {ALIGNMENT}")
    return grids, tuple(runs)
