"""`python -m experiments.reproduce`: train what is missing, then write tables, figures and a report. Needs no torch."""

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from experiments.reproduce import plan
from experiments.reproduce.plan import (
    FULL,
    OWN_FOLDERS,
    PARTS,
    QUICK,
    TEXT_PARTS,
    TEXT_QUICK,
    WIDE,
    Planner,
    Run,
    Scale,
    Selection,
    collect_runs,
)
from experiments.reproduce.records import Results, Store, read_searches
from raytraced.errors import did_you_mean, require


def reproduce(
    quick: bool = False,
    only: str | None = None,
    data: str | None = None,
    output: str = "results",
    data_root: str | None = None,
    workers: int | None = None,
    executor: str = "local",
    again: str | None = None,
    missing: bool = False,
    redraw: bool = False,
    dry_run: bool = False,
) -> int:
    """Run every model on every data set over seeds, and write tables, figures and a report.

    Args:
        quick: Run a small version of all experiments in a few minutes, into OUTPUT/quick.
        only: Parts, such as table1,fig5, or sets of parts: default, claims, frontier, union, all; or one of text, words, main
            and wide alone.
        data: Only these data sets, such as mnist,cifar10.
        output: Folder of the results; its sub-folder runs holds the run folders.
        data_root: Folder of the data sets (default: $RAYTRACED_HOME/data, else raytraced/data in the user's cache folder).
        workers: Number of runs that are trained at the same time, one core each (default: the number of cores of this
            machine; another executor gets all runs at once).
        executor: Where runs are trained: local, dask:ADDRESS, ray or slurm.
        again: Models whose runs are trained again if the code has changed since, such as mre,top-k; or all.
        missing: Train only runs that have no record in OUTPUT/records. Without it, a run counts as trained if its run folder is
            here, so that a fresh clone trains all of them again.
        redraw: Train nothing; draw from the records in OUTPUT/records.
        dry_run: Only print the number of runs and an estimate of the time.
    """
    parts = plan.choose_parts(words_of(only) or (["all"] if quick else ["default"]))
    for part in OWN_FOLDERS:
        if part in parts and len(parts) > 1:
            raise ValueError(f"only={only}: {part} has a folder of its own; give it alone")
    if quick and parts[0] in TEXT_PARTS and parts != ["text"]:
        raise ValueError(f"only={parts[0]}: a quick run of text is --only text; leave --quick out")
    if quick and parts == ["wide"]:
        raise ValueError("only=wide: a quick run of the union is --only union; leave --quick out")
    scale = choose_scale(parts, quick)
    if quick and "ship" in parts:
        raise ValueError("only=ship: quick runs are not worth shipping; leave --quick out")
    selected = tuple(dict.fromkeys(words_of(data))) or None
    for name in selected or ():
        require(name in scale.data, "data", name, f"no such data set; {did_you_mean(name, scale.data)}")
    folder = Path(output) / "quick" if quick else Path(output)
    folder = folder / OWN_FOLDERS[parts[0]] if parts[0] in OWN_FOLDERS else folder
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    require(workers is None or workers >= 1, "workers", workers, "must be at least 1")
    require(not (missing and again), "again", again, "has records, which --missing leaves out; give one of both")
    if dry_run:
        return print_plan(parts, scale, selected, folder, workers or cores, missing)
    where = Place(executor, workers or (cores if executor == "local" else None), tuple(words_of(again)), missing)
    failures = {} if redraw else train_all(parts, scale, selected, folder, data_root, where)
    page = write_results(parts, scale, selected, folder, data_root)
    for key, problem in failures.items():
        print(f"failed: {key}: {problem}")
    print(page)
    return 1 if failures else 0


def choose_scale(parts: list[str], quick: bool) -> Scale:
    """The size of the experiments that some parts belong to."""
    if parts == ["wide"]:
        return WIDE
    if parts[0] in TEXT_PARTS:
        return TEXT_QUICK if quick else TEXT_PARTS[parts[0]]
    return QUICK if quick else FULL


class Place(NamedTuple):
    """Where runs are trained, and which of them again.

    Args:
        executor: The name of an executor.
        workers: Number of runs that are trained at the same time; None leaves that to the executor.
        again: Labels of runs that are trained again if the code has changed.
        missing: Whether runs that have a record are left out, even if their run folders are not here.
    """

    executor: str = "local"
    workers: int | None = 1
    again: tuple[str, ...] = ()
    missing: bool = False


def words_of(words: str | None) -> list[str]:
    """Split at commas."""
    return [word.strip() for word in (words or "").split(",") if word.strip()]


def find_plan(scale: Scale, folder: Path) -> Planner:
    """A plan with the learning rates of the recorded searches; a search made with another recipe does not count."""
    results = Store(folder / "records").results(plan.every_run(Planner(scale, {})))
    return Planner(scale, *read_searches(results, scale))


def train_all(
    parts: list[str], scale: Scale, selected: Selection, folder: Path, data_root: str | None, place: Place
) -> dict[str, str]:
    """Train the missing runs: first the learning-rate searches, then the runs that need their results."""
    import matplotlib  # noqa: F401 (a missing one is reported before hours of training)

    from experiments.reproduce.run import run_all
    from experiments.reproduce.search import ask_searches, report_searches
    from raytraced.tasks.registry import find_task

    failures: dict[str, str] = {}
    planner = find_plan(scale, folder)
    check_labels(place.again, planner)
    records = folder / "records"

    def known() -> Results:
        return Store(records).results(plan.every_run(planner))

    while True:
        asked = ask_searches(planner, parts, selected, known(), folder)
        runs = collect_runs(parts, asked, selected)
        if not runs:
            raise ValueError(f"nothing to run: {', '.join(parts)} has no run on {', '.join(selected or ())}")
        for name in sorted({run.data for run in runs}):  # cached before training: two workers must not fetch the same
            find_task(name).load(name, data_root)
        wanted = without_records(runs, records) if place.missing else runs
        failures |= run_all(wanted, folder / "runs", records, place.workers, data_root, place.executor, place.again)
        report_searches(runs, known(), folder)
        found = find_plan(scale, folder)
        if found == planner:
            # A search's run that diverged is a result, not a failure.
            made = Store(records).records
            return {key: problem for key, problem in failures.items() if key not in made or made[key].group != "search"}
        planner = found


def without_records(runs: Iterable[Run], records: Path) -> list[Run]:
    """The runs that have no record in a folder."""
    store = Store(records)
    return [run for run in runs if store.find(run) is None]


def check_labels(names: tuple[str, ...], planner: Planner) -> None:
    """Refuse labels that no run has."""
    runs = plan.every_run(planner) if names else []
    labels, keys = {run.label for run in runs}, {run.key for run in runs}
    for name in names:
        require(name in {"all", *labels, *keys}, "again", name, f"no such model; {did_you_mean(name, sorted(labels))}")


def write_results(parts: list[str], scale: Scale, selected: Selection, folder: Path, data_root: str | None) -> Path:
    """Draw some parts, and write summary, tables and report from all records; return the page to open."""
    results = Store(folder / "records").results(plan.every_run(find_plan(scale, folder)))
    if not results.whole:
        raise ValueError(f"{folder / 'records'}: holds no record of a run; leave --redraw out to train")
    from experiments.reproduce.figures import save_figures
    from experiments.reproduce.report import write_report
    from experiments.reproduce.ship import ship_all
    from experiments.reproduce.text import write_text
    from experiments.reproduce.wide import write_wide

    quick, texts = scale.name == "quick", parts[0] in TEXT_PARTS
    names = results.data() if texts else list(selected or (name for name, info in scale.data.items() if info.paper))
    save_figures(parts, results, names, folder / "figures", data_root, quick)
    if texts:
        return write_text(results, folder, scale)
    if scale is WIDE:
        return write_wide(results, folder)
    write_report(results, scale, folder)
    if "ship" in parts:
        ship_all(results, folder / "runs", data_root=data_root)
    return folder / "report.html"


def print_plan(parts: list[str], scale: Scale, selected: Selection, folder: Path, workers: int, missing: bool) -> int:
    """Print the number of runs of each part, or of those without a record, and an estimate of the time."""
    whole = Planner(replace(scale, fixed_lr=1.0), {})  # any rate serves to count the runs that wait for a search
    planned = collect_runs(parts, find_plan(scale, folder), selected)
    rows = {part: plan.runs_of(part, whole, selected) for part in parts}
    known = set[str]()
    if missing:
        known = {run.key for run in planned} - {run.key for run in without_records(planned, folder / "records")}
        rows = {part: [run for run in runs if run.key not in known] for part, runs in rows.items()}
    counted = {run.key for runs in rows.values() for run in runs}
    first = [run for run in planned if run.group == "search" and run.key not in counted | known]
    rows = ({"search": first} if first else {}) | rows
    rows["together"] = list({run.key: run for runs in rows.values() for run in runs}.values())
    titles = PARTS | {"search": "Learning rates that must be searched for first", "together": "each run once"}
    for name, runs in rows.items():
        hours = sum(run.expected_seconds for run in runs) / workers / 3600
        print(f"{name:<12} {len(runs):>4} runs  {hours:>5.1f} h  {titles[name]}")
    return 0
