"""What may be done about experts that are not in memory: wait for them, guess them, or know them.

Axes: T tokens, L blocks, N experts per block.
"""

import mmap
import os
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from raytraced.store.budget import ByteBudget
from raytraced.store.experts import StoredExperts
from raytraced.store.pool import ReadPlan, ReadStats
from raytraced.store.reader import ExpertReader

MAX_READS = 2  # experts that a token may read under the deadline in bytes


class Policy:
    """Reads nothing ahead: each block waits for its experts.

    Args:
        experts: The experts in the store.
        traces: Which experts each token of each text runs.
        num_slots: How many experts the limit allows in memory.
    """

    belady = False

    def __init__(self, experts: StoredExperts, traces: dict[str, np.ndarray], num_slots: int) -> None:
        self.experts, self.traces, self.num_slots = experts, traces, num_slots
        self.plans: list[ReadPlan] = []

    def begin(self, active_TLN: Tensor, prompt: int, place: slice) -> tuple[Any, Tensor]:
        """Before the first block: a context for all blocks, and the experts that run (T, L, N)."""
        return nullcontext(), active_TLN

    def before(self, block: int) -> None:
        """Before each block."""

    def end(self) -> None:
        """After the last block."""
        for plan in self.plans:
            plan.close()
        self.plans = []


class Previous(Policy):
    """Expects each token to run the experts of the token before it."""

    last: Sequence[int] = ()

    def begin(self, active_TLN: Tensor, prompt: int, place: slice) -> tuple[Any, Tensor]:
        if place.start:  # of a new prompt there is no token before
            self.plans.append(self.experts.pool.expect(self.last))
        self.last = self.experts.order(active_TLN[-1:])
        return nullcontext(), active_TLN


class NextBlock(Policy):
    """Knows the next block's experts when a block begins: the best that a guess of one block ahead could be."""

    def begin(self, active_TLN: Tensor, prompt: int, place: slice) -> tuple[Any, Tensor]:
        self.ahead_LN = self.expected(active_TLN, prompt, place).any(0)
        return nullcontext(), active_TLN

    def expected(self, active_TLN: Tensor, prompt: int, place: slice) -> np.ndarray:
        """The experts that are read ahead (T, L, N)."""
        found: np.ndarray = active_TLN.numpy()
        return found

    def before(self, block: int) -> None:
        for plan in self.plans[:-1]:
            plan.close()
        self.plans = self.plans[-1:]
        if block + 1 < len(self.ahead_LN):
            first = (block + 1) * self.ahead_LN.shape[1]
            order = [first + expert for expert in np.flatnonzero(self.ahead_LN[block + 1]).tolist()]
            self.plans.append(self.experts.pool.expect(order))


class NextGate(NextBlock):
    """Expects of the next block what its gate says to this block's input: right for some experts, wrong for others."""

    def expected(self, active_TLN: Tensor, prompt: int, place: slice) -> np.ndarray:
        return self.traces["guess"][prompt, place]


class Planned(Policy):
    """Knows the whole path when the token is known; the least recently used expert leaves."""

    def begin(self, active_TLN: Tensor, prompt: int, place: slice) -> tuple[Any, Tensor]:
        return self.experts.reading(active_TLN), active_TLN


class PlannedBelady(Planned):
    """The same, and experts that the path still needs stay."""

    belady = True


class PlannedBytes(PlannedBelady):
    """The same, with a deadline in bytes for each token after a prompt."""

    def begin(self, active_TLN: Tensor, prompt: int, place: slice) -> tuple[Any, Tensor]:
        file = self.experts.pool.file
        if place.start == 0:  # a prompt has no deadline, but what it reads is there afterwards
            self.budget = ByteBudget(len(file.runs) * file.run_bytes, file, self.num_slots)
            for token in range(place.stop):
                self.budget.admit(self.path(prompt, token))
            self.budget.num_reads = MAX_READS
        else:
            kept = self.budget.admit(self.path(prompt, place.start))
            active_TLN = torch.zeros_like(active_TLN)
            active_TLN.view(-1)[kept] = 1
        return self.experts.reading(active_TLN), active_TLN

    def path(self, prompt: int, token: int) -> list[int]:
        """The experts of a token in the order of activation."""
        nodes = self.traces["nodes"][prompt, token]
        found: list[int] = nodes[nodes >= 0].tolist()
        return found


class MappedPool:
    """The whole file mapped into memory, read by the page cache, which is held to the limit expert by expert.

    The kernel offers no limit for one file's pages here: the least recently used expert's pages are given back instead.
    """

    def __init__(self, reader: ExpertReader, memory: int) -> None:
        self.file, self.reader, self.num_slots = reader.file, reader, memory // reader.file.run_bytes
        self.memory = mmap.mmap(reader.descriptors[0], 0, access=mmap.ACCESS_COPY)
        self.view, self.stats = memoryview(self.memory), ReadStats()
        self.recent: OrderedDict[int, None] = OrderedDict()
        os.posix_fadvise(reader.descriptors[0], 0, 0, os.POSIX_FADV_DONTNEED)

    def expect(self, order: Sequence[int]) -> Any:
        return SimpleNamespace(close=lambda: None, covers=lambda experts: True)

    def acquire(self, experts: Sequence[int], plan: Any = None, until: float | None = None) -> list[int]:
        for expert in experts:
            self.stats.num_uses += 1
            if expert not in self.recent:
                self.stats.num_reads += 1
                self.stats.bytes_read += self.file.run_bytes
            self.recent[expert] = None
            self.recent.move_to_end(expert)
            if len(self.recent) > self.num_slots:
                gone = self.file.runs[self.recent.popitem(last=False)[0]].offset
                self.memory.madvise(mmap.MADV_DONTNEED, gone, self.file.run_bytes)
                os.posix_fadvise(self.reader.descriptors[0], gone, self.file.run_bytes, os.POSIX_FADV_DONTNEED)
        return list(experts)

    def release(self, experts: Any) -> None:
        """Nothing is pinned."""

    def slot(self, expert: int) -> memoryview:
        offset = self.file.runs[expert].offset
        return self.view[offset : offset + self.file.run_bytes]

    def close(self) -> None:
        self.reader.close()


class Contender(NamedTuple):
    """A way to read, and the decoder whose choices it is measured on."""

    name: str
    traces: str
    policy: type[Policy]
    mapped: bool = False
    guesses: bool = False  # does not know the path: what the planned readers must be ahead of


CONTENDERS = (
    Contender("mmap, page cache", "mre", Policy, mapped=True, guesses=True),
    Contender("LRU on demand", "mre", Policy, guesses=True),
    Contender("LRU + previous token's experts", "mre", Previous, guesses=True),
    Contender("LRU + one block ahead, never wrong", "mre", NextBlock, guesses=True),
    Contender("planned, LRU", "mre", Planned),
    Contender("planned, Belady", "mre", PlannedBelady),
    Contender(f"planned, Belady, {MAX_READS} reads per token", "mre", PlannedBytes),
    Contender("top-k: LRU on demand", "top-k", Policy),
    Contender("top-k: LRU + previous token's experts", "top-k", Previous),
    Contender("top-k: LRU + next block's gate", "top-k", NextGate),
)
