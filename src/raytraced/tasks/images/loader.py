"""Batches of uint8 images; a model scales and normalises them itself.

Legend: n samples, B samples of this rank in a batch, C channels, H and W height and width.
"""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from raytraced.data.hashing import SHUFFLE, permutation, random_bits
from raytraced.tasks.images.dataset import Split
from raytraced.tasks.task import Batch

CROP_Y, CROP_X, FLIP = 1, 2, 3  # streams of random bits beside those of hashing.py
PAD = 4  # pixels added on each side before a crop back to the image's own size


@dataclass(repr=False, eq=False)
class Loader:
    """Batches of a split on one device, a pure function of (seed, epoch); `batch_size` is that of all ranks together.

    Rank r of W takes its contiguous slice of every global batch, so that any W sees the same global batches; the last
    batch of an epoch may be smaller (and a rank's slice of it empty), but no sample is lost or seen twice.
    """

    split: Split
    batch_size: int
    _: KW_ONLY
    seed: int = 0
    shuffle: bool = True
    rank: int = 0
    world_size: int = 1
    device: str | torch.device = "cpu"
    augment: bool = False

    def __post_init__(self) -> None:
        if self.batch_size < self.world_size:
            raise ValueError(f"batch_size={self.batch_size}: must be at least world_size={self.world_size}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank={self.rank}: must be 0 … {self.world_size - 1}, world_size={self.world_size}")
        if len(self.split) == 0:
            raise ValueError("split: has no samples")
        self.images = self.split.images.to(self.device)
        self.targets = self.split.labels.to(self.device)

    def __len__(self) -> int:
        """Return the number of batches in an epoch, the same on every rank."""
        return -(-len(self.targets) // self.batch_size)

    def num_targets(self, batch: int) -> int:
        """Return the number of samples in a batch of an epoch, of all ranks together."""
        return min(self.batch_size, len(self.targets) - batch * self.batch_size)

    def epoch(self, epoch: int, start_batch: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch from `start_batch` on, exactly those that a whole epoch would have given."""
        if epoch < 0:
            raise ValueError(f"epoch={epoch}: must be at least 0")
        if not 0 <= start_batch <= len(self):
            raise ValueError(f"start_batch={start_batch}: an epoch has {len(self)} batches")
        return self._batches(epoch, start_batch)

    def _batches(self, epoch: int, start_batch: int) -> Iterator[Batch]:
        num = len(self.targets)
        order = permutation(num, SHUFFLE, self.seed, epoch) if self.shuffle else np.arange(num)
        samples_n = torch.from_numpy(order)
        index_n = samples_n.to(self.device)
        targets_n, rows_n = self.targets.index_select(0, index_n), torch.arange(self.batch_size, device=self.device)
        for start in range(start_batch * self.batch_size, len(samples_n), self.batch_size):
            size = self.num_targets(start // self.batch_size)
            first, last = (size * rank // self.world_size for rank in (self.rank, self.rank + 1))
            part = slice(start + first, start + last)
            images = self.images.index_select(0, index_n[part])  # 3 times as fast as images[index]
            if self.augment:
                images = pad_crop_flip(images, samples_n[part].numpy(), self.seed, epoch)
            yield Batch(images, targets_n[part], rows_n[first:last])


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
