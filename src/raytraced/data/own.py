"""The user's own images: a folder with one sub-folder a class, or an .npz file.

Legend: n samples, C channels, H and W height and width.
"""

from pathlib import Path
from typing import Any
from zipfile import BadZipFile, is_zipfile
from zlib import error as ZlibError

import numpy as np
from numpy.typing import NDArray

from .dataset import Dataset, build_dataset, stratified_split
from .hashing import TEST

_GREY_MODES = ("1", "L", "LA", "La", "I", "I;16", "I;16B", "F")


def load_folder(folder: Path, *, size: int = 32, colour: bool | None = None) -> Dataset:
    """Return the images below a folder, one sub-folder a class, or train/ and test/ with one sub-folder a class each.

    Every image is turned upright, cut to its middle square and resized to size x size.  Without train/ and test/, one
    image in five of each class, by a fixed rule, is the test split.
    """
    if size < 1:
        raise ValueError(f"size={size}: must be at least 1")
    subfolders = _subfolders(folder)
    is_split = {path.name for path in subfolders} == {"train", "test"}
    sides = [folder / "train", folder / "test"] if is_split else [folder]
    class_names = tuple(path.name for path in (_subfolders(folder / "train") if is_split else subfolders))
    if len(class_names) < 2:
        raise ValueError(f"{sides[0]}: {len(class_names)} sub-folders, at least 2 are needed, one a class")
    if is_split and (extra := {path.name for path in _subfolders(folder / "test")} - set(class_names)):
        raise ValueError(f"{folder / 'test'}: classes {sorted(extra)} are not in train")
    paths = [_image_paths(side, class_names) for side in sides]
    if colour is None:
        colour = any(_has_colour(path) for labelled in paths for path, _ in labelled)
    arrays = [_read_images(labelled, size, colour) for labelled in paths]
    if is_split:
        (train_images, train_labels), (test_images, test_labels) = arrays
        return build_dataset(folder.name, train_images, train_labels, test_images, test_labels, class_names)
    images, labels = arrays[0]
    _check_counts(str(folder), labels, class_names, needed=3)
    test, train = stratified_split(labels, 0.2, TEST, class_names)
    return build_dataset(folder.name, images[train], labels[train], images[test], labels[test], class_names)


def load_npz(path: Path) -> Dataset:
    """Return the data set in an .npz file with x_train, y_train, x_test, y_test and, if wanted, class_names."""
    keys = ("x_train", "y_train", "x_test", "y_test")
    try:
        if not is_zipfile(path):
            raise ValueError("it is no archive of arrays")
        # opened here: np.load leaves a damaged file open
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            missing = [key for key in keys if key not in file]
            if missing:
                raise ValueError(f"it has no {', '.join(missing)}")
            arrays = {key: file[key] for key in keys}
            given_names = [str(name) for name in file["class_names"]] if "class_names" in file else None
    except (ValueError, OSError, EOFError, BadZipFile, ZlibError, TypeError) as error:
        raise ValueError(f"{path}: not an .npz file with {', '.join(keys)} ({error})") from None
    images = {key: _as_images(f"{path}: {key}", arrays[key]) for key in ("x_train", "x_test")}
    labels = {key: _as_labels(f"{path}: {key}", arrays[key]) for key in ("y_train", "y_test")}
    for side in ("train", "test"):
        num_images, num_labels = len(images[f"x_{side}"]), len(labels[f"y_{side}"])
        if num_images != num_labels:
            raise ValueError(f"{path}: x_{side} has {num_images} images, y_{side} {num_labels} labels")
    if images["x_train"].shape[1:] != images["x_test"].shape[1:]:
        shapes = f"{images['x_train'].shape[1:]} and {images['x_test'].shape[1:]}"
        raise ValueError(f"{path}: images of x_train and x_test have different shapes {shapes}")
    num_classes = int(max(labels["y_train"].max(), labels["y_test"].max())) + 1
    if given_names is not None and len(given_names) != num_classes:
        raise ValueError(f"{path}: {len(given_names)} class_names for {num_classes} classes")
    class_names = tuple(given_names or map(str, range(num_classes)))
    _check_counts(f"{path}: y_train", labels["y_train"], class_names, needed=2)
    return build_dataset(
        path.stem, images["x_train"], labels["y_train"], images["x_test"], labels["y_test"], class_names
    )


def _as_images(label: str, array: NDArray[Any]) -> NDArray[np.uint8]:
    """Return images (n, C, H, W) in uint8, from (n, H, W), (n, C, H, W) or (n, H, W, C) with C of 1 or 3."""
    if array.ndim == 3:
        array = array[:, None]
    elif array.ndim == 4 and array.shape[1] not in (1, 3) and array.shape[3] in (1, 3):
        array = array.transpose(0, 3, 1, 2)
    if array.ndim != 4 or array.shape[1] not in (1, 3) or 0 in array.shape:
        raise ValueError(
            f"{label}: shape {array.shape}, expected (n, H, W), (n, C, H, W) or (n, H, W, C) with C 1 or 3"
        )
    if array.dtype == np.uint8:
        return array
    if array.dtype.kind not in "iuf":
        raise ValueError(f"{label}: {array.dtype}, expected numbers")
    if not np.isfinite(array).all():
        raise ValueError(f"{label}: {int((~np.isfinite(array)).sum())} values are not finite")
    lowest, highest = float(array.min()), float(array.max())
    if lowest < 0 or highest > 255:
        raise ValueError(f"{label}: values {lowest:g} … {highest:g}, expected 0 … 255, or fractions 0 … 1")
    is_fraction = array.dtype.kind == "f" and highest <= 1
    return np.round(array * 255 if is_fraction else array).astype(np.uint8)


def _as_labels(label: str, array: NDArray[Any]) -> NDArray[np.int64]:
    """Return labels (n,) in int64."""
    if array.ndim != 1 or not len(array):
        raise ValueError(f"{label}: shape {array.shape}, expected (n,)")
    if array.dtype.kind not in "iuf" or not (np.isfinite(array) & (array >= 0) & (array == np.round(array))).all():
        raise ValueError(f"{label}: expected whole numbers from 0")
    if array.max() >= 65536:
        raise ValueError(f"{label}: label {array.max():g}, expected numbers from 0 without gaps")
    return array.astype(np.int64)


def _subfolders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _image_paths(folder: Path, class_names: tuple[str, ...]) -> list[tuple[Path, int]]:
    """Return the files of each class with its number, in an order that does not depend on the file system."""
    labelled = []
    for label, class_name in enumerate(class_names):
        place = folder / class_name
        files = sorted(path for path in place.glob("*") if path.is_file() and not path.name.startswith("."))
        if not files:
            raise ValueError(f"{place}: no images of class {class_name!r}")
        labelled += [(path, label) for path in files]
    return labelled


def _has_colour(path: Path) -> bool:
    with _open_image(path) as image:
        return image.mode not in _GREY_MODES


def _read_images(
    labelled: list[tuple[Path, int]], size: int, colour: bool
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    from PIL import Image, ImageOps

    images = np.empty((len(labelled), 3 if colour else 1, size, size), dtype=np.uint8)
    for number, (path, _) in enumerate(labelled):
        with _open_image(path) as image:
            try:
                upright = ImageOps.exif_transpose(image)
                if upright.mode.startswith("I;16"):
                    # sixteen bits: Pillow would clip at 255 instead of scaling
                    upright = Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
                upright = upright.convert("RGB" if colour else "L")
            except (OSError, SyntaxError, ValueError) as error:
                raise ValueError(f"{path}: unreadable image ({error})") from None
        # cut first: ImageOps.fit would blend in pixels from beyond the cut
        side = min(upright.size)
        left, top = ((length - side) // 2 for length in upright.size)
        square = upright.crop((left, top, left + side, top + side)).resize((size, size), Image.Resampling.BILINEAR)
        images[number] = np.asarray(square).reshape(size, size, -1).transpose(2, 0, 1)
    return images, np.array([label for _, label in labelled], dtype=np.int64)


def _open_image(path: Path) -> Any:
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(path)
    except UnidentifiedImageError:
        raise ValueError(f"{path}: not an image that Pillow can read") from None
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path}: unreadable image ({error})") from None


def _check_counts(label: str, labels_n: NDArray[np.int64], class_names: tuple[str, ...], needed: int) -> None:
    counts = np.bincount(labels_n, minlength=len(class_names))
    if counts.min() < needed:
        name = class_names[int(counts.argmin())]
        raise ValueError(f"{label}: class {name!r} has {counts.min()} images, at least {needed} are needed")
