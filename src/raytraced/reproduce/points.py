"""Operating points: what each model reaches at which cost; MRE has more than one, by its dial and by budgets.

Choices among points are made on validation images; what is said about a choice is said about test images.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from raytraced.reproduce.records import Record, Results, Spread, spread


@dataclass(frozen=True)
class Point:
    """A model (with a budget of experts or none) on one data set, over its seeds."""

    label: str
    budget: int | None
    validation: Spread
    test: Spread
    experts: float
    macs: float
    expert_macs: float
    fixed_macs: float  # of the input block and the output layer

    @property
    def name(self) -> str:
        """In a reader's words."""
        return self.label if self.budget is None else f"{self.label} with at most {self.budget} experts"


def make_point(label: str, records: list[Record]) -> Point:
    """The point at which a model runs by itself."""
    return Point(
        label,
        budget=None,
        validation=spread(one.validation["accuracy"] for one in records),
        test=spread(one.accuracy for one in records),
        experts=spread(one.experts for one in records).mean,
        macs=spread(one.macs["total"] for one in records).mean,
        expert_macs=spread(one.macs["experts"] for one in records).mean,
        fixed_macs=spread(fixed(one) for one in records).mean,
    )


def budget_points(label: str, records: list[Record]) -> list[Point]:
    """The points that budgets of 0, 1, … experts give; a seed whose sequences are all shorter gives its last."""
    longest = max((len(one.budgets) for one in records), default=0)
    points = []
    for budget in range(longest):
        rows = [one.budgets[min(budget, len(one.budgets) - 1)] for one in records]
        points.append(
            Point(
                label,
                budget,
                validation=spread(row["validation_accuracy"] for row in rows),
                test=spread(row["accuracy"] for row in rows),
                experts=spread(row["experts"] for row in rows).mean,
                macs=spread(row["macs"] for row in rows).mean,
                expert_macs=spread(row["expert_macs"] for row in rows).mean,
                fixed_macs=spread(fixed(one) for one in records).mean,
            )
        )
    return points


def model_points(results: Results, data: str, labels: Iterable[str]) -> list[Point]:
    """One point for each model that was run on a data set."""
    return [make_point(label, records) for label in labels if (records := results.of(data, label))]


def our_points(results: Results, data: str, labels: Iterable[str]) -> list[Point]:
    """All points of MRE: along the dial, and under budgets at every setting of the dial."""
    points = []
    for label in labels:
        records = results.of(data, label)
        if records:
            points += [make_point(label, records), *budget_points(label, records)]
    return points


def fixed(record: Record) -> float:
    """Multiply-adds that no routing can save."""
    return record.macs["input"] + record.macs["head"]
