"""Files that a crash cannot spoil: written whole under a temporary name, flushed, then renamed."""

import os
import shutil
import sys
from pathlib import Path
from typing import IO


def write_file(path: Path, content: bytes | str) -> None:
    """Write a file so that, whatever happens, its name leads to the old content or to the new one, never to a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException as error:  # Ctrl-C too
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):  # a failed write() carries no file name: tell which one it was
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    """Make a rename inside the folder survive a power cut."""
    if os.name == "nt":  # Windows cannot open folders
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_file(file: IO[str], *, shared: bool = False, wait: bool = False) -> None:
    """Lock an open file until it is closed, or raise BlockingIOError; Windows has no such lock, so nothing is held there."""
    if sys.platform != "win32":
        import fcntl

        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))


def remove_leftovers(folder: Path) -> None:
    """Delete temporary files and folders of a process that was killed while it wrote."""
    for leftover in folder.glob(".*.tmp"):
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink(missing_ok=True)
