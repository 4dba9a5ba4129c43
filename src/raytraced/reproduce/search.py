"""The learning-rate search: the same grid for every model, judged on validation images. Needs no torch."""

from collections.abc import Mapping
from pathlib import Path

from raytraced.reproduce.plan import LearningRates, Planner, Run, Scale
from raytraced.reproduce.records import Results, collect
from raytraced.reproduce.variants import frontier_variants, union_variants

# Rates whose accuracies differ by no more are equal, and of equals the smaller wins: its long runs are steadier.
TIE = 0.001
ROUNDING = 1e-9  # 6 of 6,000 images are exactly a tie


def every_search(scale: Scale) -> list[Run]:
    """The searches of everyone who has one of their own, on every data set."""
    planner = Planner(scale, {})
    return [
        run
        for data in scale.epochs
        for variant in (union_variants(()) if data == "union" else frontier_variants(()))
        if variant.lr is None and variant.tuned_as is None
        for run in planner.search(variant, data)
    ]


def find_rates(scale: Scale, raw: Path) -> LearningRates:
    """What the searches on record found; one made with another recipe does not count, and is made again."""
    return best_rates(collect(raw, every_search(scale)), scale)


def best_rates(results: Results, scale: Scale) -> LearningRates:
    """The best rate of every search that is complete; a run that diverged has no accuracy, and loses."""
    found: dict[str, dict[str, float]] = {}
    for (data, label), accuracies in searched(results).items():
        grid = scale.grid_of(data)
        if set(accuracies) != set(grid):
            continue
        known = {lr: accuracy for lr, accuracy in accuracies.items() if accuracy is not None}
        if not known:
            raise ValueError(f"{label} on {data}: diverged at every learning rate of the search ({grid})")
        found.setdefault(data, {})[label] = choose_rate(known)
    return found


def choose_rate(accuracies: Mapping[float, float]) -> float:
    """The learning rate that did best; of equals, the smaller."""
    highest = max(accuracies.values())
    return min(lr for lr, accuracy in accuracies.items() if accuracy >= highest - TIE - ROUNDING)


def searched(results: Results) -> dict[tuple[str, str], dict[float, float | None]]:
    """(data set, label) → learning rate → validation accuracy, None where the run diverged."""
    table: dict[tuple[str, str], dict[float, float | None]] = {}
    for record in results.all:
        if record.group == "search":
            label = record.label.rpartition("-lr-")[0]
            accuracy = None if record.error else float(record.validation["accuracy"])
            table.setdefault((record.data, label), {})[record.lr] = accuracy
    return table
