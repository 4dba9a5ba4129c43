import json
import signal
import subprocess
import sys

import pytest

from raytraced.benchmark import bars, commands, results, timing
from raytraced.benchmark.outcome import Check, Outcome
from raytraced.benchmark.results import ResultsFile, code_hash, git_commit

MACHINE, STAMP = {"processor": "p"}, {"code": "1", "settings": [1], "commit": "c"}


def outcome(value=2.0):
    return Outcome([Check("x", value, 1.0, "at most")], samples={"x": [value]})


@pytest.mark.parametrize(
    ("rule", "value", "holds"),
    [
        ("at most", 1.0, True), ("at most", 1.01, False), ("at least", 1.0, True), ("at least", 0.99, False),
        ("below", 1.0, False), ("below", 0.99, True), ("below", None, False), ("at most", None, False),
    ],
)  # fmt: skip
def test_a_check_holds_by_its_rule_and_never_unmeasured(rule, value, holds):
    assert Check("x", value, 1.0, rule).holds is holds


def test_the_worst_check_gives_the_value_and_all_must_hold():
    checks = [
        Check("half", 0.5, 1.0, "at most"),
        Check("over", 3.0, 2.0, "at most"),
        Check("fast", 30.0, 25, "at least"),
    ]
    bar = Outcome(checks).as_dict()
    assert (bar["value"], bar["bar"], bar["holds"], bar["detail"]["worst"]) == (3.0, 2.0, False, "over")
    assert Outcome([checks[0], checks[2]]).as_dict()["value"] == 30.0  # 25/30 is nearer to its limit than 1/2
    assert Outcome([checks[0], checks[2]]).holds
    assert Outcome([checks[2], Check("faster", 90.0, 25, "at least")]).worst.what == "fast"


def test_a_condition_that_fails_fails_the_bar():
    assert not Outcome([Check("x", 0.5, 1.0, "at most")], conditions={"equal": False}).as_dict()["holds"]


def test_an_unmeasured_check_is_the_worst():
    bar = Outcome(
        [Check("over", 30.0, 2.0, "at most"), Check("lost", None, 1.0, "below", note="no such module")]
    ).as_dict()
    assert bar["value"] is None
    assert not bar["holds"]
    assert bar["detail"]["checks"][1]["note"] == "no such module"


def test_a_finished_bar_is_on_disk_at_once_and_not_measured_again(tmp_path):
    path = tmp_path / "results.json"
    ResultsFile(path, MACHINE, STAMP).add("b", outcome(), 1.0)
    again = ResultsFile(path, MACHINE, STAMP)
    assert again.is_done("b")
    assert not again.is_done("a")
    again.add("a", outcome(3.0), 1.0)
    saved = json.loads(path.read_text())
    assert {letter: bar["value"] for letter, bar in saved["bars"].items()} == {"a": 3.0, "b": 2.0}
    assert list(saved["bars"]) == ["a", "b"]
    assert saved["samples"] == {"a": {"x": [3.0]}, "b": {"x": [2.0]}}


@pytest.mark.parametrize(
    ("stamp", "done"), [({"code": "2"}, False), ({"settings": [2]}, False), ({"commit": "d"}, True)]
)
def test_other_code_or_settings_are_measured_again_but_a_mere_commit_is_not(tmp_path, stamp, done):
    path = tmp_path / "results.json"
    ResultsFile(path, MACHINE, STAMP).add("a", outcome(), 1.0)
    assert ResultsFile(path, MACHINE, STAMP | stamp).is_done("a") is done


def test_another_machine_or_fresh_begins_anew(tmp_path):
    path = tmp_path / "results.json"
    ResultsFile(path, MACHINE, STAMP).add("a", outcome(), 1.0)
    assert not ResultsFile(path, {"processor": "q"}, STAMP).is_done("a")
    assert not ResultsFile(path, MACHINE, STAMP, fresh=True).is_done("a")


def test_a_file_that_is_not_json_is_refused_with_a_remedy(tmp_path):
    path = tmp_path / "results.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=r"results.json: not JSON .* --fresh"):
        ResultsFile(path, MACHINE, STAMP)


def test_code_hash_changes_with_a_byte_of_code_and_with_nothing_else(tmp_path):
    (tmp_path / "a.py").write_text("x = 1")
    before = code_hash(tmp_path)
    (tmp_path / "notes.txt").write_text("no code")
    assert code_hash(tmp_path) == before
    (tmp_path / "kernel.cpp").write_text("")
    assert code_hash(tmp_path) != before


def test_outside_of_a_clone_there_is_no_commit(tmp_path):
    assert git_commit(tmp_path) is None


SCRIPT = """
import os, pathlib, signal, sys
from raytraced.benchmark import bars, commands, results, timing
from raytraced.benchmark.outcome import Check, Outcome

def measure(letter):
    def run(bench):
        print("measured", letter, flush=True)
        if letter == "c":
            os.kill(os.getpid(), signal.SIGKILL)
        return Outcome([Check("x", 1.0, 1.0, "at most")])
    return run

results.code_hash = lambda package: "1"
bars.BARS = {letter: bars.Bar(letter, measure(letter)) for letter in "abcd"}
commands.run(list("abcd"), pathlib.Path(sys.argv[1]), timing.QUICK, False)
"""


@pytest.fixture
def measured(monkeypatch):
    """Bars a to d that only note that they were asked for, and a letter at which Ctrl-C is pressed."""
    calls = []

    def measure(letter):
        def run(bench):
            calls.append(letter)
            if letter == stop[0]:
                raise KeyboardInterrupt
            return outcome()

        return run

    stop = [""]
    monkeypatch.setattr(results, "code_hash", lambda package: "1")
    monkeypatch.setattr(bars, "BARS", {letter: bars.Bar(letter, measure(letter)) for letter in "abcd"})
    return calls, stop


def test_a_killed_run_goes_on_where_it_was(tmp_path, measured, capsys):
    killed = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert [line for line in killed.stdout.splitlines() if line.startswith("measured")][-1] == "measured c"
    calls, _ = measured
    assert commands.run(list("abcd"), tmp_path, timing.QUICK, fresh=False) == 0
    assert calls == ["c", "d"]
    assert "2 of 4 measured before" in capsys.readouterr().out
    assert sorted(json.loads((tmp_path / "results.json").read_text())["bars"]) == ["a", "b", "c", "d"]
    assert not list(tmp_path.glob(".*.tmp"))


def test_an_interrupted_run_says_how_to_go_on_and_keeps_what_is_finished(tmp_path, measured, capsys):
    calls, stop = measured
    stop[0] = "b"
    with pytest.raises(KeyboardInterrupt):
        commands.run(list("abcd"), tmp_path, timing.QUICK, fresh=False)
    assert "the same command goes on" in capsys.readouterr().out
    stop[0] = ""
    assert commands.run(list("abcd"), tmp_path, timing.QUICK, fresh=False) == 0
    assert calls == ["a", "b", "b", "c", "d"]


def test_fresh_measures_everything_again(tmp_path, measured):
    calls, _ = measured
    for _ in range(2):
        commands.run(["a"], tmp_path, timing.QUICK, fresh=True)
    assert calls == ["a", "a"]
