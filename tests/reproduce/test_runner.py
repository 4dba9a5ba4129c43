"""Real workers on digits: two at a time, killed in the middle, interrupted, resumed."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from raytraced.reproduce import runner
from raytraced.reproduce.records import read_record
from raytraced.reproduce.worker import decode, encode
from raytraced.training.run_folder import RunFolder

SCRIPT = Path(__file__).with_name("tiny.py")
SECONDS = 300  # for what takes a few: only a hang is longer


def load_tiny():
    spec = importlib.util.spec_from_file_location("tiny", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tiny = load_tiny()


def start(folder, num_workers):
    command = [sys.executable, str(SCRIPT), str(folder / "work"), str(folder / "raw"), str(num_workers)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(condition, process):
    """Look until a condition holds; the process must not end before."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def epochs_done(folder):
    return [len(RunFolder(folder / "work" / run.folder).read_metrics()) for run in tiny.RUNS]


def outcome(folder):
    """Everything in the records that does not depend on the clock."""
    records = [read_record(folder / "raw" / f"{run.key}.json") for run in tiny.RUNS]
    histories = [
        [{name: value for name, value in epoch.items() if name != "seconds"} for epoch in one.history]
        for one in records
    ]
    return [(one.test, one.validation, one.macs, one.budgets, one.class_load) for one in records], histories


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    process = start(folder, 2)
    told, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, told
    return folder, told


def test_all_runs_are_done_and_told_with_the_time_left(undisturbed):
    _, told = undisturbed
    assert "[1/2]" in told
    assert "left)" in told
    assert "[2/2]" in told
    assert "(all done)" in told


def test_a_record_tells_what_the_model_does_with_the_test_images(undisturbed):
    folder, _ = undisturbed
    mre, mlp = (read_record(folder / "raw" / f"{run.key}.json") for run in tiny.RUNS)
    assert len(mre.history) == 20
    assert mre.accuracy > 0.5
    assert mre.macs["total"] == pytest.approx(
        sum(mre.macs[name] for name in ("input", "routing", "experts", "head")), rel=1e-5
    )
    assert mre.macs["experts"] == pytest.approx(768 * mre.experts, rel=1e-5)
    assert mre.budgets[-1]["accuracy"] == mre.accuracy
    assert sum(part["num"] for part in mre.lengths.values()) == mre.test["num_samples"]
    assert not mlp.budgets
    assert mlp.macs["routing"] == 0


def test_a_second_call_trains_nothing(undisturbed, monkeypatch):
    folder, _ = undisturbed
    monkeypatch.setattr(runner, "start_worker", lambda place: pytest.fail("a worker was started"))
    (folder / "raw" / f"{tiny.RUNS[0].key}.json").unlink()  # comes back from the run folder
    assert runner.run_all(tiny.RUNS, folder / "work", folder / "raw", 2) == {}
    assert read_record(folder / "raw" / f"{tiny.RUNS[0].key}.json") is not None


def test_killed_and_interrupted_it_goes_on_and_ends_as_if_nothing_had_happened(undisturbed, tmp_path):
    for number, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 128 + signal.SIGINT)):
        process = start(tmp_path, 1)
        before = sum(epochs_done(tmp_path))
        wait_for(lambda before=before: sum(epochs_done(tmp_path)) > before, process)
        os.kill(process.pid, number)
        process.communicate(timeout=SECONDS)
        assert process.returncode == code
        assert sum(epochs_done(tmp_path)) < 40
    process = start(tmp_path, 1)
    told, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, told
    assert outcome(tmp_path) == outcome(undisturbed[0])


def test_a_run_survives_the_way_to_a_worker():
    for run in tiny.RUNS:
        assert decode(encode(run)) == run
        json.loads(encode(run))


def test_two_runners_do_not_share_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "LOCK_SECONDS", 0)
    with (
        runner.locked(tmp_path),
        pytest.raises(ValueError, match="another `raytraced reproduce` is at work here"),
        runner.locked(tmp_path),
    ):
        pass
    with runner.locked(tmp_path):  # free again
        pass
