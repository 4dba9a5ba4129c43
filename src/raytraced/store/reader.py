"""Reads of experts from a store into memory that the caller owns, with or without the page cache."""

import errno
import mmap
import os
import re
import zlib
from contextlib import suppress

from raytraced.errors import require
from raytraced.files import DamagedFileError
from raytraced.store.layout import Shard, StoreFile, identify

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{letter}B": 1000 ** (power + 1) for power, letter in enumerate("KMGT")}
_UNITS |= {f"{letter}IB": 1024 ** (power + 1) for power, letter in enumerate("KMGT")}
_UNITS |= {letter: 1000 ** (power + 1) for power, letter in enumerate("KMGT")}


def parse_size(name: str, size: int | str) -> int:
    """A number of bytes.

    Args:
        name: Name of the option, for the error message.
        size: Bytes, or text such as "2 GB" (10**9 bytes each), "1.5GiB" (2**30 each) or "500 MB".

    Returns:
        The number of bytes.
    """
    if type(size) is int:
        require(size > 0, name, size, "must be above 0 bytes")
        return size
    found = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z]*)\s*", size) if isinstance(size, str) else None
    unit = _UNITS.get(found[2].upper()) if found else None
    rule = "must be a number of bytes above 0, such as 2GB, 1.5GiB or 500MB"
    if found is None or unit is None or not (total := int(float(found[1]) * unit)):
        raise ValueError(f"{name}={size}: {rule}")
    return total


def format_size(num_bytes: int) -> str:
    """A number of bytes as text that `parse_size` reads, rounded up: 2.1 GB."""
    for unit, word in ((10**9, "GB"), (10**6, "MB"), (10**3, "KB")):
        if num_bytes >= unit:
            return f"{-(-num_bytes * 10 // unit) / 10:.1f} {word}"
    return f"{num_bytes} B"


class ExpertReader:
    """Reads the experts of a store; several threads may read at the same time.

    Args:
        file: The store.
        direct: Whether reads bypass the operating system's page cache. None: where the file system is able to.
    """

    def __init__(self, file: StoreFile, direct: bool | None = None) -> None:
        self.file, self.direct = file, True
        self.descriptors: list[int] = []  # of the store's files
        try:
            for shard in file.shards:
                self._open(shard, direct)
        except BaseException:
            self.close()
            raise
        self._checked = bytearray(len(file.runs))

    def _open(self, shard: Shard, direct: bool | None) -> None:
        flag = getattr(os, "O_DIRECT", 0)
        path, plain = shard.path, os.O_RDONLY | getattr(os, "O_BINARY", 0)
        is_direct = bool(flag) and direct is not False
        try:
            descriptor = os.open(path, plain | (flag if is_direct else 0))
        except OSError as error:
            if not is_direct or direct or error.errno != errno.EINVAL:  # EINVAL: a file system without such reads
                raise
            descriptor, is_direct = os.open(path, plain), False
        self.descriptors.append(descriptor)
        self.direct = self.direct and is_direct
        if identify(os.fstat(descriptor)) != shard.identity:
            raise DamagedFileError(f"{path}: altered: was replaced while it was opened")
        if direct and not is_direct:
            raise ValueError(f"direct={direct}: this system has no reads that bypass the page cache; leave it out")

    def read(self, expert: int, target: memoryview) -> None:
        """Read one expert.

        Args:
            expert: Its number among the experts of all grids.
            target: Memory of `file.run_bytes` bytes, which begins at a multiple of the alignment.

        Raises:
            OSError: The disk reported an error.
            DamagedFileError: The file has become shorter, or the expert does not match its checksum.
        """
        run, done = self.file.runs[expert], 0
        path, descriptor = self.file.shards[run.shard].path, self.descriptors[run.shard]
        while done < self.file.run_bytes:
            try:
                count = _read_at(descriptor, target[done:], run.offset + done)
            except OSError as error:
                reason = (error.strerror or str(error)).lower()
                raise OSError(f"{path}: expert {run.name} cannot be read ({reason})") from error
            if count == 0:
                end = run.offset + done
                raise DamagedFileError(f"{path}: cut: ends inside expert {run.name}, at byte {end}")
            done += count
        if not self._checked[expert]:
            if zlib.crc32(target[: self.file.expert_bytes]) != run.crc32:
                raise DamagedFileError(f"{path}: altered: expert {run.name} does not match its checksum")
            self._checked[expert] = 1

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        while self.descriptors:
            os.close(self.descriptors.pop())


def _read_at(descriptor: int, target: memoryview, offset: int) -> int:
    """Read from a place in a file; how many bytes were read."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [target], offset)
    raise OSError(errno.ENOSYS, "this system has no preadv")


def aligned_memory(num_bytes: int) -> mmap.mmap:
    """Zeroed memory of its own, which begins at a page; in large pages where the system has them.

    Large pages take the system less time to hand to the disk, and the processor less time to find. A forked process does not
    get this memory: the disk may be writing to it.
    """
    if not hasattr(mmap, "MAP_ANONYMOUS"):  # Windows
        return mmap.mmap(-1, num_bytes)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, advice):
            with suppress(OSError):  # a system that was built without large pages
                memory.madvise(getattr(mmap, advice))
    return memory
