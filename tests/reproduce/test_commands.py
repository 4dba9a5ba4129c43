"""The command: mistakes, the plan, and redrawing from records."""

import subprocess
import sys

import pytest

from raytraced.cli import main
from raytraced.reproduce import commands
from raytraced.reproduce.commands import reproduce, train_all
from raytraced.reproduce.parts import collect_runs
from raytraced.reproduce.plan import FULL, QUICK, Planner
from raytraced.reproduce.records import write_record


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--only", "figg5"], "only=figg5: no such part; did you mean fig5?"),
        (["--data", "mnits"], "data=mnits: no such data set; did you mean mnist?"),
        (["--quick", "--only", "ship"], "only=ship: quick runs are not worth shipping; leave --quick out"),
        (["--workers", "0"], "workers=0: must be at least 1"),
        (["--only", "union", "--data", "digits"], "nothing to run: union has no run on digits"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(words, line, tmp_path, capsys):
    assert main(["reproduce", "--output", str(tmp_path), *words]) == 2
    assert capsys.readouterr().err == f"raytraced: {line}\n"


def test_without_records_there_is_nothing_to_redraw(tmp_path, capsys):
    assert main(["reproduce", "--redraw", "--output", str(tmp_path)]) == 2
    assert "holds no record of a run" in capsys.readouterr().err


def test_the_plan_can_be_told_without_training(tmp_path, capsys):
    assert reproduce(dry_run=True, only="fig5", data="mnist", output=str(tmp_path)) == 0
    told = capsys.readouterr().out
    assert "search          5 runs" in told
    assert "fig5            1 runs" in told
    assert "together        6 runs" in told
    assert list(tmp_path.iterdir()) == []


def test_redrawing_writes_everything_from_records_alone(tmp_path, record):
    runs = collect_runs(["table1"], Planner(QUICK, {}), ("digits",))
    for run in runs:
        one = record("digits", run.label, run.seed, digest=run.digest, curve=[0.5, 0.9])
        write_record(tmp_path / "quick" / "raw" / f"{run.key}.json", one)
    assert reproduce(quick=True, redraw=True, only="table1,fig6", output=str(tmp_path)) == 0
    found = {path.name for path in (tmp_path / "quick").rglob("*.*") if path.parent.name != "raw"}
    assert found == {"summary.json", "tables.md", "about.json", "report.html", "fig6.png"}


def test_a_record_of_another_configuration_is_not_taken_for_this_one(tmp_path, record):
    (run, *_) = collect_runs(["table1"], Planner(QUICK, {}), ("digits",))
    write_record(tmp_path / "quick" / "raw" / f"{run.key}.json", record("digits", run.label, run.seed, digest="other"))
    with pytest.raises(ValueError, match="holds no record of a run"):
        reproduce(quick=True, redraw=True, output=str(tmp_path))


def test_a_search_that_diverged_is_a_finding_and_one_that_left_no_record_a_failure(tmp_path, record, monkeypatch):
    def run_all(runs, work, raw, *_):
        crashed, diverged, *whole = runs  # the five rates of MRE's search on digits
        for run in (diverged, *whole):
            error = "not finite" if run is diverged else None
            figures = {"group": "search", "lr": run.config.lr, "digest": run.digest, "error": error}
            write_record(raw / f"{run.key}.json", record(run.data, run.label, run.seed, **figures))
        return {crashed.key: "its process ended with code -9", diverged.key: "not finite"}

    monkeypatch.setattr(commands, "run_all", run_all)
    failures = train_all(["fig5"], FULL, ("digits",), tmp_path, None, 1)
    assert failures == {"search-digits-mre-lr-0.0005-s100": "its process ended with code -9"}


def test_the_command_is_described_without_torch():
    code = "import sys, raytraced.reproduce.commands, raytraced.reproduce.worker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
