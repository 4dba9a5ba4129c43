"""The rules of benchmarks/aims-images.md: the second recipe to the end, at every budget, and with early exit."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from experiments.reproduce.plan import FULL
from experiments.reproduce.reading_aims import (
    AHEAD,
    BEHIND,
    NO_BASELINES,
    Difference,
    difference,
    in_percent,
    strongest,
)
from experiments.reproduce.records import SHOWN_WITHIN, Point, Record, Results, spread
from experiments.reproduce.text_aims import Level, frontier, gap
from experiments.reproduce.variants import (
    DATA_NAMES,
    EXIT_BASELINES,
    MRE,
    MRE_BUDGETS,
    MRE_BUDGETS_EXITS,
    MRE_FINAL,
    compared_variants,
)

OURS, EXITS = MRE_BUDGETS.label, MRE_BUDGETS_EXITS.label
BASELINES_WITH_EXITS = (*(one.label for one in EXIT_BASELINES), "multi-exit-exits")
BUDGETS = (1, 2, 4, 8)  # mean experts per image
MOST_BELOW = 0.2  # points below the line of the baselines
DEEP = "dense-8-exits"


class Row(NamedTuple):
    """A verdict on one data set."""

    data: str
    holds: bool
    found: str


def is_missing(results: Results, labels: Iterable[str], data: str) -> bool:
    """Whether some of these models have fewer seeds on a data set than are planned."""
    return any(len(results.of(data, label)) < FULL.num_compared_seeds for label in labels)


def compared_data() -> list[str]:
    """The data sets that the rules are about."""
    return [name for name, plan in FULL.data.items() if plan.compared]


def needed(rule: int, data: str) -> list[str]:
    """The models without which a rule is not decided: 1 to 3, and 4 for the default."""
    if rule == 3:
        return [EXITS, *BASELINES_WITH_EXITS]
    if rule == 4:
        return [OURS, EXITS, MRE.label, MRE_FINAL.label]
    return [OURS, *(one.label for one in compared_variants(FULL.data[data].wide))]


def baselines(results: Results, data: str) -> list[Point]:
    """The models that are trained without a loss on exits and are not ours."""
    points = [results.point(data, label) for label in results.compared(data)]
    return [one for one in points if one.records[0].family not in NO_BASELINES]


def known_data(results: Results, label: str) -> list[str]:
    """The data sets on which a model was trained."""
    return [data for data in results.data() if results.of(data, label)]


def to_the_end(results: Results) -> list[Row]:
    """Rule 1: level with the most accurate baseline of at most its multiply-adds."""
    rows = []
    for data in known_data(results, OURS):
        ours = results.point(data, OURS)
        best = strongest(baselines(results, data), ours.macs)
        if best is not None:
            above = difference(in_percent(ours.accuracy), in_percent(best.accuracy))
            found = f"{DATA_NAMES[data]} {above} ({above.verdict}, {best.records[0].label})"
            rows.append(Row(data, above.verdict != BEHIND, found))
    return rows


def dial_level(records: Sequence[Record], experts: float) -> Level:
    """One checkpoint per seed at a mean number of experts: its errors in percent, in the form of a level of bits."""
    errors, macs = [], []
    for one in records:
        rows = sorted((row["experts"], row["accuracy"], row["macs"]) for row in one.dial)
        counts, accuracies, costs = (list(column) for column in zip(*rows, strict=True))
        errors.append(100 - 100 * float(np.interp(experts, counts, accuracies)))
        macs.append(float(np.interp(experts, counts, costs)))
    error = spread(errors)
    return Level(f"{experts:g}", error.mean, error.error, spread(macs).mean, experts)


def error_level(point: Point) -> Level:
    """A baseline's errors in percent."""
    percent = in_percent(point.accuracy)
    return Level(point.records[0].label, 100 - percent.mean, percent.error, point.macs, point.experts)


def above_line(ours: Point, others: Iterable[Point]) -> Difference:
    """Points of accuracy above the line of some baselines at our multiply-adds."""
    one = gap(error_level(ours), frontier(map(error_level, others)))
    return Difference(-one.bits, one.error)


def below_line(results: Results, data: str) -> list[Difference]:
    """Rule 2: for each budget the points of accuracy above the line of the baselines at its multiply-adds."""
    line = frontier(error_level(one) for one in baselines(results, data))
    found = (gap(dial_level(results.of(data, OURS), num), line) for num in BUDGETS)
    return [Difference(-one.bits, one.error) for one in found]


def one_checkpoint(results: Results) -> list[Row]:
    """Rule 2 on every data set."""
    rows = []
    for data in known_data(results, OURS):
        if not baselines(results, data):
            continue
        above = below_line(results, data)
        shown = ", ".join(f"{num}: {one}" for num, one in zip(BUDGETS, above, strict=True))
        rows.append(Row(data, all(one.mean >= -MOST_BELOW for one in above), f"{DATA_NAMES[data]} {shown}"))
    return rows


def accuracy_at(rows: Iterable[Mapping[str, float]], macs: float) -> float:
    """The accuracy of one model at some multiply-adds, linearly between its settings."""
    line = sorted((row["macs"], row["accuracy"]) for row in rows)
    costs, accuracies = (list(column) for column in zip(*line, strict=True))
    return float(np.interp(macs, costs, accuracies))


def points_ahead(ours: Sequence[Record], baseline: Sequence[Record]) -> Difference:
    """Points of accuracy of ours with early exit above the baseline with its thresholds, at the mean macs of ours."""
    shown = [shown_point(one) for one in ours]
    macs = spread(point["macs"] for point in shown).mean
    others = spread(accuracy_at(other.early_exit["points"], macs) for other in baseline)
    return difference(in_percent(spread(point["accuracy"] for point in shown)), in_percent(others))


def with_exits(results: Results, data: str) -> dict[str, Difference]:
    """Rule 3: points above every baseline with exits at our multiply-adds."""
    ours = results.of(data, EXITS)
    found = {}
    for label in BASELINES_WITH_EXITS:
        others = results.of(data, label)
        if others:
            found[label] = points_ahead(ours, others)
    return found


def early_exit(results: Results) -> list[Row]:
    """Rule 3 on every data set: level with every baseline."""
    rows = []
    for data in known_data(results, EXITS):
        found = with_exits(results, data)
        if DEEP not in found:
            continue
        worst = min(found, key=lambda label: found[label].mean / max(found[label].error, math.ulp(1.0)))
        shown = f"{DATA_NAMES[data]} {found[worst]} ({worst}); {DEEP} {found[DEEP]} ({found[DEEP].verdict})"
        rows.append(Row(data, all(one.verdict != BEHIND for one in found.values()), shown))
    return rows


def is_default(results: Results) -> Row:
    """Whether the second recipe is nowhere behind the first: to the end, and with early exit."""
    behind = []
    for data in known_data(results, OURS):
        first, second = (in_percent(results.point(data, label).accuracy) for label in (MRE_FINAL.label, OURS))
        pairs = {"to the end": difference(second, first)}
        stopped = [in_percent(spread(map(accuracy_stopped, results.of(data, label)))) for label in (MRE.label, EXITS)]
        pairs["early exit"] = difference(stopped[1], stopped[0])
        behind += [f"{DATA_NAMES[data]}, {name} {one}" for name, one in pairs.items() if one.verdict == BEHIND]
    return Row("", not behind, f"behind on {'; '.join(behind)}" if behind else "nowhere behind")


class EqualCost(NamedTuple):
    """The second recipe less the first at equal multiply-adds, in points of accuracy."""

    to_the_end: Difference  # the second one's dial turned until it costs what the first one costs
    few_experts: Difference  # the first one with at most so many experts that it costs what the second one costs
    early_exit: Difference  # the first one's thresholds at the mean multiply-adds of the second one


def equal_cost(results: Results, data: str) -> EqualCost:
    """Both recipes at equal multiply-adds, which the rule on the default does not compare."""
    first, second = results.of(data, MRE_FINAL.label), results.of(data, OURS)
    first_macs, second_macs = (results.point(data, label).macs for label in (MRE_FINAL.label, OURS))

    def less(second_accuracies: Iterable[float], first_accuracies: Iterable[float]) -> Difference:
        return difference(in_percent(spread(second_accuracies)), in_percent(spread(first_accuracies)))

    return EqualCost(
        less((accuracy_at(one.dial, first_macs) for one in second), (one.accuracy for one in first)),
        less((one.accuracy for one in second), (accuracy_at(one.budgets, second_macs) for one in first)),
        points_ahead(results.of(data, EXITS), results.of(data, MRE.label)),
    )


def shown_point(record: Record) -> dict[str, float]:
    """Accuracy and cost with early exit, at the threshold that is shown."""
    return next(row for row in record.early_exit["points"] if row["within"] == SHOWN_WITHIN)


def accuracy_stopped(record: Record) -> float:
    """Test accuracy with early exit, at the threshold that is shown."""
    return float(shown_point(record)["accuracy"])


def verdicts(results: Results) -> list[list[str]]:
    """A line for each rule: its words, whether it holds, and what was found."""
    ends, budgets, exits = to_the_end(results), one_checkpoint(results), early_exit(results)
    ahead = sum(with_exits(results, row.data)[DEEP].verdict == AHEAD for row in exits)
    at = ", ".join(map(str, BUDGETS))
    missing = {
        rule for rule in range(1, 5) for data in compared_data() if is_missing(results, needed(rule, data), data)
    }
    rules = [
        ("1. to the end, level with the best baseline of at most its MACs", ends, True),
        (f"2. one checkpoint at {at} experts, at most {MOST_BELOW} points below the baselines", budgets, True),
        ("3. with early exit level with every baseline, ahead of eight dense blocks on two sets", exits, ahead >= 2),
        ("the second recipe becomes the default", [] if 4 in missing else [is_default(results)], True),
    ]
    return [
        [rule, verdict_on([] if number in missing else rows, more), "; ".join(row.found for row in rows)]
        for number, (rule, rows, more) in enumerate(rules, 1)
    ]


def verdict_on(rows: Sequence[Row], more: bool) -> str:
    """Whether a rule holds: on every data set, and by what it asks beyond."""
    if not rows:
        return "not decided yet"
    return "holds" if more and all(row.holds for row in rows) else "fails"
