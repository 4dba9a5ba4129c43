import json
import signal
import sys
import threading
import time

import pytest

import forked
from experiments import ROOT
from experiments.benchmark import command as benchmark
from experiments.benchmark import model_workloads, results, timing
from experiments.benchmark.results import Outcome, ResultsFile, code_hash, others_share, read_ticks

MACHINE, STAMP = {"processor": "p"}, {"code": "1", "settings": {"rounds": 1}}


def outcome(ratio=2.0):
    return Outcome([{"what": "x", "against": "y", "ratio": ratio, "quartiles": [1.9, 2.1]}])


def test_an_entry_has_its_figures_under_plain_names_with_code_time_and_load(tmp_path):
    file = ResultsFile(tmp_path / "results.json", MACHINE, STAMP)
    row = {"what": "x", "against": "y", "ratio": 1.23456789, "quartiles": (1.0, 1.5), "median_ms": 3.0, "threads": 1}
    file.add("sequence", Outcome([row], {"the same draws": True}), 2.5, 0.25)
    saved = json.loads((tmp_path / "results.json").read_text())
    assert saved["machine"] == MACHINE
    entry = saved["workloads"]["sequence"]
    assert entry["rows"] == [row | {"ratio": 1.2346, "quartiles": [1.0, 1.5]}]
    assert entry["conditions"] == {"the same draws": True}
    assert entry["others_share_of_cores"] == 0.25
    assert entry["measured"]["code"] == "1"
    assert entry["measured"]["seconds"] == 2.5


def test_a_finished_workload_is_on_disk_at_once_and_not_measured_again(tmp_path):
    path = tmp_path / "results.json"
    ResultsFile(path, MACHINE, STAMP).add("latency", outcome(), 1.0, None)
    again = ResultsFile(path, MACHINE, STAMP)
    assert again.is_done("latency")
    assert not again.is_done("step")
    again.add("step", outcome(3.0), 1.0, None)
    saved = json.loads(path.read_text())["workloads"]
    assert {name: entry["rows"][0]["ratio"] for name, entry in saved.items()} == {"step": 3.0, "latency": 2.0}
    assert list(saved) == ["step", "latency"]  # in the order of the table


@pytest.mark.parametrize("stamp", [{"code": "2"}, {"settings": {"rounds": 2}}])
def test_other_code_or_settings_are_measured_again_but_the_old_figures_stay_until_then(tmp_path, stamp):
    path = tmp_path / "results.json"
    ResultsFile(path, MACHINE, STAMP).add("step", outcome(), 1.0, None)
    again = ResultsFile(path, MACHINE, STAMP | stamp)
    assert not again.is_done("step")
    assert again.content["workloads"]["step"]["measured"]["code"] == "1"
    assert again.content["code"] == (STAMP | stamp)["code"]


def test_another_machine_or_fresh_begins_anew(tmp_path):
    path = tmp_path / "results.json"
    ResultsFile(path, MACHINE, STAMP).add("step", outcome(), 1.0, None)
    assert not ResultsFile(path, {"processor": "q"}, STAMP).is_done("step")
    assert not ResultsFile(path, MACHINE, STAMP, fresh=True).is_done("step")


def test_a_file_that_is_not_json_is_refused_with_a_remedy(tmp_path):
    path = tmp_path / "results.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=r"results.json: not JSON .* --fresh"):
        ResultsFile(path, MACHINE, STAMP)


def test_code_hash_changes_with_a_byte_of_code_that_is_measured_and_with_nothing_else(tmp_path):
    def write(path, text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    write("src/raytraced/a.py", "x = 1")
    before = code_hash(tmp_path)
    not_measured = ("src/raytraced/notes.txt", "src/raytraced/cli/a.py", "experiments/reproduce/a.py", "tests/a.py")
    for path in (*not_measured, "experiments/benchmark/report.py"):
        write(path, "not measured")
    assert code_hash(tmp_path) == before
    write("src/raytraced/kernels/kernel.cpp", "")
    with_kernel = code_hash(tmp_path)
    assert with_kernel != before
    write("experiments/benchmark/timing.py", "")
    assert code_hash(tmp_path) != with_kernel


def test_the_code_that_is_named_as_not_measured_exists():
    assert all((ROOT / place).exists() for place in (*results.MEASURED, *results.NOT_MEASURED))


def test_own_work_is_not_that_of_others(monkeypatch):
    """Ticks as the system would count them: 60 of 100 busy, of which 20 are this process's."""
    monkeypatch.setattr(results, "read_ticks", lambda: (160.0, 400.0, 70.0))
    assert others_share((100.0, 300.0, 50.0)) == pytest.approx(0.4)


def test_the_share_of_others_is_read_from_this_system():
    ticks, until = read_ticks(), time.process_time() + 0.1
    while time.process_time() < until:
        pass
    share = others_share(ticks)
    assert share is None or 0 <= share <= 1


@pytest.fixture
def measured(monkeypatch):
    """Workloads a to d that only note that they were asked for, and a name at which Ctrl-C is pressed."""
    calls, stop = [], [""]

    def measure(name):
        def run(bench):
            calls.append(name)
            if name == stop[0]:
                raise KeyboardInterrupt
            return outcome()

        return run

    monkeypatch.setattr(results, "code_hash", lambda root: "1")
    FAKE = dict.fromkeys("abcd", "a title")
    for module in ("results", "report"):
        monkeypatch.setattr(f"experiments.benchmark.{module}.WORKLOADS", FAKE)
    for name in FAKE:
        monkeypatch.setitem(model_workloads.MEASUREMENTS, name, measure(name))
    return calls, stop


SCRIPT = """
import os, pathlib, signal, sys
from experiments.benchmark import model_workloads, report, results, timing
from experiments.benchmark import command as benchmark

def measure(name):
    def run(bench):
        print("measured", name, flush=True)
        if name == "c":
            os.kill(os.getpid(), signal.SIGKILL)
        return results.Outcome([{"what": "x", "against": "y", "ratio": 2.0, "quartiles": [1.9, 2.1]}])
    return run

results.code_hash = lambda root: "1"
results.WORKLOADS = report.WORKLOADS = dict.fromkeys("abcd", "a title")
for name in "abcd":
    model_workloads.MEASUREMENTS[name] = measure(name)
benchmark.run(list("abcd"), pathlib.Path(sys.argv[1]), timing.SHORT, "digits", False)
"""


def test_a_killed_run_continues_where_it_was(tmp_path, measured, capsys):
    killed = forked.run(forked.program, SCRIPT, tmp_path)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert [line for line in killed.stdout.splitlines() if line.startswith("measured")][-1] == "measured c"
    calls, _ = measured
    benchmark.run(list("abcd"), tmp_path, timing.SHORT, "digits", fresh=False)
    assert calls == ["c", "d"]
    assert "2 of 4 measured before" in capsys.readouterr().out
    assert sorted(json.loads((tmp_path / "results.json").read_text())["workloads"]) == ["a", "b", "c", "d"]
    assert not list(tmp_path.glob(".*.tmp"))


def test_an_interrupted_run_says_how_to_continue_and_keeps_finished_workloads(tmp_path, measured, capsys):
    calls, stop = measured
    stop[0] = "b"
    with pytest.raises(KeyboardInterrupt):
        benchmark.run(list("abcd"), tmp_path, timing.SHORT, "digits", fresh=False)
    assert "the same command continues" in capsys.readouterr().out
    stop[0] = ""
    benchmark.run(list("abcd"), tmp_path, timing.SHORT, "digits", fresh=False)
    assert calls == ["a", "b", "b", "c", "d"]


def test_fresh_measures_everything_again(tmp_path, measured):
    calls, _ = measured
    for _ in range(2):
        benchmark.run(["a"], tmp_path, timing.SHORT, "digits", fresh=True)
    assert calls == ["a", "a"]


def test_the_live_bar_has_no_thread_that_redraws_while_times_are_taken(tmp_path, measured, monkeypatch, capsys):
    running = []
    measure = lambda bench: running.append(threading.active_count()) or outcome()  # noqa: E731
    monkeypatch.setitem(model_workloads.MEASUREMENTS, "a", measure)
    before = threading.active_count()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    benchmark.run(["a"], tmp_path, timing.SHORT, "digits", fresh=True)
    assert running == [before]
    assert "1/1" in capsys.readouterr().out  # there was a bar, and it got to its end
