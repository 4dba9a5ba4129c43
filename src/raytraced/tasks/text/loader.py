"""Batches of windows of a text.

Legend: B windows of this rank in a batch, T = context tokens of a window, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from raytraced.data.hashing import random_bits
from raytraced.tasks.task import Batch
from raytraced.tasks.text.dataset import Split

WINDOW = 6  # the stream of random bits, beside those of hashing.py
MOST_TOKENS = 16_384  # of a batch in evaluation: the logits of more would take hundreds of megabytes


@dataclass(repr=False, eq=False)
class Loader:
    """Batches of a split on one device; `batch_size` is that of all ranks together.

    With `shuffle`, batch b of an epoch is a pure function of (seed, step = epoch · steps + b): windows that begin anywhere,
    of each domain in turn. Without, they are the split's own windows in order, the last filled up and masked. Rank r of W
    takes its contiguous slice of every global batch, so that any W sees the same global batches.
    """

    split: Split
    batch_size: int
    steps: int
    _: KW_ONLY
    lengths: NDArray[np.int64] | None = None
    seed: int = 0
    shuffle: bool = True
    rank: int = 0
    world_size: int = 1
    device: str | torch.device = "cpu"

    def __post_init__(self) -> None:
        if self.batch_size < self.world_size:
            raise ValueError(f"batch_size={self.batch_size}: must be at least world_size={self.world_size}")
        if not self.shuffle:
            self.batch_size = min(self.batch_size, max(self.world_size, MOST_TOKENS // self.split.context))
        self.lengths_V = None if self.lengths is None else torch.from_numpy(self.lengths).to(self.device)

    def __len__(self) -> int:
        """How many batches an epoch has, the same on every rank."""
        return self.steps if self.shuffle else -(-len(self.split) // self.batch_size)

    def epoch(self, epoch: int, start_batch: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from `start_batch` on, exactly those that a whole epoch would have given."""
        for batch in range(start_batch, len(self)):
            start = batch * self.batch_size
            size = self.batch_size if self.shuffle else min(self.batch_size, len(self.split) - start)
            first, last = (size * rank // self.world_size for rank in (self.rank, self.rank + 1))
            rows_B = np.arange(first, last)
            windows = (
                self.draw(epoch * self.steps + batch, rows_B) if self.shuffle else self.split.windows[start + rows_B]
            )
            yield self.batch(windows, rows_B)

    def draw(self, step: int, rows_B: NDArray[np.int64]) -> NDArray[np.int64]:
        """The domain and the first token of some rows' windows at a step (B, 2)."""
        domain_B = (step * self.batch_size + rows_B) % len(self.split.domains)
        # one token more than a window must follow
        num_B = np.array([len(text) for text in self.split.domains])[domain_B] - self.split.context
        start_B = random_bits(WINDOW, self.seed, step, rows_B) % num_B.astype(np.uint64)
        return np.stack((domain_B, start_B.astype(np.int64)), 1)

    def batch(self, windows: NDArray[np.int64], rows_B: NDArray[np.int64]) -> Batch:
        """Windows as inputs and, one further on, targets."""
        tokens = torch.from_numpy(self.split.read(windows)).to(self.device)
        inputs, targets = tokens[:, :-1].clamp_min(0), tokens[:, 1:].clamp_min(0)
        mask = None if self.shuffle else tokens[:, 1:] >= 0
        if mask is not None and bool(mask.all()):
            mask = None
        sizes = None if self.lengths_V is None else self.lengths_V[targets]
        return Batch(inputs, targets, torch.from_numpy(rows_B).to(self.device), mask, sizes)
