"""Batches for a model, straight from the uint8 images.

Legend: n samples, B samples of this rank in a batch, C channels, H and W height and width.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from .dataset import Split
from .hashing import CROP_X, CROP_Y, FLIP, SHUFFLE, permutation, random_bits

PAD = 4  # pixels added on each side before a crop back to the image's own size


class Batch(NamedTuple):
    """Normalised float32 images (B, C, H, W), int64 labels (B,), int64 positions in the global batch (B,)."""

    images: Tensor
    labels: Tensor
    rows: Tensor


class Loader:
    """Batches of a split on one device, a pure function of (seed, epoch); `batch_size` is that of all ranks together.

    Rank r of W takes its contiguous slice of every global batch, so that any W sees the same global batches; the last
    batch of an epoch may be smaller (and a rank's slice of it empty), but no sample is lost or seen twice.
    """

    def __init__(
        self,
        split: Split,
        batch_size: int,
        *,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        seed: int = 0,
        shuffle: bool = True,
        rank: int = 0,
        world_size: int = 1,
        device: str | torch.device = "cpu",
        augment: bool = False,
    ) -> None:
        channels = split.images.shape[1]
        if len(mean) != channels or len(std) != channels:
            raise ValueError(f"mean={mean}, std={std}: one value a channel is needed, the images have {channels}")
        if min(std) <= 0:
            raise ValueError(f"std={std}: must be above 0")
        if batch_size < world_size:
            raise ValueError(f"batch_size={batch_size}: must be at least world_size={world_size}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank}: must be 0 … {world_size - 1}, world_size={world_size}")
        if len(split) == 0:
            raise ValueError("split: has no samples")
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.rank = rank
        self.world_size = world_size
        self.device = torch.device(device)
        self.augment = augment
        self.images = split.images.to(self.device)
        self.labels = split.labels.to(self.device)
        mean_C11, std_C11 = (torch.tensor(value, dtype=torch.float64).view(-1, 1, 1) for value in (mean, std))
        # (pixel / 255 - mean) / std as one multiplication and one addition
        self.scale_C11 = (1 / (255 * std_C11)).float().to(self.device)
        self.shift_C11 = (-mean_C11 / std_C11).float().to(self.device)

    def __len__(self) -> int:
        """Return the number of batches in an epoch, the same on every rank."""
        return -(-len(self.labels) // self.batch_size)

    def epoch(self, epoch: int, start_batch: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch from `start_batch` on, exactly those that a whole epoch would have given."""
        if epoch < 0:
            raise ValueError(f"epoch={epoch}: must be at least 0")
        if not 0 <= start_batch <= len(self):
            raise ValueError(f"start_batch={start_batch}: an epoch has {len(self)} batches")
        return self._batches(epoch, start_batch)

    def _batches(self, epoch: int, start_batch: int) -> Iterator[Batch]:
        samples_n = torch.from_numpy(self._order(epoch))
        index_n = samples_n.to(self.device)
        labels_n, rows_n = self.labels.index_select(0, index_n), torch.arange(self.batch_size, device=self.device)
        for start in range(start_batch * self.batch_size, len(samples_n), self.batch_size):
            size = min(self.batch_size, len(samples_n) - start)
            first, last = (size * rank // self.world_size for rank in (self.rank, self.rank + 1))
            part = slice(start + first, start + last)
            images = self.images.index_select(0, index_n[part])  # 3 times as fast as images[index]
            if self.augment:
                images = pad_crop_flip(images, samples_n[part].numpy(), self.seed, epoch)
            normalised = images.float().mul_(self.scale_C11).add_(self.shift_C11)  # in place on the one float copy
            yield Batch(normalised, labels_n[part], rows_n[first:last])

    def _order(self, epoch: int) -> np.ndarray:
        if self.shuffle:
            return permutation(len(self.labels), SHUFFLE, self.seed, epoch)
        return np.arange(len(self.labels), dtype=np.int64)


def pad_crop_flip(images_BCHW: Tensor, samples_B: np.ndarray, seed: int, epoch: int) -> Tensor:
    """Shift each image by up to PAD pixels, black coming in, and mirror it or not, by (seed, epoch, sample) alone."""
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
