"""Stop when sure: each sample takes the first answer that is sure enough, and nothing runs for it after that.

Axes: B batch, n the rows that still go on, Y classes.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from raytraced.layer import Looks
from raytraced.sequence import Route
from raytraced.words import require

Sure = float | Sequence[float]
"""how large the largest class probability must be, at every look or at each of them"""


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same, not followed by torch.compile: who goes on depends on values, and generators do not survive a graph's break."""
    return torch.compiler.disable(function) if torch.compiler.is_compiling() else function


def check_sure(sure: Sure) -> list[float]:
    """A threshold for each look, the last one for all that follow."""
    thresholds = list(sure) if isinstance(sure, Sequence) and not isinstance(sure, str) else [sure]
    require(len(thresholds) > 0, "sure", sure, "must hold at least one probability")
    for threshold in thresholds:
        numeric = isinstance(threshold, int | float) and not isinstance(threshold, bool)
        require(numeric and 0 <= threshold <= 1, "sure", repr(threshold), "must lie in 0 … 1, it is a probability")
    return thresholds


def answer_when_sure(looks: Looks[Any], sure: Sure, mask_B: Tensor | None = None, deadline: float | None = None) -> Any:
    """The first Output of a model's looks, for each row, that is sure enough, or the last there is.

    `deadline`, in perf_counter's time, ends all. Rows whose mask is False take the first.
    """
    *_, last = answers_until_sure(looks, sure, mask_B, deadline)
    return last


def answers_until_sure(
    looks: Looks[Any], sure: Sure, mask_B: Tensor | None = None, deadline: float | None = None
) -> Iterator[Any]:
    """As above, but the answers of all rows after every look: those that are sure stay as they are."""
    thresholds = check_sure(sure)
    (out, ended_n), rows_n = next(looks), None
    looks_B = torch.ones(len(out.logits), dtype=torch.int64, device=out.logits.device)
    looks_B = looks_B if mask_B is None else looks_B * mask_B
    total = out._replace(num_looks=looks_B)
    for threshold in chain(thresholds, repeat(thresholds[-1])):
        yield total
        unsure_n = (out.logits.softmax(-1).amax(-1) < threshold) & ~ended_n
        if rows_n is None and mask_B is not None:
            unsure_n = unsure_n & mask_B
        kept_n = unsure_n.nonzero()[:, 0]
        if not len(kept_n) or (deadline is not None and perf_counter() >= deadline):
            return
        all_go_on = len(kept_n) == len(unsure_n)
        try:
            out, ended_n = looks.send(None if all_go_on else kept_n)
        except StopIteration:
            return
        if not all_go_on:
            rows_n = kept_n if rows_n is None else rows_n[kept_n]
        # one image, or rows that nobody has left yet: nothing to put in place
        total = out._replace(num_looks=total.num_looks + 1) if rows_n is None else _put(total, out, rows_n)


def _put(total: Any, out: Any, rows_n: Tensor) -> Any:
    """The newer answer in the place of the older, for some rows."""

    def put_route(old: Route, new: Route) -> Route:
        active = old.active.index_copy(0, rows_n, new.active)
        num_active = old.num_active.index_copy(0, rows_n, new.num_active)
        num_runs = None if old.num_runs is None else old.num_runs.index_copy(0, rows_n, new.num_runs)  # type: ignore[arg-type]
        nodes = new.nodes
        if nodes is not None:  # a longer look has longer sequences
            nodes = nodes.new_full((len(active), nodes.shape[1]), -1)
            if old.nodes is not None:
                nodes[:, : old.nodes.shape[1]] = old.nodes
            nodes = nodes.index_copy(0, rows_n, new.nodes)  # type: ignore[arg-type]
        return Route(active, nodes, num_active, None, num_runs)

    routes = tuple(put_route(old, new) for old, new in zip(total.routes, out.routes, strict=True))
    looks_B = total.num_looks.index_add(0, rows_n, torch.ones_like(rows_n))
    return total._replace(logits=total.logits.index_copy(0, rows_n, out.logits), routes=routes, num_looks=looks_B)
