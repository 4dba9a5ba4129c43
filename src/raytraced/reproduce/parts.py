"""The parts of the evidence, by the names that --only takes: which runs each needs. Needs no torch."""

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from raytraced.reproduce.plan import Planner, Run
from raytraced.reproduce.variants import (
    BALANCE_VARIANTS,
    MRE,
    MRE_PAPER,
    PAPER_VARIANTS,
    frontier_variants,
    init_variants,
    temperature_variants,
    union_variants,
)

Wanted = tuple[str, ...] | None
"""data sets that were asked for; None: those that a part is made for"""


@dataclass(frozen=True)
class Part:
    """What a part shows, and which runs it needs on which data sets."""

    title: str
    runs: Callable[[Planner, Wanted], list[Run]]


def paper_data(planner: Planner, wanted: Wanted) -> tuple[str, ...]:
    """The paper's data sets, or any others that were asked for; the union has models of its own."""
    return planner.scale.data if wanted is None else tuple(name for name in wanted if name != "union")


def only(names: tuple[str, ...], wanted: Wanted) -> tuple[str, ...]:
    """Those data sets of a part that were asked for."""
    return names if wanted is None else tuple(name for name in names if name in wanted)


def all_models(planner: Planner, wanted: Wanted) -> list[Run]:
    return planner.runs("main", PAPER_VARIANTS, paper_data(planner, wanted), planner.scale.num_seeds)


def both_recipes(planner: Planner, wanted: Wanted) -> list[Run]:
    return planner.runs("main", (MRE, MRE_PAPER), paper_data(planner, wanted), planner.scale.num_seeds)


def one_model(planner: Planner, wanted: Wanted) -> list[Run]:
    return planner.runs("main", (MRE,), paper_data(planner, wanted), 1)


def equal_and_best_lr(planner: Planner, wanted: Wanted) -> list[Run]:
    return [*all_models(planner, wanted), *planner.equal_lr(paper_data(planner, wanted))]


def searches(planner: Planner, wanted: Wanted) -> list[Run]:
    names = only(planner.scale.search_data, wanted)
    return [run for name in names for variant in PAPER_VARIANTS for run in planner.search(variant, name)]


def balance(planner: Planner, wanted: Wanted) -> list[Run]:
    return planner.runs("main", BALANCE_VARIANTS, paper_data(planner, wanted), planner.scale.num_seeds)


def temperature(planner: Planner, wanted: Wanted) -> list[Run]:
    scale = planner.scale
    names = only((scale.probe_data,), wanted)
    variants = temperature_variants(scale.temperatures)
    return planner.runs("temperature", variants, names, scale.num_seeds, scale.probe_epochs)


def init(planner: Planner, wanted: Wanted) -> list[Run]:
    scale = planner.scale
    return planner.runs("init", init_variants(), only((scale.probe_data,), wanted), scale.num_seeds, scale.probe_epochs)


def frontier(planner: Planner, wanted: Wanted) -> list[Run]:
    scale = planner.scale
    names = only(scale.frontier_data, wanted)
    return planner.runs("main", frontier_variants(scale.dials), names, scale.num_frontier_seeds)


def union(planner: Planner, wanted: Wanted) -> list[Run]:
    scale = planner.scale
    return planner.runs(
        "main", union_variants(scale.union_dials), only(scale.union_data, wanted), scale.num_frontier_seeds
    )


def shipped(planner: Planner, wanted: Wanted) -> list[Run]:
    scale = planner.scale
    names = tuple(dict.fromkeys((*scale.data, "digits"))) if wanted is None else paper_data(planner, wanted)
    ours = planner.runs("main", (MRE,), names, scale.num_seeds)
    return [*ours, *planner.runs("main", (MRE_PAPER,), only(("fashion-mnist",), wanted), scale.num_seeds)]


PARTS = {
    "table1": Part("Table 1: accuracy of every model", all_models),
    "table2": Part("Table 2: parameters and experts used", both_recipes),
    "fig2": Part("Figure 2: accuracy along the sequence, and how many experts are used", both_recipes),
    "fig3": Part("Figure 3: accuracy against epochs, at an equal learning rate and at each model's best", equal_and_best_lr),
    "fig5": Part("Figure 5: experts by class", one_model),
    "fig6": Part("Figure 6: validation accuracy over the epochs", all_models),
    "fig7": Part("Figure 7: images ordered by the experts they use", one_model),
    "lr": Part("The learning-rate search", searches),
    "balance": Part("How evenly experts are used", balance),
    "temperature": Part("Temperature of the Gumbel-softmax", temperature),
    "init": Part("Scaling of the initialisation", init),
    "frontier": Part("Accuracy against multiply-adds", frontier),
    "union": Part("Accuracy against multiply-adds, the union of three data sets", union),
    "ship": Part("Trained models for the package", shipped),
}  # fmt: skip

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
            known = [*PARTS, *SETS]
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"must be one of {', '.join(known)}"
            raise ValueError(f"only={name}: no such part; {hint}")
        chosen |= set(SETS.get(name, (name,)))
    return [part for part in PARTS if part in chosen]


def collect_runs(parts: Iterable[str], planner: Planner, wanted: Wanted) -> list[Run]:
    """All runs that some parts need, each once."""
    runs = {run.key: run for part in parts for run in PARTS[part].runs(planner, wanted)}
    return list(runs.values())
