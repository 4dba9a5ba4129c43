"""Early exit: each sample takes the first answer that is confident enough, and nothing runs for it after that.

One loop serves `model(…, confidence=…)`, `rt.anytime`, calibration, evaluation and the server. A model offers its answers
on the way as an object of type `Exits`; an `ExitPolicy` says when a sample leaves; `walk` takes one exit after the other.

Axes: B batch, n rows that have not left yet, Y classes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from raytraced.errors import check_budget, require
from raytraced.layer import Exit
from raytraced.sequence import Route

T = TypeVar("T")
U = TypeVar("U")

ExitEvery = Literal["layer", "expert"]
Confidence = float | Sequence[float]
"""a threshold for the largest class probability: the same at every exit, or one per exit (the last holds for the rest)"""
StopReason = Literal["confidence", "budget", "end", "deadline"]

# A step begins only if it would end before the deadline, were it to take this many times as long as the one before.
SLOWEST_STEP = 1.5


class Exits(Protocol[T]):
    """Answers on the way, one after the other.

    `current` holds the newest answer of the rows that have not left, and which of them have ended (`Exit`).
    `advance(rows)` continues with these of its rows (numbers into the current ones, None: all) to the next exit.
    """

    @property
    def current(self) -> Exit[T]: ...

    def advance(self, rows: Tensor | None = None) -> None: ...


class MappedExits(Generic[T, U]):
    """The exits of a part of a model, with a function applied to each answer: a layer's vectors to a model's logits."""

    def __init__(self, exits: Exits[T], function: Callable[[T], U]) -> None:
        self.exits, self.function = exits, function
        self.current = self._map()

    def advance(self, rows: Tensor | None = None) -> None:
        """Continue with some of the current rows."""
        self.exits.advance(rows)
        self.current = self._map()

    def _map(self) -> Exit[U]:
        output, ended_n = self.exits.current
        return Exit(self.function(output), ended_n)


class BudgetExits(Generic[T]):
    """Answers with at most 0, 1, 2, … experts, each computed from the start: for models that cannot extend an answer.

    Args:
        answer: Budget -> the model's answer with at most that many experts per routed layer.
        max_experts: The largest budget.
    """

    def __init__(self, answer: Callable[[int], T], max_experts: int) -> None:
        self.answer, self.max_experts, self.budget = answer, max_experts, 0
        self.current = self._run()

    def advance(self, rows: Tensor | None = None) -> None:
        """Answer anew with one expert more. All rows must continue: a text's tokens depend on each other."""
        require(rows is None or len(rows) == len(self.current.ended), "rows", rows, "must be None: all rows continue")
        self.budget += 1
        self.current = self._run()

    def _run(self) -> Exit[T]:
        out: Any = self.answer(self.budget)
        uses_all = [(route.num_active == self.budget).flatten(1).any(1) for route in _batched(out.routes)]
        continues_n = torch.stack(uses_all).any(0) & (self.budget < self.max_experts)
        return Exit(out, ~continues_n)


def _batched(routes: Sequence[Route]) -> Iterator[Route]:
    """Routes whose counts have at least two axes: one value per sample becomes (B, 1)."""
    for route in routes:
        yield route._replace(num_active=route.num_active.unsqueeze(-1))


@dataclass(frozen=True)
class ExitPolicy:
    """When a sample leaves.

    Args:
        confidence: Leave at the first answer whose largest class probability reaches this threshold. One number, or one per
            exit (the last holds for all later exits). None: no threshold.
        max_experts: Leave when this many experts have run. None: no budget.
        deadline: Leave before the next step would end later than this, in seconds of `time.perf_counter`. None: no deadline.
        exit_every: Where exits are: after every "layer" of the grid, or after every "expert" of the activation sequence.
    """

    confidence: Confidence | None = None
    max_experts: int | None = None
    deadline: float | None = None
    exit_every: ExitEvery = "layer"

    def __post_init__(self) -> None:
        check_budget(self.max_experts)
        if self.confidence is not None:
            check_confidence(self.confidence)

    def threshold(self, number: int) -> float | None:
        """The confidence at which a sample leaves at an exit.

        Args:
            number: Number of the exit, from 0.

        Returns:
            The threshold; None where there is none.
        """
        if self.confidence is None:
            return None
        thresholds = check_confidence(self.confidence)
        return thresholds[min(number, len(thresholds) - 1)]

    def leaves(self, step: "WalkStep[Any]") -> Tensor:
        """Which rows of an exit leave, where all rows share this policy and the exits end at its budget.

        Args:
            step: The exit.

        Returns:
            (n,), True where a row leaves.
        """
        (out, ended_n), threshold = step.exit, self.threshold(step.number)
        if self.deadline is not None and step.next_end > self.deadline:
            return torch.ones_like(ended_n)
        return ended_n if threshold is None else ended_n | ~(confidences(out.logits) < threshold)

    def stop_reason(self, step: "WalkStep[Any]", confidence: float, num_experts: int, ended: bool) -> StopReason | None:
        """Why one row of an exit leaves: for rows that have policies of their own.

        Args:
            step: The exit.
            confidence: The row's largest class probability.
            num_experts: How many experts are active for it.
            ended: Whether every later exit would give the same answer.

        Returns:
            "confidence", "budget", "end" or "deadline"; None if the row continues.
        """
        threshold = self.threshold(step.number)
        if threshold is not None and not confidence < threshold:
            return "confidence"
        if self.max_experts is not None and num_experts >= self.max_experts:
            return "budget"
        if ended:
            return "end"
        return "deadline" if self.deadline is not None and step.next_end > self.deadline else None


def check_confidence(confidence: Confidence) -> list[float]:
    """The thresholds of all exits, the last of which holds for later ones too; refuses what is no probability."""
    one_per_exit = isinstance(confidence, Sequence) and not isinstance(confidence, str)
    thresholds: list[Any] = list(confidence) if one_per_exit else [confidence]  # type: ignore[arg-type]
    require(len(thresholds) > 0, "confidence", confidence, "must hold at least one probability")
    for threshold in thresholds:
        numeric = isinstance(threshold, int | float) and not isinstance(threshold, bool)
        require(
            numeric and 0 <= threshold <= 1, "confidence", repr(threshold), "must lie in 0 … 1, it is a probability"
        )
    return thresholds


class WalkStep(NamedTuple, Generic[T]):
    """One exit of a walk."""

    number: int  # of the exit, from 0
    exit: Exit[T]
    rows: Tensor | None  # (n,), numbers of the rows in the first batch; None: all are still there
    next_end: float  # when the next step would end, if it is slow; in seconds of perf_counter


class Walk(Generic[T]):
    """Takes a model's exits one after the other; after each, rows may leave.

        walk = Walk(lambda: model.exits(images))
        while walk.step is not None:
            ...                                 # read walk.step
            walk.leave(leaves_n)                # a bool for each of its rows; the others continue to the next exit

    The exits are made by a function, so that the time they take until the first answer counts as a step.
    """

    def __init__(self, make_exits: Callable[[], Exits[T]]) -> None:
        began = perf_counter()
        self.exits = make_exits()
        self.step: WalkStep[T] | None = self._step(0, None, began)

    def leave(self, leaves_n: Tensor) -> None:
        """Let rows leave (n,), and take the next exit with the others; `step` is None when no row is left."""
        assert self.step is not None
        number, current, rows_n, _ = self.step
        kept_n = (~(leaves_n | current.ended)).nonzero()[:, 0]
        if not len(kept_n):
            self.step = None
            return
        began, all_stay = perf_counter(), len(kept_n) == len(leaves_n)
        self.exits.advance(None if all_stay else kept_n)
        if not all_stay:
            rows_n = kept_n if rows_n is None else rows_n[kept_n]
        self.step = self._step(number + 1, rows_n, began)

    def _step(self, number: int, rows_n: Tensor | None, began: float) -> WalkStep[T]:
        now = perf_counter()
        return WalkStep(number, self.exits.current, rows_n, now + SLOWEST_STEP * (now - began))


def confidences(logits: Tensor) -> Tensor:
    """The largest class probability of each row (n,)."""
    return logits.softmax(-1).amax(-1)


def answers(make_exits: Callable[[], Exits[Any]], policy: ExitPolicy, mask_B: Tensor | None = None) -> Iterator[Any]:
    """The answers of all rows after every exit; rows that have left keep theirs.

    Args:
        make_exits: Makes the exits of a model; their outputs are `raytraced.Output`.
        policy: When a row leaves. Its budget must be that of the exits.
        mask_B: (B,), rows that are False take the first answer.

    Yields:
        Output with `num_exits` (B,), the number of exits that each row has taken.
    """
    walk = Walk(make_exits)
    total: Any = None
    while walk.step is not None:
        out, rows_n = walk.step.exit.output, walk.step.rows
        if total is None:
            num_exits_B = torch.ones(len(out.logits), dtype=torch.int64, device=out.logits.device)
            total = out._replace(num_exits=num_exits_B if mask_B is None else num_exits_B * mask_B)
        elif rows_n is None:  # Hot path at batch size 1: nothing to put in place.
            total = out._replace(num_exits=total.num_exits + 1)
        else:
            total = _put(total, out, rows_n)
        yield total
        leaves_n = policy.leaves(walk.step)
        if mask_B is not None and rows_n is None:
            leaves_n = leaves_n | ~mask_B
        walk.leave(leaves_n)


def run(make_exits: Callable[[], Exits[Any]], policy: ExitPolicy, mask_B: Tensor | None = None) -> Any:
    """The answer with which each row leaves: the last of `answers`."""
    *_, last = answers(make_exits, policy, mask_B)
    return last


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which torch.compile does not trace: which rows continue depends on values."""
    return torch.compiler.disable(function) if torch.compiler.is_compiling() else function


def _put(total: Any, out: Any, rows_n: Tensor) -> Any:
    """Replace the answers of some rows by newer ones."""

    def put_route(old: Route, new: Route) -> Route:
        active = old.active.index_copy(0, rows_n, new.active)
        num_active = old.num_active.index_copy(0, rows_n, new.num_active)
        num_runs = None if old.num_runs is None else old.num_runs.index_copy(0, rows_n, new.num_runs)  # type: ignore[arg-type]
        nodes = new.nodes
        if nodes is not None:  # a later exit has longer sequences
            nodes = nodes.new_full((len(active), nodes.shape[1]), -1)
            if old.nodes is not None:
                nodes[:, : old.nodes.shape[1]] = old.nodes
            nodes = nodes.index_copy(0, rows_n, new.nodes)  # type: ignore[arg-type]
        return Route(active, nodes, num_active, None, num_runs)

    routes = tuple(put_route(old, new) for old, new in zip(total.routes, out.routes, strict=True))
    num_exits_B = total.num_exits.index_add(0, rows_n, torch.ones_like(rows_n))
    return total._replace(logits=total.logits.index_copy(0, rows_n, out.logits), routes=routes, num_exits=num_exits_B)
