"""Sweeps: trials that follow from the seed, resumed and shared without a difference, pruned, and reported in a table."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

optuna = pytest.importorskip("optuna", reason="needs optuna: pip install '.[sweep]'")

from forked import Forked, command  # noqa: E402
from raytraced.cli.main import main  # noqa: E402
from raytraced.training import sweep as sweeping  # noqa: E402
from raytraced.training.callbacks import Reporter  # noqa: E402
from raytraced.training.config import read_config  # noqa: E402
from raytraced.training.interrupt import Interrupted  # noqa: E402
from raytraced.training.run_folder import RunFolder, list_runs  # noqa: E402
from raytraced.training.sweep import Pruning, open_study, run_sweep, sweep_rows, write_best  # noqa: E402
from raytraced.training.sweep_file import Range, Sweep  # noqa: E402
from training.runs import assert_same_run  # noqa: E402
from training.stripes import GRID  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")


@pytest.fixture
def plan(data_file):
    options = {"data": str(data_file), "epochs": 2, "batch_size": 32, "model_options": GRID, "device": "cpu"}
    ranges = (Range("lr", None, 1e-3, 1e-1, True), Range("optimizer", ("adam", "adamw")))
    return Sweep(ranges, options, trials=3, prune=False)


def run(plan, folder):
    return run_sweep(plan, folder, Reporter())


def params(study):
    return [one.params for one in study.get_trials()]


def test_a_sweep_in_two_parts_is_the_sweep_in_one(plan, tmp_path):
    plan = replace(plan, trials=2)
    whole = run(plan, tmp_path / "whole")
    run(replace(plan, trials=1), tmp_path / "parts")
    parts = run(plan, tmp_path / "parts")
    assert params(whole) == params(parts)
    assert [one.value for one in whole.get_trials()] == [one.value for one in parts.get_trials()]
    assert len({tuple(one.values()) for one in params(whole)}) == 2  # no draw is repeated
    other = run(replace(plan, seed=1, trials=1), tmp_path / "other")
    assert params(other)[0] != params(whole)[0]
    assert RunFolder(tmp_path / "other/runs/trial-0000").config.seed == 1


def test_the_value_of_a_trial_is_its_best_validation_figure_and_the_best_options_can_be_trained(plan, tmp_path):
    study = run(plan, tmp_path)
    for number, one in enumerate(study.get_trials()):
        folder = RunFolder(tmp_path / "runs" / f"trial-{number:04d}")
        figures = [epoch["validation_accuracy"] for epoch in folder.read_metrics()]
        assert one.value == max(figures)
        assert list(one.intermediate_values.values()) == figures
        assert folder.config.lr == one.params["lr"]
    rows = sweep_rows(study, plan, "accuracy")
    assert [row["accuracy"] for row in rows] == sorted((one.value for one in study.get_trials()), reverse=True)
    assert write_best(study, plan, tmp_path / "best.yaml") == study.best_params
    best = read_config(tmp_path / "best.yaml")
    assert (best.lr, best.optimizer, best.name) == (*study.best_params.values(), None)


def test_an_interrupted_trial_is_continued_and_ends_as_if_nothing_had_happened(plan, tmp_path, monkeypatch):
    whole = run(plan, tmp_path / "whole")
    with monkeypatch.context() as patch:
        report = Pruning.report

        def stop(self, history):
            report(self, history)
            if self.trial.number == 1 and len(history) == 1:
                raise Interrupted(signal.SIGINT, 1, tmp_path)

        patch.setattr(Pruning, "report", stop)
        with pytest.raises(Interrupted):
            run(plan, tmp_path / "cut")
    study = run(plan, tmp_path / "cut")
    assert params(study) == params(whole)
    assert [one.state.name for one in study.get_trials()] == ["COMPLETE"] * 3
    for name in ("trial-0000", "trial-0001", "trial-0002"):
        assert_same_run(RunFolder(tmp_path / "cut/runs" / name), RunFolder(tmp_path / "whole/runs" / name))


def test_a_trial_that_another_process_trains_is_left_to_it(plan, tmp_path):
    from raytraced.training.claims import claim

    study = open_study(plan, tmp_path)
    study.ask()  # trial 0, of a process that lives
    with claim(tmp_path, "trial-0000"):
        run(plan, tmp_path)
    states = [one.state.name for one in study.get_trials()]
    assert states == ["RUNNING", "COMPLETE", "COMPLETE"]


def test_a_trial_that_falls_behind_is_pruned_and_one_that_diverges_is_a_failure(plan, tmp_path, monkeypatch):
    monkeypatch.setattr(sweeping, "NUM_STARTUP", 1)
    plan = replace(plan, prune=True, ranges=(Range("lr", (0.02, 1e-9, 1e30)),))
    study = open_study(plan, tmp_path)
    for lr in (0.02, 1e-9, 1e30):
        study.enqueue_trial({"lr": lr})
    run(plan, tmp_path)
    assert [one.state.name for one in study.get_trials()] == ["COMPLETE", "PRUNED", "FAIL"]
    assert len(RunFolder(tmp_path / "runs/trial-0001").read_metrics()) == 1
    rows = sweep_rows(study, plan, "accuracy")
    assert [row["state"] for row in rows] == ["complete", "pruned", "fail"]


def test_a_grid_has_every_combination_once(plan, tmp_path):
    plan = replace(
        plan,
        sampler="grid",
        trials=100,
        options={**plan.options, "epochs": 1},
        ranges=(Range("lr", (0.01, 0.02)), Range("warmup", None, 0.0, 1.0, False, 0.5)),
    )
    study = run(plan, tmp_path)
    found = [tuple(one.values()) for one in params(study)]
    assert found == [(lr, warmup) for lr in (0.01, 0.02) for warmup in (0.0, 0.5, 1.0)]


def test_a_folder_with_another_sweep_is_refused(plan, tmp_path):
    open_study(plan, tmp_path)
    open_study(replace(plan, trials=9), tmp_path)  # more trials of the same sweep
    with pytest.raises(
        ValueError, match="holds a sweep with other options and seed; give another folder with --output"
    ):
        open_study(replace(plan, seed=1, options={**plan.options, "epochs": 3}), tmp_path)


@pytest.fixture
def words(data_file, tmp_path, monkeypatch):
    """The words of a command in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(
        f"trials: 2\nprune: false\noptions: {{data: {data_file}, epochs: 2, batch_size: 32, device: cpu, model_options: {GRID}}}\n"
        "ranges:\n  lr: {from: 1e-3, to: 1e-1, log: true}\n  optimizer: [adam, adamw]\n"
    )
    return ["sweep", "mine.yaml"]


def test_the_command_prints_a_table_and_draws_a_picture(words, capsys):
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("[1/2] lr=")
    assert lines[-2:] == ["train with the best values: raytraced train -c sweeps/mine/best.yaml", "sweeps/mine"]
    assert Path("sweeps/mine/sweep.png").stat().st_size > 5000
    assert len(list_runs("sweeps/mine/runs")) == 2
    assert main([*words, "--json", "--trials", "2"]) == 0  # nothing is left to train
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (["--trials", "0"], "trials=0: must be at least 1"),
        (["no.yaml"], "sweep: "),
    ],
)
def test_a_mistake_of_the_command_is_one_line(words, capsys, more, line):
    assert main([*words, *more]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"raytraced: {line}")
    assert len(error.splitlines()) == 1
    assert not Path("sweeps").exists()


def test_a_file_that_is_not_there_and_a_missing_package_are_one_line(words, capsys, monkeypatch):
    assert main(["sweep", "no.yaml"]) == 2
    assert capsys.readouterr().err == "raytraced: no.yaml: No such file or directory\n"
    monkeypatch.setattr("raytraced.cli.sweep.find_spec", lambda _: None)
    assert main(words) == 2
    expected = (
        "sweep: the package optuna is not installed; install it with pip install '.[sweep]' in a clone of raytraced"
    )
    assert capsys.readouterr().err == f"raytraced: {expected}\n"


@pytest.mark.slow
def test_two_processes_share_a_sweep_one_is_killed_and_ctrl_c_stops_cleanly(words, tmp_path):
    Path("mine.yaml").write_text(
        Path("mine.yaml").read_text().replace("trials: 2", "trials: 6").replace("epochs: 2", "epochs: 30")
    )
    first, second = (Forked(command, *words) for _ in range(2))

    def epochs():
        return [len(one.read_metrics()) for one in list_runs("sweeps/mine/runs")]

    deadline = time.monotonic() + 120
    while len(epochs()) < 2 or min(epochs()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(first.pid, signal.SIGKILL)
    os.kill(second.pid, signal.SIGINT)
    printed, _ = second.communicate(timeout=120)
    first.communicate(timeout=120)
    assert second.returncode == 130, printed
    assert "saved. The same command continues the sweep." in printed
    third = Forked(command, *words)
    printed, _ = third.communicate(timeout=240)
    assert third.returncode == 0, printed
    runs = list_runs("sweeps/mine/runs")
    assert len(runs) == 6
    assert all(one.read_summary()["epochs"] == 30 for one in runs)
