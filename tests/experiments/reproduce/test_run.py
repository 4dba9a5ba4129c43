"""Real workers on digits: two at a time, killed in the middle, interrupted, resumed."""

import os
import signal
from concurrent.futures import Future
from dataclasses import replace

import pytest

import tiny_runs as tiny
from experiments.reproduce import run as running
from experiments.reproduce.executors import JobExecutor
from experiments.reproduce.records import Store, write_line
from forked import Forked
from raytraced.training import loop
from raytraced.training.claims import claim
from raytraced.training.evaluation import Diverged
from raytraced.training.run_folder import RunFolder
from tiny_runs import SECONDS, epochs_done, outcome, start, wait_for


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
    assert {name: len(values) for name, values in mre.history.items()} == dict.fromkeys(of_images, tiny.NUM_EPOCHS)
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
    monkeypatch.setattr(running, "make_executor", lambda *_: pytest.fail("a worker was started"))
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
        assert sum(epochs_done(tmp_path)) < tiny.NUM_EPOCHS  # the worker did not outlive its runner for long
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


def test_a_run_that_another_process_trains_is_left_to_it(tmp_path, monkeypatch):
    run = tiny.RUNS[0]
    monkeypatch.setattr(running, "perform", lambda *_: pytest.fail("trained by two"))
    with claim(tmp_path, run.folder):
        outcome = running.perform_in_worker(run, tmp_path, None)
    assert outcome.state == "claimed"
    assert f"is being trained by process {os.getpid()} on" in outcome.problem


def test_a_run_that_diverges_leaves_a_record_that_says_so(tmp_path, monkeypatch):
    def diverge(*_, **__):
        raise Diverged("step 3 (epoch 1): loss nan; a smaller --lr usually helps")

    monkeypatch.setattr(loop, "train", diverge)
    run = replace(tiny.RUNS[0], label="mre-lr-1", setting=1.0)
    (tmp_path / run.folder).mkdir()
    running.perform(run, tmp_path, None)
    record = running.publish(run, tmp_path, Store(tmp_path / "records"))
    assert (record.error, record.setting, record.digest) == ("step 3 (epoch 1): loss nan", 1.0, run.digest)


def test_two_runners_share_a_folder_and_train_every_run_once(undisturbed, tmp_path):
    runners = [start(tmp_path, 1) for _ in range(2)]
    printed = [runner.communicate(timeout=SECONDS)[0] for runner in runners]
    assert [runner.returncode for runner in runners] == [0, 0], printed
    assert outcome(tmp_path) == outcome(undisturbed[0])
    folders = [path for path in (tmp_path / "work").iterdir() if not path.name.startswith(".")]
    assert sorted(path.name for path in folders) == sorted(
        run.folder for run in tiny.RUNS
    )  # no run has a second folder


def test_a_run_that_another_runner_gives_up_is_taken_back(tmp_path, monkeypatch, record):
    """A runner finds a run claimed; when the claim ends without a record, it trains the run itself."""
    run, asked = tiny.RUNS[0], []

    class Once(JobExecutor):
        def submit(self, function, *args):
            asked.append(args[0].key)
            future = Future()
            if len(asked) == 1:
                future.set_result(running.Outcome("claimed", "by another"))
            else:
                (tmp_path / "work" / run.folder).mkdir()
                made = record("digits", run.label, run.seed, config=run.config, family=run.family)
                (tmp_path / "work" / run.folder / "record.json").write_text(write_line(made))
                future.set_result(running.Outcome("done"))
            return future

        def shutdown(self, **_):
            pass

    monkeypatch.setattr(running, "make_executor", lambda *_: Once())
    monkeypatch.setattr(running, "POLL_SECONDS", 0.01)
    assert running.run_all([run], tmp_path / "work", tmp_path / "records", 1) == {}
    assert asked == [run.key] * 2


def test_two_stores_keep_the_records_of_each_other(tmp_path, record):
    one, other = Store(tmp_path), Store(tmp_path)
    one.put(record("digits", "mre", 0))
    other.put(record("digits", "mre", 1))
    assert Store(tmp_path).records.keys() == {"main-digits-mre-s0", "main-digits-mre-s1"}


def test_again_removes_what_other_code_has_trained_and_nothing_else(tmp_path):
    stale, fresh, held, unnamed = (
        replace(tiny.RUNS[0], label=label) for label in ("stale", "fresh", "held", "unnamed")
    )
    for run, code in ((stale, "older"), (fresh, running.code_digest()), (held, "older"), (unnamed, "older")):
        (tmp_path / run.folder).mkdir()
        (tmp_path / run.folder / "code.txt").write_text(code)
    with claim(tmp_path, held.folder):
        running.drop_stale([stale, fresh, held], tmp_path)
    assert [(tmp_path / run.folder).exists() for run in (stale, fresh, held, unnamed)] == [False, True, True, True]


def test_a_run_folder_names_the_code_that_trained_it(undisturbed):
    for run in tiny.RUNS:
        assert (undisturbed[0] / "work" / run.folder / "code.txt").read_text() == running.code_digest()


@pytest.mark.parametrize("stop_range", [None, [0.05, 20.0]])
def test_a_model_of_images_that_is_trained_for_all_budgets_is_measured_along_its_dial(tmp_path, stop_range):
    options = {} if stop_range is None else {"stop_range": stop_range, "weighting": "relative"}
    run = replace(tiny.RUNS[0], config=replace(tiny.RUNS[0].config, epochs=1, model_options=options))
    running.perform(run, tmp_path, None)
    record = running.publish(run, tmp_path, Store(tmp_path / "records"))
    assert not record.error
    if stop_range is None:
        assert not record.dial
        return
    assert [row["setting"] for row in record.dial] == list(running.DIALS["mre"][1])
    experts = [row["experts"] for row in record.dial]
    assert experts == sorted(experts)
    assert experts[0] < experts[-1]
    drawn = next(row for row in record.dial if row["setting"] == 1)  # as it is evaluated
    assert (drawn["accuracy"], drawn["experts"]) == pytest.approx((record.accuracy, record.experts), rel=1e-4)
    assert drawn["validation_accuracy"] == pytest.approx(record.validation["accuracy"], rel=1e-4)
    assert drawn["macs"] == pytest.approx(record.macs["total"], rel=1e-4)
