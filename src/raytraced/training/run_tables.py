"""Runs, their results and evaluations, printed as tables; needs no torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from raytraced.errors import printable
from raytraced.tables import FORMATS, clock, make_table, print_table, table_width
from raytraced.training.run_folder import RunFolder

if TYPE_CHECKING:
    from raytraced.tasks.task import Data, Task

FEW = 10
"""groups shown at each end of a long table"""
DISPENSABLE = ("parameters", "seed", "time", "validation", "data", "model", "experts")
"""columns that the table of runs leaves out on a narrow terminal, in this order"""


def run_row(run: RunFolder) -> dict[str, Any]:
    """Summarise a run.

    Args:
        run: A run folder, of a finished run or not.

    Returns:
        Names and values as `raytraced runs --json` prints them; figures that do not exist yet are None.
    """
    config, history, summary = run.config, run.read_metrics(), run.read_summary()
    last, test = history[-1] if history else {}, summary["test"] if summary else {}
    names = [key.removeprefix("validation_") for key in last if key.startswith("validation_")]
    figures = [name for name in names if name not in ("loss", "experts")]
    return {
        "run": str(run.path),
        "data": config.data,
        "model": config.model,
        "seed": config.seed,
        "epochs": len(history),
        "of": config.epochs,
        "complete": summary is not None,
        "process": run.writer(),
        **{f"validation_{name}": last[f"validation_{name}"] for name in figures},
        **{f"test_{name}": test.get(name) for name in figures},
        "experts": test.get("mean_experts"),
        "parameters": summary["parameters"] if summary else None,
        "seconds": sum(epoch["seconds"] for epoch in history),
    }


def print_runs(found: Sequence[dict[str, Any]]) -> None:
    """Print a table with one row per run and as many columns as fit: `resume` needs whole names."""
    console = Console()
    rows = [_shown(row) for row in found]
    formats = dict.fromkeys(("epochs", "validation", "test", "time"), "") | FORMATS
    for num_left_out in range(len(DISPENSABLE) + 1):
        left_out = DISPENSABLE[:num_left_out]
        table = make_table([{name: row[name] for name in row if name not in left_out} for row in rows], formats)
        width = table_width(table)
        if width <= console.width or not console.is_terminal:
            break
    Console(width=width, height=100).print(table)
    if left_out:
        console.print(f"no room for {', '.join(left_out)}: --json prints all columns", style="dim")


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """The cells of a run's row; of the task's figures the first is shown."""

    def figure(part: str) -> str:
        key = next((key for key in row if key.startswith(part)), part)
        value = row.get(key)
        return "" if value is None else f"{value:.2%}" if key.endswith("accuracy") else f"{value:.4g}"

    state = "complete" if row["complete"] else "can be resumed"
    return {
        "run": Path(row["run"]).name,
        "data": Path(row["data"]).name,
        "model": row["model"],
        "seed": row["seed"],
        "epochs": f"{row['epochs']}/{row['of']}",
        "validation": figure("validation_"),
        "test": figure("test_"),
        "experts": row["experts"],
        "parameters": row["parameters"],
        "time": clock(row["seconds"]),
        "state": state if row["process"] is None else f"running (process {row['process']})",
    }


def print_outcome(run: RunFolder) -> None:
    """Print the figures of a finished run in one to three lines."""
    from raytraced.tasks.registry import find_task

    summary = run.read_summary()
    assert summary is not None
    test, formats = summary["test"], find_task(run.config.data).formats
    figures = ", ".join(f"test {name} {test[name]:{form}}" for name, form in formats.items())
    print(f"{figures} with {test['mean_experts']:.2f} experts on average, {clock(summary['seconds'])} of training")
    (name, form), *_ = formats.items()
    steps = [f"{row[name]:{form}}" for row in test.get("budgets", [])]
    if steps:
        print(f"with at most 0, 1, 2 … experts: {' '.join(steps[:6])}{' …' if len(steps) > 6 else ''}")
    for picture in sorted(run.path.glob("sequences.png")):
        print(f"activation sequences of some test data: {printable(str(picture))}")


def print_evaluation(result: dict[str, Any], task: "Task[Data]", data: "Data", title: str) -> None:
    """Print the figures of an evaluation, then one table by group and one by number of experts.

    Args:
        result: What `evaluate` returned.
        task: The task, which knows its figures and groups.
        data: The data set that was evaluated on.
        title: The first line.
    """
    console = Console()
    console.print(printable(title), markup=False, highlight=False, soft_wrap=True)
    # a line in a file or a pipe has no width to fit
    console.print("  ".join(_figures(result, task)), highlight=False, soft_wrap=not console.is_terminal)
    formats, (name, *_) = FORMATS | task.formats, task.formats
    if groups := task.group_rows(data, result):
        few = _shortened(groups, name)
        print_table(make_table(few, formats))
        if len(few) < len(groups):
            shown = f"the worst {FEW} and the best {FEW} of {len(groups):,}; --json prints all"
            console.print(shown, style="dim")
    if budgets := result.get("budgets"):
        rows = [
            {
                "at most so many experts": number,
                name: row[name],
                "experts": row["experts"],
                "macs": round(row["macs"]),
            }
            for number, row in enumerate(budgets)
        ]
        print_table(make_table(rows, formats))


def _figures(result: dict[str, Any], task: "Task[Data]") -> list[str]:
    """The task's figures, the number of samples, the loss, other fractions, and the mean number of experts."""
    known = {*task.formats, "loss", "mean_experts", "used_parameters"}
    others = {key: value for key, value in result.items() if key not in known and isinstance(value, float)}
    shown = [f"{name} {result[name]:{form}}" for name, form in task.formats.items()]
    shown[-1] += f" of {result['num_samples']:,} {task.sample_name}"
    shown.append(f"loss {result['loss']:.4f}")
    shown += [f"{key.replace('_', ' ')} {value:.4f}" for key, value in others.items()]
    return [*shown, f"experts {result['mean_experts']:.2f}"]


def _shortened(groups: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """All rows of a short table; of a long one those with the lowest and the highest figure."""
    if len(groups) <= 2 * FEW:
        return groups
    ranked = sorted((row for row in groups if isinstance(row[name], float)), key=lambda row: row[name])
    return [*ranked[:FEW], *ranked[-FEW:]] if len(ranked) > 2 * FEW else ranked
