"""The store: safetensors files in which every expert is one aligned run of bytes, so that it can be read by itself.

    header          padded with spaces: the data begins at a multiple of ALIGNMENT
    other tensors   everything but the experts, read when the file is opened
    experts         one tensor of P numbers each, sorted by grid, layer and expert; each begins at a multiple of ALIGNMENT

The format of safetensors has no holes between tensors: tensors named "padding.0", "padding.1", … fill them. A store is one
such file, or several with an index (see `raytraced.store.index`): the first holds the other tensors and the metadata of all.
The content of a file is not trusted. Lengths, types, offsets and overlaps are checked before anything else is read, the other
tensors by a checksum, and each expert by a checksum of its own when it is first read.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from raytraced.files import DamagedFileError, replacing_file
from raytraced.store.headers import DTYPES, MAX_STORE_HEADER, TensorEntry, check_regular, check_table, read_header
from raytraced.store.index import (
    MAX_SHARDS,
    check_shards,
    encode_index,
    former_shards,
    index_path,
    is_index,
    read_index,
    shard_paths,
)

STORE_FORMAT = "raytraced-store-1"
SHARD_FORMAT = "raytraced-store-shard-1"
ALIGNMENT = 4096  # of reads that bypass the page cache
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_EXPERT_DTYPES = ("F64", "F32", "F16", "BF16")


class GridShape(NamedTuple):
    """How many layers a grid of experts has, and how many experts each layer has."""

    num_layers: int
    num_experts: int


class ExpertRun(NamedTuple):
    """Where an expert is in its file, the checksum of its numbers, and the number of the file."""

    name: str
    offset: int
    crc32: int
    shard: int = 0


class Shard(NamedTuple):
    """A file of a store; device, inode and size say which: what is opened later must be the same file."""

    path: Path
    identity: tuple[int, int, int]


@dataclass(frozen=True)
class StoreFile:
    """A store that was opened and checked.

    Args:
        path: The file, or the index of several.
        text: The text that was stored with the tensors: the model's card.
        tensors: Everything but the experts.
        grids: The shape of every grid of experts, by the name of its module.
        runs: The experts of all grids, in the order of `grids`, then by layer and expert.
        dtype: Type of the experts' numbers.
        num_numbers: How many numbers an expert has.
        shards: The files.
    """

    path: Path
    text: str
    tensors: dict[str, Tensor]
    grids: dict[str, GridShape]
    runs: tuple[ExpertRun, ...]
    dtype: torch.dtype
    num_numbers: int
    shards: tuple[Shard, ...]

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert."""
        return self.num_numbers * self.dtype.itemsize

    @property
    def run_bytes(self) -> int:
        """Bytes of one expert with its padding: what one read reads."""
        return self.expert_bytes + -self.expert_bytes % ALIGNMENT

    def first(self, grid: str) -> int:
        """The number of a grid's first expert among those of all grids.

        Args:
            grid: Name of the grid.

        Returns:
            The number, from 0.
        """
        before = list(self.grids)[: list(self.grids).index(grid)]
        return sum(prod(self.grids[name]) for name in before)


def identify(status: os.stat_result) -> tuple[int, int, int]:
    """What distinguishes one file from another: its device, its inode and its size."""
    return status.st_dev, status.st_ino, status.st_size


class _Table:
    """The tensors of one file in the order in which they are written.

    Args:
        num_paddings: How many tensors of padding the files before have.
    """

    def __init__(self, num_paddings: int) -> None:
        self.entries: dict[str, dict[str, Any]] = {}
        self.end, self.num_paddings = 0, num_paddings

    def add(self, name: str, dtype: str, shape: list[int], num_bytes: int) -> None:
        self.entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [self.end, self.end + num_bytes]}
        self.end += num_bytes

    def pad(self) -> None:
        """Let the next tensor begin at a multiple of the alignment."""
        if missing := -self.end % ALIGNMENT:
            self.add(f"padding.{self.num_paddings}", "U8", [missing], missing)
            self.num_paddings += 1

    def header(self, path: Path, metadata: Mapping[str, str]) -> bytes:
        """The header of the file, with its length in front."""
        content = json.dumps({"__metadata__": metadata, **self.entries}, separators=(",", ":")).encode()
        content += b" " * (-(8 + len(content)) % ALIGNMENT)
        if len(content) > MAX_STORE_HEADER:
            words = f"{len(self.entries)} tensors need a header of {len(content)} bytes; the format allows 100 MB"
            raise ValueError(f"{path}: {words}")
        return len(content).to_bytes(8, "little") + content


_Place = tuple[str, int, int]  # grid, layer, expert


def write_store(
    path: Path,
    tensors: Mapping[str, Tensor],
    grids: Mapping[str, GridShape],
    expert: Callable[[str, int, int], Tensor],
    text: str,
    max_shard_bytes: int | None = None,
) -> Path:
    """Write a store, whole or not at all.

    Args:
        path: The file to write.
        tensors: Everything but the experts.
        grids: The shape of every grid of experts, by the name of its module.
        expert: Called with a grid's name, a layer and an expert: the numbers of that expert (P,), as many for each.
        text: A text to keep with the tensors.
        max_shard_bytes: The most bytes of tensors in one file; more are written to several files beside `path` and an index.
            Everything but the experts is in the first; each has at least one expert. None: one file.

    Returns:
        The file, or the index of several.
    """
    others = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    places = [(name, *place) for name, shape in grids.items() for place in _places(shape)]
    like = expert(*places[0])
    shares = _share_out(
        places, _padded(sum(tensor.nbytes for tensor in others.values())), _padded(like.nbytes), max_shard_bytes
    )
    is_whole = len(shares) == 1
    paths = [path] if is_whole else shard_paths(path, len(shares))
    tables = _make_tables([file.name for file in paths], shares, others, like)
    sums = "".join([f"{zlib.crc32(_content(expert(*place))):08x}" for place in places])
    shapes = json.dumps({name: list(shape) for name, shape in grids.items()})
    metadata = {"card": text, "crc32": sums, "format": STORE_FORMAT if is_whole else SHARD_FORMAT, "grids": shapes}
    metadata["sha256"] = _digest(others, metadata)
    rest = {name: metadata[name] for name in ("format", "sha256")}  # of the other files: which store they belong to
    with ExitStack() as stack:
        # The first to be opened is the last to be renamed: an index names files that are there.
        if not is_whole:
            index = stack.enter_context(replacing_file(index_path(path)))
            index.write(encode_index({name: table.entries for name, table in tables.items()}, STORE_FORMAT))
        for file, share in zip(paths, shares, strict=True):
            stream = stack.enter_context(replacing_file(file))
            is_first = file is paths[0]
            stream.write(tables[file.name].header(file, metadata if is_first else rest))
            for tensor in others.values() if is_first else ():
                stream.write(_content(tensor))
            _write_padding(stream)
            for place in share:
                stream.write(_content(expert(*place)))
                _write_padding(stream)
    # A store that was there before under this name, in other files, is replaced.
    former = [index_path(path)] if is_whole else [path]
    for each in (*former, *former_shards(path, paths)):
        each.unlink(missing_ok=True)
    return path if is_whole else index_path(path)


def _make_tables(
    names: Sequence[str], shares: Sequence[Sequence[_Place]], others: Mapping[str, Tensor], like: Tensor
) -> dict[str, _Table]:
    """What each file holds, by its name; the first everything but the experts, too."""
    tables: dict[str, _Table] = {}
    num_paddings = 0
    for file, share in zip(names, shares, strict=True):
        table = tables[file] = _Table(num_paddings)
        for name, tensor in others.items() if file == names[0] else ():
            table.add(name, _NAMES[tensor.dtype], list(tensor.shape), tensor.nbytes)
        table.pad()
        for grid, layer, number in share:
            table.add(f"{grid}.{layer}.{number}", _NAMES[like.dtype], [like.numel()], like.nbytes)
            table.pad()
        num_paddings = table.num_paddings
    return tables


def _share_out(places: list[_Place], first: int, size: int, max_bytes: int | None) -> list[list[_Place]]:
    """The experts of each file, if everything else takes `first` bytes of the first file and an expert `size` bytes."""
    if max_bytes is None or first + len(places) * size <= max_bytes:
        return [places]
    each = max(1, max_bytes // size)
    begin = max(1, (max_bytes - first) // size)
    shares = [places[:begin], *[places[start : start + each] for start in range(begin, len(places), each)]]
    if len(shares) > MAX_SHARDS:
        least = size * -(-len(places) // (MAX_SHARDS - 1))
        words = f"gives {len(shares)} files, must give at most {MAX_SHARDS}: allow at least {least}"
        raise ValueError(f"max_shard_size={max_bytes}: {words}")
    return shares


def _padded(num_bytes: int) -> int:
    return num_bytes + -num_bytes % ALIGNMENT


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


class _Part(NamedTuple):
    """A file of a store whose header was checked: its tensors, sorted by where they begin."""

    shard: Shard
    stream: BinaryIO
    metadata: dict[str, str]
    entries: dict[str, TensorEntry]
    start: int  # where the data begins

    def read(self, name: str) -> Tensor:
        """One of the tensors."""
        entry = self.entries[name]
        self.stream.seek(self.start + entry.begin)
        content = bytearray(self.stream.read(entry.end - entry.begin))
        if len(content) < entry.end - entry.begin:
            raise DamagedFileError(f"{self.shard.path}: cut: ends inside {name}")
        flat = torch.frombuffer(content, dtype=DTYPES[entry.dtype]) if content else torch.empty(0)
        return flat.to(DTYPES[entry.dtype]).reshape(entry.shape)


def open_store(path: Path) -> StoreFile:
    """Open a store and check everything but the experts' own numbers.

    Args:
        path: The file or the index that `write_store` wrote.

    Returns:
        The store; its experts are not read.

    Raises:
        DamagedFileError: The file is not a store, is cut short, or was altered.
    """
    with ExitStack() as stack:
        parts = _open_parts(path, stack)
        metadata = parts[0].metadata
        try:
            grids, runs = _find_experts(metadata, parts)
        except ValueError as error:
            raise DamagedFileError(f"{path}: {error}") from error
        names = {run.name for run in runs}
        rest = [(name, part) for part in parts for name in part.entries if name not in names]
        tensors = {name: part.read(name) for name, part in rest if not name.startswith("padding.")}
    if _digest(tensors, metadata) != metadata.get("sha256"):
        raise DamagedFileError(f"{path}: altered: its content does not match its checksum")
    expert = parts[runs[0].shard].entries[runs[0].name]
    shards = tuple([part.shard for part in parts])
    return StoreFile(path, metadata["card"], tensors, grids, runs, DTYPES[expert.dtype], expert.shape[0], shards)


def _open_parts(path: Path, stack: ExitStack) -> list[_Part]:
    """The files of a store, in the order of their names; closed with the stack."""
    if not is_index(path):
        return [_open_part(path, stack, STORE_FORMAT)]
    index, parts = read_index(path, STORE_FORMAT), []
    for file in index.tensors:
        try:
            parts.append(_open_part(path.with_name(file), stack, SHARD_FORMAT))
        except FileNotFoundError as error:
            raise DamagedFileError(f"{path}: cut: {file}, one of its files, is missing") from error
    total = sum(max((entry.end for entry in part.entries.values()), default=0) for part in parts)
    try:
        check_shards(index, [(part.shard.path.name, part.entries) for part in parts], total)
    except ValueError as error:
        raise DamagedFileError(f"{path}: {error}") from error
    for part in parts:
        if part.metadata.get("sha256") != parts[0].metadata.get("sha256"):
            names = f"{part.shard.path.name} and {parts[0].shard.path.name}"
            raise DamagedFileError(f"{path}: altered: {names} are files of two stores")
    return parts


def _open_part(path: Path, stack: ExitStack, expected: str) -> _Part:
    check_regular(path)
    stream = stack.enter_context(path.open("rb"))
    status = os.fstat(stream.fileno())
    metadata, table, start = read_header(path, stream)
    if metadata.get("format") != expected:
        raise DamagedFileError(f"{path}: foreign: has {metadata.get('format', 'no format')}, not {expected}")
    try:
        entries = check_table(table, status.st_size - start)
    except ValueError as error:
        raise DamagedFileError(f"{path}: {error}") from error
    return _Part(Shard(path, identify(status)), stream, metadata, entries, start)


def _find_experts(
    metadata: dict[str, str], parts: Sequence[_Part]
) -> tuple[dict[str, GridShape], tuple[ExpertRun, ...]]:
    """The grids that the metadata states, and where their experts are; a ValueError if the files do not hold them."""
    homes = {name: number for number, part in enumerate(parts) for name in part.entries}
    try:
        stated = json.loads(metadata["grids"])
        sums = bytes.fromhex(metadata["crc32"])
        grids = {name: GridShape(*shape) for name, shape in stated.items()}
        counts = [prod(shape) for shape in grids.values()]
        fits = all(type(size) is int and size >= 1 for shape in grids.values() for size in shape)
        total = sum(counts)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise ValueError("altered: its metadata does not describe grids of experts") from error
    if not fits or not total or total > len(homes) or len(sums) != 4 * total or "card" not in metadata:
        raise ValueError(f"altered: its metadata describes {total} experts, the file holds {len(homes)} tensors")
    runs: list[ExpertRun] = []
    for grid, shape in grids.items():
        for layer, number in _places(shape):
            name = f"{grid}.{layer}.{number}"
            if name not in homes:
                raise ValueError(f"altered: expert {name} is missing")
            crc = int.from_bytes(sums[4 * len(runs) : 4 * len(runs) + 4], "big")
            part = parts[homes[name]]
            runs.append(ExpertRun(name, part.start + part.entries[name].begin, crc, homes[name]))
    _check_runs(runs, parts)
    return grids, tuple(runs)


def _check_runs(runs: Sequence[ExpertRun], parts: Sequence[_Part]) -> None:
    """Refuse experts that differ in type or size, or cannot be read by themselves, in a ValueError."""
    first = parts[runs[0].shard].entries[runs[0].name]
    if first.dtype not in _EXPERT_DTYPES or len(first.shape) != 1 or not first.shape[0]:
        raise ValueError(
            f"altered: expert {runs[0].name} is {first.dtype} {list(first.shape)}; must be a list of numbers"
        )
    run_bytes = _padded(first.end - first.begin)
    ends = [part.start + max((entry.end for entry in part.entries.values()), default=0) for part in parts]
    for run in runs:
        entry = parts[run.shard].entries[run.name]
        if entry[:2] != first[:2]:
            raise ValueError(f"altered: expert {run.name} is {entry.dtype} {list(entry.shape)}, others are not")
        if run.offset % ALIGNMENT or run.offset + run_bytes > ends[run.shard]:
            raise ValueError(f"altered: expert {run.name} begins at byte {run.offset}; must be aligned to {ALIGNMENT}")
