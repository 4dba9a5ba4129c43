"""Image data sets, the rules by which splits are held out, and batches.

Axes: n samples, B samples of this rank in a batch, C channels, H and W height and width.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from raytraced.data.hashing import SHUFFLE, TEST, VALIDATION, permutation, random_bits
from raytraced.tasks import task
from raytraced.tasks.task import Batch

CROP_Y, CROP_X, FLIP = 1, 2, 3  # streams of random bits beside those of hashing.py
PAD = 4  # pixels added on each side before a crop back to the image's own size


@dataclass(frozen=True)
class Split:
    """Images (n, C, H, W) in uint8 and their labels (n,) in int64."""

    images: Tensor  # (n, C, H, W), uint8
    labels: Tensor  # (n,), int64

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Dataset(task.Data[Split]):
    """Three splits, their classes, and the mean and deviation of each channel in training (pixels scaled to 0 … 1)."""

    class_names: tuple[str, ...]  # in the order of the labels
    mean: tuple[float, ...]  # of each channel
    std: tuple[float, ...]  # standard deviation of each channel

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    @property
    def image_shape(self) -> tuple[int, ...]:
        """Channels, height, width."""
        return tuple(self.train.images.shape[1:])


def build_dataset(
    name: str,
    class_names: tuple[str, ...],
    train_images: NDArray[np.uint8],
    train_labels: NDArray[np.integer],
    test_images: NDArray[np.uint8] | None = None,
    test_labels: NDArray[np.integer] | None = None,
) -> Dataset:
    """Hold out the validation split, and a fifth as test split where there is none.

    Args:
        name: Name of the data set.
        class_names: Names of the classes.
        train_images: (n, C, H, W).
        train_labels: (n,), numbers of classes.
        test_images: (n, C, H, W), or None.
        test_labels: (n,), or None.

    Returns:
        The data set with the mean and the standard deviation of its training images.
    """
    if len(class_names) < 2:
        raise ValueError(f"{name}: {len(class_names)} class, at least 2 are needed")
    if doubled := [word for word, num in Counter(class_names).items() if num > 1]:
        raise ValueError(f"{name}: two classes are called {doubled[0]!r}; give them different names")
    counts = np.bincount(train_labels, minlength=len(class_names))
    needed = 3 if test_images is None else 2  # one for each split
    if counts.min() < needed:
        count = f"class {class_names[counts.argmin()]!r} has {counts.min()} images to train on"
        raise ValueError(f"{name}: {count}, at least {needed} are needed")
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


@dataclass(repr=False, eq=False, kw_only=True)
class Loader(task.Loader[Split]):
    """Batches of uint8 images; with `augment` they are shifted and mirrored at random."""

    augment: bool = False  # whether images are shifted and mirrored at random

    def __post_init__(self) -> None:
        super().__post_init__()
        self.images = self.split.images.to(self.device)
        self.targets = self.split.labels.to(self.device)

    def batches(self, epoch: int, numbers: range) -> Iterator[Batch]:
        num = len(self.targets)
        order = permutation(num, SHUFFLE, self.seed, epoch) if self.shuffle else np.arange(num)
        samples_n = torch.from_numpy(order)
        index_n = samples_n.to(self.device)
        targets_n, rows_n = self.targets.index_select(0, index_n), torch.arange(self.batch_size, device=self.device)
        for number in numbers:
            rows, start = self.rows(number), number * self.batch_size
            part = slice(start + rows.start, start + rows.stop)
            images = self.images.index_select(0, index_n[part])  # 3 times as fast as images[index]
            if self.augment:
                images = pad_crop_flip(images, samples_n[part].numpy(), self.seed, epoch)
            yield Batch(images, targets_n[part], rows_n[rows])


def pad_crop_flip(images_BCHW: Tensor, samples_B: np.ndarray, seed: int, epoch: int) -> Tensor:
    """Shift each image by up to PAD pixels, filled with black, and mirror half of them, by (seed, epoch, sample) alone."""
    num, channels, height, width = images_BCHW.shape
    top_B = random_bits(CROP_Y, seed, epoch, samples_B) % np.uint64(2 * PAD + 1)
    left_B = random_bits(CROP_X, seed, epoch, samples_B) % np.uint64(2 * PAD + 1)
    flip_B = random_bits(FLIP, seed, epoch, samples_B) % np.uint64(2) == 1
    columns_W = np.arange(width)
    y_BH = top_B.astype(np.int64)[:, None] + np.arange(height)
    x_BW = left_B.astype(np.int64)[:, None] + np.where(flip_B[:, None], columns_W[::-1], columns_W)
    place_BHW = torch.from_numpy(y_BH[:, :, None] * (width + 2 * PAD) + x_BW[:, None, :]).to(images_BCHW.device)
    padded = pad(images_BCHW, (PAD, PAD, PAD, PAD)).flatten(2)
    index = place_BHW.view(num, 1, height * width).expand(num, channels, height * width)
    return padded.gather(2, index).view(num, channels, height, width)
