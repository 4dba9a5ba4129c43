"""The plan of all runs: epochs and seeds per data set, configurations, and the parts that need them. Needs no torch."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Literal

from experiments.reproduce import variants
from experiments.reproduce.variants import Variant
from raytraced.errors import did_you_mean
from raytraced.training.config import TrainConfig, preset_values

Group = Literal["main", "equal-lr", "search", "temperature", "init", "reading"]
LearningRates = Mapping[str, Mapping[str, float]]  # data set → label → learning rate
Grids = Mapping[tuple[str, str], tuple[float, ...]]  # (data set, label) → the learning rates that its search tries
Selection = tuple[str, ...] | None  # data sets that the user chose; None: the default ones of a part

SEARCH_SEED = 100  # no other run has it
# Rates to try beyond a grid if the best one is at its edge.
LADDER = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 1e-1)


@dataclass(frozen=True)
class DataPlan:
    """How long models are trained on one data set, and for which comparisons."""

    epochs: int
    search_epochs: int
    paper: bool = True  # whether it is in the paper's tables and figures
    compared: bool = True  # whether all baselines are tuned and trained on it
    grid: tuple[float, ...] = (5e-4, 1e-3, 2e-3, 5e-3, 1e-2)  # learning rates that the search tries, for every model
    targets: tuple[float, ...] = (2.0, 12.0)  # mean numbers of experts that MRE is trained for, besides the recipe's
    options: dict[str, Any] = field(
        default_factory=dict
    )  # options of all its models, where they are wider than the paper's
    training: dict[str, Any] = field(default_factory=dict)  # training options of all its runs
    extends: bool = (
        True  # whether a search continues while the best rate is at the edge; False: as many runs for every model
    )
    epoch_seconds: float = 1.0  # of MRE on one core; for the first estimate of the time, and for the order of runs

    @property
    def wide(self) -> bool:
        """Whether its models are wider than the paper's; then they are not in the paper's tables."""
        return bool(self.options)


@dataclass(frozen=True)
class Scale:
    """The size of the experiments: full or quick."""

    name: Literal["full", "quick"]
    data: Mapping[str, DataPlan]
    num_seeds: int
    num_compared_seeds: int
    temperatures: tuple[float, ...]
    probe_data: str  # the data set on which temperature and initialisation are varied
    probe_epochs: int
    fixed_lr: float | None = None  # of all models, in place of a search


FULL = Scale(
    "full",
    {
        "digits": DataPlan(60, 20, paper=False, compared=False, epoch_seconds=0.3),
        "mnist": DataPlan(25, 8),
        "fashion-mnist": DataPlan(25, 8),
        # A short search would favour rates that are too large: fewer rates, each in a full run.
        "cifar10": DataPlan(25, 25, grid=(2e-3, 5e-3, 1e-2), epoch_seconds=2.0),
        # 64-wide experts, so that capacity matters; searched in full runs as well.
        "union": DataPlan(6, 6, False, True, (1e-3, 2e-3, 5e-3), options={"dim": 64}, epoch_seconds=7.0),
    },
    num_seeds=3,
    num_compared_seeds=5,
    temperatures=(1.0, 10.0, 20.0, 50.0),
    probe_data="fashion-mnist",
    probe_epochs=15,
)
# Defaults of the quick scale.
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

# The union with experts twice as wide again: eight of them take more multiply-adds than all the rest.
WIDE_OPTIONS = {"dim": 128}
WIDE = Scale("full", {"union": replace(FULL.data["union"], options=WIDE_OPTIONS, epoch_seconds=12.0)}, 5, 5, (), "", 0)

# Text: small decoders with 16 experts per block; an epoch is 250 steps of 1,024 bytes.
WINDOWS = {"context": 64, "steps": 250, "eval_tokens": 32768}
BYTES = DataPlan(
    6, 1, False, False, (3e-3, 6e-3, 1.2e-2), (), {"dim": 64, "hidden": 128, "depth": 4},
    {"batch_size": 16, "warmup": 0.2, "data_options": WINDOWS}, extends=False, epoch_seconds=18.0,
)  # fmt: skip
TEXT = Scale("full", {"enwik8": BYTES}, 5, 5, (), "", 0)
# The same decoders over words of 2.5 bytes, for three times as many steps.
TOKENIZER = (
    "experiments/reproduce/enwik8-2048.json"  # written by `python -m experiments.tokenizer`; seen from the clone
)
WORDS = replace(
    BYTES,
    epochs=18,
    grid=(3e-3, 6e-3, 1.2e-2, 2.4e-2),
    training=BYTES.training | {"data_options": WINDOWS | {"tokenizer": TOKENIZER}},
)
TEXT_WORDS = Scale("full", {"enwik8": WORDS}, 3, 3, (), "", 0)
# The main size: longer again, and every model has a search of its own, of 1,000 steps per learning rate.
MAIN = replace(WORDS, epochs=20, search_epochs=4, grid=(3e-3, 6e-3, 1.2e-2))
TEXT_MAIN = Scale("full", {"enwik8": MAIN}, 3, 3, (), "", 0)
TEXT_QUICK = Scale("quick", {"shakespeare": replace(BYTES, epochs=1, search_epochs=1)}, 1, 1, (), "", 0, fixed_lr=4e-3)


@dataclass(frozen=True)
class Run:
    """One training run: its purpose, its label in tables, and its configuration."""

    group: Group
    label: str
    config: TrainConfig
    family: str = ""  # the model of which it is one setting, or its label
    setting: float | None = None  # learning rate of a search, temperature, target, number of blocks

    @property
    def data(self) -> str:
        return self.config.data

    @property
    def seed(self) -> int:
        return self.config.seed

    @property
    def key(self) -> str:
        """The name of the run and of its record."""
        return f"{self.group}-{self.data}-{self.label}-s{self.seed}"

    @property
    def public_config(self) -> dict[str, Any]:
        """The configuration without fields that may differ between machines."""
        return self.config.public()

    @property
    def digest(self) -> str:
        """A short hash of the configuration: a run with another configuration is another run."""
        return hashlib.sha256(json.dumps(self.public_config, sort_keys=True).encode()).hexdigest()[:8]

    @property
    def folder(self) -> str:
        """The name of its run folder."""
        return f"{self.key}-{self.digest}"

    @property
    def expected_seconds(self) -> float:
        """A rough estimate, for starting long runs first."""
        slow = self.config.model == "mre-paper"
        plan = FULL.data.get(self.data, BYTES)
        return self.config.epochs * plan.epoch_seconds * (2.0 if slow else 1.0) + 4.0


@dataclass(frozen=True)
class Planner:
    """Plans runs at a scale with the learning rates known so far; a run without a known rate is replaced by its search."""

    scale: Scale
    rates: LearningRates
    grids: Grids = field(default_factory=dict)  # searches that went beyond the planned grid
    searches: dict[tuple[str, str], list[Run]] = field(default_factory=dict, repr=False, compare=False)  # made so far

    def runs(
        self, group: Group, models: Iterable[Variant], names: Iterable[str], seeds: Iterable[int], epochs: int = 0
    ) -> list[Run]:
        """The runs of models over data sets and seeds, or the searches that must come before them."""
        planned: list[Run] = []
        for variant, data in product(models, names):
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
        """One run for each learning rate of the grid; many parts of a plan ask for the same."""
        if (data, variant.label) not in self.searches:
            self.searches[data, variant.label] = self.make_search(variant, data)
        return self.searches[data, variant.label]

    def make_search(self, variant: Variant, data: str) -> list[Run]:
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
        # Patience for all epochs: training never ends early, and keeps the weights of the best validation accuracy.
        values |= {"preset": variant.preset, "epochs": epochs, "lr": lr, "seed": seed, "patience": max(1, epochs)}
        values |= {"device": "cpu", "threads": 1, "quiet": True}
        values["model_options"] = self.scale.data[data].options | variant.options
        return TrainConfig(data=data, model=variant.model, **values)


# The parts by the names that --only accepts.
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
    "readings": "The text as it is written, and mre-paper trained for longer",
    "final-loss": "Our recipe trained on its last answer alone, as the baselines are",
    "recipe": "The second recipe, one checkpoint for all budgets, without and with exits",
    "frontier": "Accuracy against MACs",
    "union": "Accuracy against MACs on the union of the three data sets",
    "early-exit": "Early exit: accuracy against MACs",
    "wide": "Accuracy against MACs on the union, with experts of width 128",
    "text": "Bits per byte against MACs: language models",
    "text-searches": "A search for every one of these models, in place of those that they share: to compare, nothing follows",
    "pairs": "The same on bytes for paths that depend on two tokens, into the folder of text",
    "words": "The same over words of several bytes, trained for longer",
    "main": "The same at the main size: words, trained for longest, a search for each model",
    "main-pairs": "The main size for paths that depend on two tokens, into its folder",
    "ship": "Trained models for the package",
}
TEXT_PARTS = {
    "text": TEXT,
    "text-searches": TEXT,
    "pairs": TEXT,
    "words": TEXT_WORDS,
    "main": TEXT_MAIN,
    "main-pairs": TEXT_MAIN,
}
OWN_FOLDERS = {
    "text": "text",
    "text-searches": "text",
    "pairs": "text",
    "words": "text-words",
    "main": "text-main",
    "main-pairs": "text-main",
    "wide": "wide",
}  # part → the folder of its results
SETS = {
    "default": ("table1", "table2", "fig2", "fig3", "fig5", "fig6", "fig7"),
    "claims": ("lr", "balance", "temperature", "init"),
    "all": tuple(part for part in PARTS if part not in ("ship", *OWN_FOLDERS)),
}


def choose_parts(names: Iterable[str]) -> list[str]:
    """The parts that names of parts and sets of parts stand for, in the order of the table."""
    chosen: set[str] = set()
    for name in names:
        if name not in PARTS and name not in SETS:
            raise ValueError(f"only={name}: no such part; {did_you_mean(name, [*PARTS, *SETS])}")
        chosen |= set(SETS.get(name, (name,)))
    return [part for part in PARTS if part in chosen]


def runs_of(part: str, planner: Planner, selected: Selection) -> list[Run]:
    """The runs that a part needs: its models on its data sets."""
    scale, plans = planner.scale, planner.scale.data
    some, many = range(scale.num_seeds), range(scale.num_compared_seeds)
    chosen_data = [name for name in plans if selected is None or name in selected]
    # The paper's data sets, or those that the user chose; wide models are not in the paper.
    papers = [name for name in chosen_data if (plans[name].paper or selected) and not plans[name].wide]
    probed = [name for name in chosen_data if name == scale.probe_data]
    texts = [name for name in chosen_data if plans[name].options == BYTES.options]
    wider = [name for name in chosen_data if plans[name].options == WIDE_OPTIONS]
    tuned = [name for name in chosen_data if plans[name].compared]
    compared = [name for name in tuned if plans[name].wide == (part == "union")]
    if part == "lr":
        return [run for name, one in product(compared, variants.PAPER_VARIANTS) for run in planner.search(one, name)]
    if part == "text-searches":
        return [
            run for name, one in product(texts, variants.searched_text_variants()) for run in planner.search(one, name)
        ]
    frontier = [("main", variants.swept_variants(plans[name].targets), [name], some) for name in compared]
    frontier += [("main", variants.compared_variants(plans[name].wide), [name], many) for name in compared]
    taus, recipes = variants.temperature_variants(scale.temperatures), (variants.MRE, variants.MRE_PAPER)
    shipped = variants.SHIPPED_RECIPES.values()
    longest = variants.LONG_EPOCHS if scale.name == "full" else scale.probe_epochs
    needs: dict[str, list[Any]] = {
        "table1": [("main", (*variants.PAPER_VARIANTS, *variants.PAPER_BASELINES), papers, some)],
        "table2": [("main", recipes, papers, some)],
        "fig2": [("main", recipes, papers, some)],
        "fig3": [("main", variants.PAPER_VARIANTS, papers, some), ("equal-lr", variants.EQUAL_VARIANTS, papers, [0])],
        "fig5": [("main", recipes, papers, [0])],
        "fig6": [("main", variants.PAPER_VARIANTS, papers, some)],
        "fig7": [("main", recipes, papers, [0])],
        "balance": [("main", variants.BALANCE_VARIANTS, papers, some)],
        "temperature": [("temperature", taus, probed, some, scale.probe_epochs)],
        "init": [("init", variants.INIT_VARIANTS, probed, some, scale.probe_epochs)],
        "readings": [
            ("reading", variants.READING_VARIANTS, papers, many),
            ("reading", [variants.MRE_PAPER_LONG], [name for name in papers if name == "cifar10"], many, longest),
        ],
        "final-loss": [("main", [variants.MRE_FINAL], tuned, many)],
        "recipe": [("main", [variants.MRE_BUDGETS, variants.MRE_BUDGETS_EXITS], tuned, many)],
        "frontier": frontier,
        "union": frontier,
        "early-exit": [("main", variants.exit_variants(plans[name].wide), [name], many) for name in tuned],
        "wide": [("main", variants.wide_variants(), wider, [seed]) for seed in many],
        # Seed by seed: stopped at any time, the records hold whole seeds. The other rows come after all seeds of the main ones.
        "text": [
            ("main", models, texts, [seed])
            for models in (variants.text_variants(), variants.more_text_variants())
            for seed in some
        ],
        "pairs": [
            ("main", variants.pair_text_variants(), [name for name in texts if name == "enwik8"], [seed])
            for seed in many
        ],
        "words": [("main", variants.word_variants(), texts, [seed]) for seed in some],
        "main": [("main", variants.main_text_variants(), texts, [seed]) for seed in some],
        "main-pairs": [("main", variants.main_pair_variants(), texts, [seed]) for seed in some],
        "ship": [("main", [variant], [name], some) for name, variant in shipped if name in chosen_data],
    }
    return [run for need in needs[part] for run in planner.runs(*need)]


def collect_runs(parts: Iterable[str], planner: Planner, selected: Selection) -> list[Run]:
    """All runs that some parts need, without repetitions."""
    return list({run.key: run for part in parts for run in runs_of(part, planner, selected)}.values())


def every_run(planner: Planner) -> list[Run]:
    """All runs of a scale that any command may have made: with the rates known now, and with those of the searches."""
    wide = {name: replace(plan, grid=tuple({*plan.grid, *LADDER})) for name, plan in planner.scale.data.items()}
    planners, everywhere = (Planner(replace(planner.scale, data=wide), {}), planner), tuple(planner.scale.data)
    runs = (collect_runs(PARTS, one, selected) for one in planners for selected in (None, everywhere))
    return list({run.key: run for some in runs for run in some}.values())
