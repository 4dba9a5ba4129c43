"""The table of runs: what is trained for which part, from what configuration. Needs no torch."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

from raytraced.reproduce.variants import PAPER_VARIANTS, Variant
from raytraced.training.config import Preset, TrainConfig, preset_values

Group = Literal["main", "equal-lr", "search", "temperature", "init"]

EQUAL_LR = 1e-3
SEARCH_SEED = 100  # of no other run

# Seconds an epoch of MRE takes on one core: the first guess at the time left, and what orders the runs.
EPOCH_SECONDS = {"digits": 0.3, "mnist": 1.0, "fashion-mnist": 1.0, "cifar10": 2.0, "union": 7.0}

# Where two runs may differ without being different runs.
PRIVATE = ("data_root", "output", "name", "quiet", "device", "threads", "checkpoint_seconds", "checkpoint_steps")

LearningRates = Mapping[str, Mapping[str, float]]
"""data set → label → learning rate"""


@dataclass(frozen=True)
class Scale:
    """How much is run: the whole evidence, or a small likeness of it."""

    name: Literal["full", "quick"]
    data: tuple[str, ...]
    """data sets of the paper's tables and figures"""
    num_seeds: int
    num_equal_seeds: int
    """of the runs at an equal learning rate"""
    num_frontier_seeds: int
    epochs: Mapping[str, int]
    search_epochs: Mapping[str, int]
    search_data: tuple[str, ...]
    grid: tuple[float, ...]
    """learning rates that the search tries, the same for every model"""
    union_grid: tuple[float, ...]
    """those on the union, where a short run favours too large ones: fewer, each for as long as a run"""
    fixed_lr: float | None
    """the learning rate of everyone in place of a search"""
    dials: tuple[float, ...]
    """settings of MRE's cost dial, besides 0"""
    union_dials: tuple[float, ...]
    """those on the union, whose wide experts are worth more"""
    temperatures: tuple[float, ...]
    probe_data: str
    """the data set on which temperature and initialisation are varied"""
    probe_epochs: int
    frontier_data: tuple[str, ...]
    union_data: tuple[str, ...] = ("union",)

    def grid_of(self, data: str) -> tuple[float, ...]:
        """The learning rates that the search tries on a data set."""
        return self.union_grid if data == "union" else self.grid


FULL = Scale(
    name="full",
    data=("mnist", "fashion-mnist", "cifar10"),
    num_seeds=3,
    num_equal_seeds=1,
    num_frontier_seeds=5,
    epochs={"digits": 60, "mnist": 25, "fashion-mnist": 25, "cifar10": 25, "union": 6},
    search_epochs={"digits": 20, "mnist": 8, "fashion-mnist": 8, "cifar10": 5, "union": 6},
    search_data=("mnist", "fashion-mnist", "cifar10"),
    grid=(5e-4, 1e-3, 2e-3, 5e-3, 1e-2),
    union_grid=(1e-3, 2e-3, 5e-3),
    fixed_lr=None,
    dials=(0.0003, 0.001, 0.003),
    union_dials=(0.003, 0.03),
    temperatures=(1.0, 10.0, 20.0, 50.0),
    probe_data="fashion-mnist",
    probe_epochs=15,
    frontier_data=("mnist", "fashion-mnist", "cifar10"),
)

QUICK = Scale(
    name="quick",
    data=("digits", "fashion-mnist"),
    num_seeds=1,
    num_equal_seeds=1,
    num_frontier_seeds=1,
    epochs={"digits": 10, "mnist": 2, "fashion-mnist": 2, "cifar10": 1, "union": 1},
    search_epochs={"digits": 3, "mnist": 1, "fashion-mnist": 1, "cifar10": 1, "union": 1},
    search_data=("digits",),
    grid=(1e-3, 5e-3),
    union_grid=(1e-3, 5e-3),
    fixed_lr=5e-3,
    dials=(0.03,),
    union_dials=(),
    temperatures=(10.0, 50.0),
    probe_data="digits",
    probe_epochs=6,
    frontier_data=("digits",),
    union_data=(),
)


@dataclass(frozen=True)
class Run:
    """One training run: what it is for, what it is called in tables, and its whole configuration."""

    group: Group
    label: str
    config: TrainConfig

    @property
    def data(self) -> str:
        """The data set."""
        return self.config.data

    @property
    def seed(self) -> int:
        """Of everything random in it."""
        return self.config.seed

    @property
    def key(self) -> str:
        """Its name, and that of its record."""
        return f"{self.group}-{self.data}-{self.label}-s{self.seed}"

    @property
    def digest(self) -> str:
        """A few letters that change with the configuration: what was trained otherwise is another run."""
        values = {name: value for name, value in asdict(self.config).items() if name not in PRIVATE}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]

    @property
    def folder(self) -> str:
        """The name of its run folder."""
        return f"{self.key}-{self.digest}"

    @property
    def expected_seconds(self) -> float:
        """A guess, good enough to start long runs first."""
        slow = self.config.model == "mre-paper"
        return self.config.epochs * EPOCH_SECONDS.get(self.data, 1.0) * (2.0 if slow else 1.0) + 4.0


def configure(variant: Variant, data: str, seed: int, epochs: int, lr: float, **training: Any) -> TrainConfig:
    """The configuration of a variant's run: its preset, then its own options, then what all runs share."""
    values = preset_values(cast("Preset", variant.preset), data, variant.model)
    options = values.pop("model_options", {}) | variant.options
    # patience that cannot run out: the weights of the epoch with the best validation accuracy are kept, for every model
    shared = {"epochs": epochs, "lr": lr, "seed": seed, "patience": max(1, epochs)}
    rest = {"preset": variant.preset, "device": "cpu", "threads": 1, "quiet": True}
    values |= variant.training | rest | shared | training
    return TrainConfig(data=data, model=variant.model, model_options=options, **values)


@dataclass(frozen=True)
class Planner:
    """Makes runs at a scale, with the learning rates known so far; a run whose rate is not known yet needs its search."""

    scale: Scale
    rates: LearningRates

    def lr(self, variant: Variant, data: str) -> float | None:
        """The learning rate of a variant, None while its search is not over."""
        if variant.lr is not None:
            return variant.lr
        if self.scale.fixed_lr is not None:
            return self.scale.fixed_lr
        return self.rates.get(data, {}).get(variant.tuned_as or variant.label)

    def runs(
        self,
        group: Group,
        variants: Iterable[Variant],
        data_names: Iterable[str],
        num_seeds: int,
        epochs: int | None = None,
    ) -> list[Run]:
        """The runs of variants over data sets and seeds, or the searches that must come before them."""
        planned: list[Run] = []
        variants = tuple(variants)
        for data in data_names:
            for variant in variants:
                lr = self.lr(variant, data)
                if lr is None:
                    planned += self.search(source_of(variant, variants), data)
                    continue
                for seed in range(num_seeds):
                    config = configure(variant, data, seed, epochs or self.scale.epochs[data], lr)
                    planned.append(Run(group, variant.label, config))
        return planned

    def search(self, variant: Variant, data: str) -> list[Run]:
        """One short run for each learning rate of the grid."""
        epochs = self.scale.search_epochs[data]
        return [
            Run("search", f"{variant.label}-lr-{lr:g}", configure(variant, data, SEARCH_SEED, epochs, lr))
            for lr in self.scale.grid_of(data)
        ]

    def equal_lr(self, data_names: Iterable[str]) -> list[Run]:
        """Everyone at the same, constant learning rate, as in the paper's figure 3."""
        return [
            Run(
                "equal-lr",
                variant.label,
                configure(variant, data, seed, self.scale.epochs[data], EQUAL_LR, schedule="constant"),
            )
            for data in data_names
            for variant in PAPER_VARIANTS
            for seed in range(self.scale.num_equal_seeds)
        ]


def source_of(variant: Variant, variants: tuple[Variant, ...]) -> Variant:
    """The variant whose search decides a variant's learning rate."""
    wanted = variant.tuned_as or variant.label
    known = (*variants, *PAPER_VARIANTS)
    # first among those it is run with: the union's are wider than the paper's
    return next(other for other in known if other.label == wanted)
