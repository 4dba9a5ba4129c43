"""What came out of a run, as one line of JSON; means over seeds; which learning rates did best. Needs no torch."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from raytraced.files import write_file
from raytraced.reproduce.plan import FULL, LADDER, Grids, LearningRates, Run, Scale
from raytraced.reproduce.variants import DATA_NAMES
from raytraced.training.config import TrainConfig

# Learning rates whose accuracies differ by no more are equal, and of equals the smaller wins: its long runs are steadier.
TIE = 0.001 + 1e-9  # 6 of 6,000 images are exactly a tie
SHOWN_WITHIN = 0.1  # points of validation accuracy that an early stop may cost, where one number is told
COSTS = ("accuracy", "experts", "macs", "expert_macs")


@dataclass(frozen=True)
class Record(Run):
    """A run and its figures; those of the test images were taken once, after training had ended."""

    error: str | None = None  # why there are no figures: the run diverged
    best_epoch: int = 0
    parameters: int = 0
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    history: dict[str, list[float]] = field(default_factory=dict)  # a value an epoch
    validation: dict[str, Any] = field(default_factory=dict)
    test: dict[str, Any] = field(default_factory=dict)  # with cost, load, and what sequences of each length did
    budgets: list[dict[str, float]] = field(default_factory=list)  # with at most 0, 1, … experts: accuracy, cost
    sure: dict[str, Any] = field(default_factory=dict)  # when images stop where the answer is sure: see `stops`

    @property
    def accuracy(self) -> float:
        """On the test images."""
        return float(self.test["accuracy"])

    @property
    def bits(self) -> float:
        """A byte of the test text."""
        return float(self.test["bits_per_byte"])

    @property
    def score(self) -> float:
        """What is to be high on validation data: the accuracy of images, the bits of bytes with their sign turned."""
        known = self.validation
        return float(known["accuracy"] if "accuracy" in known else -known["bits_per_byte"])

    @property
    def experts(self) -> float:
        """Mean number that a test image used."""
        return float(self.test["mean_experts"])

    @property
    def costs(self) -> dict[str, float]:
        """Accuracy and cost without a budget, as a row of `budgets`."""
        return dict(zip(COSTS, (self.accuracy, self.experts, self.macs["total"], self.macs["experts"]), strict=True))

    @property
    def macs(self) -> Mapping[str, float]:
        """Mean multiply-adds of a test image: total, input, routing, experts, head."""
        return self.test["macs"]


def write_line(record: Record) -> str:
    """A record as a line: what is empty is left out, figures have a sensible length."""
    values = {name: shorten(value) for name, value in asdict(record).items() if value not in (None, [], {})}
    return json.dumps(values | {"config": record.public_config}, separators=(",", ":")) + "\n"


def read_line(line: str) -> Record:
    """The record that a line tells."""
    values = json.loads(line)
    return Record(**values | {"config": TrainConfig(**values["config"])})


def shorten(value: Any) -> Any:
    """The same value with every number at six digits: what a thousand images can tell, and no more bytes."""
    return json.loads(json.dumps(value), parse_float=lambda digits: float(f"{float(digits):.6g}"))


class Store:
    """The records in a folder: a file a data set, a line a record, sorted by key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records: dict[str, Record] = {}
        for path in sorted(folder.glob("*.jsonl")):
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                try:
                    record = read_line(line)
                except (ValueError, TypeError, KeyError) as error:
                    remedy = "remove the file to train its runs anew"
                    message = f"{path}, line {number}: is no record of this version ({error}); {remedy}"
                    raise ValueError(message) from error
                self.records[record.key] = record

    def put(self, record: Record) -> None:
        """Keep a record in place of another of its name."""
        self.records[record.key] = record
        lines = [write_line(one) for _, one in sorted(self.records.items()) if one.data == record.data]
        self.folder.mkdir(parents=True, exist_ok=True)
        write_file(self.folder / f"{record.data}.jsonl", "".join(lines))

    def find(self, run: Run) -> Record | None:
        """The record of a run, if it was made by this very configuration."""
        record = self.records.get(run.key)
        return record if record is not None and record.digest == run.digest else None

    def results(self, runs: Iterable[Run]) -> "Results":
        """The records of these runs, as far as there are any."""
        return Results(record for run in runs if (record := self.find(run)) is not None)


class Spread(NamedTuple):
    """Mean, standard deviation and number of some values."""

    mean: float
    std: float
    num: int


def spread(values: Iterable[float]) -> Spread:
    """Mean and (sample) standard deviation; the deviation of a single value is 0, the mean of none is not a number."""
    known = list(values)
    mean = math.fsum(known) / len(known) if known else math.nan
    variance = math.fsum((value - mean) ** 2 for value in known) / max(1, len(known) - 1)
    return Spread(mean, math.sqrt(variance), len(known))


class Point(NamedTuple):
    """One model on one data set, means over its seeds: what it reaches at which cost."""

    records: list[Record]
    accuracy: Spread
    experts: float
    macs: float
    expert_macs: float
    fixed_macs: float  # of the input block and the output layer, which no routing can save


def make_point(records: list[Record], budget: int | None = None) -> Point:
    """A model as it runs by itself, or with at most so many experts; a seed whose sequences are shorter gives its last."""
    rows = [one.budgets[min(budget, len(one.budgets) - 1)] if budget is not None else one.costs for one in records]
    accuracy, experts, macs, expert_macs = (spread(row[name] for row in rows) for name in COSTS)
    fixed = spread(one.macs["input"] + one.macs["head"] for one in records)
    return Point(records, accuracy, experts.mean, macs.mean, expert_macs.mean, fixed.mean)


def budget_points(records: list[Record]) -> list[Point]:
    """A model with at most 0, 1, … experts."""
    return [make_point(records, budget) for budget in range(max((len(one.budgets) for one in records), default=0))]


class Results:
    """All records at hand, to be asked for by group, data set and label."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.all = sorted(records, key=lambda record: (record.data, record.label, record.seed))
        self.whole = [record for record in self.all if record.error is None]

    def of(self, data: str, label: str, group: str = "main") -> list[Record]:
        """The seeds of one model on one data set."""
        return [one for one in self.whole if (one.data, one.label, one.group) == (data, label, group)]

    def labels(self, data: str, group: str = "main") -> list[str]:
        """The models that were run on a data set."""
        return list(dict.fromkeys(one.label for one in self.whole if (one.data, one.group) == (data, group)))

    def compared(self, data: str) -> list[str]:
        """The same without those who meet in tables of their own: trained to be stopped early, or as the paper has them."""
        apart = ("-sure", "-paper")
        return [label for label in self.labels(data) if label == "mre-paper" or not label.endswith(apart)]

    def stopped(self, data: str) -> list[str]:
        """Those who are stopped when sure: ours, and rivals of its width that were trained for it."""
        known = {label: self.of(data, label)[0] for label in self.labels(data)}
        return [label for label, one in known.items() if one.sure and (one.family == "mre" or label.endswith("-sure"))]

    def data(self, group: str = "main", wide: bool = True) -> list[str]:
        """The data sets of a group, those with wide models too or not."""
        found = {one.data for one in self.whole if one.group == group}
        return [name for name in DATA_NAMES if name in found and (wide or not FULL.data[name].wide)]

    def point(self, data: str, label: str, group: str = "main") -> Point:
        """The seeds of one model on one data set, together."""
        return make_point(self.of(data, label, group))

    def searches(self) -> dict[tuple[str, str], dict[float, float | None]]:
        """(data set, label) → learning rate → score on validation data, None where the run diverged."""
        table: dict[tuple[str, str], dict[float, float | None]] = {}
        for one in self.all:
            if one.group == "search":
                table.setdefault((one.data, one.family), {})[one.config.lr] = None if one.error else one.score
        return table


def read_searches(results: Results, scale: Scale) -> tuple[LearningRates, Grids]:
    """The best rate of every search that is complete; and the rates that each search tries.

    Those are the grid and, while the best lies on an edge, one rate beyond.
    """
    found: dict[str, dict[str, float]] = {}
    grids: dict[tuple[str, str], tuple[float, ...]] = {}
    for (data, label), accuracies in results.searches().items():
        rates, best = sorted({*scale.data[data].grid, *accuracies}), choose_rate(accuracies)
        if len(accuracies) == len(rates) and scale.fixed_lr is None:
            higher, lower = [lr for lr in LADDER if lr > rates[-1]], [lr for lr in LADDER if lr < rates[0]]
            rates += higher[:1] if best == rates[-1] else lower[-1:] if best == rates[0] else []
        grids[data, label] = tuple(rates)
        if len(accuracies) == len(rates):
            if best is None:
                raise ValueError(f"{label} on {data}: diverged at every learning rate of the search ({tuple(rates)})")
            found.setdefault(data, {})[label] = best
    return found, grids


def choose_rate(accuracies: Mapping[float, float | None]) -> float | None:
    """The learning rate that did best; of equals, the smaller; a run that diverged has no accuracy, and loses."""
    known = {lr: accuracy for lr, accuracy in accuracies.items() if accuracy is not None}
    highest = max(known.values(), default=0.0)
    return min((lr for lr, accuracy in known.items() if accuracy >= highest - TIE), default=None)
