"""Deadlines: which experts of a path are computed when a token may read so many bytes, or a pass may wait for so long."""

from collections import OrderedDict
from collections.abc import Sequence
from math import inf
from time import perf_counter

from raytraced.errors import require
from raytraced.store.layout import StoreFile


class ByteBudget:
    """Decides, token by token, which experts of one text are read.

    The decision must not depend on what other texts left in memory, so it follows a list of its own: what a pool of this size
    would hold if this text alone used it, the least recently used expert leaving first. It depends on the tokens, the number
    of slots and the deadline alone: the same deadline gives the same answer.

    Args:
        max_bytes: The most bytes that a token may read.
        file: The store.
        num_slots: How many experts fit into memory.
    """

    def __init__(self, max_bytes: int, file: StoreFile, num_slots: int) -> None:
        fits = type(max_bytes) is int and max_bytes >= 0
        require(fits, "max_bytes", repr(max_bytes), "must be a whole number of bytes, at least 0")
        self.num_reads, self.num_slots = max_bytes // file.run_bytes, num_slots
        self.recent: OrderedDict[int, None] = OrderedDict()

    def admit(self, path: Sequence[int]) -> list[int]:
        """The experts of a token that are computed: those in memory, and the first of the others, by their rank.

        Args:
            path: The token's experts, in the order of activation.

        Returns:
            The experts that stay, in the same order.
        """
        remaining, admitted = self.num_reads, []
        for expert in path:
            if expert not in self.recent:
                if not remaining:
                    continue
                remaining -= 1
            self.recent[expert] = None
            self.recent.move_to_end(expert)
            admitted.append(expert)
            if len(self.recent) > self.num_slots:
                self.recent.popitem(last=False)
        return admitted


class TimeLimit:
    """How long one pass waits for experts; what has not arrived by then is left out.

    Args:
        max_ms: Milliseconds from now on.
    """

    def __init__(self, max_ms: float) -> None:
        fits = isinstance(max_ms, int | float) and not isinstance(max_ms, bool) and 0 < max_ms < inf
        require(fits, "max_ms", repr(max_ms), "must be a number of milliseconds above 0")
        self.until = perf_counter() + max_ms / 1000
        self.missed: set[int] = set()  # experts of the grid that were left out, numbered l·N + i
