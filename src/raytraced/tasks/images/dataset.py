"""What `load` returns, and the rules that carve splits out of a training set.

Legend: n samples, C channels, H and W height and width.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raytraced.data.hashing import TEST, VALIDATION, permutation


@dataclass(frozen=True)
class Split:
    """Images (n, C, H, W) in uint8 and their labels (n,) in int64."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Dataset:
    """Three splits, their classes, and the mean and deviation of each channel in training (pixels scaled to 0 … 1)."""

    name: str
    train: Split
    validation: Split
    test: Split
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        channels, height, width = self.train.images.shape[1:]
        return channels, height, width


def build_dataset(
    name: str,
    class_names: tuple[str, ...],
    train_images: NDArray[np.uint8],
    train_labels: NDArray[np.integer],
    test_images: NDArray[np.uint8] | None = None,
    test_labels: NDArray[np.integer] | None = None,
) -> Dataset:
    """Carve out the validation split (and a fifth as test split where none is given) and measure what is left."""
    if len(class_names) < 2:
        raise ValueError(f"{name}: {len(class_names)} class, at least 2 are needed")
    counts = np.bincount(train_labels, minlength=len(class_names))
    needed = 3 if test_images is None else 2  # one for each split
    if counts.min() < needed:
        fewest = class_names[int(counts.argmin())]
        raise ValueError(
            f"{name}: class {fewest!r} has {counts.min()} images to train on, at least {needed} are needed"
        )
    if test_images is None or test_labels is None:
        out, kept = stratified_split(train_labels, 0.2, TEST, len(class_names))
        test_images, test_labels = train_images[out], train_labels[out]
        train_images, train_labels = train_images[kept], train_labels[kept]
    out, kept = stratified_split(train_labels, 0.1, VALIDATION, len(class_names))
    train = _split(train_images[kept], train_labels[kept])
    validation = _split(train_images[out], train_labels[out])
    return Dataset(
        name, train, validation, _split(test_images, test_labels), class_names, *channel_statistics(train.images)
    )


def stratified_split(
    labels_n: NDArray[np.integer], fraction: float, stream: int, num_classes: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows held out and the rows kept, both ascending.

    Of a class with m rows, max(1, round-half-up(fraction * m)) are held out: the first ones of a permutation of the
    class's rows that depends on the class number and m alone.
    """
    held_out = np.zeros(len(labels_n), dtype=bool)
    for label in range(num_classes):
        rows = np.flatnonzero(labels_n == label)
        num_held_out = max(1, int(fraction * len(rows) + 0.5))
        held_out[rows[permutation(len(rows), stream, 0, label)[:num_held_out]]] = True
    return np.flatnonzero(held_out), np.flatnonzero(~held_out)


def channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and the standard deviation of each channel (C,), of pixels scaled to 0 … 1."""
    counts = np.zeros((images.shape[1], 256), dtype=np.int64)
    # Chunked: bincount widens its input to int64, eight times the size of the images.
    for chunk in images.split(1024):
        counts += [np.bincount(channel.numpy().ravel(), minlength=256) for channel in chunk.unbind(1)]
    pixel_values = np.arange(256) / 255
    weights = counts / counts.sum(axis=1, keepdims=True)
    means = weights @ pixel_values
    variances = (weights * (pixel_values[None] - means[:, None]) ** 2).sum(axis=1)
    if not variances.all():
        raise ValueError(f"channel {int(variances.argmin())}: every pixel of the training images has the same value")
    return tuple(means.tolist()), tuple(np.sqrt(variances).tolist())


def _split(images: NDArray[np.uint8], labels: NDArray[np.integer]) -> Split:
    return Split(torch.from_numpy(np.ascontiguousarray(images)), torch.from_numpy(labels.astype(np.int64)))
