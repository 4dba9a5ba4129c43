"""Who trains a run: a claim per run, which two processes never hold at once, on one machine or on several.

A claim is a locked file. The operating system releases the lock of a process that dies, so that the run is free at once.
Some network file systems do not show locks to other machines: there the file's age counts, which its owner renews.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from raytraced.files import lock_file

BEAT_SECONDS = 15  # how often an owner renews its claim
STALE_SECONDS = 120  # an owner on another machine that has not renewed its claim for so long is dead


class ClaimedError(Exception):
    """Another process trains this run.

    Args:
        name: The run.
        owner: Its process, as text.
    """

    def __init__(self, name: str, owner: str) -> None:
        super().__init__(f"{name}: is being trained by {owner}")


@contextmanager
def claim(work: Path, name: str) -> Iterator[None]:
    """Hold the claim of a run inside this context.

    Args:
        work: Folder of the run folders.
        name: The name of the run folder.

    Raises:
        ClaimedError: Another process holds it.
    """
    path = claim_path(work, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file:
        take(file, name)
        file.truncate(0)
        file.write(json.dumps({"host": socket.gethostname(), "process": os.getpid()}))
        file.flush()
        ended = threading.Event()
        threading.Thread(target=renew, args=(path, ended), daemon=True).start()
        try:
            yield
        finally:
            ended.set()
            file.truncate(0)


def take(file: IO[str], name: str) -> None:
    """Lock a file, or raise: another process holds the lock, or another machine has renewed its claim lately."""
    try:
        lock_file(file)
        is_locked = True
    except BlockingIOError:
        is_locked = False
    file.seek(0)
    text = file.read()
    try:
        owner = json.loads(text) if text else None
    except ValueError:  # its owner died while it wrote
        owner = None
    is_elsewhere = owner is not None and owner["host"] != socket.gethostname()
    age = time.time() - os.fstat(file.fileno()).st_mtime
    if not is_locked or (is_elsewhere and age < STALE_SECONDS):
        raise ClaimedError(name, f"process {owner['process']} on {owner['host']}" if owner else "another process")


def is_claimed(work: Path, name: str) -> bool:
    """Whether a process that lives holds the claim of a run."""
    path = claim_path(work, name)
    if not path.exists():
        return False
    with path.open("a+", encoding="utf-8") as file:
        try:
            take(file, name)
        except ClaimedError:
            return True
    return False


def claim_path(work: Path, name: str) -> Path:
    return work / ".claims" / name


def renew(path: Path, ended: threading.Event) -> None:
    """Keep a claim young until it ends."""
    while not ended.wait(BEAT_SECONDS):
        os.utime(path)
