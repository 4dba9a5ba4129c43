"""A user's own files: where a path leads, and what a folder holds."""

import os
from collections.abc import Iterable
from pathlib import Path

from raytraced.words import did_you_mean


def own_path(name: str, known: Iterable[str]) -> Path:
    """A file or folder from the root on, so that "." has a name; refuses what is not there, with what was probably meant."""
    path = Path(os.path.abspath(Path(name).expanduser()))
    if not path.exists():
        meant = did_you_mean(name, known)
        raise ValueError(f"data set {name!r}: neither a file, nor a folder, nor a known name; {meant}")
    return path


def visible(folder: Path, below: bool = False) -> list[Path]:
    """What is in a folder, or all `below` it, and not hidden, in an order that no file system decides."""
    # not by glob, which hides what may not be read
    found = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    if not below:
        return found
    inside = (visible(path, True) if path.is_dir() and not path.is_symlink() else [] for path in found)
    return [one for path, more in zip(found, inside, strict=True) for one in (path, *more)]
