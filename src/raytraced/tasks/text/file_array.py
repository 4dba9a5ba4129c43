"""The values of a large file, read from the disk where they are used: a memory map that survives a file cut short.

A memory map ends the process by SIGBUS when its file has become shorter; here that is an OSError, and a run keeps its
checkpoint.
"""

import errno
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray


@dataclass(frozen=True)
class FileArray:
    """The values from `start` to `stop` of a file; slicing it reads nothing, `np.asarray` reads them.

    Args:
        path: The file.
        dtype: Type of a value.
        offset: Number of bytes before the first value of the file.
        start: Number of the first value.
        stop: Number of the value behind the last.
    """

    path: Path
    dtype: np.dtype[Any]
    offset: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, part: slice) -> "FileArray":
        first, last, _ = part.indices(len(self))
        return FileArray(self.path, self.dtype, self.offset, self.start + first, self.start + max(first, last))

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        """Read the values; they are always a copy."""
        values = np.empty(len(self), self.dtype)
        left = values.data.cast("B") if len(values) else memoryview(b"")
        # Opened for each read: a folder may hold more files than a process may keep open.
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.offset + self.start * self.dtype.itemsize)
            while left and (num := file.readinto(left)):
                left = left[num:]
            if left:
                size, needed = file.seek(0, 2), self.offset + self.stop * self.dtype.itemsize
                reason = f"is cut short: it has {size:,} bytes, at least {needed:,} were there when it was opened"
                raise OSError(errno.EIO, reason, str(self.path))
        return values if dtype is None else values.astype(dtype)


def text_file(path: Path) -> FileArray:
    """The bytes of a file."""
    return FileArray(path, np.dtype(np.uint8), 0, 0, path.stat().st_size)


def npy_file(path: Path) -> FileArray:
    """The values of a one-dimensional array that `np.save` wrote."""
    with path.open("rb") as file:
        np.lib.format.read_magic(file)
        (num,), _, dtype = np.lib.format.read_array_header_1_0(file)
        return FileArray(path, dtype, file.tell(), 0, num)
