"""`raytraced reproduce`: train what is missing, then write tables, figures and the report. Importable without torch."""

import os
from dataclasses import replace
from pathlib import Path

from raytraced.reproduce import plan
from raytraced.reproduce.plan import FULL, PARTS, QUICK, TEXT, TEXT_QUICK, Planner, Scale, Wanted, collect_runs
from raytraced.reproduce.records import Store, read_searches
from raytraced.words import did_you_mean, require


def reproduce(
    quick: bool = False,
    only: str | None = None,
    data: str | None = None,
    output: str = "results",
    data_root: str | None = None,
    workers: int | None = None,
    redraw: bool = False,
    dry_run: bool = False,
) -> int:
    """Run every model on every data set over seeds, and write tables, figures and a report.

    Args:
        quick: A small likeness of everything in a few minutes, into OUTPUT/quick.
        only: Parts, such as table1,fig5, or sets of parts: default, claims, frontier, union, all; or text, by itself.
        data: Only these data sets, such as mnist,cifar10.
        output: Folder of the results; runs are trained in its sub-folder runs.
        workers: Processes that train side by side, one core each (default: as many as there are cores).
        redraw: Train nothing: draw from the records in OUTPUT/records.
        dry_run: Only tell what would be trained, and how long it may take.
    """
    parts = plan.choose_parts(words_of(only) or (["all"] if quick else ["default"]))
    if "text" in parts and len(parts) > 1:
        raise ValueError(f"only={only}: text has runs and results of its own; ask for it by itself")
    texts = parts == ["text"]
    scale = (TEXT_QUICK if quick else TEXT) if texts else QUICK if quick else FULL
    if quick and "ship" in parts:
        raise ValueError("only=ship: quick runs are not worth shipping; leave --quick out")
    wanted = tuple(dict.fromkeys(words_of(data))) or None
    for name in wanted or ():
        require(name in scale.data, "data", name, f"no such data set; {did_you_mean(name, scale.data)}")
    folder = Path(output) / "quick" if quick else Path(output)
    folder = folder / "text" if texts else folder
    if workers is None:
        workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    require(workers >= 1, "workers", workers, "must be at least 1")
    if dry_run:
        return tell_plan(parts, scale, wanted, folder, workers)
    failures = {} if redraw else train_all(parts, scale, wanted, folder, data_root, workers)
    page = write_results(parts, scale, wanted, folder, data_root)
    for key, problem in failures.items():
        print(f"failed: {key}: {problem}")
    print(page)
    return 1 if failures else 0


def words_of(words: str | None) -> list[str]:
    """Words separated by commas."""
    return [word.strip() for word in (words or "").split(",") if word.strip()]


def find_plan(scale: Scale, folder: Path) -> Planner:
    """With what the searches on record found; one made with another recipe does not count, and is made again."""
    results = Store(folder / "records").results(plan.every_run(Planner(scale, {})))
    return Planner(scale, *read_searches(results, scale))


def train_all(
    parts: list[str], scale: Scale, wanted: Wanted, folder: Path, data_root: str | None, workers: int
) -> dict[str, str]:
    """Train what is missing: first the learning-rate searches, then the runs that need what they find."""
    import matplotlib  # noqa: F401 (where it is missing, that is told before hours of training)

    from raytraced.reproduce.run import run_all
    from raytraced.tasks.table import find_task

    failures: dict[str, str] = {}
    planner = find_plan(scale, folder)
    while True:
        runs = collect_runs(parts, planner, wanted)
        if not runs:
            raise ValueError(f"nothing to run: {', '.join(parts)} has no run on {', '.join(wanted or ())}")
        for name in sorted({run.data for run in runs}):  # cached before anyone trains: two need not fetch the same
            find_task(name).load(name, data_root)
        failures |= run_all(runs, folder / "runs", folder / "records", workers, data_root)
        found = find_plan(scale, folder)
        if found == planner:
            # a search's run that diverged has been taken into account: a finding, not a failure
            known = Store(folder / "records").records
            return {key: told for key, told in failures.items() if key not in known or known[key].group != "search"}
        planner = found


def write_results(parts: list[str], scale: Scale, wanted: Wanted, folder: Path, data_root: str | None) -> Path:
    """Draw the parts that were asked for, and write summary, tables and report from all there is; returns the page to open."""
    results = Store(folder / "records").results(plan.every_run(find_plan(scale, folder)))
    if not results.whole:
        raise ValueError(f"{folder / 'records'}: holds no record of a run; leave --redraw out to train")
    from raytraced.reproduce.figures import save_figures
    from raytraced.reproduce.report import write_report
    from raytraced.reproduce.ship import ship_all
    from raytraced.reproduce.text import write_text

    quick, texts = scale.name == "quick", parts == ["text"]
    names = results.data() if texts else list(wanted or (name for name, how in scale.data.items() if how.paper))
    save_figures(parts, results, names, folder / "figures", data_root, quick)
    if texts:
        return write_text(results, folder, quick)
    write_report(results, scale, folder)
    if "ship" in parts:
        ship_all(results, folder / "runs", data_root=data_root)
    return folder / "report.html"


def tell_plan(parts: list[str], scale: Scale, wanted: Wanted, folder: Path, workers: int) -> int:
    """Print the runs of each part, and a guess at the time."""
    whole = Planner(replace(scale, fixed_lr=1.0), {})  # any rate will do to count what waits for a search
    planned = collect_runs(parts, find_plan(scale, folder), wanted)
    rows = {part: plan.runs_of(part, whole, wanted) for part in parts}
    told = {run.key for runs in rows.values() for run in runs}
    first = [run for run in planned if run.group == "search" and run.key not in told]
    rows = ({"search": first} if first else {}) | rows
    rows["together"] = list({run.key: run for runs in rows.values() for run in runs}.values())
    titles = PARTS | {"search": "Learning rates that must be searched for first", "together": "each run once"}
    for name, runs in rows.items():
        hours = sum(run.expected_seconds for run in runs) / workers / 3600
        print(f"{name:<12} {len(runs):>4} runs  {hours:>5.1f} h  {titles[name]}")
    return 0
