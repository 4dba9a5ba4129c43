"""What `load` returns, and the rule that carves a validation split out of a training set.

Legend: n samples, C channels, H and W height and width.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .hashing import VALIDATION, permutation


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
    train_images: NDArray[np.uint8],
    train_labels: NDArray[np.integer],
    test_images: NDArray[np.uint8],
    test_labels: NDArray[np.integer],
    class_names: tuple[str, ...],
) -> Dataset:
    """Carve the validation split out of the training arrays and measure the channels of what is left."""
    held_out, kept = stratified_split(train_labels, 0.1, VALIDATION, class_names)
    train = Split(_tensor(train_images[kept]), _tensor(train_labels[kept].astype(np.int64)))
    validation = Split(_tensor(train_images[held_out]), _tensor(train_labels[held_out].astype(np.int64)))
    test = Split(_tensor(test_images), _tensor(test_labels.astype(np.int64)))
    mean, std = channel_statistics(train.images)
    return Dataset(name, train, validation, test, class_names, mean, std)


def stratified_split(
    labels_n: NDArray[np.integer], fraction: float, stream: int, class_names: tuple[str, ...]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows held out and the rows kept, both ascending.

    Of a class with m rows, max(1, round-half-up(fraction * m)) are held out: the first ones of a permutation of the
    class's rows that depends on the class number and m alone.
    """
    held_out = np.zeros(len(labels_n), dtype=bool)
    for label, class_name in enumerate(class_names):
        rows = np.flatnonzero(labels_n == label)
        if len(rows) < 2:
            raise ValueError(f"class {class_name!r}: {len(rows)} training images, at least 2 are needed")
        num_held_out = max(1, int(fraction * len(rows) + 0.5))
        held_out[rows[permutation(len(rows), stream, 0, label)[:num_held_out]]] = True
    return np.flatnonzero(held_out), np.flatnonzero(~held_out)


def channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and the standard deviation of each channel (C,), of pixels scaled to 0 … 1."""
    channels = images.shape[1]
    counts = np.zeros((channels, 256), dtype=np.int64)
    # Chunked: bincount widens its input to int64, eight times the size of the images.
    for chunk in images.split(1024):
        for channel in range(channels):
            counts[channel] += np.bincount(chunk[:, channel].numpy().ravel(), minlength=256)
    pixel_values = np.arange(256) / 255
    weights = counts / counts.sum(axis=1, keepdims=True)
    means = weights @ pixel_values
    variances = (weights * (pixel_values[None] - means[:, None]) ** 2).sum(axis=1)
    if not variances.all():
        raise ValueError(f"channel {int(variances.argmin())}: every pixel of the training images has the same value")
    return tuple(means.tolist()), tuple(np.sqrt(variances).tolist())


def _tensor(array: NDArray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))
