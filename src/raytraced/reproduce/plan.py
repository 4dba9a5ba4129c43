"""The table of runs: how much is trained on which data set, from what configuration, and for which part. Needs no torch."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Literal

from raytraced.reproduce import variants as who
from raytraced.reproduce.variants import Variant
from raytraced.training.config import TrainConfig, preset_values
from raytraced.words import did_you_mean

Group = Literal["main", "equal-lr", "search", "temperature", "init"]
LearningRates = Mapping[str, Mapping[str, float]]  # data set → label → learning rate
Grids = Mapping[tuple[str, str], tuple[float, ...]]  # (data set, label) → the learning rates that its search tries
Wanted = tuple[str, ...] | None  # data sets that were asked for; None: those that a part is made for

SEARCH_SEED = 100  # of no other run
# The rates beyond a grid, should its best lie on an edge.
LADDER = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 1e-1)


@dataclass(frozen=True)
class DataPlan:
    """How much is trained on one data set, and what for."""

    epochs: int
    search_epochs: int
    paper: bool = True  # whether it is in the paper's tables and figures
    compared: bool = True  # whether every rival is searched for and trained
    grid: tuple[float, ...] = (5e-4, 1e-3, 2e-3, 5e-3, 1e-2)  # learning rates that the search tries, for every model
    targets: tuple[float, ...] = (2.0, 12.0)  # mean numbers of experts that MRE is trained for, besides the recipe's
    options: dict[str, Any] = field(default_factory=dict)  # of every model, where they are wider than the paper's
    training: dict[str, Any] = field(default_factory=dict)  # of every model's runs
    rates_of: str = ""  # the data set whose learning rates it takes, without a search of its own
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


FULL = Scale(
    "full",
    {
        "digits": DataPlan(60, 20, paper=False, compared=False, epoch_seconds=0.3),
        "mnist": DataPlan(25, 8),
        "fashion-mnist": DataPlan(25, 8),
        # a short search would favour too large rates: fewer rates, each a whole run
        "cifar10": DataPlan(25, 25, grid=(2e-3, 5e-3, 1e-2), epoch_seconds=2.0),
        # 64-wide experts, so that capacity matters; searched by whole runs as well
        "union": DataPlan(6, 6, False, True, (1e-3, 2e-3, 5e-3), options={"dim": 64}, epoch_seconds=7.0),
    },
    num_seeds=3,
    num_compared_seeds=5,
    temperatures=(1.0, 10.0, 20.0, 50.0),
    probe_data="fashion-mnist",
    probe_epochs=15,
)
# what a quick run has in small, where its own line does not say otherwise
SMALL: dict[str, Any] = {"search_epochs": 1, "paper": False, "compared": False, "grid": (1e-3, 5e-3), "targets": (2.0,)}
QUICK = Scale(
    "quick",
    {
        "digits": replace(FULL.data["digits"], **SMALL | {"epochs": 10, "search_epochs": 3, "paper": True, "compared": True}),
        "mnist": replace(FULL.data["mnist"], **SMALL, epochs=2),
        "fashion-mnist": replace(FULL.data["fashion-mnist"], **SMALL | {"epochs": 2, "paper": True}),
        "cifar10": replace(FULL.data["cifar10"], **SMALL, epochs=1),
        "union": replace(FULL.data["union"], **SMALL, epochs=1),
    },
    num_seeds=1,
    num_compared_seeds=1,
    temperatures=(10.0, 50.0),
    probe_data="digits",
    probe_epochs=6,
    fixed_lr=5e-3,
)  # fmt: skip

# Tokens: small decoders with 32 experts a block; an epoch is 100 steps of 1,024 bytes. One search, for both texts.
WINDOWS = {"context": 64, "steps": 100, "judged": 32768}
BYTES = DataPlan(
    10, 10, False, False, (2e-3, 4e-3, 8e-3, 1.6e-2), (), {"dim": 64, "hidden": 128},
    {"batch_size": 16, "warmup": 0.5, "data_options": WINDOWS}, epoch_seconds=7.0,
)  # fmt: skip
TEXT = Scale("full", {"enwik8": BYTES, "mix": replace(BYTES, rates_of="enwik8")}, 3, 3, (), "", 0)
TEXT_QUICK = Scale("quick", {"shakespeare": replace(BYTES, epochs=1, search_epochs=1)}, 1, 1, (), "", 0, fixed_lr=4e-3)


@dataclass(frozen=True)
class Run:
    """One training run: what it is for, what it is called in tables, and its whole configuration."""

    group: Group
    label: str
    config: TrainConfig
    family: str = ""  # what it is one setting of, or its label
    setting: float | None = None  # learning rate of a search, temperature, target, number of blocks

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
        return self.config.public()

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
        plan = FULL.data.get(self.data, BYTES)
        return self.config.epochs * plan.epoch_seconds * (2.0 if slow else 1.0) + 4.0


@dataclass(frozen=True)
class Planner:
    """Makes runs at a scale, with the learning rates known so far; a run whose rate is not known yet needs its search."""

    scale: Scale
    rates: LearningRates
    grids: Grids = field(default_factory=dict)  # of searches wider than planned

    def runs(
        self, group: Group, variants: Iterable[Variant], names: Iterable[str], seeds: Iterable[int], epochs: int = 0
    ) -> list[Run]:
        """The runs of variants over data sets and seeds, or the searches that must come before them."""
        planned: list[Run] = []
        for variant, data in product(variants, names):
            source, family = variant.tuned_as or variant, variant.family or variant.label
            searched = self.scale.data[data].rates_of or data
            lr = variant.lr or self.scale.fixed_lr or self.rates.get(searched, {}).get(source.label)
            if lr is None:
                planned += self.search(source, searched)
                continue
            for seed in seeds:
                config = self.configure(variant, data, seed, epochs or self.scale.data[data].epochs, lr)
                planned.append(Run(group, variant.label, config, family, variant.setting))
        return planned

    def search(self, variant: Variant, data: str) -> list[Run]:
        """One run for each learning rate of the grid."""
        plan = self.scale.data[data]
        tried = [
            replace(variant, label=f"{variant.label}-lr-{lr:g}", lr=lr, family=variant.label, setting=lr)
            for lr in self.grids.get((data, variant.label), plan.grid)
        ]
        return self.runs("search", tried, [data], [SEARCH_SEED], plan.search_epochs)

    def configure(self, variant: Variant, data: str, seed: int, epochs: int, lr: float) -> TrainConfig:
        """The configuration of a run: the variant's preset, then its own options, then what all runs share."""
        values = preset_values(variant.preset, data, variant.model) | self.scale.data[data].training | variant.training
        # patience that cannot run out: the weights of the epoch with the best validation accuracy are kept, for every model
        values |= {"preset": variant.preset, "epochs": epochs, "lr": lr, "seed": seed, "patience": max(1, epochs)}
        values |= {"device": "cpu", "threads": 1, "quiet": True}
        values["model_options"] = self.scale.data[data].options | variant.options
        return TrainConfig(data=data, model=variant.model, **values)


# The parts of the evidence, by the names that --only takes.
PARTS = {
    "table1": "Table 1: accuracy of every model",
    "table2": "Table 2: parameters and experts used",
    "fig2": "Figure 2: accuracy along the sequence, and how many experts are used",
    "fig3": "Figure 3: accuracy against epochs, at an equal learning rate and at each model's best",
    "fig5": "Figure 5: experts by class",
    "fig6": "Figure 6: validation accuracy over the epochs",
    "fig7": "Figure 7: images ordered by the experts they use",
    "lr": "The learning-rate search",
    "balance": "How evenly experts are used",
    "temperature": "Temperature of the Gumbel-softmax",
    "init": "Scaling of the initialisation",
    "frontier": "Accuracy against multiply-adds",
    "union": "Accuracy against multiply-adds, the union of three data sets",
    "sure": "Accuracy against multiply-adds, everyone stopping when sure",
    "text": "Bits per byte against multiply-adds: language models",
    "ship": "Trained models for the package",
}
SETS = {
    "default": ("table1", "table2", "fig2", "fig3", "fig5", "fig6", "fig7"),
    "claims": ("lr", "balance", "temperature", "init"),
    "all": tuple(part for part in PARTS if part not in ("ship", "text")),
}


def choose_parts(names: Iterable[str]) -> list[str]:
    """The parts that names of parts and of sets stand for, in the table's order."""
    chosen: set[str] = set()
    for name in names:
        if name not in PARTS and name not in SETS:
            raise ValueError(f"only={name}: no such part; {did_you_mean(name, [*PARTS, *SETS])}")
        chosen |= set(SETS.get(name, (name,)))
    return [part for part in PARTS if part in chosen]


def runs_of(part: str, planner: Planner, wanted: Wanted) -> list[Run]:
    """The runs that a part needs, of the models that it compares on the data sets that it is made for."""
    scale, plans = planner.scale, planner.scale.data
    some, many = range(scale.num_seeds), range(scale.num_compared_seeds)
    asked = [name for name in plans if wanted is None or name in wanted]
    # the paper's, or any others that were asked for; wide models are not the paper's
    papers = [name for name in asked if (plans[name].paper or wanted) and not plans[name].wide]
    probed = [name for name in asked if name == scale.probe_data]
    texts = [name for name in asked if plans[name].options == BYTES.options]
    races = [name for name in asked if plans[name].compared]
    compared = [name for name in races if plans[name].wide == (part == "union")]
    if part == "lr":
        return [run for name, one in product(compared, who.PAPER_VARIANTS) for run in planner.search(one, name)]
    frontier = [("main", who.swept_variants(plans[name].targets), [name], some) for name in compared]
    frontier += [("main", who.compared_variants(plans[name].wide), [name], many) for name in compared]
    taus, recipes = who.temperature_variants(scale.temperatures), (who.MRE, who.MRE_PAPER)
    needs: dict[str, list[Any]] = {
        "table1": [("main", (*who.PAPER_VARIANTS, *who.PAPER_RIVALS), papers, some)],
        "table2": [("main", recipes, papers, some)],
        "fig2": [("main", recipes, papers, some)],
        "fig3": [("main", who.PAPER_VARIANTS, papers, some), ("equal-lr", who.EQUAL_VARIANTS, papers, [0])],
        "fig5": [("main", recipes, papers, [0])],
        "fig6": [("main", who.PAPER_VARIANTS, papers, some)],
        "fig7": [("main", recipes, papers, [0])],
        "balance": [("main", who.BALANCE_VARIANTS, papers, some)],
        "temperature": [("temperature", taus, probed, some, scale.probe_epochs)],
        "init": [("init", who.INIT_VARIANTS, probed, some, scale.probe_epochs)],
        "frontier": frontier,
        "union": frontier,
        "sure": [("main", who.sure_variants(plans[name].wide), [name], many) for name in races],
        "text": [("main", who.text_variants(), texts, some)],
        "ship": [("main", [variant], [name], some) for name, variant in who.SHIPPED.values() if name in asked],
    }
    return [run for need in needs[part] for run in planner.runs(*need)]


def collect_runs(parts: Iterable[str], planner: Planner, wanted: Wanted) -> list[Run]:
    """All runs that some parts need, each once."""
    return list({run.key: run for part in parts for run in runs_of(part, planner, wanted)}.values())


def every_run(planner: Planner) -> list[Run]:
    """Whatever may have been run at a scale by whichever command: with the rates known by now, and before, the searches."""
    wide = {name: replace(plan, grid=tuple({*plan.grid, *LADDER})) for name, plan in planner.scale.data.items()}
    planners, everywhere = (Planner(replace(planner.scale, data=wide), {}), planner), tuple(planner.scale.data)
    runs = (collect_runs(PARTS, one, wanted) for one in planners for wanted in (None, everywhere))
    return list({run.key: run for some in runs for run in some}.values())
