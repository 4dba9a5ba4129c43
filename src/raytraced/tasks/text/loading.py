"""A name or a path -> a text to learn from."""

import lzma
from importlib.resources import files
from pathlib import Path

import numpy as np

from raytraced.data.cache import cache_root, obtain
from raytraced.data.sources import PublicSet
from raytraced.tasks.paths import own_path, visible
from raytraced.tasks.text.catalog import CATALOG, SUFFIXES
from raytraced.tasks.text.dataset import Dataset, Text, build_dataset, held_out
from raytraced.tasks.text.file_array import text_file
from raytraced.tasks.text.tokens import encode_domains, read_tokenizer


def load(
    name: str,
    root: str | Path | None = None,
    *,
    context: int = 128,
    steps: int = 100,
    eval_tokens: int | None = 32_768,
    tokenizer: str | None = None,
) -> Dataset:
    """Load a text.

    Args:
        name: Name of a catalogued text, or path of a file or of a folder of text files.
        root: The cache folder.
        context: Number of tokens per window.
        steps: Number of steps per epoch.
        eval_tokens: Largest number of tokens of a split that evaluation uses; None uses all.
        tokenizer: Path of a tokenizer.json, or the JSON itself; None makes every byte a token.

    Returns:
        The data set; bytes of files stay on the disk.
    """
    title = name if name in CATALOG else own_path(name, CATALOG).name
    domains, lengths = read_domains(name, root), None
    if tokenizer is not None:
        tokenizer = read_tokenizer(tokenizer)
        domains, lengths = encode_domains(tokenizer, domains, cache_root(root))
    return build_dataset(
        title, domains, context=context, steps=steps, eval_tokens=eval_tokens, tokenizer=tokenizer, lengths=lengths
    )


def read_domains(name: str, root: str | Path | None) -> dict[str, dict[str, Text]]:
    """The splits of every domain of a name or a path; nothing is copied into memory."""
    if name == "shakespeare":
        return {name: held_out(Text((bundled(),)))}
    if name in CATALOG:
        return {part.name: public_splits(part, cache_root(root)) for part in CATALOG[name].parts}
    path = own_path(name, CATALOG)
    found = [path] if path.is_file() else [one for one in visible(path, below=True) if one.suffix.lower() in SUFFIXES]
    return {path.name: held_out(Text(tuple(text_file(one) for one in found if one.is_file())))}


def bundled() -> np.ndarray:
    """The ten plays shipped inside the package."""
    return np.frombuffer(lzma.decompress(files(__package__).joinpath("shakespeare.txt.xz").read_bytes()), np.uint8)


def public_splits(public_set: PublicSet, root: Path) -> dict[str, Text]:
    """The splits of a public text: its original ones, or those that every other text gets."""
    texts = {name: Text((array,)) for name, array in obtain(public_set, root).items()}
    return texts if "train" in texts else held_out(texts["text"])
