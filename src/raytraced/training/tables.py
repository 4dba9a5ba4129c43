"""Runs as tables; needs no torch."""

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from raytraced.training.progress import clock
from raytraced.training.run_folder import RunFolder


def run_row(run: RunFolder) -> dict[str, Any]:
    """What the table of runs tells about one."""
    config, history, summary = run.config, run.read_metrics(), run.read_summary()
    return {
        "run": str(run.path),
        "data": config.data,
        "model": config.model,
        "seed": config.seed,
        "epochs": len(history),
        "of": config.epochs,
        "complete": summary is not None,
        "validation_accuracy": history[-1]["validation_accuracy"] if history else None,
        "test_accuracy": summary["test"]["accuracy"] if summary else None,
        "experts": summary["test"]["mean_experts"] if summary else None,
        "parameters": summary["parameters"] if summary else None,
        "seconds": sum(epoch["seconds"] for epoch in history),
    }


def print_runs(runs: Sequence[RunFolder]) -> None:
    """A table with a row a run."""
    table = Table("run", "data", "model", box=SIMPLE_HEAD)
    for title in ("seed", "epochs", "validation", "test", "experts", "parameters", "time"):
        table.add_column(title, justify="right")
    table.add_column("state")
    for run in runs:
        row = run_row(run)
        table.add_row(
            escape(run.path.name),
            escape(row["data"]),
            row["model"],
            str(row["seed"]),
            f"{row['epochs']}/{row['of']}",
            _percent(row["validation_accuracy"]),
            _percent(row["test_accuracy"]),
            "" if row["experts"] is None else f"{row['experts']:.2f}",
            "" if row["parameters"] is None else f"{row['parameters']:,}",
            clock(row["seconds"]),
            "complete" if row["complete"] else "can be resumed",
        )
    # as wide as it needs to be: a name that is cut short is of no use to `resume`
    Console(width=Console(width=1000).measure(table).maximum).print(table)


def short_names(runs: Sequence[RunFolder]) -> list[str]:
    """Names that tell runs apart: the folder's own, or the whole path where two share it."""
    names = [run.path.name for run in runs]
    return [name if names.count(name) == 1 else str(run.path) for name, run in zip(names, runs, strict=True)]


def print_outcome(run: RunFolder) -> None:
    """The last words of a training run."""
    summary = run.read_summary()
    assert summary is not None
    test = summary["test"]
    print(
        f"test accuracy {test['accuracy']:.2%} with {test['mean_experts']:.2f} experts on average, "
        f"calibration error {test['calibration_error']:.3f}, {clock(summary['seconds'])} of training"
    )
    if test["accuracy_by_prefix"]:
        steps = [f"{number}: {accuracy:.1%}" for number, accuracy in enumerate(test["accuracy_by_prefix"])]
        print(f"test accuracy with at most so many experts  {'  '.join(steps[:10])}{' …' if len(steps) > 10 else ''}")
    picture = run.path / "sequences.png"
    if picture.exists():
        print(f"activation sequences of some test images: {picture}")


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"
