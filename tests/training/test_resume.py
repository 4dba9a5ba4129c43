"""A run that was stopped, by whatever, ends exactly as one that was not."""

import atexit
import os
import random
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forked import Forked, command
from raytraced.training.callbacks import Reporter
from raytraced.training.config import write_config
from raytraced.training.interrupt import Interrupted
from raytraced.training.loop import train
from raytraced.training.run_folder import RunFolder, create_run_folder
from raytraced.training.state import list_checkpoints
from training.runs import assert_same_run, metrics, weights

# a run has 3 epochs of 6 steps: 87 images in batches of 16


class SignalAt(Reporter):
    """Sends this process a signal after so many steps."""

    def __init__(self, step: int, number: int = signal.SIGINT) -> None:
        self.left, self.number = step, number

    def on_step(self, state):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("stops", [[1], [6], [7, 3], [2, 2, 2, 2], [17], [18]])
def test_resumed_run_is_bitwise_identical(config, no_pictures, stops):
    whole = train(replace(config, name="whole"))
    run = create_run_folder(config, "")
    for steps in stops:
        with pytest.raises(Interrupted):
            train(config, run, SignalAt(steps))
    train(config, run)
    assert_same_run(run, whole)


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "sgd", "lr": 0.05, "warmup": 1.0},
        {"optimizer": "adamw", "weight_decay": 0.1, "clip": 0.5, "schedule": "constant"},
        {"patience": 1, "lr_routing": 1e-3},
        {"anytime_loss": 0.5, "target_experts": 3.0, "label_smoothing": 0.1},
    ],
)
def test_every_option_survives_a_resume(config, no_pictures, options):
    config = replace(config, **options)
    whole = train(replace(config, name="whole"))
    run = create_run_folder(config, "")
    with pytest.raises(Interrupted):
        train(config, run, SignalAt(4))
    train(config, run)
    assert_same_run(run, whole)


def test_two_runs_with_one_seed_are_identical_and_another_seed_is_not(config, no_pictures):
    one, other = (train(replace(config, name=name)) for name in ("one", "other"))
    assert_same_run(one, other)
    different = train(replace(config, seed=1))
    assert metrics(different) != metrics(one)


def test_number_of_threads_changes_the_last_bits_at_most(config, no_pictures):
    try:
        one, two = (train(replace(config, name=str(threads), threads=threads)) for threads in (1, 2))
    finally:
        torch.set_num_threads(1)
    for line_one, line_two in zip(metrics(one), metrics(two), strict=True):
        assert line_one["validation_accuracy"] == line_two["validation_accuracy"]
        for name in ("train_loss", "gradient_norm", "validation_loss"):
            assert line_one[name] == pytest.approx(line_two[name], rel=1e-5), name


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_finishes_the_step_saves_and_sets_the_exit_code(config, no_pictures, number, code):
    with pytest.raises(Interrupted) as stop:
        train(config, None, SignalAt(5, number))
    assert stop.value.exit_code == code
    assert [path.name for path in list_checkpoints(stop.value.run / "last")] == ["step-0000000005.safetensors"]


def test_damaged_checkpoint_is_named_and_the_one_before_is_used(config, no_pictures, capsys):
    whole = train(replace(config, name="whole"))
    run = create_run_folder(config, "")
    for steps in (5, 4):
        with pytest.raises(Interrupted):
            train(config, run, SignalAt(steps))
    newest = list_checkpoints(run.last)[0]
    newest.write_bytes(newest.read_bytes()[:-7])
    train(config, run)
    assert newest.name in capsys.readouterr().err
    assert_same_run(run, whole)


def test_interrupted_command_prints_how_to_resume_and_its_last_line_is_the_run(config):
    process = start(replace(config, epochs=500, checkpoint_steps=None))
    run = announced_run(process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 143
    assert f"raytraced resume {run.path}" in output
    assert output.splitlines()[-1] == str(run.path)


def test_run_killed_at_a_random_moment_ends_as_if_it_was_not(config):
    kill_and_resume(config, num_kills=1, seed=random.SystemRandom().randrange(1000))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_run_killed_five_times_ends_as_if_it_was_not(config, seed, record_property):
    kill_and_resume(config, num_kills=5, seed=seed)
    record_property("kills", 5)  # for experiments/attack.py


def kill_and_resume(config, num_kills: int, seed: int) -> None:
    """SIGKILL a real process at random moments, most of them inside a checkpoint's writing, since every step writes one."""
    print(f"moments drawn with seed {seed}")  # shown if the test fails
    moments = random.Random(seed)
    # Five epochs are 30 steps; from one kill to the next a process takes up to 12, and what 0.03 s hold: at most about 20.
    config = replace(config, checkpoint_steps=1, epochs=5 + 5 * num_kills, quiet=False)
    whole = run_to_end(start(replace(config, name="whole")))
    process = start(config)
    run = announced_run(process)
    killed = 0
    for _ in range(num_kills):
        step = moments.randrange(1, 12)
        wait_for_steps(process, run, step, moments.random() * 0.03)
        process.kill()
        process.communicate()
        killed += process.returncode == -signal.SIGKILL
        process = start(config, run)
    run_to_end(process)
    assert killed == num_kills  # each kill met a process that was still at work
    assert_same_run(run, whole)
    assert len(weights(run)) > 0
    assert not list(run.path.rglob("*.tmp"))


def start(config, run: RunFolder | None = None) -> Forked:
    """`raytraced train` or `raytraced resume` as a separate process."""
    file = write_options(config)
    words = ["resume", str(run.path)] if run else ["train", "-c", str(file)]
    return Forked(command, *words)


def write_options(config) -> Path:
    """A file of options beside the runs folder."""
    file = Path(config.runs_dir).with_name(f"{config.name}.yaml")
    file.write_text(write_config(config))
    return file


def announced_run(process: Forked) -> RunFolder:
    line = process.stdout.readline()
    assert ", into " in line, line + process.stdout.read()
    return RunFolder(Path(line.split(", into ")[1].strip()))


def newest_step(run: RunFolder) -> int:
    paths = list_checkpoints(run.last)
    return int(paths[0].stem.removeprefix("step-")) if paths else 0


def wait_for_steps(process: Forked, run: RunFolder, num_steps: int, extra_seconds: float) -> None:
    """Wait until so many more steps have been saved, and then a random while."""
    target = newest_step(run) + num_steps
    while newest_step(run) < target and process.poll() is None:
        try:
            process.wait(0.005)
        except subprocess.TimeoutExpired:
            continue
    try:
        process.wait(extra_seconds)
    except subprocess.TimeoutExpired:
        return


def run_to_end(process: Forked) -> RunFolder:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return RunFolder(Path(output.splitlines()[-1]))


@pytest.mark.parametrize("moment", ["while its result is printed", "while Python exits"])
def test_a_signal_after_a_run_is_complete_does_not_change_its_exit_code(config, moment):
    config = replace(config, epochs=1)
    process = Forked(interrupted_late, moment, str(write_options(config)))
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert RunFolder(Path(output.splitlines()[-1])).read_summary() is not None


def interrupted_late(moment: str, file: str) -> int:
    """`raytraced train` in a process that gets SIGINT at a late moment."""
    from raytraced.training import run_tables

    def interrupt(*_):
        os.kill(os.getpid(), signal.SIGINT)

    if moment == "while its result is printed":
        run_tables.print_outcome = interrupt
        return command("train", "-c", file)
    code = command("train", "-c", file)
    atexit._run_exitfuncs()  # as at the end of every process that is not forked
    interrupt()
    return code
