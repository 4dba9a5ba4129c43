"""Runs and figures as tables; needs no torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from raytraced.training.run_folder import RunFolder

if TYPE_CHECKING:
    from raytraced.tasks.task import Data, Task

FORMATS = {"experts": ".2f", "probability": ".1%"}
"""how fractions are written that every task has"""
FEW = 10
"""groups at each end of a long table"""
DISPENSABLE = ("parameters", "seed", "time", "validation", "data", "model", "experts")
"""columns that a narrow terminal's table of runs does without, the first of them first"""


def clock(seconds: float) -> str:
    """A duration as 1:02:03 or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def make_table(
    rows: Sequence[Mapping[str, Any]], formats: Mapping[str, str] = FORMATS, whole: Sequence[str] = ()
) -> Table:
    """A row for each of some dicts of the same names; words stand to the left, numbers and what has a format to the right.

    What is in columns of the names `whole` is never cut.
    """
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name, first in rows[0].items():
        side: Literal["left", "right"] = "left" if isinstance(first, str) and name not in formats else "right"
        table.add_column(name, justify=side, no_wrap=name in whole)
    for row in rows:
        # of "2. probability" the last word tells what it is
        table.add_row(*(_cell(value, formats.get(name.rpartition(" ")[2], "")) for name, value in row.items()))
    return table


def _cell(value: Any, form: str) -> str:
    if value is None or isinstance(value, str):
        return escape(value or "")
    return f"{value:{form}}" if isinstance(value, float) else f"{value:,}"


def run_row(run: RunFolder) -> dict[str, Any]:
    """All there is to tell about a run in a line."""
    config, history, summary = run.config, run.read_metrics(), run.read_summary()
    last, test = history[-1] if history else {}, summary["test"] if summary else {}
    judged = [key.removeprefix("validation_") for key in last if key.startswith("validation_")]
    figures = [name for name in judged if name not in ("loss", "experts")]
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
    """A table with a row a run, of as many columns as there is room for: a name cut short would be of no use to `resume`."""
    console = Console()
    wide = Console(width=1000, height=100)  # rich heeds a width in every terminal only with a height
    rows = [_shown(row) for row in found]
    formats = dict.fromkeys(("epochs", "validation", "test", "time"), "") | FORMATS
    for num_left_out in range(len(DISPENSABLE) + 1):
        left_out = DISPENSABLE[:num_left_out]
        table = make_table([{name: row[name] for name in row if name not in left_out} for row in rows], formats)
        width = wide.measure(table).maximum
        if width <= console.width or not console.is_terminal:
            break
    Console(width=width, height=100).print(table)
    if left_out:
        console.print(f"no room for {', '.join(left_out)}: --json tells all", style="dim")


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """What the table tells of all that; the first of the task's figures stands for how good a run is."""

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
    """The last words of a training run."""
    from raytraced.tasks.table import find_task

    summary = run.read_summary()
    assert summary is not None
    test, formats = summary["test"], find_task(run.config.data).formats
    told = ", ".join(f"test {name} {test[name]:{form}}" for name, form in formats.items())
    print(f"{told} with {test['mean_experts']:.2f} experts on average, {clock(summary['seconds'])} of training")
    (name, form), *_ = formats.items()
    steps = [f"{row[name]:{form}}" for row in test.get("budgets", [])]
    if steps:
        print(f"with at most 0, 1, 2 … experts: {' '.join(steps[:6])}{' …' if len(steps) > 6 else ''}")
    for picture in sorted(run.path.glob("sequences.png")):
        print(f"activation sequences of some test data: {picture}")


def print_evaluation(result: dict[str, Any], task: "Task[Data]", data: "Data", title: str) -> None:
    """The figures, then the task's table of groups, then the figures by the number of experts."""
    console, (name, *_) = Console(), task.formats
    console.print(title, markup=False, highlight=False, soft_wrap=True)
    known = {*task.formats, "loss", "mean_experts", "used_parameters"}
    more = [
        f"{key.replace('_', ' ')} {value:.4f}"
        for key, value in result.items()
        if key not in known and isinstance(value, float)
    ]
    shown = [f"{name} {result[name]:{form}}" for name, form in task.formats.items()]
    shown[-1] += f" of {result['num_samples']:,}"
    shown += [f"loss {result['loss']:.4f}", *more, f"experts {result['mean_experts']:.2f}"]
    console.print("  ".join(shown), highlight=False)
    formats = FORMATS | task.formats
    if groups := task.group_rows(data, result):
        # of many groups those that tell the most
        judged = sorted((row for row in groups if isinstance(row[name], float)), key=lambda row: row[name])
        few = groups if len(groups) <= 2 * FEW else [*judged[:FEW], *judged[-FEW:]] if len(judged) > 2 * FEW else judged
        console.print(make_table(few, formats))
        if len(few) < len(groups):
            console.print(f"the worst {FEW} and the best {FEW} of {len(groups):,}; --json tells all", style="dim")
    if budgets := result.get("budgets"):
        rows = [
            {
                "at most so many experts": number,
                name: row[name],
                "experts": row["experts"],
                "multiply-adds": round(row["macs"]),
            }
            for number, row in enumerate(budgets)
        ]
        console.print(make_table(rows, formats))
