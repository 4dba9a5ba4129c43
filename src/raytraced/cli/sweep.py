"""`raytraced sweep`: search training options; heavy imports are where they are used."""

import sys
from importlib.util import find_spec
from json import dumps
from pathlib import Path

from raytraced.errors import install_extra, printable, require


def sweep(
    ranges: str, output: str | None = None, trials: int | None = None, quiet: bool = False, json: bool = False
) -> int:
    """Search training options: train trials with values from ranges, print a table, and draw a picture.

    Args:
        ranges: YAML file with the options to search: see docs/guides/sweep.md.
        output: Folder to write the sweep into (default: sweeps/ and the name of the file).
        trials: Number of trials, including those already done (default: as the file says).
        quiet: Print the table only.
    """
    from dataclasses import replace

    from raytraced.training.sweep_file import read_sweep

    if find_spec("optuna") is None:
        raise ValueError(f"sweep: the package optuna is not installed; install it with {install_extra('sweep')}")
    plan = read_sweep(Path(ranges))
    require(trials is None or trials >= 1, "trials", trials, "must be at least 1")
    plan = plan if trials is None else replace(plan, trials=trials)
    folder = Path(output) if output else Path("sweeps") / Path(ranges).stem
    from raytraced.models.registry import find_model
    from raytraced.tasks.registry import find_task
    from raytraced.training.callbacks import PlainLines, Reporter
    from raytraced.training.interrupt import Interrupted
    from raytraced.training.sweep import run_sweep, sweep_rows, write_best
    from raytraced.training.trackers.registry import find_trackers

    config = plan.configure({})
    for name in {config.model, *(value for one in plan.ranges if one.name == "model" for value in one.samples)}:
        find_model(name)
        find_task(config.data).check_model(name)
    find_trackers(config.tracker)
    try:
        study = run_sweep(plan, folder, Reporter() if quiet or json else PlainLines())
    except Interrupted as stop:
        print(f"raytraced: {printable(stop)}; saved. The same command continues the sweep.", file=sys.stderr)
        return stop.exit_code
    from raytraced.tables import make_table, print_table

    task = find_task(config.data)
    rows = sweep_rows(study, plan, task.better)
    best = write_best(study, plan, folder / "best.yaml")
    if json:
        for row in rows:
            print(dumps(row))
    else:
        formats = {one.name: ".4g" for one in plan.ranges} | {task.better: task.formats[task.better]}
        print_table(make_table(rows, formats))
    if best is None:
        raise ValueError(f"{folder}: no trial is complete; a smaller lr usually helps where trials diverge")
    if find_spec("matplotlib") is not None:
        from raytraced.training.sweep_picture import draw_sweep

        draw_sweep(rows, plan.ranges, task.better, folder / "sweep.png")
    if not json:
        print(f"train with the best values: raytraced train -c {printable(folder / 'best.yaml')}")
        print(printable(folder))
    return 0
