"""A name or a path -> an image data set."""

from importlib.resources import files
from pathlib import Path

import numpy as np
import torch

from raytraced.data.cache import cache_root, obtain
from raytraced.tasks.images.catalog import CATALOG, ImageSet
from raytraced.tasks.images.dataset import Dataset, Split, build_dataset, channel_statistics
from raytraced.tasks.images.own import load_folder, load_npz
from raytraced.tasks.paths import own_path


def load(
    name: str, root: str | Path | None = None, *, size: int = 32, colour: bool | None = None, skip_bad: bool = False
) -> Dataset:
    """Return a data set by its name, or by the path of an .npz file or of a folder with one sub-folder a class.

    `root` is the cache folder.  The others concern image folders: every image becomes size x size pixels, and grey or
    colour (unless stated, colour if any image has it); `skip_bad` leaves out what cannot be read.
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
