"""The command: mistakes, the plan, and redrawing from records."""

import subprocess
import sys

import pytest

from experiments.reproduce import run as running
from experiments.reproduce.command import Place, find_plan, reproduce, train_all
from experiments.reproduce.plan import FULL, QUICK, Planner, collect_runs, every_run
from experiments.reproduce.records import Store
from raytraced.cli.main import run_command


def main(*words):
    return run_command(reproduce, list(words), "experiments.reproduce")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--only", "figg5"], "only=figg5: no such part; did you mean fig5?"),
        (["--data", "mnits"], "data=mnits: no such data set; did you mean mnist?"),
        (["--quick", "--only", "ship"], "only=ship: quick runs are not worth shipping; leave --quick out"),
        (["--workers", "0"], "workers=0: must be at least 1"),
        (["--again", "mre", "--missing"], "again=mre: has records, which --missing leaves out; give one of both"),
        (["--again", "mree"], "again=mree: no such model; did you mean mre?"),
        (["--only", "union", "--data", "digits"], "nothing to run: union has no run on digits"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(words, line, tmp_path, capsys):
    assert main("--output", str(tmp_path), *words) == 2
    assert capsys.readouterr().err == f"experiments.reproduce: {line}\n"


def test_without_records_there_is_nothing_to_redraw(tmp_path, capsys):
    assert main("--redraw", "--output", str(tmp_path)) == 2
    assert "holds no record of a run" in capsys.readouterr().err


def test_the_plan_is_printed_without_training(tmp_path, capsys):
    assert reproduce(dry_run=True, only="fig5", data="mnist", output=str(tmp_path)) == 0
    output = capsys.readouterr().out
    assert "search          5 runs" in output
    assert "fig5            2 runs" in output
    assert "together        7 runs" in output
    assert list(tmp_path.iterdir()) == []


def record_of(run, record, **figures):
    """A made-up record of a planned run."""
    return record(run.data, run.label, run.seed, group=run.group, config=run.config, family=run.family, setting=run.setting, **figures)  # fmt: skip


def test_redrawing_writes_everything_from_records_alone(tmp_path, record):
    store = Store(tmp_path / "quick" / "records")
    for run in collect_runs(["table1"], Planner(QUICK, {}), ("digits",)):
        store.put(record_of(run, record, curve=[0.5] * 9 + [0.9]))
    assert reproduce(quick=True, redraw=True, only="table1,fig6", output=str(tmp_path)) == 0
    found = {path.name for path in (tmp_path / "quick").rglob("[!.]*.*")}
    assert found == {"digits.jsonl", "summary.json", "tables.md", "table.md", "about.json", "report.html", "fig6.png"}


def test_a_record_of_another_configuration_is_not_taken_for_this_one(tmp_path, record):
    (run, *_) = collect_runs(["table1"], Planner(QUICK, {}), ("digits",))
    Store(tmp_path / "quick" / "records").put(record("digits", run.label, run.seed))
    with pytest.raises(ValueError, match="holds no record of a run"):
        reproduce(quick=True, redraw=True, output=str(tmp_path))


def test_rates_come_from_the_records_of_searches_with_this_very_recipe(tmp_path, record):
    store = Store(tmp_path / "records")
    runs = [
        run for run in every_run(Planner(FULL, {})) if (run.group, run.data, run.family) == ("search", "mnist", "top-k")
    ]
    for run in runs:
        store.put(record_of(run, record, validation=0.9 if run.setting == 2e-3 else 0.8))
    assert find_plan(FULL, tmp_path).rates == {"mnist": {"top-k": 2e-3}}
    (one,) = (run for run in runs if run.setting == 5e-4)
    store.put(record("mnist", one.label, one.seed, group="search", family="top-k", lr=one.config.lr))
    assert find_plan(FULL, tmp_path).rates == {}


def test_a_search_that_diverged_is_a_finding_and_one_that_left_no_record_a_failure(tmp_path, record, monkeypatch):
    def run_all(runs, work, records, *_):
        crashed, diverged, *whole = runs  # the five rates of MRE's search on digits, and the paper's recipe
        store = Store(records)
        for run in (diverged, *whole):
            best = run.setting == 5e-3  # not on the edge, where the search would continue
            store.put(
                record_of(run, record, error="not finite" if run is diverged else None, validation=0.8 + 0.1 * best)
            )
        return {crashed.key: "its process ended with code -9", diverged.key: "not finite"}

    monkeypatch.setattr(running, "run_all", run_all)
    failures = train_all(["fig5"], FULL, ("digits",), tmp_path, None, Place())
    assert failures == {"search-digits-mre-lr-0.0005-s100": "its process ended with code -9"}


def test_missing_trains_only_runs_without_a_record(tmp_path, record, capsys, monkeypatch):
    first, *rest = collect_runs(["table1"], Planner(QUICK, {}), ("digits",))
    folder = tmp_path / "quick"
    Store(folder / "records").put(record_of(first, record))
    asked = []
    monkeypatch.setattr(running, "run_all", lambda runs, *_: asked.append([run.key for run in runs]) or {})
    for missing in (False, True):
        train_all(["table1"], QUICK, ("digits",), folder, None, Place(missing=missing))
    assert asked == [[run.key for run in (first, *rest)], [run.key for run in rest]]
    options = ("--quick", "--dry-run", "--only", "table1", "--data", "digits", "--output", str(tmp_path))
    for words, num in (((), 1 + len(rest)), (("--missing",), len(rest))):
        assert main(*options, *words) == 0
        assert f"table1 {num:>10} runs" in capsys.readouterr().out


def test_the_command_is_described_and_workers_start_without_torch():
    slow = "{'torch', 'numpy', 'matplotlib'}"
    for module in ("command", "run"):
        code = f"import sys, experiments.reproduce.{module}; sys.exit(len({slow} & set(sys.modules)))"
        assert subprocess.run([sys.executable, "-c", code], timeout=100).returncode == 0, module
