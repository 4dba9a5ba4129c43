"""The arrays of a public data set: from the cache, else from the first source that has them, always verified.

The cache has one folder per data set with one memory-mapped file per array. No entry is ever half written, and an altered
one is not used.

An entry appears by one rename of its whole folder.  Its bytes are hashed when it is written, when `raytraced data get`
asks for it, and when a file's size or time differs from what `verified.json` noted at the last hashing; any other load
checks headers and sizes only.
"""

import contextlib
import errno
import hashlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from raytraced.data.sources import ArrayInfo, Arrays, Files, PublicSet, Source, read_tar, say, show_bar
from raytraced.errors import with_notes
from raytraced.files import flush_folder, lock_file, write_file

STAMP = "verified.json"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class UnavailableError(OSError):
    """No source could provide a data set; the notes of the error say why, source by source, and the remedy."""


class DamagedError(ValueError):
    """Bytes that are not those of the data set: what was expected and what was found."""


def cache_root(root: str | Path | None = None) -> Path:
    """Return the folder of all entries: `root`, else $RAYTRACED_HOME/data, else raytraced/data in the user's cache."""
    if root is not None:
        return Path(root).expanduser().absolute()
    if home := os.environ.get("RAYTRACED_HOME"):
        return Path(home).expanduser().absolute() / "data"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    # the specification of XDG_CACHE_HOME asks that a relative path be ignored
    return (cache if cache.is_absolute() else Path("~/.cache").expanduser()) / "raytraced" / "data"


def obtain(public_set: PublicSet, root: Path, *, hashed: bool = False) -> Arrays:
    """Return the arrays of a public set from the cache, fetching them first where they are missing or altered."""
    # Another process may be replacing the entry: what is wrong here is read again below, under the lock.
    with contextlib.suppress(DamagedError, FileNotFoundError):
        return read_entry(root, public_set, hashed=hashed)
    with locked(root, public_set):
        try:
            return read_entry(root, public_set, hashed=hashed)
        except FileNotFoundError:
            pass
        except DamagedError as error:
            say(f"{public_set.name}: the cached copy is discarded and fetched again: {error}")
        replace_entry(root, public_set, fetch(public_set, root))
        return read_entry(root, public_set)


def fetch(public_set: PublicSet, root: Path) -> Arrays:
    """Return the verified arrays from the first source that has them; UnavailableError if none has."""
    named = os.environ.get("RAYTRACED_DATA")
    folders = [Path(named).expanduser(), root] if named else [root]
    sources: tuple[Path | Source, ...] = (*folders, *public_set.sources)
    failures = []
    for source in sources:
        try:
            if isinstance(source, Path):
                arrays = from_folder(source, public_set)
            else:
                say(f"{public_set.name}: trying {source}")
                with working_folder(root, public_set.name) as folder, show_bar(public_set.name) as report:
                    arrays = _verified(public_set, source.fetch(public_set.file_names, folder, report))
            say(f"{public_set.name}: taken from {source}, every checksum matches")
            return arrays
        except (ValueError, OSError) as error:
            if is_out_of_space(error):
                raise
            failures.append(f"  - {source}: {error}")
            if not isinstance(source, Path):
                say(f"{public_set.name}: failed: {error}")
    place = f"{root / public_set.folders[0]} (or name the folder that has them with RAYTRACED_DATA)"
    again = f"raytraced data get {public_set.name}{'' if root == cache_root() else f' --data-root {root}'}"
    remedy = [f"Put its original files into {place}, then run:", f"  {again}"]
    raise with_notes(UnavailableError(f"data set {public_set.name}: no source could provide it"), [*failures, *remedy])


def from_folder(folder: Path, public_set: PublicSet) -> Arrays:
    """Return the arrays of original files, or of an archive of them, that lie in one of the places in a folder."""
    problems = []
    for place in (folder / name for name in public_set.folders):
        try:
            archive = next((place / name for name in public_set.archives if (place / name).is_file()), None)
            if archive is not None:
                return _verified(public_set, read_tar(archive, public_set.file_names))
            files = [place / name for name in sorted(public_set.file_names) if (place / name).is_file()]
            if files:
                return _verified(public_set, {path.name: path.read_bytes() for path in files})
        except ValueError as error:
            problems.append(f"in {place.name}: {error}")
    raise ValueError("; ".join(problems) or f"no original files in {', '.join(public_set.folders)}")


def _verified(public_set: PublicSet, files: Files) -> Arrays:
    try:
        arrays = public_set.decode(files)
    except KeyError as error:
        raise ValueError(f"{error.args[0]}: not found") from None
    for key, info in public_set.arrays.items():
        check_array(f"{public_set.name} {key}", arrays[key], info)
    return arrays


def entry_folder(root: Path, public_set: PublicSet) -> Path:
    """Return the folder of an entry; a user's original files may be beside it in a folder of the bare name."""
    return root / f"{public_set.name}-arrays"


def check_array(label: str, array: NDArray[np.uint8], info: ArrayInfo, *, hashed: bool = True) -> None:
    """Raise DamagedError unless dtype, shape and (if `hashed`) the bytes are those of the table."""
    if array.dtype != np.uint8 or array.shape != info.shape:
        raise DamagedError(f"{label}: expected uint8 {info.shape}, found {array.dtype} {array.shape}")
    if hashed and (found := hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()) != info.sha256:
        raise DamagedError(f"{label}: expected sha256 {info.sha256}, found {found}")


def is_cached(root: Path, *sets: PublicSet) -> bool:
    """Whether every array of some public sets is in the cache folder."""
    return all((entry_folder(root, each) / f"{key}.npy").is_file() for each in sets for key in each.arrays)


def read_entry(root: Path, public_set: PublicSet, *, hashed: bool = False) -> Arrays:
    """Return the arrays of an entry as memory maps; FileNotFoundError if it is not there, DamagedError if it was altered."""
    folder, noted, stamp, arrays = entry_folder(root, public_set), {}, {}, {}
    with contextlib.suppress(OSError, ValueError, TypeError):
        noted = {} if hashed else dict(json.loads((folder / STAMP).read_text()))
    try:
        for key, info in public_set.arrays.items():
            path = folder / f"{key}.npy"
            stamp[path.name] = [path.stat().st_size, path.stat().st_mtime_ns]
            arrays[key] = _map_file(path)
            check_array(str(path), arrays[key], info, hashed=noted.get(path.name) != stamp[path.name])
    except (FileNotFoundError, NotADirectoryError):
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder}: there is no such folder") from None
        raise DamagedError(f"{folder}: expected {len(public_set.arrays)} arrays, some are missing") from None
    if noted != stamp:
        # A cache that this user may not write is hashed at every load instead.
        with contextlib.suppress(OSError):
            write_file(folder / STAMP, json.dumps(stamp))
    return arrays


def replace_entry(root: Path, public_set: PublicSet, arrays: Arrays) -> None:
    """Write an entry under a temporary name and rename it, so that no reader ever gets a part of it."""
    entry = entry_folder(root, public_set)
    with working_folder(root, public_set.name) as folder:
        (new := folder / "new").mkdir()
        for key, array in arrays.items():
            file = io.BytesIO()
            np.save(file, np.ascontiguousarray(array), allow_pickle=False)
            write_file(new / f"{key}.npy", file.getvalue())
        with contextlib.suppress(FileNotFoundError):
            entry.rename(folder / "old")  # a process that has it mapped keeps its bytes
        new.rename(entry)
        flush_folder(root)


@contextlib.contextmanager
def working_folder(root: Path, name: str) -> Iterator[Path]:
    """Make a temporary folder beside the entries and remove it at the end; call it under the lock."""
    with tempfile.TemporaryDirectory(".tmp", f".{name}.", root, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextlib.contextmanager
def locked(root: Path, public_set: PublicSet) -> Iterator[None]:
    """Hold the only right to write an entry; a failure to write names the folder and the remedy."""
    remedy = "name another folder with --data-root or RAYTRACED_HOME"
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = (root / f".{public_set.name}.lock").open("a")
    except OSError as error:
        raise OSError(f"{root}: cannot be used as the cache folder ({error.strerror}); {remedy}") from error
    with lock:
        try:
            lock_file(lock)
        except BlockingIOError:
            say(f"{public_set.name}: waiting for another process that downloads it")
            lock_file(lock, wait=True)
        # Left by a process that was killed: under the lock, no other process is writing.
        for stale in root.glob(f".{public_set.name}.*.tmp"):
            shutil.rmtree(stale, ignore_errors=True)
        try:
            yield
        except OSError as error:
            if not is_out_of_space(error):
                raise
            needed = 3 * public_set.num_bytes / 1e6  # the download, what it unpacks to, and the arrays
            raise OSError(
                f"{root}: no space left ({error.strerror}), {public_set.name} needs up to {needed:.0f} MB; {remedy}"
            ) from error


def is_out_of_space(error: BaseException) -> bool:
    """Whether the disk is full: then another source would not help."""
    return isinstance(error, OSError) and error.errno in _NO_SPACE


def _map_file(path: Path) -> NDArray[np.uint8]:
    try:
        # Copy on write: torch needs writable memory, and the file must never change.
        return np.load(path, mmap_mode="c", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DamagedError(f"{path}: expected an array of uint8, found a cut or altered file ({error})") from None
