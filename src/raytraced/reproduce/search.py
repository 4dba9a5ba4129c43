"""The learning-rate search: the same grid for every model, judged on validation images, kept in lr.json. Needs no torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raytraced.reproduce.plan import SEARCH_SEED, LearningRates, Scale
from raytraced.reproduce.records import Results, shorten
from raytraced.training.files import write_file

# Rates whose accuracies differ by no more are equal, and of equals the smaller wins: its long runs are steadier.
TIE = 0.001
ROUNDING = 1e-9  # 6 of 6,000 images are exactly a tie


def read_rates(path: Path) -> LearningRates:
    """What earlier searches found."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write_rates(path: Path, rates: LearningRates) -> None:
    """Keep what searches found: data set → label → {lr, validation, epochs, seed}."""
    write_file(path, json.dumps(rates, indent=1, sort_keys=True) + "\n")


def add_found(rates: LearningRates, results: Results, scale: Scale) -> LearningRates:
    """The rates, with those of every search that is complete; a run that diverged has no accuracy, and loses."""
    found: dict[str, dict[str, Any]] = {data: dict(labels) for data, labels in rates.items()}
    for (data, label), accuracies in searched(results).items():
        grid = scale.grid_of(data)
        if set(accuracies) != set(grid):
            continue
        known = {lr: accuracy for lr, accuracy in accuracies.items() if accuracy is not None}
        if not known:
            raise ValueError(f"{label} on {data}: diverged at every learning rate of the search ({grid})")
        best = choose_rate(known)
        found.setdefault(data, {})[label] = {
            "lr": best,
            "validation": {f"{lr:g}": shorten(accuracies[lr]) for lr in grid},
            "epochs": scale.search_epochs[data],
            "seed": SEARCH_SEED,
        }
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
