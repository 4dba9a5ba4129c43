"""The cache: a folder a data set, in it one memory-mapped file an array, never half written, never used when altered.

An entry appears by one rename of its whole folder.  Its bytes are hashed when it is written, when `raytraced data get`
asks for it, and when a file's size or time differs from what `verified.json` noted at the last hashing; any other load
checks headers and sizes only.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .catalog import ArrayInfo, PublicSet
from .decode import Arrays
from .progress import say

STAMP = "verified.json"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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


def entry_folder(root: Path, public_set: PublicSet) -> Path:
    """Return the folder of an entry; a user's original files may well lie beside it in a folder of the bare name."""
    return root / f"{public_set.name}-arrays"


def check_array(label: str, array: NDArray[np.uint8], info: ArrayInfo, *, hashed: bool = True) -> None:
    """Raise DamagedError unless dtype, shape and (if `hashed`) the bytes are those of the table."""
    if array.dtype != np.uint8 or array.shape != info.shape:
        raise DamagedError(f"{label}: expected uint8 {info.shape}, found {array.dtype} {array.shape}")
    if hashed and (found := hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()) != info.sha256:
        raise DamagedError(f"{label}: expected sha256 {info.sha256}, found {found}")


def read_entry(root: Path, public_set: PublicSet, *, hashed: bool = False) -> Arrays | None:
    """Return the arrays of an entry as memory maps, or None if it is not there; DamagedError if it was altered."""
    folder = entry_folder(root, public_set)
    try:
        noted = {} if hashed else _read_stamp(folder)
        arrays, stamp = {}, {}
        for key, info in public_set.arrays.items():
            path = folder / f"{key}.npy"
            status = path.stat()
            stamp[path.name] = [status.st_size, status.st_mtime_ns]
            arrays[key] = _map_file(path)
            check_array(str(path), arrays[key], info, hashed=noted.get(path.name) != stamp[path.name])
    except (FileNotFoundError, NotADirectoryError):
        # An entry without one of its arrays is an altered one; without any, none was written yet.
        if any((folder / f"{key}.npy").exists() for key in public_set.arrays):
            raise DamagedError(f"{folder}: expected {len(public_set.arrays)} arrays, some are missing") from None
        return None
    if noted != stamp:
        # A cache that only others may write is hashed at every load instead.
        with contextlib.suppress(OSError):
            _write_stamp(folder, stamp)
    return arrays


def write_entry(root: Path, public_set: PublicSet, arrays: Arrays) -> None:
    """Write an entry under a temporary name and rename it, so that no reader ever sees a part of it."""
    with working_folder(root, public_set.name) as folder:
        stamp = {}
        for key, array in arrays.items():
            path = folder / f"{key}.npy"
            with path.open("wb") as file:
                # not np.save: on a full disk it may write less and say nothing
                contiguous = np.ascontiguousarray(array)
                np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(contiguous))
                file.write(contiguous.data)
                file.flush()
                os.fsync(file.fileno())
            status = path.stat()
            stamp[path.name] = [status.st_size, status.st_mtime_ns]
        _write_stamp(folder, stamp)
        folder.chmod(0o755)
        folder.rename(entry_folder(root, public_set))
        _sync_folder(root)


def discard_entry(root: Path, public_set: PublicSet) -> None:
    """Remove an entry if there is one; whoever has it mapped keeps its bytes."""
    with working_folder(root, public_set.name) as folder, contextlib.suppress(FileNotFoundError):
        entry_folder(root, public_set).rename(folder / "discarded")


@contextlib.contextmanager
def working_folder(root: Path, name: str) -> Iterator[Path]:
    """Make a temporary folder beside the entries and remove what is left of it at the end; call it under the lock."""
    folder = Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=".tmp", dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def locked(root: Path, public_set: PublicSet) -> Iterator[None]:
    """Hold the only right to write an entry; failures to write are told with the folder and the remedy."""
    remedy = "name another folder with --root or RAYTRACED_HOME"
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = (root / f".{public_set.name}.lock").open("a")
    except OSError as error:
        raise OSError(f"{root}: cannot be used as the cache folder ({error.strerror}); {remedy}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{public_set.name}: another process is getting it, waiting")
            fcntl.flock(lock, fcntl.LOCK_EX)
        # Left by a process that was killed: nobody else can be writing now.
        for stale in root.glob(f".{public_set.name}.*.tmp"):
            shutil.rmtree(stale, ignore_errors=True)
        try:
            yield
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise
            needed = 3 * public_set.num_bytes / 1e6  # the download, what it unpacks to, and the arrays
            raise OSError(
                f"{root}: no space left ({error.strerror}), {public_set.name} needs up to {needed:.0f} MB; {remedy}"
            ) from error


def is_out_of_space(error: BaseException) -> bool:
    """Tell a full disk from a failure of a source: another source would not help."""
    return isinstance(error, OSError) and error.errno in _NO_SPACE


def _map_file(path: Path) -> NDArray[np.uint8]:
    try:
        # copy on write: torch wants writable memory, and the file must never change
        return np.load(path, mmap_mode="c", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DamagedError(f"{path}: expected an array of uint8, found a cut or altered file ({error})") from None


def _read_stamp(folder: Path) -> dict[str, list[int]]:
    try:
        stamp = json.loads((folder / STAMP).read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def _write_stamp(folder: Path, stamp: dict[str, list[int]]) -> None:
    with tempfile.NamedTemporaryFile("w", dir=folder, prefix=STAMP, delete=False) as file:
        json.dump(stamp, file)
    os.chmod(file.name, 0o644)  # a temporary file is private, but a cache may be shared
    os.replace(file.name, folder / STAMP)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
