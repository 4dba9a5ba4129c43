"""The index of a store in several files (shards), in the layout that safetensors models are usually shared in.

    plays.safetensors.index.json          {"metadata": {"total_size": …, "format": …}, "weight_map": {tensor: file}}
    plays-00001-of-00003.safetensors      everything but the experts, and the first experts
    plays-00002-of-00003.safetensors      further experts

The content of an index is not trusted: it names files of its own folder, and these must hold the tensors that it says.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from raytraced.files import DamagedFileError
from raytraced.store.headers import MAX_STORE_HEADER, check_regular

INDEX_SUFFIX = ".index.json"
MAX_SHARDS = 512  # all are open at the same time


class Index(NamedTuple):
    """Which tensors each file of a store holds, by the file's name, and the bytes of all tensors."""

    tensors: dict[str, set[str]]
    total_size: int


def index_path(path: Path) -> Path:
    """The index of a store that is written in several files under the name of `path`."""
    return path.with_name(path.name + INDEX_SUFFIX)


def is_index(path: Path) -> bool:
    """Whether a file's name is that of an index."""
    return path.name.endswith(INDEX_SUFFIX)


def shard_paths(path: Path, num: int) -> list[Path]:
    """The files of a store in `num` shards."""
    return [path.with_name(f"{path.stem}-{one:05}-of-{num:05}{path.suffix}") for one in range(1, num + 1)]


def former_shards(path: Path, kept: Iterable[Path]) -> list[Path]:
    """Shards of this name in other numbers: those of a store that was there before."""
    begin, end = f"{path.stem}-", path.suffix
    found = [each for each in path.parent.iterdir() if each.name.startswith(begin) and each.suffix == end]
    words = {each: each.stem.removeprefix(begin).split("-of-") for each in found}
    names = set(kept)
    return [
        each
        for each, numbers in words.items()
        if each not in names and len(numbers) == 2 and all(len(one) == 5 and one.isdecimal() for one in numbers)
    ]


def encode_index(tables: Mapping[str, Mapping[str, Any]], store_format: str) -> bytes:
    """The content of an index, given the table of tensors of each file."""
    weights = {tensor: file for file, table in tables.items() for tensor in table}
    ends = [each["data_offsets"][1] - each["data_offsets"][0] for table in tables.values() for each in table.values()]
    values = {"metadata": {"total_size": sum(ends), "format": store_format}, "weight_map": weights}
    return (json.dumps(values, indent=2) + "\n").encode()


def read_index(path: Path, store_format: str) -> Index:
    """Read an index and check it by itself.

    Args:
        path: The file.
        store_format: The format that it must state.

    Raises:
        DamagedFileError: It is not the index of a store.
    """
    check_regular(path)
    if path.stat().st_size > MAX_STORE_HEADER:
        raise DamagedFileError(f"{path}: foreign: is larger than any index of a store")
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"{path}: cut or altered: is not the JSON of an index") from error
    table: dict[str, Any] = values if isinstance(values, dict) else {}
    metadata, weights = table.get("metadata"), table.get("weight_map")
    if not isinstance(metadata, dict) or not isinstance(weights, dict) or not weights:
        raise DamagedFileError(f"{path}: altered: has no metadata and weight_map of an index")
    if metadata.get("format") != store_format:
        raise DamagedFileError(f"{path}: foreign: has {metadata.get('format', 'no format')!s:.40}, not {store_format}")
    total = metadata.get("total_size")
    if type(total) is not int or total < 0:
        raise DamagedFileError(f"{path}: altered: total_size is {total!r:.40}; must be a number of bytes")
    tensors: dict[str, set[str]] = {}
    for tensor, file in weights.items():
        if not is_plain_name(file):
            words = f"{tensor:.80} is in {file!r:.80}; must be the name of a .safetensors file of the same folder"
            raise DamagedFileError(f"{path}: altered: {words}")
        tensors.setdefault(file, set()).add(tensor)
    if len(tensors) > MAX_SHARDS:
        raise DamagedFileError(f"{path}: altered: names {len(tensors)} files; a store has at most {MAX_SHARDS}")
    return Index(dict(sorted(tensors.items())), total)


def is_plain_name(name: object) -> bool:
    """Whether this is the name of a safetensors file in the folder where it is stated."""
    return (
        isinstance(name, str)
        and name.endswith(".safetensors")
        and not name.startswith(".")
        and len(name) <= 255
        and not any(one in "/\\:\0" or not one.isprintable() for one in name)
    )


def check_shards(index: Index, found: Sequence[tuple[str, Mapping[str, Any]]], total_size: int) -> None:
    """Refuse files that do not hold what their index says, in a ValueError; `found` are their names and tensors."""
    for file, table in found:
        stated = index.tensors[file]
        missing, extra = sorted(stated - table.keys()), sorted(table.keys() - stated)
        if missing:
            raise ValueError(f"altered: {file} does not hold {missing[0]:.80}, which the index says it does")
        if extra:
            raise ValueError(f"altered: {file} holds {extra[0]:.80}, of which the index does not say so")
    if total_size != index.total_size:
        raise ValueError(f"altered: total_size is {index.total_size}, its files hold {total_size} bytes")
