"""A name or a path -> an image data set: the shipped digits, public sets, folders of images and .npz files.

Axes: n samples, C channels, H and W height and width.
"""

import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, is_zipfile
from zlib import error as ZlibError

import numpy as np
import torch
from numpy.typing import NDArray

from raytraced.data.cache import cache_root, obtain
from raytraced.data.sources import say
from raytraced.errors import require, with_notes
from raytraced.tasks.images.catalog import CATALOG, ImageSet
from raytraced.tasks.images.dataset import Dataset, Split, build_dataset, channel_statistics
from raytraced.tasks.images.image_file import read_image
from raytraced.tasks.paths import own_path, visible

_KEYS = ("x_train", "y_train", "x_test", "y_test")
_MAX_NAMED = 10  # bad files named in one message
_MAX_CLASSES = 65536


def load(
    name: str, root: str | Path | None = None, *, size: int = 32, colour: bool | None = None, skip_bad: bool = False
) -> Dataset:
    """Load an image data set.

    Args:
        name: Name of a catalogued set, or path of an .npz file or of a folder with one sub-folder per class.
        root: The cache folder.
        size: Height and width in pixels to which the images of a folder are resized.
        colour: Whether images of a folder become colour or grey; None: colour if any image has it.
        skip_bad: Leave out files of a folder that cannot be read, instead of refusing the folder.

    Returns:
        The data set with its three splits.
    """
    if name == "digits":
        return load_digits()
    if name == "union":
        return load_union(root)
    if name in CATALOG:
        (image_set,) = CATALOG[name].parts
        assert isinstance(image_set, ImageSet)
        return build_dataset(name, image_set.class_names, **obtain(image_set, cache_root(root)))
    path = own_path(name, CATALOG)
    return load_folder(path, size=size, colour=colour, skip_bad=skip_bad) if path.is_dir() else load_npz(path)


def load_digits() -> Dataset:
    """Return the digits shipped inside the package; one image in five of each class is its test split."""
    with files(__package__).joinpath("digits.npz").open("rb") as file, np.load(file) as arrays:
        images, labels = arrays["images"], arrays["labels"]
    # 17 grey levels, 0 … 16, spread over the whole byte
    return build_dataset("digits", tuple("0123456789"), np.round(images[:, None] * (255 / 16)).astype(np.uint8), labels)


def load_union(root: str | Path | None = None) -> Dataset:
    """Return the 30-class task of all public sets, split by split; CIFAR-10 is made grey and cut to its middle 28 x 28."""
    parts = [load(part.name, root) for part in CATALOG["union"].parts]

    def join(split_name: str) -> Split:
        splits = [getattr(part, split_name) for part in parts]
        images = torch.cat([grey_28(split.images) for split in splits])
        return Split(images, torch.cat([split.labels + 10 * number for number, split in enumerate(splits)]))

    train = join("train")
    class_names = tuple(f"{part.name} {class_name}" for part in parts for class_name in part.class_names)
    return Dataset("union", train, join("validation"), join("test"), class_names, *channel_statistics(train.images))


def grey_28(images: torch.Tensor) -> torch.Tensor:
    """Return images (n, 1, 28, 28): grey ones as they are, colour ones by (299 R + 587 G + 114 B + 500) // 1000."""
    top, left = ((side - 28) // 2 for side in images.shape[2:])
    images = images[:, :, top : top + 28, left : left + 28]
    if images.shape[1] == 1:
        return images
    red, green, blue = images.int().unbind(1)
    return ((299 * red + 587 * green + 114 * blue + 500) // 1000).to(torch.uint8).unsqueeze(1)


def load_folder(folder: Path, *, size: int = 32, colour: bool | None = None, skip_bad: bool = False) -> Dataset:
    """Return the images below a folder, one sub-folder per class, or train/ and test/ with one sub-folder per class each.

    Every image is turned upright, cut to its middle square and resized to size x size.  Without train/ and test/, one
    image in five of each class, by a fixed rule, is the test split.
    """
    require(size >= 1, "size", size, "must be at least 1")
    is_split = {path.name for path in visible(folder) if path.is_dir()} == {"train", "test"}
    sides = [folder / "train", folder / "test"] if is_split else [folder]
    paths_by_class = [_class_files(side) for side in sides]
    class_names = tuple(paths_by_class[0])
    if len(class_names) < 2:
        raise ValueError(
            f"{sides[0]}: {len(class_names)} sub-folders with images, at least 2 are needed, one per class"
        )
    if unknown := paths_by_class[-1].keys() - set(class_names):
        raise ValueError(f"{sides[-1]}: classes {sorted(unknown)} are not in train")
    if missing := [name for name in class_names if name not in paths_by_class[-1]]:
        say(f"{sides[-1]}: no images of {', '.join(missing)}")

    bad: list[str] = []
    read: list[list[tuple[NDArray[np.uint8], int]]] = []  # of each side: images, and the numbers of their classes
    for paths in paths_by_class:
        read.append([])
        for path, label in ((path, label) for label, name in enumerate(class_names) for path in paths.get(name, ())):
            try:
                read[-1].append((read_image(path, height=size, width=size, colour=colour), label))
            except ValueError as error:
                bad.append(str(error))
    report_bad_files(bad, sum(map(len, read)) + len(bad), skip_bad, folder)
    channels = max((len(image) for side in read for image, _ in side), default=1)
    arrays: list[NDArray[Any]] = []
    for side, labelled in zip(sides, read, strict=True):
        if not labelled:
            raise ValueError(f"{side}: no images that can be read")
        arrays.append(np.stack([np.broadcast_to(image, (channels, size, size)) for image, _ in labelled]))
        arrays.append(np.array([label for _, label in labelled]))
    return build_dataset(folder.name, class_names, *arrays)


def report_bad_files(bad: Sequence[str], num_files: int, skip_bad: bool, folder: Path | None = None) -> None:
    """Refuse files that cannot be read, or with `skip_bad` print one line that they are left out.

    Args:
        bad: What is wrong with each of them, its path first.
        num_files: Number of all files, the good ones included.
        skip_bad: Whether bad files are left out.
        folder: Where the files are.
    """
    if not bad:
        return
    count = f"{'' if folder is None else f'{folder}: '}{len(bad)} of {num_files} files cannot be read"
    if skip_bad:
        say(f"{count}, left out")
        return
    more = [f"and {len(bad) - _MAX_NAMED} more"] if len(bad) > _MAX_NAMED else []
    notes = [f"  {line}" for line in (*bad[1:_MAX_NAMED], *more)]
    raise with_notes(ValueError(f"{count} (skip_bad leaves them out): {bad[0]}"), notes)


def load_npz(path: Path) -> Dataset:
    """Return the data set in an .npz file with x_train, y_train and, optionally, x_test, y_test, class_names."""
    try:
        if not is_zipfile(path):
            raise ValueError("it is not an archive of arrays")
        # opened here: np.load leaves a damaged file open
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            needed = _KEYS if "x_test" in file or "y_test" in file else _KEYS[:2]
            if missing := [key for key in needed if key not in file]:
                raise ValueError(f"it has no {', '.join(missing)}")
            arrays = {key: np.asarray(file[key]) for key in _KEYS if key in file}
            given_names = tuple(map(str, np.atleast_1d(file["class_names"]))) if "class_names" in file else ()
    except (ValueError, OSError, EOFError, BadZipFile, ZlibError, TypeError) as error:
        is_object = "allow_pickle" in str(error)  # numpy's words for what only code in the file could rebuild
        objects = "it has objects in place of numbers or text: np.array(labels, dtype=str) makes text of them"
        expected = "x_train and y_train, perhaps with x_test and y_test"
        raise ValueError(f"{path}: not an .npz file with {expected} ({objects if is_object else error})") from None
    images = {key: _as_images(f"{path}: {key}", array) for key, array in arrays.items() if key.startswith("x")}
    labels = {key: array for key, array in arrays.items() if key.startswith("y")}
    for (x, images_n), (y, labels_n) in zip(images.items(), labels.items(), strict=True):
        if labels_n.ndim != 1 or not len(labels_n):
            raise ValueError(f"{path}: {y}: shape {labels_n.shape}, expected (n,)")
        if len(images_n) != len(labels_n):
            raise ValueError(f"{path}: {x} has {len(images_n)} images, {y} {len(labels_n)} labels")
    if len(set(shapes := [array.shape[1:] for array in images.values()])) > 1:
        raise ValueError(f"{path}: images of x_train and x_test have different shapes {shapes[0]} and {shapes[1]}")
    numbers, class_names = _as_numbers(path, labels, given_names)
    sides: list[NDArray[Any]] = [array for pair in zip(images.values(), numbers, strict=True) for array in pair]
    return build_dataset(path.stem, class_names, *sides)


def _as_images(label: str, array: NDArray[Any]) -> NDArray[np.uint8]:
    """Return images (n, C, H, W) in uint8, from (n, H, W), (n, C, H, W) or (n, H, W, C) with C of 1 or 3."""
    if array.ndim == 3:
        array = array[:, None]
    elif array.ndim == 4 and array.shape[1] not in (1, 3) and array.shape[3] in (1, 3):
        array = array.transpose(0, 3, 1, 2)
    if array.ndim != 4 or array.shape[1] not in (1, 3) or 0 in array.shape:
        expected = "(n, H, W), (n, C, H, W) or (n, H, W, C) with C 1 or 3"
        raise ValueError(f"{label}: shape {array.shape}, expected {expected}")
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
    if not is_fraction and (array % 1 != 0).any():
        raise ValueError(f"{label}: fractions up to {highest:g}, expected whole numbers 0 … 255, or fractions 0 … 1")
    return np.round(array * 255 if is_fraction else array).astype(np.uint8)


def _as_numbers(
    path: Path, labels: dict[str, NDArray[Any]], given_names: tuple[str, ...]
) -> tuple[list[NDArray[np.int64]], tuple[str, ...]]:
    """Return the labels (n,) as the numbers of their classes, and the names of the classes."""
    kinds = {array.dtype.kind for array in labels.values()}
    if kinds <= {"U", "S"}:
        words = {key: array.astype(str).tolist() for key, array in labels.items()}
        class_names = given_names or tuple(sorted({word for column in words.values() for word in column}))
        number = {name: n for n, name in enumerate(class_names)}
        for key, column in words.items():
            if unknown := sorted(set(column) - number.keys()):
                raise ValueError(f"{path}: {key}: label {unknown[0]!r} is not one of class_names")
        return [np.array([number[word] for word in column]) for column in words.values()], class_names
    for key, array in labels.items():
        is_number = array.dtype.kind in "biuf" and np.isfinite(array).all()
        if not is_number or (array < 0).any() or (array % 1 != 0).any():
            raise ValueError(f"{path}: {key}: expected whole numbers from 0, or text in all labels")
        if array.max() >= _MAX_CLASSES:
            raise ValueError(f"{path}: {key}: label {array.max():g}, expected numbers from 0 without gaps")
    numbers = [array.astype(np.int64) for array in labels.values()]
    num_classes = 1 + max(int(column.max()) for column in numbers)
    if given_names and len(given_names) != num_classes:
        raise ValueError(f"{path}: {len(given_names)} class_names for {num_classes} classes")
    default = ("False", "True") if kinds == {"b"} else map(str, range(num_classes))
    return numbers, given_names or tuple(default)


def _class_files(folder: Path) -> dict[str, list[Path]]:
    """Return the files in each sub-folder, by its name; an empty one is left out with a message."""
    found = {}
    for place in (path for path in visible(folder) if path.is_dir()):
        if files := [path for path in visible(place) if path.is_file()]:
            # a name that is not UTF-8 could neither be printed nor drawn
            found[os.fsencode(place.name).decode(errors="backslashreplace")] = files
        elif visible(place):
            raise ValueError(f"{place}: sub-folders but no images, where the images of one class are expected")
        else:
            say(f"{place}: an empty folder, left out")
    return found
