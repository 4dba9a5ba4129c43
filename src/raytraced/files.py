"""Files that survive a crash: written whole under a temporary name, flushed, then renamed."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO


class DamagedFileError(ValueError):
    """A file whose content is cut, altered or of another format; the message names the file and the reason."""


def write_file(path: Path, content: bytes | str) -> None:
    """Write a file so that its name always leads to the whole old content or to the whole new content.

    Args:
        path: The file.
        content: Bytes, or text that is encoded as UTF-8.
    """
    with replacing_file(path) as stream:
        stream.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing_file(path: Path) -> Iterator[BinaryIO]:
    """A stream that becomes the file when the block ends without an error; else nothing is left of it.

    Args:
        path: The file.

    Yields:
        The open stream of bytes.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException as error:  # Ctrl-C too
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):  # a failed write() has no file name
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    """Flush a folder, so that a rename inside it survives a power cut."""
    if os.name == "nt":  # Windows cannot open folders
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_file(file: IO[str], *, shared: bool = False, wait: bool = False) -> None:
    """Lock an open file until it is closed; does nothing on Windows, which has no such lock.

    Args:
        file: The open file.
        shared: Whether other processes may hold a shared lock, too.
        wait: Whether to wait for the lock; otherwise a lock that is held raises BlockingIOError.
    """
    if sys.platform != "win32":
        import fcntl

        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))


def remove_leftovers(folder: Path) -> None:
    """Delete the temporary files and folders that a killed process left behind."""
    for leftover in folder.glob(".*.tmp"):
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink(missing_ok=True)
