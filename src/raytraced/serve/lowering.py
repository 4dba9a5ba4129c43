"""Which efforts are lowered when the queue would break deadlines: those whose loss grows least per second that is saved."""

import heapq
from collections.abc import Sequence
from itertools import count
from time import perf_counter

from raytraced.serve.admission import ServiceTimes
from raytraced.serve.answering import Query
from raytraced.serve.budgets import Budget

Reduction = tuple[float, int, Query, Budget, float]
"""loss per second saved, a number that breaks ties, a query, its lower budget, and the seconds saved"""


def lower_efforts(queries: Sequence[Query], start: float, times: ServiceTimes, handling: float) -> bool:
    """Lower the efforts of queries so that all are answered in time, as far as their requests allow it.

    The most urgent query is computed first. Where one would be late, the queries up to it are lowered by rows of their
    models' tables, each time the one whose loss grows least per second.

    Args:
        queries: Those that wait.
        start: When the first of them can begin.
        times: The measured seconds of computation.
        handling: Seconds per query beside its computation.

    Returns:
        Whether an effort was lowered.
    """
    reductions, numbers, end, lowered = list[Reduction](), count(), start, False

    def offer(query: Query) -> None:
        below = query.budget.lowered() if query.budget is not None else None
        seconds = times.expect(query)
        if below is None or not seconds:
            return
        assert query.budget is not None
        saved = seconds * (1 - below.effort / query.budget.effort)
        heapq.heappush(reductions, ((below.loss - query.budget.loss) / saved, next(numbers), query, below, saved))

    for query in sorted(queries, key=lambda query: query.due):
        end += times.expect(query) + handling
        offer(query)
        while query.deadline is not None and end > query.deadline and reductions:
            _, _, cheapest, budget, saved = heapq.heappop(reductions)
            cheapest.budget, lowered = budget, True
            end -= saved
            offer(cheapest)
    return lowered


def relieve(query: Query, pressure: float) -> None:
    """Lower an effort where requests are being refused: a lower effort costs less than no answer.

    Args:
        query: The query.
        pressure: The share of what its request allows to save that is saved, 0 … 1.
    """
    if query.budget is None:
        return
    highest = query.budget.effort - pressure * (query.budget.effort - query.budget.least)
    while query.budget.effort > highest and (below := query.budget.lowered()) is not None:
        query.budget = below


def lower_text(query: Query, step_seconds: float) -> None:
    """Lower the effort of a text that would not reach its length before its deadline, as far as its request allows it."""
    if query.deadline is None or query.budget is None or query.sampling is None:
        return
    left, highest = query.deadline - perf_counter(), query.budget.effort
    needed = query.sampling.length * step_seconds
    while needed * query.budget.effort / highest > left and (below := query.budget.lowered()) is not None:
        query.budget = below
