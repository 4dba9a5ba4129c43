"""Texts as memory-mapped arrays, their splits, the windows that a split is judged by, and batches of windows.

Axes: n windows of a split, B of this rank in a batch, T = context tokens of a window, V vocabulary. A token is a byte unless
there is a tokenizer.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from raytraced.data.hashing import random_bits
from raytraced.tasks import task
from raytraced.tasks.task import Batch
from raytraced.words import require

WINDOW = 6  # the stream of random bits, beside those of hashing.py
MOST_TOKENS = 16_384  # of a batch in evaluation: the logits of more would take hundreds of megabytes

NUM_STRETCHES, LAP = 100, 20
"""a text is cut into so many equal stretches; of every lap of 20 the tenth is for validation, the last for testing"""


@dataclass(frozen=True)
class Text:
    """Tokens that lie in one or more arrays, files in memory maps say, read as if they were one; nothing is copied before."""

    pieces: tuple[NDArray[Any], ...]

    @cached_property
    def ends(self) -> list[int]:
        """Where each piece ends."""
        return list(accumulate(map(len, self.pieces)))

    def __len__(self) -> int:
        return self.ends[-1] if self.pieces else 0

    def part(self, start: int, stop: int) -> "Text":
        """The tokens from start to stop, still where they are."""
        firsts = (end - len(piece) for piece, end in zip(self.pieces, self.ends, strict=True))
        cuts = (
            piece[max(0, start - first) : max(0, stop - first)]
            for piece, first in zip(self.pieces, firsts, strict=True)
            if first < stop and first + len(piece) > start
        )
        return Text(tuple(cuts))

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """The same, copied into one array."""
        if len(self.pieces) == 1:
            return self.pieces[0][start:stop]
        return np.concatenate(self.part(start, stop).pieces or (np.zeros(0, dtype=np.uint8),))


def held_out(text: Text) -> dict[str, Text]:
    """The splits of a text: 90 % to train on, 5 % each for validation and test, spread over all of it."""
    edges = [len(text) * number // NUM_STRETCHES for number in range(NUM_STRETCHES + 1)]
    split_of = {LAP // 2 - 1: "validation", LAP - 1: "test"}
    pieces: dict[str, list[NDArray[Any]]] = {"train": [], "validation": [], "test": []}
    for number, (start, stop) in enumerate(pairwise(edges)):
        pieces[split_of.get(number % LAP, "train")] += text.part(start, stop).pieces
    return {name: Text(tuple(parts)) for name, parts in pieces.items()}


@dataclass(frozen=True)
class Split:
    """The same split of every domain; training draws windows anywhere, evaluation takes these, a sample each."""

    domains: tuple[Text, ...]
    context: int
    num_judged: int | None
    """how many tokens evaluation takes at most, spread over all domains alike; None for all"""

    def __len__(self) -> int:
        return len(self.windows)

    @cached_property
    def windows(self) -> NDArray[np.int64]:
        """The domain and the first token of each window (n, 2); they lie one behind the other, or with gaps between."""
        parts = []
        for number, text in enumerate(self.domains):
            num = -(-(len(text) - 1) // self.context)  # the first token of all is nobody's target
            most = num if self.num_judged is None else max(1, self.num_judged // self.context // len(self.domains))
            kept = np.arange(num) if num <= most else np.arange(most) * num // most
            parts.append(np.stack((np.full_like(kept, number), kept * self.context), 1))
        return np.concatenate(parts)

    def read(self, windows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The tokens of some windows, and the one after each (n, T + 1), -1 where the text has ended."""
        tokens = np.full((len(windows), self.context + 1), -1, dtype=np.int64)
        for row, (domain, start) in zip(tokens, windows.tolist(), strict=True):
            found = self.domains[domain].read(start, start + self.context + 1)
            row[: len(found)] = found
        return tokens


@dataclass(frozen=True)
class Dataset(task.Data[Split]):
    """A text's splits, the names of its domains, how many steps an epoch has, and what its tokens are."""

    domain_names: tuple[str, ...]
    steps: int
    tokenizer: str | None = None
    """the JSON of a tokenizer; None: tokens are bytes"""
    lengths: NDArray[np.int64] | None = None
    """how many bytes each token stands for (V,); None: one"""

    @property
    def context(self) -> int:
        """How many tokens a window has."""
        return self.train.context

    @property
    def vocabulary(self) -> int:
        """How many tokens there are."""
        return 256 if self.lengths is None else len(self.lengths)


def build_dataset(
    name: str,
    domains: dict[str, dict[str, Text]],
    *,
    context: int,
    steps: int,
    judged: int | None,
    tokenizer: str | None = None,
    lengths: NDArray[np.int64] | None = None,
) -> Dataset:
    """Put domains, each with its three splits, together; refuses a text that is too short for one window."""
    for option, value in (("context", context), ("steps", steps), ("judged", judged)):
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
        split: Split(tuple(splits[split] for splits in domains.values()), context, judged)
        for split in ("train", "validation", "test")
    }
    return Dataset(name, **parts, domain_names=tuple(domains), steps=steps, tokenizer=tokenizer, lengths=lengths)


@dataclass(repr=False, eq=False)
class Loader(task.Loader[Split]):
    """Batches of windows.

    With `shuffle`, batch b of an epoch is a pure function of (seed, step = epoch · steps + b): windows that begin anywhere,
    of each domain in turn. Without, they are the split's own windows in order, the last filled up and masked.
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
            # to ask whether there is padding waits for the device: training has none
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
