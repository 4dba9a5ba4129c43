"""Texts as arrays in memory or on the disk, their splits, the windows that evaluation uses, and batches of windows.

Axes: n windows of a split, B windows of this rank in a batch, T = context tokens per window, V vocabulary size. A token is a
byte unless there is a tokenizer.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from raytraced.data.hashing import random_bits
from raytraced.errors import require
from raytraced.tasks import task
from raytraced.tasks.task import Batch
from raytraced.tasks.text.file_array import FileArray

WINDOW = 6  # the stream of random bits, beside those of hashing.py
MOST_TOKENS = 16_384  # per batch in evaluation: the logits of more would take hundreds of megabytes
CHUNK = 1 << 20  # tokens that are read at once

NUM_STRETCHES, LAP = 100, 20
"""a text is divided into 100 equal stretches; of every 20 the tenth is for validation and the last for testing"""


@dataclass(frozen=True)
class Text:
    """Tokens in one or more arrays, in memory or in files, read as if they were one array.

    Args:
        pieces: The arrays, in order; those of files are read where they are used.
    """

    pieces: tuple[NDArray[Any] | FileArray, ...]

    @cached_property
    def ends(self) -> list[int]:
        """Number of tokens up to the end of each piece."""
        return list(accumulate(map(len, self.pieces)))

    def __len__(self) -> int:
        return self.ends[-1] if self.pieces else 0

    def part(self, start: int, stop: int) -> "Text":
        """The tokens from start to stop, without reading them."""
        firsts = (end - len(piece) for piece, end in zip(self.pieces, self.ends, strict=True))
        cuts = (
            piece[max(0, start - first) : max(0, stop - first)]
            for piece, first in zip(self.pieces, firsts, strict=True)
            if first < stop and first + len(piece) > start
        )
        return Text(tuple(cuts))

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """The tokens from start to stop as one array."""
        if len(self.pieces) == 1:
            return np.asarray(self.pieces[0][start:stop])
        return np.concatenate([np.asarray(piece) for piece in self.part(start, stop).pieces] or [np.zeros(0, np.uint8)])

    def chunks(self) -> Iterator[NDArray[Any]]:
        """All tokens, a part at a time."""
        return (self.read(start, start + CHUNK) for start in range(0, len(self), CHUNK))


def held_out(text: Text) -> dict[str, Text]:
    """Divide a text into 90 % for training and 5 % each for validation and test, spread over all of it."""
    edges = [len(text) * number // NUM_STRETCHES for number in range(NUM_STRETCHES + 1)]
    split_of = {LAP // 2 - 1: "validation", LAP - 1: "test"}
    pieces: dict[str, list[NDArray[Any] | FileArray]] = {"train": [], "validation": [], "test": []}
    for number, (start, stop) in enumerate(pairwise(edges)):
        pieces[split_of.get(number % LAP, "train")] += text.part(start, stop).pieces
    return {name: Text(tuple(parts)) for name, parts in pieces.items()}


@dataclass(frozen=True)
class Split:
    """The same split of every domain; training draws windows anywhere, for evaluation each of `windows` is a sample."""

    domains: tuple[Text, ...]
    context: int
    num_eval_tokens: int | None
    """largest number of tokens that evaluation uses, the same for every domain; None for all"""

    def __len__(self) -> int:
        return len(self.windows)

    @cached_property
    def windows(self) -> NDArray[np.int64]:
        """The domain and the first token of each window (n, 2); windows are adjacent, or evenly spaced with gaps."""
        parts = []
        for number, text in enumerate(self.domains):
            num = -(-(len(text) - 1) // self.context)  # the first token of a text is never a target
            most = (
                num
                if self.num_eval_tokens is None
                else max(1, self.num_eval_tokens // self.context // len(self.domains))
            )
            kept = np.arange(num) if num <= most else np.arange(most) * num // most
            parts.append(np.stack((np.full_like(kept, number), kept * self.context), 1))
        return np.concatenate(parts)

    def read(self, windows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The tokens of some windows and the token after each window (n, T + 1), -1 behind the end of the text."""
        tokens = np.full((len(windows), self.context + 1), -1, dtype=np.int64)
        for row, (domain, start) in zip(tokens, windows.tolist(), strict=True):
            found = self.domains[domain].read(start, start + self.context + 1)
            row[: len(found)] = found
        return tokens


@dataclass(frozen=True)
class Dataset(task.Data[Split]):
    """A text's splits, the names of its domains, the number of steps per epoch, and what its tokens are."""

    domain_names: tuple[str, ...]
    steps: int
    tokenizer: str | None = None
    """the JSON of a tokenizer; None: tokens are bytes"""
    lengths: NDArray[np.int64] | None = None
    """number of bytes per token (V,); None: one"""

    @property
    def context(self) -> int:
        """Number of tokens per window."""
        return self.train.context

    @property
    def vocab_size(self) -> int:
        """Number of different tokens."""
        return 256 if self.lengths is None else len(self.lengths)

    def sha256(self) -> str:
        """The SHA-256 of all tokens: training, validation and test of one domain after the other."""
        digest = hashlib.sha256()
        for domain in range(len(self.domain_names)):
            for split in self.splits.values():
                for tokens in split.domains[domain].chunks():
                    digest.update(np.ascontiguousarray(tokens).data)
        return digest.hexdigest()


def build_dataset(
    name: str,
    domains: dict[str, dict[str, Text]],
    *,
    context: int,
    steps: int,
    eval_tokens: int | None,
    tokenizer: str | None = None,
    lengths: NDArray[np.int64] | None = None,
) -> Dataset:
    """Make a data set of domains, each with its three splits; refuses a text that is too short for one window."""
    for option, value in (("context", context), ("steps", steps), ("eval_tokens", eval_tokens)):
        require(value is None or value >= 1, f"data option {option}", value, "must be at least 1")
    unit = "bytes" if tokenizer is None else "tokens"
    for domain, splits in domains.items():
        where, num = name if domain == name else f"{name}: {domain}", sum(map(len, splits.values()))
        if num == 0:
            raise ValueError(f"{where}: is empty; there is nothing to learn from")
        if len(splits["train"]) <= context or min(map(len, splits.values())) < 2:
            raise ValueError(
                f"{where}: has {num:,} {unit}, {len(splits['train']):,} of them to train on; a window takes "
                f"{context + 1:,}: give a longer text, or a smaller --data_options.context"
            )
    parts = {
        split: Split(tuple(splits[split] for splits in domains.values()), context, eval_tokens)
        for split in ("train", "validation", "test")
    }
    return Dataset(name, **parts, domain_names=tuple(domains), steps=steps, tokenizer=tokenizer, lengths=lengths)


@dataclass(repr=False, eq=False)
class Loader(task.Loader[Split]):
    """Batches of windows.

    With `shuffle`, batch b of an epoch is a pure function of (seed, step = epoch · steps + b): windows that begin anywhere,
    from each domain in turn. Without it, batches are the split's windows in order, the last one padded and masked.
    """

    steps: int
    lengths: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.shuffle:
            self.batch_size = min(self.batch_size, max(self.world_size, MOST_TOKENS // self.split.context))
        self.lengths_V = None if self.lengths is None else torch.from_numpy(self.lengths).to(self.device)

    @property
    def num_samples(self) -> int:
        return self.steps * self.batch_size if self.shuffle else len(self.split)

    def batches(self, epoch: int, numbers: range) -> Iterator[Batch]:
        for number in numbers:
            rows = self.rows(number)
            rows_B = np.arange(rows.start, rows.stop)
            if self.shuffle:
                windows = self.draw(epoch * self.steps + number, rows_B)
            else:
                windows = self.split.windows[number * self.batch_size + rows_B]
            tokens = torch.from_numpy(self.split.read(windows)).to(self.device)
            inputs, targets = tokens[:, :-1].clamp_min(0), tokens[:, 1:].clamp_min(0)
            # Training has no padding; finding out would wait for the device.
            mask = None if self.shuffle or bool((tokens >= 0).all()) else tokens[:, 1:] >= 0
            sizes = None if self.lengths_V is None else self.lengths_V[targets]
            yield Batch(inputs, targets, torch.from_numpy(rows_B).to(self.device), mask, sizes)

    def draw(self, step: int, rows_B: NDArray[np.int64]) -> NDArray[np.int64]:
        """The domain and the first token of some rows' windows at a step (B, 2)."""
        domain_B = (step * self.batch_size + rows_B) % len(self.split.domains)
        # one token more than a window must follow
        num_B = np.array([len(text) for text in self.split.domains])[domain_B] - self.split.context
        start_B = random_bits(WINDOW, self.seed, step, rows_B) % num_B.astype(np.uint64)
        return np.stack((domain_B, start_B.astype(np.int64)), 1)
