"""The header of a safetensors file, read with distrust: nothing in it is used before it was checked."""

import json
import os
import stat
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from raytraced.files import DamagedFileError

MAX_STORE_HEADER = 100_000_000  # the limit of the safetensors format
_LARGEST = 2**48  # bytes of a file; offsets beyond it are not read as numbers of any use
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class TensorEntry(NamedTuple):
    """A tensor of a header: its type, its shape, and where its bytes begin and end, counted from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def check_regular(path: Path) -> None:
    """Refuse what is not a regular file before it is opened: a pipe would block, a device may never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise DamagedFileError(f"{path}: foreign: is a pipe, a device or a folder; must be a regular file")


def read_header(path: Path, stream: BinaryIO) -> tuple[dict[str, str], dict[str, Any], int]:
    """The metadata, the table of tensors, and where the data begins."""
    size, begin = os.fstat(stream.fileno()).st_size, stream.read(8)
    length = int.from_bytes(begin, "little")
    if len(begin) < 8 or not 2 <= length <= MAX_STORE_HEADER:
        raise DamagedFileError(f"{path}: foreign: is not a safetensors file")
    if size < 8 + length:
        raise DamagedFileError(f"{path}: cut: ends inside its header, at byte {size}")
    try:
        table = json.loads(stream.read(length))
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"{path}: altered: its header is not the JSON of a safetensors file") from error
    metadata = table.pop("__metadata__", {}) if isinstance(table, dict) else None
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise DamagedFileError(f"{path}: altered: its header has no metadata of a safetensors file")
    return metadata, table, 8 + length


def read_format(path: Path) -> str | None:
    """The format that a safetensors file states in its metadata; None where that cannot be read."""
    try:
        check_regular(path)
        with path.open("rb") as stream:
            return read_header(path, stream)[0].get("format")
    except (DamagedFileError, OSError):
        return None


def check_table(table: dict[str, Any], num_bytes: int) -> dict[str, TensorEntry]:
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


def _check_entry(name: str, values: Any) -> TensorEntry:
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
    return TensorEntry(dtype, tuple(shape), *offsets)
