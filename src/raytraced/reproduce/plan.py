"""The table of runs: how much is trained on which data set, from what configuration. Needs no torch."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any, Literal

from raytraced.reproduce.variants import Variant
from raytraced.training.config import PRIVATE_FIELDS, TrainConfig, preset_values

Group = Literal["main", "equal-lr", "search", "temperature", "init"]
LearningRates = Mapping[str, Mapping[str, float]]  # data set → label → learning rate

SEARCH_SEED = 100  # of no other run


@dataclass(frozen=True)
class DataPlan:
    """How much is trained on one data set, and what for."""

    epochs: int
    search_epochs: int
    paper: bool = True  # whether it is in the paper's tables and figures
    compared: bool = True  # whether every rival is searched for and trained
    grid: tuple[float, ...] = (5e-4, 1e-3, 2e-3, 5e-3, 1e-2)  # learning rates that the search tries, for every model
    costs: tuple[float, ...] = (0.0003, 0.001, 0.003)  # that MRE is charged for an expert, besides none
    options: dict[str, Any] = field(default_factory=dict)  # of every model, where they are wider than the paper's
    epoch_seconds: float = 1.0  # of MRE on one core: the first guess at the time left, and what orders the runs

    @property
    def wide(self) -> bool:
        """Whether its models are wider than the paper's, and so no part of the paper's tables."""
        return bool(self.options)


@dataclass(frozen=True)
class Scale:
    """How much is run: the whole evidence, or a small likeness of it."""

    name: Literal["full", "quick"]
    data: Mapping[str, DataPlan]
    num_seeds: int
    num_compared_seeds: int
    temperatures: tuple[float, ...]
    probe_data: str  # on which temperature and initialisation are varied
    probe_epochs: int
    fixed_lr: float | None = None  # of everyone, in place of a search


# 64-wide experts, so that capacity matters. A short search would favour too large rates: fewer rates, each a whole run.
UNION = DataPlan(6, 6, False, True, (1e-3, 2e-3, 5e-3), (0.003, 0.03), {"dim": 64}, epoch_seconds=7.0)
FULL = Scale(
    "full",
    {
        "digits": DataPlan(60, 20, paper=False, compared=False, epoch_seconds=0.3),
        "mnist": DataPlan(25, 8),
        "fashion-mnist": DataPlan(25, 8),
        "cifar10": DataPlan(25, 5, epoch_seconds=2.0),
        "union": UNION,
    },
    num_seeds=3,
    num_compared_seeds=5,
    temperatures=(1.0, 10.0, 20.0, 50.0),
    probe_data="fashion-mnist",
    probe_epochs=15,
)


def small(name: str, epochs: int, search_epochs: int = 1, paper: bool = False, compared: bool = False) -> DataPlan:
    """A data set's plan in small."""
    plan = replace(FULL.data[name], epochs=epochs, search_epochs=search_epochs, paper=paper, compared=compared)
    return replace(plan, grid=(1e-3, 5e-3), costs=(0.03,))


QUICK = Scale(
    "quick",
    {
        "digits": small("digits", 10, 3, paper=True, compared=True),
        "mnist": small("mnist", 2),
        "fashion-mnist": small("fashion-mnist", 2, paper=True),
        "cifar10": small("cifar10", 1),
        "union": small("union", 1),
    },
    num_seeds=1,
    num_compared_seeds=1,
    temperatures=(10.0, 50.0),
    probe_data="digits",
    probe_epochs=6,
    fixed_lr=5e-3,
)


@dataclass(frozen=True)
class Run:
    """One training run: what it is for, what it is called in tables, and its whole configuration."""

    group: Group
    label: str
    config: TrainConfig
    family: str = ""  # what it is one setting of, or its label
    setting: float | None = None  # learning rate of a search, temperature, cost of an expert, number of blocks

    @property
    def data(self) -> str:
        return self.config.data

    @property
    def seed(self) -> int:
        return self.config.seed

    @property
    def key(self) -> str:
        """Its name, and that of its record."""
        return f"{self.group}-{self.data}-{self.label}-s{self.seed}"

    @property
    def public_config(self) -> dict[str, Any]:
        """The configuration without what may differ between machines: what makes a run this run."""
        return {name: value for name, value in asdict(self.config).items() if name not in PRIVATE_FIELDS}

    @property
    def digest(self) -> str:
        """A few letters that change with the configuration: what was trained otherwise is another run."""
        return hashlib.sha256(json.dumps(self.public_config, sort_keys=True).encode()).hexdigest()[:8]

    @property
    def folder(self) -> str:
        """The name of its run folder."""
        return f"{self.key}-{self.digest}"

    @property
    def expected_seconds(self) -> float:
        """A guess, good enough to start long runs first."""
        slow = self.config.model == "mre-paper"
        return self.config.epochs * FULL.data[self.data].epoch_seconds * (2.0 if slow else 1.0) + 4.0


@dataclass(frozen=True)
class Planner:
    """Makes runs at a scale, with the learning rates known so far; a run whose rate is not known yet needs its search."""

    scale: Scale
    rates: LearningRates

    def runs(
        self, group: Group, variants: Iterable[Variant], names: Iterable[str], seeds: Iterable[int], epochs: int = 0
    ) -> list[Run]:
        """The runs of variants over data sets and seeds, or the searches that must come before them."""
        planned: list[Run] = []
        for variant, data in product(variants, names):
            source, family = variant.tuned_as or variant, variant.family or variant.label
            lr = variant.lr or self.scale.fixed_lr or self.rates.get(data, {}).get(source.label)
            if lr is None:
                planned += self.search(source, data)
                continue
            for seed in seeds:
                config = self.configure(variant, data, seed, epochs or self.scale.data[data].epochs, lr)
                planned.append(Run(group, variant.label, config, family, variant.setting))
        return planned

    def search(self, variant: Variant, data: str) -> list[Run]:
        """One short run for each learning rate of the grid."""
        plan = self.scale.data[data]
        tried = [
            replace(variant, label=f"{variant.label}-lr-{lr:g}", lr=lr, family=variant.label, setting=lr)
            for lr in plan.grid
        ]
        return self.runs("search", tried, [data], [SEARCH_SEED], plan.search_epochs)

    def configure(self, variant: Variant, data: str, seed: int, epochs: int, lr: float) -> TrainConfig:
        """The configuration of a run: the variant's preset, then its own options, then what all runs share."""
        values = preset_values(variant.preset, data, variant.model) | variant.training
        # patience that cannot run out: the weights of the epoch with the best validation accuracy are kept, for every model
        values |= {"preset": variant.preset, "epochs": epochs, "lr": lr, "seed": seed, "patience": max(1, epochs)}
        values |= {"device": "cpu", "threads": 1, "quiet": True}
        values["model_options"] = self.scale.data[data].options | variant.options
        return TrainConfig(data=data, model=variant.model, **values)
