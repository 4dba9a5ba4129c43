"""The parts of the evidence, by the names that --only takes: which runs each needs. Needs no torch."""

from collections.abc import Iterable

from raytraced.reproduce.plan import Planner, Run
from raytraced.reproduce.variants import (
    BALANCE_VARIANTS,
    EQUAL_VARIANTS,
    INIT_VARIANTS,
    MRE,
    MRE_PAPER,
    PAPER_VARIANTS,
    compared_variants,
    temperature_variants,
)  # fmt: skip
from raytraced.words import did_you_mean

Wanted = tuple[str, ...] | None
"""data sets that were asked for; None: those that a part is made for"""

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
    "ship": "Trained models for the package",
}
SETS = {
    "default": ("table1", "table2", "fig2", "fig3", "fig5", "fig6", "fig7"),
    "claims": ("lr", "balance", "temperature", "init"),
    "all": tuple(part for part in PARTS if part != "ship"),
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
    scale = planner.scale
    plans, seeds = scale.data, range(scale.num_seeds)
    # the paper's, or any others that were asked for; wide models are not the paper's
    papers = [
        name for name, plan in plans.items() if (plan.paper if wanted is None else name in wanted) and not plan.wide
    ]
    asked = [name for name in plans if wanted is None or name in wanted]
    probed = [name for name in asked if name == scale.probe_data]
    compared = [name for name in asked if plans[name].compared and plans[name].wide == (part == "union")]
    match part:
        case "table1" | "fig6":
            return planner.runs("main", PAPER_VARIANTS, papers, seeds)
        case "table2" | "fig2":
            return planner.runs("main", (MRE, MRE_PAPER), papers, seeds)
        case "fig3":
            return planner.runs("main", PAPER_VARIANTS, papers, seeds) + planner.runs(
                "equal-lr", EQUAL_VARIANTS, papers, [0]
            )
        case "fig5" | "fig7":
            return planner.runs("main", (MRE,), papers, [0])
        case "lr":
            return [run for name in compared for variant in PAPER_VARIANTS for run in planner.search(variant, name)]
        case "balance":
            return planner.runs("main", BALANCE_VARIANTS, papers, seeds)
        case "temperature":
            variants = temperature_variants(scale.temperatures)
            return planner.runs("temperature", variants, probed, seeds, scale.probe_epochs)
        case "init":
            return planner.runs("init", INIT_VARIANTS, probed, seeds, scale.probe_epochs)
        case "frontier" | "union":
            everyone = {name: compared_variants(plans[name].costs, plans[name].wide) for name in compared}
            seeds = range(scale.num_compared_seeds)
            return [run for name in compared for run in planner.runs("main", everyone[name], [name], seeds)]
        case _:  # ship
            small = ["digits"] if wanted is None and "digits" not in papers else []
            written = [name for name in papers if name == "fashion-mnist"]
            ours = planner.runs("main", (MRE,), [*papers, *small], seeds)
            return [*ours, *planner.runs("main", (MRE_PAPER,), written, seeds)]


def collect_runs(parts: Iterable[str], planner: Planner, wanted: Wanted) -> list[Run]:
    """All runs that some parts need, each once."""
    return list({run.key: run for part in parts for run in runs_of(part, planner, wanted)}.values())


def every_search(planner: Planner) -> list[Run]:
    """The searches of everyone who has one of their own, on every data set."""
    return [
        run
        for name, plan in planner.scale.data.items()
        for variant in compared_variants((), plan.wide)
        if variant.lr is None and variant.tuned_as is None
        for run in planner.search(variant, name)
    ]


def every_run(planner: Planner) -> list[Run]:
    """Whatever may have been run at a scale, by whichever command."""
    everywhere = tuple(planner.scale.data)
    runs = every_search(planner) + collect_runs(PARTS, planner, None) + collect_runs(PARTS, planner, everywhere)
    return list({run.key: run for run in runs}.values())
