"""Real workers on digits: two at a time, killed in the middle, interrupted, resumed."""

import os
import signal
import time
from dataclasses import replace

import pytest

import tiny_runs as tiny
from experiments.reproduce import run as running
from experiments.reproduce.records import Record, Store
from forked import Forked
from raytraced.training import loop
from raytraced.training.evaluation import Diverged
from raytraced.training.run_folder import RunFolder

SECONDS = 300  # for what takes a few: only a hang is longer


def start(folder, num_workers):
    return Forked(tiny.main, folder / "work", folder / "records", num_workers)


def wait_for(condition, process):
    """Wait until a condition holds; the process must not end before."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def epochs_done(folder):
    return [len(RunFolder(folder / "work" / run.folder).read_metrics()) for run in tiny.RUNS]


def outcome(folder):
    """Everything in the records that does not depend on the clock."""
    store = Store(folder / "records")
    records = [store.find(run) for run in tiny.RUNS]
    histories = [{name: one.history[name] for name in one.history if name != "seconds"} for one in records]
    return [(one.test, one.validation, one.budgets, one.best_epoch) for one in records], histories


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    process = start(folder, 2)
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, output
    return folder, output


def test_every_finished_run_is_reported_with_the_time_left(undisturbed):
    _, output = undisturbed
    assert "[1/2]" in output
    assert "left)" in output
    assert "[2/2]" in output
    assert "(all done)" in output


def test_a_record_holds_accuracy_and_cost_on_the_test_images(undisturbed):
    store = Store(undisturbed[0] / "records")
    mre, mlp = (store.find(run) for run in tiny.RUNS)
    of_images = [name for name in running.HISTORY if "bits_per_byte" not in name]
    assert {name: len(values) for name, values in mre.history.items()} == dict.fromkeys(of_images, 20)
    assert mre.accuracy > 0.5
    parts = sum(mre.macs[name] for name in ("input", "routing", "experts", "head"))
    assert mre.macs["total"] == pytest.approx(parts, rel=1e-5)
    assert mre.macs["experts"] == pytest.approx(768 * mre.experts, rel=1e-5)
    assert mre.budgets[-1]["accuracy"] == mre.accuracy
    assert mre.budgets[-1]["validation_accuracy"] == mre.validation["accuracy"]
    assert set(mre.budgets[0]) == {
        "validation_accuracy",
        "validation_macs",
        "accuracy",
        "experts",
        "macs",
        "expert_macs",
    }
    assert sum(part["num"] for part in mre.test["lengths"].values()) == mre.test["num_samples"]
    assert not mlp.budgets
    assert mlp.macs["routing"] == 0


def test_the_record_is_made_of_the_runs_own_summary_alone(undisturbed):
    run, folder = tiny.RUNS[0], RunFolder(undisturbed[0] / "work" / tiny.RUNS[0].folder)
    (folder.path / "model.safetensors").unlink()
    record = running.make_record(run, folder)
    summary = folder.read_summary()
    assert record.test == {name: value for name, value in summary["test"].items() if name != "budgets"}
    assert record.validation.items() <= summary["validation"].items()


def test_a_second_call_trains_nothing(undisturbed, monkeypatch):
    folder, _ = undisturbed
    monkeypatch.setattr(running, "start_worker", lambda: pytest.fail("a worker was started"))
    (folder / "records" / "digits.jsonl").unlink()  # comes back from the run folders
    assert running.run_all(tiny.RUNS, folder / "work", folder / "records", 2) == {}
    assert all(Store(folder / "records").find(run) for run in tiny.RUNS)


def test_killed_and_interrupted_runs_are_resumed_and_end_as_if_nothing_had_happened(undisturbed, tmp_path):
    for number, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 128 + signal.SIGINT)):
        process = start(tmp_path, 1)
        before = sum(epochs_done(tmp_path))
        wait_for(lambda before=before: sum(epochs_done(tmp_path)) > before, process)
        os.kill(process.pid, number)
        process.communicate(timeout=SECONDS)
        assert process.returncode == code
        assert sum(epochs_done(tmp_path)) < 20  # the worker did not outlive its runner for long
    process = start(tmp_path, 1)
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, output
    assert outcome(tmp_path) == outcome(undisturbed[0])


def test_after_a_signal_the_runner_waits_for_a_run_that_cannot_be_stopped_and_starts_no_other(tmp_path):
    process = Forked(tiny.main, tmp_path / "work", tmp_path / "records", 1, tiny.ignore_signals)
    wait_for(lambda: (tmp_path / "work" / "started").exists(), process)
    (tmp_path / "work" / "started").unlink()
    process.send_signal(signal.SIGINT)
    (tmp_path / "work" / "may-end").touch()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT, output
    assert "The same command continues from here." in output
    assert not (tmp_path / "work" / "started").exists()


def test_a_run_whose_worker_is_killed_is_tried_again_and_ends_as_if_nothing_had_happened(undisturbed, tmp_path):
    process = start(tmp_path, 1)
    wait_for(lambda: sum(epochs_done(tmp_path)) > 0, process)
    os.kill(RunFolder(tmp_path / "work" / tiny.RUNS[0].folder).writer(), signal.SIGKILL)
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, output
    assert outcome(tmp_path) == outcome(undisturbed[0])


def test_a_run_whose_worker_always_dies_is_reported_and_no_other_run_is_lost(tmp_path):
    process = Forked(tiny.main, tmp_path / "work", tmp_path / "records", 2, tiny.crash)
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 1, output
    assert "failed: its worker process was killed or crashed 2 times" in output
    assert (tmp_path / "work" / "tries").read_text() == "x" * running.MOST_TRIES
    assert [Store(tmp_path / "records").find(run) is None for run in tiny.RUNS] == [True, False]


def test_a_worker_of_a_killed_runner_may_finish_saving_its_run_before_the_run_is_resumed(tmp_path, monkeypatch):
    """The lock of a run is free when its training begins, though another process held it at first."""
    run, writers = tiny.RUNS[0], [4321, 4321, None]
    monkeypatch.setattr(running.RunFolder, "writer", lambda folder: writers.pop(0))
    monkeypatch.setattr(loop, "train", lambda *_, **__: pytest.fail("trained too early") if writers else None)
    monkeypatch.setattr(running, "make_record", lambda run, folder: Record(**vars(run), test={}))
    (tmp_path / run.folder).mkdir()
    running.perform(run, tmp_path, None)
    assert writers == []


def test_a_run_that_diverges_leaves_a_record_that_says_so(tmp_path, monkeypatch):
    def diverge(*_, **__):
        raise Diverged("step 3 (epoch 1): loss nan; a smaller --lr usually helps")

    monkeypatch.setattr(loop, "train", diverge)
    run = replace(tiny.RUNS[0], label="mre-lr-1", setting=1.0)
    (tmp_path / run.folder).mkdir()
    running.perform(run, tmp_path, None)
    record = running.publish(run, tmp_path, Store(tmp_path / "records"))
    assert (record.error, record.setting, record.digest) == ("step 3 (epoch 1): loss nan", 1.0, run.digest)


def test_two_runners_do_not_share_a_folder(tmp_path):
    path = tmp_path / ".runner"
    with (
        running.only_runner(path),
        pytest.raises(ValueError, match=r"another `python -m experiments\.reproduce` trains here"),
        running.only_runner(path),
    ):
        pass
    with running.only_runner(path):  # free again
        pass
