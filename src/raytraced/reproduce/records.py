"""What came out of a run, as one small JSON file, and means over seeds. Needs no torch."""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from raytraced.reproduce.plan import Run
from raytraced.training.files import write_file


@dataclass(frozen=True)
class Record:
    """The figures of one run; those of the test images were taken once, after training had ended."""

    key: str
    digest: str
    group: str
    data: str
    label: str
    seed: int
    epochs: int
    lr: float
    config: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    """why there are no figures: the run diverged"""
    history: list[dict[str, float]] = field(default_factory=list)
    """an epoch each: validation_accuracy, validation_experts, train_loss, seconds"""
    best_epoch: int = 0
    validation: dict[str, Any] = field(default_factory=dict)
    test: dict[str, Any] = field(default_factory=dict)
    parameters: int = 0
    used_parameters: float = 0.0
    macs: dict[str, float] = field(default_factory=dict)
    """mean multiply-adds of a test image: total, input, routing, experts, head"""
    budgets: list[dict[str, float]] = field(default_factory=list)
    """of raytraced models, with at most 0, 1, … experts: accuracies, experts, multiply-adds"""
    lengths: dict[str, Any] = field(default_factory=dict)
    """of raytraced models, by sequence length: how many test images, and their accuracy after 0, 1, … experts"""
    class_load: list[list[list[float]]] = field(default_factory=list)
    """of raytraced models: share of each class's test images that activated each expert"""
    gallery: dict[str, list[int]] = field(default_factory=dict)
    """of raytraced models, by the number of experts used: some test images that are classified correctly"""
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def accuracy(self) -> float:
        """On the test images."""
        return float(self.test["accuracy"])

    @property
    def experts(self) -> float:
        """Mean number that a test image used."""
        return float(self.test["mean_experts"])


def new_record(run: Run, **figures: Any) -> Record:
    """A record of a run with the figures it gave."""
    return Record(
        key=run.key,
        digest=run.digest,
        group=run.group,
        data=run.data,
        label=run.label,
        seed=run.seed,
        epochs=run.config.epochs,
        lr=run.config.lr,
        **figures,
    )


def write_record(path: Path, record: Record) -> None:
    """Write a record with numbers of a sensible length."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps(shorten(asdict(record)), separators=(",", ":")) + "\n")


def read_record(path: Path) -> Record | None:
    """The record in a file; None if there is none, or none that this version can read."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    known = {one.name for one in fields(Record)}
    return Record(**values) if isinstance(values, dict) and set(values) <= known and "digest" in values else None


def shorten(value: Any) -> Any:
    """The same value with every number at six digits: what a thousand images can tell, and no more bytes."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: shorten(one) for key, one in value.items()}
    return [shorten(one) for one in value] if isinstance(value, list | tuple) else value


class Spread(NamedTuple):
    """Mean, standard deviation and number of some values."""

    mean: float
    std: float
    num: int

    @property
    def error(self) -> float:
        """The standard error of the mean."""
        return self.std / math.sqrt(self.num)


def spread(values: Iterable[float]) -> Spread:
    """Mean and (sample) standard deviation; the deviation of a single value is 0."""
    known = list(values)
    mean = math.fsum(known) / len(known)
    variance = math.fsum((value - mean) ** 2 for value in known) / max(1, len(known) - 1)
    return Spread(mean, math.sqrt(variance), len(known))


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

    def data(self, group: str = "main") -> list[str]:
        """The data sets of a group, in the order of the paper."""
        order = ("digits", "mnist", "fashion-mnist", "cifar10", "union")
        found = {one.data for one in self.whole if one.group == group}
        return [name for name in order if name in found] + sorted(found - set(order))

    def spread(self, data: str, label: str, figure: Callable[[Record], float], group: str = "main") -> Spread | None:
        """A figure's spread over the seeds; None if nothing was run."""
        records = self.of(data, label, group)
        return spread(figure(record) for record in records) if records else None


def collect(raw: Path, runs: Iterable[Run]) -> Results:
    """The records of these runs, as far as they exist and were made by this very configuration."""
    found = ((run, read_record(raw / f"{run.key}.json")) for run in runs)
    return Results(record for run, record in found if record is not None and record.digest == run.digest)
