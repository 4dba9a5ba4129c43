"""Files that run code where a reader lets them: pickles and Python files under every name that raytraced reads.

Each file leaves a marker, an empty folder, once its code runs. `run_themselves` lets them do so, as a program that trusts them
would: a file that could not leave a marker would prove nothing.
"""

import gzip
import io
import json
import os
import pickle
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from raytraced import load
from raytraced.io.saving import MODEL_FORMAT, write_tensors

BATCHES = [f"data_batch_{number}" for number in range(1, 6)]  # CIFAR-10's own files are pickles
MARKERS = {
    "pickle",
    "torch",
    "tokenizer",
    "array",
    "code",
    "zip",
    "tar",
    "yaml",
    "run",
    "shared",
    "classes",
    "originals",
}


class Marks:
    """An object whose pickle makes a folder when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.makedirs, (str(self.marker), 0o777, True)


def write_code_files(folder: Path) -> list[Path]:
    """Write the files and folders that run code into a folder; their markers go into its sub-folder "markers".

    Args:
        folder: An empty folder.

    Returns:
        The paths.
    """
    markers = folder / "markers"
    markers.mkdir()
    paths = []
    for name, content in _contents(markers).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        paths.append(path)
    _write_card(folder / "card.safetensors", folder / "code.py")
    return [
        *paths,
        folder / "card.safetensors",
        folder / "run",
        folder / "shared",
        folder / "classes",
        folder / "originals",
    ]


def _contents(markers: Path) -> dict[str, bytes]:
    """The content of each file by its name."""

    def pickled(name: str) -> bytes:
        return pickle.dumps({"x_train": Marks(markers / name), "state_dict": Marks(markers / name)})

    def saved(name: str, **values: Any) -> bytes:
        file = io.BytesIO()
        torch.save({"model": Marks(markers / name)} | values, file)
        return file.getvalue()

    def code(name: str) -> bytes:
        return f"import os\nos.makedirs({str(markers / name)!r}, exist_ok=True)\n".encode()

    array = np.empty(3, dtype=object)
    array[:] = [Marks(markers / "array")] * 3
    one, several = io.BytesIO(), io.BytesIO()
    np.save(one, array, allow_pickle=True)
    np.savez(several, x_train=array, y_train=np.arange(3), x_test=array, y_test=np.arange(3))
    shared = {"auto_map": {"AutoConfig": "modeling_raytraced.RaytracedConfig"}, "model_type": "raytraced"}
    call = f"!!python/object/apply:os.makedirs [{str(markers / 'yaml')!r}, 511, true]\n".encode()
    return {
        "pickle.pt": pickled("pickle"),
        "pickle.pkl": pickled("pickle"),
        "pickle.safetensors": pickled("pickle"),
        "pickle.png": pickled("pickle"),
        "pickle.npz": pickled("pickle"),
        "pickle.txt": pickled("pickle"),
        "pickle.gz": gzip.compress(pickled("pickle")),
        "torch.pt": saved("torch"),
        "torch.safetensors": saved("torch"),
        "torch.npz": saved("torch"),
        "tokenizer.json": saved("tokenizer", tokenizer=Marks(markers / "tokenizer")),
        "tokenizer.pt": saved("tokenizer", tokenizer=Marks(markers / "tokenizer")),
        "array.npy": one.getvalue(),
        "array.npz": several.getvalue(),
        "code.py": code("code"),
        "code.zip": _zipped(
            {"__main__.py": code("zip"), "sitecustomize.py": code("zip"), "x_train.npy": one.getvalue()}
        ),
        "code.npz": _zipped({"__main__.py": code("zip"), "__init__.py": code("zip"), "x_train.npy": one.getvalue()}),
        "code.tar.gz": _tarred({"__init__.py": code("tar"), "data_batch_1": pickled("tar")}),
        "code.yaml": b"data: " + call,
        "run/config.yaml": b"data: " + call,
        "run/model.safetensors": pickled("run"),
        "shared/config.json": json.dumps(shared).encode(),
        "shared/modeling_raytraced.py": code("shared"),
        "shared/pytorch_model.bin": saved("shared"),
        "shared/tokenizer.json": saved("shared"),
        **{f"originals/{name}": pickled("originals") for name in ("batches.meta", "test_batch", *BATCHES)},
        "classes/a/1.png": pickled("classes"),
        "classes/a/code.py": code("classes"),
        "classes/b/2.png": saved("classes"),
        "classes/__init__.py": code("classes"),
    }


def _zipped(files: dict[str, bytes]) -> bytes:
    """A zip file of some files."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, each in files.items():
            archive.writestr(name, each)
    return content.getvalue()


def _tarred(files: dict[str, bytes]) -> bytes:
    """A compressed tar archive of some files."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for name, each in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(each)
            archive.addfile(entry, io.BytesIO(each))
    return content.getvalue()


def _write_card(path: Path, code: Path) -> None:
    """A whole model file, checksum and all, whose card names a Python file as the origin of its model and its task."""
    model = load("mre-digits")
    card = replace(model.card, model="my-router", task="my-task", plugins=[f"file {code}"])
    write_tensors(path, model.state_dict(), MODEL_FORMAT, "card", json.dumps(asdict(card)))


def run_themselves(folder: Path) -> set[str]:
    """Let the files run their code, as a program that trusts them does.

    Args:
        folder: The folder that `write_code_files` filled.

    Returns:
        The names of the markers, which are removed again: all of `MARKERS`.
    """
    for name in ("pickle.pt", "run/model.safetensors", "classes/a/1.png", "originals/test_batch"):
        with (folder / name).open("rb") as file:
            pickle.load(file)
    for name in ("torch.pt", "tokenizer.pt", "shared/pytorch_model.bin"):
        torch.load(folder / name, weights_only=False)
    np.load(folder / "array.npy", allow_pickle=True)
    for name in ("code.py", "code.zip", "shared/modeling_raytraced.py"):
        subprocess.run([sys.executable, str(folder / name)], check=True)
    yaml.unsafe_load((folder / "code.yaml").read_text())
    with tarfile.open(folder / "code.tar.gz") as archive:
        batch = archive.extractfile("data_batch_1")
        assert batch is not None
        pickle.load(batch)
    return take_markers(folder)


def take_markers(folder: Path) -> set[str]:
    """The names of the markers that were left since the last call; they are removed."""
    found = list((folder / "markers").iterdir())
    for marker in found:
        marker.rmdir()
    return {marker.name for marker in found}
