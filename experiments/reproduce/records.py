"""The record of a run as one line of JSON; means over seeds; the best learning rates. Needs no torch."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from experiments.reproduce.plan import FULL, LADDER, Grids, LearningRates, Run, Scale
from experiments.reproduce.variants import DATA_NAMES
from raytraced.files import lock_file, write_file
from raytraced.training.config import TrainConfig

# Learning rates whose accuracies differ by no more count as equal. Of equals the smaller wins: its long runs are steadier.
TIE = 0.001 + 1e-9  # 6 of 6,000 images are still equal
SHOWN_WITHIN = 0.1  # points of validation accuracy that an early exit may cost, where one number is shown
COSTS = ("accuracy", "experts", "macs", "expert_macs")


@dataclass(frozen=True)
class Record(Run):
    """A run and its metrics. The test images were used once, after training had ended."""

    error: str | None = None  # why there are no metrics: the run diverged
    best_epoch: int = 0
    parameters: int = 0
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    history: dict[str, list[float]] = field(default_factory=dict)  # name → one value per epoch
    validation: dict[str, Any] = field(default_factory=dict)
    test: dict[str, Any] = field(default_factory=dict)  # with cost, load, and the accuracy for each sequence length
    budgets: list[dict[str, float]] = field(default_factory=list)  # accuracy and cost with at most 0, 1, … experts
    early_exit: dict[str, Any] = field(default_factory=dict)  # see `measure_early_exit`
    dial: list[dict[str, float]] = field(default_factory=list)  # see `measure_dial`

    @property
    def accuracy(self) -> float:
        """Accuracy on the test images."""
        return float(self.test["accuracy"])

    @property
    def bits(self) -> float:
        """Bits per byte of the test text."""
        return float(self.test["bits_per_byte"])

    @property
    def score(self) -> float:
        """A number to maximise on validation data: accuracy on images, negative bits per byte on text."""
        known = self.validation
        return float(known["accuracy"] if "accuracy" in known else -known["bits_per_byte"])

    @property
    def experts(self) -> float:
        """Mean number of experts per test image."""
        return float(self.test["mean_experts"])

    @property
    def costs(self) -> dict[str, float]:
        """Accuracy and cost without a budget, in the form of a row of `budgets`."""
        return dict(zip(COSTS, (self.accuracy, self.experts, self.macs["total"], self.macs["experts"]), strict=True))

    @property
    def macs(self) -> Mapping[str, float]:
        """Mean MACs per test image: total, input, routing, experts, head."""
        return self.test["macs"]


def write_line(record: Record) -> str:
    """A record as a line of JSON. Empty fields are left out, numbers have six digits."""
    values = {name: shorten(value) for name, value in asdict(record).items() if value not in (None, [], {})}
    return json.dumps(values | {"config": record.public_config}, separators=(",", ":")) + "\n"


def read_line(line: str) -> Record:
    """The record of a line of JSON."""
    values = json.loads(line)
    return Record(**values | {"config": TrainConfig(**values["config"])})


def shorten(value: Any) -> Any:
    """The same value with every number rounded to six digits: test sets are not more precise."""
    return json.loads(json.dumps(value), parse_float=lambda digits: float(f"{float(digits):.6g}"))


class Store:
    """The records in a folder: one file per data set, one line per record, sorted by key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records: dict[str, Record] = {}
        for path in sorted(folder.glob("*.jsonl")):
            self.read(path)

    def read(self, path: Path) -> None:
        """Take over the records of a file."""
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                record = read_line(line)
            except (ValueError, TypeError, KeyError) as error:
                remedy = "remove the file to train its runs again"
                message = f"{path}, line {number}: is not a record of this version ({error}); {remedy}"
                raise ValueError(message) from error
            self.records[record.key] = record

    def put(self, record: Record) -> None:
        """Save a record; it replaces a record with the same key, and keeps what other processes have saved meanwhile."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{record.data}.jsonl"
        with (self.folder / ".lock").open("a") as lock:
            lock_file(lock, wait=True)
            if path.exists():
                self.read(path)
            self.records[record.key] = record
            lines = [write_line(one) for _, one in sorted(self.records.items()) if one.data == record.data]
            write_file(path, "".join(lines))

    def find(self, run: Run) -> Record | None:
        """The record of a run, if it was made with the same configuration."""
        record = self.records.get(run.key)
        return record if record is not None and record.digest == run.digest else None

    def results(self, runs: Iterable[Run]) -> "Results":
        """The records of these runs, where there are any."""
        return Results(record for run in runs if (record := self.find(run)) is not None)


class Spread(NamedTuple):
    """Mean, standard deviation and number of some values."""

    mean: float
    std: float
    num: int

    @property
    def error(self) -> float:
        """The standard error of the mean."""
        return self.std / math.sqrt(max(1, self.num))


def spread(values: Iterable[float]) -> Spread:
    """Mean and (sample) standard deviation; the deviation of a single value is 0, the mean of none is not a number."""
    known = list(values)
    mean = math.fsum(known) / len(known) if known else math.nan
    variance = math.fsum((value - mean) ** 2 for value in known) / max(1, len(known) - 1)
    return Spread(mean, math.sqrt(variance), len(known))


class Point(NamedTuple):
    """Accuracy and cost of one model on one data set, means over its seeds."""

    records: list[Record]
    accuracy: Spread
    experts: float
    macs: float
    expert_macs: float
    fixed_macs: float  # of the input block and the output layer, which routing does not change


def make_point(records: list[Record], budget: int | None = None) -> Point:
    """A model without a budget, or with at most `budget` experts; a seed with shorter sequences counts with its last answer."""
    rows = [one.budgets[min(budget, len(one.budgets) - 1)] if budget is not None else one.costs for one in records]
    accuracy, experts, macs, expert_macs = (spread(row[name] for row in rows) for name in COSTS)
    fixed = spread(one.macs["input"] + one.macs["head"] for one in records)
    return Point(records, accuracy, experts.mean, macs.mean, expert_macs.mean, fixed.mean)


def budget_points(records: list[Record]) -> list[Point]:
    """A model with at most 0, 1, … experts."""
    return [make_point(records, budget) for budget in range(max((len(one.budgets) for one in records), default=0))]


class Results:
    """Records by group, data set and label."""

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
        """The same without the models of other tables: trained for early exit, or as in the paper."""
        apart = ("-exits", "-paper")
        return [label for label in self.labels(data) if label == "mre-paper" or not label.endswith(apart)]

    def with_early_exit(self, data: str) -> list[str]:
        """The models that exit early: ours, and baselines of the same width that were trained for it."""
        known = {label: self.of(data, label)[0] for label in self.labels(data)}
        return [
            label
            for label, one in known.items()
            if one.early_exit and (one.family == "mre" or label.endswith("-exits"))
        ]

    def data(self, group: str = "main", wide: bool = True) -> list[str]:
        """The data sets of a group, with or without those that have wide models."""
        found = {one.data for one in self.whole if one.group == group}
        return [name for name in DATA_NAMES if name in found and (wide or not FULL.data[name].wide)]

    def point(self, data: str, label: str, group: str = "main") -> Point:
        """The means of one model on one data set over its seeds."""
        return make_point(self.of(data, label, group))

    def searches(self) -> dict[tuple[str, str], dict[float, float | None]]:
        """(data set, label) → learning rate → score on validation data, None where the run diverged."""
        table: dict[tuple[str, str], dict[float, float | None]] = {}
        for one in self.all:
            if one.group == "search":
                table.setdefault((one.data, one.family), {})[one.config.lr] = None if one.error else one.score
        return table


def read_searches(results: Results, scale: Scale) -> tuple[LearningRates, Grids]:
    """Return the best rate of every complete search, and the rates that each search tries.

    These are the grid and, while the best rate is at its edge, one rate beyond.
    """
    found: dict[str, dict[str, float]] = {}
    grids: dict[tuple[str, str], tuple[float, ...]] = {}
    for (data, label), accuracies in results.searches().items():
        extends = scale.fixed_lr is None and scale.data[data].extends
        rates = rates_to_try(accuracies, {*scale.data[data].grid, *accuracies}, extends)
        best = choose_rate(accuracies)
        grids[data, label] = tuple(rates)
        if len(accuracies) == len(rates):
            if best is None:
                raise ValueError(f"{label} on {data}: diverged at every learning rate of the search ({tuple(rates)})")
            found.setdefault(data, {})[label] = best
    return found, grids


def rates_to_try(accuracies: Mapping[float, float | None], grid: Iterable[float], extend: bool) -> list[float]:
    """The learning rates of a search: its grid and, once all are tried and the best is at the edge, one rate beyond."""
    rates = sorted({*grid})
    if extend and all(lr in accuracies for lr in rates):
        best = choose_rate(accuracies)
        higher, lower = [lr for lr in LADDER if lr > rates[-1]], [lr for lr in LADDER if lr < rates[0]]
        rates += higher[:1] if best == rates[-1] else lower[-1:] if best == rates[0] else []
    return rates


def choose_rate(accuracies: Mapping[float, float | None]) -> float | None:
    """The learning rate with the highest accuracy; of equals, the smaller. None is the accuracy of a run that diverged."""
    known = {lr: accuracy for lr, accuracy in accuracies.items() if accuracy is not None}
    highest = max(known.values(), default=0.0)
    return min((lr for lr, accuracy in known.items() if accuracy >= highest - TIE), default=None)
