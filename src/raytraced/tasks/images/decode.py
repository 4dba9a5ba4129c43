"""The original files of an image set -> its four uint8 arrays.

Axes: n samples, C channels, H and W height and width. Files come as {file name: bytes}. A damaged file is a ValueError that
names it, a missing file a KeyError; nothing in a file can run code.
"""

import gzip
import io
import json
import pickle
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raytraced.data.sources import Arrays, Files

IDX_FILES = {
    "train_images": "train-images-idx3-ubyte",
    "train_labels": "train-labels-idx1-ubyte",
    "test_images": "t10k-images-idx3-ubyte",
    "test_labels": "t10k-labels-idx1-ubyte",
}
CIFAR_BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
# The labels beside the PNG sheets; the misspelling is theirs.
SHEET_LABELS = {"train_labels": "train_lables.json", "test_labels": "test_lables.json"}
_RECORD = 1 + 3 * 32 * 32  # a label, then the red, the green and the blue plane


def decode_mnist(files: Files) -> Arrays:
    """Return images (n, 1, H, W) and labels (n,) of training and test, from IDX files, gzipped or not."""
    arrays = {}
    for key, name in IDX_FILES.items():
        name = name if name in files else f"{name}.gz"
        array = decode_idx(name, files[name])
        arrays[key] = array[:, None] if key.endswith("images") else array
    return arrays


def decode_cifar10(files: Files) -> Arrays:
    """Return images (n, 3, 32, 32) and labels (n,) of training and test, from sheets, binary batches or pickles."""
    if "test_batch.png" in files:
        labels = {}
        for key, name in SHEET_LABELS.items():
            try:
                labels[key] = np.array(json.loads(files[name]), dtype=np.uint8)
            except (ValueError, TypeError, OverflowError) as error:
                raise ValueError(f"{name}: not a list of labels ({error})") from None
        sheets = [decode_sheet(f"{name}.png", files[f"{name}.png"]) for name in CIFAR_BATCHES]
        return {"train_images": np.concatenate(sheets[:-1]), "test_images": sheets[-1], **labels}
    # The binary version is preferred: it holds nothing but bytes.
    suffix, decode = (".bin", decode_cifar_binary) if "test_batch.bin" in files else ("", decode_cifar_pickle)
    batches = [decode(name + suffix, files[name + suffix]) for name in CIFAR_BATCHES]
    return {
        "train_images": np.concatenate([images for images, _ in batches[:-1]]),
        "train_labels": np.concatenate([labels for _, labels in batches[:-1]]),
        "test_images": batches[-1][0],
        "test_labels": batches[-1][1],
    }


def decode_idx(name: str, content: bytes) -> NDArray[np.uint8]:
    """Return the array in an IDX file of unsigned bytes, gzipped or not."""
    if content[:2] == b"\x1f\x8b":
        try:
            content = gzip.decompress(content)
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(f"{name}: cut or damaged gzip file ({error})") from None
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise ValueError(f"{name}: not an IDX file of unsigned bytes, it starts with {content[:4].hex(' ')}")
    num_axes = content[3]
    start = 4 + 4 * num_axes
    shape = tuple(int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4))
    expected = start + int(np.prod(shape, dtype=object))
    if len(content) != expected:
        raise ValueError(f"{name}: {len(content)} bytes found, its header asks for {expected}")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


def decode_cifar_binary(name: str, content: bytes) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the images (n, 3, 32, 32) and the labels (n,) of a batch in CIFAR-10's binary version."""
    if not content or len(content) % _RECORD:
        raise ValueError(f"{name}: {len(content)} bytes found, expected a multiple of {_RECORD}")
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, _RECORD)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]


def decode_cifar_pickle(name: str, content: bytes) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the images (n, 3, 32, 32) and the labels (n,) of a batch in CIFAR-10's Python version."""
    try:
        batch = _InertUnpickler(io.BytesIO(content), encoding="bytes").load()
        (_, shape, dtype, _, pixels) = batch[b"data"].state
        if dtype.arguments[0] not in (b"u1", "u1") or tuple(shape) != (len(batch[b"labels"]), 3072):
            raise ValueError(f"its array is {dtype.arguments[0]} {shape}")
        images = np.frombuffer(pixels, dtype=np.uint8).reshape(-1, 3, 32, 32)
        return images, np.array(batch[b"labels"], dtype=np.uint8)
    # A pickle is a program: a damaged one can fail in any way.
    except Exception as error:
        raise ValueError(f"{name}: not a batch of CIFAR-10 ({type(error).__name__}: {error})") from None


def decode_sheet(name: str, content: bytes) -> NDArray[np.uint8]:
    """Return the images (n, 3, 32, 32) of a PNG sheet: one image per row, its 1024 pixels side by side."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(content), formats=["PNG"]) as sheet:
            pixels = np.asarray(sheet)
    except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"{name}: unreadable PNG sheet ({error})") from None
    if pixels.ndim != 3 or pixels.shape[1:] != (1024, 3):
        raise ValueError(f"{name}: a sheet of shape {pixels.shape}, expected (images, 1024, 3)")
    return pixels.transpose(0, 2, 1).reshape(-1, 3, 32, 32)


class _Inert:
    """Takes the place of every object in a pickle: it keeps the arguments and the state, and runs nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _InertUnpickler(pickle.Unpickler):
    """Reads NumPy arrays as inert records and refuses every other class, so that no code of the file can run."""

    def find_class(self, module: str, name: str) -> Any:
        is_numpy = module in ("numpy.core.multiarray", "numpy._core.multiarray", "numpy")
        if is_numpy and name in ("_reconstruct", "ndarray", "dtype"):
            return _Inert
        raise pickle.UnpicklingError(f"refused to load {module}.{name}")
