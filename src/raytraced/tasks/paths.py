"""Paths that a user gives: where one leads, and what a folder holds."""

import os
from collections.abc import Iterable
from pathlib import Path

from raytraced.errors import did_you_mean


def own_path(name: str, known: Iterable[str]) -> Path:
    """The absolute path of a file or folder, so that "." has a name; refuses one that does not exist."""
    path = Path(os.path.abspath(Path(name).expanduser()))
    if not path.exists():
        meant = did_you_mean(name, known)
        raise ValueError(f"data set {name!r}: neither a file, nor a folder, nor a known name; {meant}")
    return path


def visible(folder: Path, below: bool = False) -> list[Path]:
    """The files and folders in a folder, or everything `below` it, that are not hidden, sorted by name."""
    # Not by glob, which ignores folders that may not be read.
    found = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    if not below:
        return found
    inside = (visible(path, True) if path.is_dir() and not path.is_symlink() else [] for path in found)
    return [one for path, more in zip(found, inside, strict=True) for one in (path, *more)]
