"""A name or a path -> a data set."""

from importlib.resources import files
from pathlib import Path

import numpy as np

from .dataset import Dataset, build_dataset, stratified_split
from .hashing import TEST


def load(name: str, root: str | Path | None = None) -> Dataset:
    """Return the data set called `name`."""
    if name == "digits":
        return load_digits()
    raise ValueError(f"data set {name!r}: unknown, the names are digits")


def load_digits() -> Dataset:
    """Return the digits shipped inside the package; one image in five of each class is its test split."""
    with files(__package__).joinpath("digits.npz").open("rb") as file, np.load(file) as arrays:
        images, labels = arrays["images"], arrays["labels"]
    class_names = tuple("0123456789")
    # 17 grey levels, 0 … 16, spread over the whole byte
    images = np.round(images[:, None] * (255 / 16)).astype(np.uint8)
    test, train = stratified_split(labels, 0.2, TEST, class_names)
    return build_dataset("digits", images[train], labels[train], images[test], labels[test], class_names)
