"""The rules of benchmarks/aims-readings.md: readings of the text, longer training, and a loss on the last answer alone."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from experiments.reproduce.records import Point, Results, Spread
from experiments.reproduce.variants import LONG_EPOCHS

AHEAD, LEVEL, BEHIND = "ahead", "level", "behind"
LITTLE_ACCURACY = 0.3  # points that a row may differ from the paper's by, or two of its deviations if that is more
LITTLE_EXPERTS = 0.25  # of the paper's number of experts
# Families of models that are no baseline of rule 3: ours, and one that is trained with a loss on exits.
NO_BASELINES = ("mre", "mre-paper", "mre-final-loss", "mre-budgets", "multi-exit")
LITTLE_LONGER = 0.1  # of the number of experts, by which longer training may change it


def agrees(accuracy: float, experts: float, paper: tuple[float, float], paper_experts: float) -> bool:
    """Rule 1: whether a row agrees with the paper on a data set.

    Args:
        accuracy: Mean test accuracy in percent.
        experts: Mean number of experts per image.
        paper: The paper's accuracy in percent and its standard deviation.
        paper_experts: The paper's number of experts.
    """
    mean, deviation = paper
    near = abs(accuracy - mean) <= max(2 * deviation, LITTLE_ACCURACY)
    return near and abs(experts - paper_experts) <= LITTLE_EXPERTS * paper_experts


class Difference(NamedTuple):
    """The difference of two means over seeds, and its standard error."""

    mean: float
    error: float

    @property
    def verdict(self) -> str:
        """Whether the first is ahead of the second, level with it (below two standard errors) or behind."""
        if abs(self.mean) < 2 * self.error:
            return LEVEL
        return AHEAD if self.mean > 0 else BEHIND if self.mean < 0 else LEVEL

    def __str__(self) -> str:
        return f"{self.mean:+.2f} ± {self.error:.2f}"


def difference(first: Spread, second: Spread) -> Difference:
    """The first mean less the second: seeds of different models are not paired."""
    return Difference(first.mean - second.mean, math.hypot(first.error, second.error))


def changes_little(accuracy: Difference, experts: tuple[float, float]) -> bool:
    """Rule 2: whether longer training changes little.

    Args:
        accuracy: That of long training less that of short training.
        experts: Mean numbers of experts after short and after long training.
    """
    short, long = experts
    return accuracy.verdict == LEVEL and abs(long - short) < LITTLE_LONGER * short


def in_percent(values: Spread) -> Spread:
    """The same accuracies in percent."""
    return Spread(100 * values.mean, 100 * values.std, values.num)


class Longer(NamedTuple):
    """`mre-paper` after long training beside short training."""

    accuracy: Difference
    short: Point
    long: Point
    little: bool


def compare_longer(results: Results, data: str = "cifar10") -> Longer | None:
    """Rule 2 on our records; None without them."""
    short, long = results.point(data, "mre-paper"), results.point(data, f"mre-paper-{LONG_EPOCHS}-epochs", "reading")
    if not short.records or not long.records:
        return None
    accuracy = difference(in_percent(long.accuracy), in_percent(short.accuracy))
    return Longer(accuracy, short, long, changes_little(accuracy, (short.experts, long.experts)))


def strongest(points: Iterable[Point], macs: float) -> Point | None:
    """The most accurate of some models that need at most so many multiply-adds; None if all need more."""
    return max((one for one in points if one.macs <= macs), key=lambda one: one.accuracy.mean, default=None)


class FinalLoss(NamedTuple):
    """`mre-final-loss` beside the most accurate baseline of at most its multiply-adds, and beside `threshold`."""

    ours: Point
    best: Point | None
    threshold: Point

    def against(self, other: Point) -> Difference:
        """Points of accuracy above another model."""
        return difference(in_percent(self.ours.accuracy), in_percent(other.accuracy))


def compare_final_loss(results: Results, data: str) -> FinalLoss | None:
    """Rule 3 on the records of one data set; None without them.

    Baselines are all models of the table of accuracy and cost but MRE and multi-exit: none is trained with a loss on exits.
    """
    ours, threshold = results.point(data, "mre-final-loss"), results.point(data, "threshold")
    if not ours.records or not threshold.records:
        return None
    points = [results.point(data, label) for label in results.compared(data)]
    baselines = [point for point in points if point.records[0].family not in NO_BASELINES]
    return FinalLoss(ours, strongest(baselines, ours.macs), threshold)
