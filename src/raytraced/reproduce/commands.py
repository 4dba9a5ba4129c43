"""`raytraced reproduce`: train what is missing, then write tables, figures and the report. Importable without torch."""

import difflib
import os
from dataclasses import replace
from pathlib import Path

from raytraced.data.catalog import NAMES, PUBLIC_SETS
from raytraced.reproduce.parts import PARTS, Wanted, choose_parts, collect_runs
from raytraced.reproduce.plan import EQUAL_LR, FULL, QUICK, Planner, Scale
from raytraced.reproduce.records import Results, collect
from raytraced.reproduce.runner import Stopped, run_all
from raytraced.reproduce.search import every_search, find_rates


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
        only: Parts, such as table1,fig5, or sets of parts: default, claims, frontier, union, all.
        data: Only these data sets, such as mnist,cifar10.
        output: Folder of the results; runs are trained in its sub-folder runs.
        data_root: Where data sets are kept.
        workers: Processes that train side by side, one core each (default: as many as there are cores).
        redraw: Train nothing: draw from the records in OUTPUT/raw.
        dry_run: Only tell what would be trained, and how long it may take.
    """
    scale = QUICK if quick else FULL
    parts = choose_parts(split(only) or (["all"] if quick else ["default"]))
    if quick and "ship" in parts:
        raise ValueError("only=ship: quick runs are not worth shipping; leave --quick out")
    wanted = check_data(split(data))
    folder = Path(output) / "quick" if quick else Path(output)
    workers = num_cores() if workers is None else workers
    if workers < 1:
        raise ValueError(f"workers={workers}: must be at least 1")
    if dry_run:
        return tell_plan(parts, scale, wanted, folder, workers)
    try:
        failures = {} if redraw else train_all(parts, scale, wanted, folder, data_root, workers)
    except Stopped as stop:
        print("stopped; everything is saved. The same command goes on from here.")
        return stop.exit_code
    write_results(parts, scale, wanted, folder, data_root)
    for key, problem in failures.items():
        print(f"failed: {key}: {problem}")
    print(folder / "report.html")
    return 1 if failures else 0


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def split(words: str | None) -> list[str]:
    """Words separated by commas."""
    return [word.strip() for word in (words or "").split(",") if word.strip()]


def check_data(names: list[str]) -> Wanted:
    """Refuse a data set that there is none of."""
    for name in names:
        if name not in NAMES:
            close = difflib.get_close_matches(name, NAMES, n=1)
            hint = f"did you mean {close[0]}?" if close else f"must be one of {', '.join(NAMES)}"
            raise ValueError(f"data={name}: no such data set; {hint}")
    return tuple(dict.fromkeys(names)) or None


def train_all(
    parts: list[str], scale: Scale, wanted: Wanted, folder: Path, data_root: str | None, workers: int
) -> dict[str, str]:
    """Train what is missing: first the learning-rate searches, then the runs that need what they find."""
    failures: dict[str, str] = {}
    raw = folder / "raw"
    rates = find_rates(scale, raw)
    while True:
        runs = collect_runs(parts, Planner(scale, rates), wanted)
        if not runs:
            raise ValueError(f"nothing to run: {', '.join(parts)} has no run on {', '.join(wanted or ())}")
        fetch(sorted({run.data for run in runs}), data_root)
        failures |= run_all(runs, folder / "runs", raw, workers, data_root)
        found = find_rates(scale, raw)
        if found == rates:
            # a search's run that diverged has been taken into account: a finding, not a failure; one without a record has not
            records = collect(raw, [*every_search(scale), *runs]).all
            findings = {record.key for record in records if record.group == "search"}
            return {key: problem for key, problem in failures.items() if key not in findings}
        rates = found


def fetch(data_names: list[str], data_root: str | None) -> None:
    """Have every data set in the cache before anyone trains: two workers need not fetch the same, nor fail one by one."""
    from raytraced.data.cache import cache_root
    from raytraced.data.sources import obtain

    needed = {part for name in data_names for part in (PUBLIC_SETS if name == "union" else [name])}
    for name in sorted(needed & set(PUBLIC_SETS)):
        obtain(PUBLIC_SETS[name], cache_root(data_root))


def known_results(scale: Scale, folder: Path) -> Results:
    """Everything that was ever run at this scale, not only what this command asked for."""
    planner = Planner(scale, find_rates(scale, folder / "raw"))
    everywhere = tuple(scale.epochs)
    runs = every_search(scale) + collect_runs(PARTS, planner, None) + collect_runs(PARTS, planner, everywhere)
    return collect(folder / "raw", {run.key: run for run in runs}.values())


def write_results(parts: list[str], scale: Scale, wanted: Wanted, folder: Path, data_root: str | None) -> None:
    """Draw the parts that were asked for, and write summary, tables and report from all there is."""
    results = known_results(scale, folder)
    if not results.whole:
        raise ValueError(f"{folder / 'raw'}: holds no record of a run; leave --redraw out to train")
    from raytraced.reproduce.drawing import save_figures
    from raytraced.reproduce.report import write_report

    save_figures(parts, results, list(wanted or scale.data), folder / "figures", data_root, scale.name == "quick")
    write_report(results, scale, folder)
    if "ship" in parts:
        from raytraced.reproduce.ship import ship_all

        ship_all(results, folder / "runs")


def tell_plan(parts: list[str], scale: Scale, wanted: Wanted, folder: Path, workers: int) -> int:
    """Print the runs of each part, and a guess at the time."""
    # any rate will do to count the runs that wait for a search
    whole = Planner(replace(scale, fixed_lr=scale.fixed_lr or EQUAL_LR), {})
    planned = Planner(scale, find_rates(scale, folder / "raw"))
    rows = {part: (PARTS[part].runs(whole, wanted), PARTS[part].title) for part in parts}
    told = {run.key for runs, _ in rows.values() for run in runs}
    first = [run for run in collect_runs(parts, planned, wanted) if run.group == "search" and run.key not in told]
    if first:
        rows = {"search": (first, "Learning rates that must be searched for first")} | rows
    rows["together"] = list({run.key: run for runs, _ in rows.values() for run in runs}.values()), "each run once"
    for name, (runs, title) in rows.items():
        hours = sum(run.expected_seconds for run in runs) / workers / 3600
        print(f"{name:<12} {len(runs):>4} runs  {hours:>5.1f} h  {title}")
    return 0
