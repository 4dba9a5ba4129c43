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


def visible(folder: Path, pattern: str = "*") -> list[Path]:
    """What is in a folder (or, by the pattern **/*, below it) and not hidden, in an order that no file system decides."""
    found = sorted(folder.iterdir() if pattern == "*" else folder.glob(pattern))  # glob hides what may not be read
    return [path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
