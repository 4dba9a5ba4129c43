"""Many processes do what one does: same global batch, same result up to the order of sums."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

from forked import Forked, command, run_together, with_parent
from raytraced.training.config import write_config
from raytraced.training.loop import train
from raytraced.training.run_folder import RunFolder, create_run_folder
from raytraced.training.state import list_checkpoints, load_checkpoint
from raytraced.training.world import World
from training import worker
from training.runs import assert_close, metrics, weights

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes=1")


def torchrun(num_processes: int, *words: str) -> str:
    command = [*TORCHRUN, f"--nproc-per-node={num_processes}", *words]
    done = subprocess.run(with_parent(command), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def assert_close_runs(run, whole) -> None:
    assert len(metrics(run)) == len(metrics(whole)) == 3
    for ours, theirs in zip(metrics(run), metrics(whole), strict=True):
        for name in ("train_loss", "train_accuracy", "train_experts", "validation_loss", "gradient_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), name
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(weights(run)[name], tensor, rtol=1e-3, atol=1e-4)


def output_of_torchrun(file: Path) -> str:
    return torchrun(2, "-m", "raytraced.cli.main", "train", "-c", str(file))


def output_of_two_processes(file: Path) -> str:
    """What torchrun gives, without the time that it and its processes take to import PyTorch."""
    return "".join(run_together(2, command, "train", "-c", str(file)))


@pytest.mark.parametrize(
    "run_command", [output_of_two_processes, pytest.param(output_of_torchrun, marks=pytest.mark.slow)]
)
def test_two_processes_under_the_same_command_equal_one(run_command, config, no_pictures, tmp_path):
    # batches of 16 leave a last one of 7, of which one process gets 3 and the other 4
    config = replace(config, optimizer="sgd")  # Adam would make whole steps of the rounding of gradients near zero
    whole = train(replace(config, name="whole"))
    file = tmp_path / "config.yaml"
    file.write_text(write_config(config))
    output = run_command(file)
    run = RunFolder(Path(config.runs_dir) / config.name)
    assert output.splitlines()[-1] == str(run.path)
    assert len([line for line in output.splitlines() if line.startswith("epoch")]) == 3  # the leader alone prints
    assert_close_runs(run, whole)


@pytest.mark.parametrize(
    "legs",
    [
        pytest.param([(1, "ddp", 4), (2, "fsdp", 5), (1, "ddp", 0)], id="one-two"),
        pytest.param(
            [(1, "ddp", 4), (2, "fsdp", 5), (4, "ddp", 3), (1, "ddp", 0)], id="one-two-four", marks=pytest.mark.slow
        ),
    ],
)
def test_checkpoints_move_between_numbers_of_processes(config, no_pictures, tmp_path, legs):
    whole = train(replace(config, name="whole"))
    run, done = create_run_folder(config, ""), 0
    for num_processes, strategy, steps in legs:
        file = tmp_path / "config.yaml"
        file.write_text(write_config(replace(config, strategy=strategy)))
        words = ("train", str(file), str(run.path), str(steps))
        if num_processes == 1:
            worker.train_some_steps(*words[1:])
        else:
            run_together(num_processes, worker.main, *words)
        done += steps
        if steps:
            assert load_checkpoint(list_checkpoints(run.last)[0]).step == done
    assert_close_runs(run, whole)


def test_three_processes_find_the_figures_and_gradients_of_one(config, no_pictures, tmp_path):
    run, alone, file = train(replace(config, epochs=1)), World(0, 1, torch.device("cpu")), tmp_path / "found.json"
    run_together(3, worker.main, "measure", str(run.model), config.data, str(file))
    found = json.loads(file.read_text())
    # 30 test images in batches of 7 leave a last one of 2: of three processes one gets none of it
    figures = worker.figures(alone, str(run.model), config.data)
    assert figures["budgets"]
    assert_close(found["figures"], figures)
    assert_close(run.read_summary()["test"], figures)  # one batch of all, in the run itself
    # an expert, and a process, that got no sample neither makes the others wait nor changes their gradients
    gradients = worker.gradients(alone, "ddp")
    assert any(not any(values) for name, values in gradients.items() if "experts" in name)
    for strategy in ("ddp", "fsdp"):
        assert found[strategy].keys() == gradients.keys()
        for name, values in gradients.items():
            assert found[strategy][name] == pytest.approx(values, rel=1e-5, abs=1e-7), (strategy, name)


def test_a_process_that_is_gone_is_one_line_and_the_checkpoint_stays(config, no_pictures, tmp_path):
    """Processes that no torchrun watches over: one is killed, the other must say so and end."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    place |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    file = tmp_path / "config.yaml"
    file.write_text(write_config(replace(config, epochs=10_000, checkpoint_steps=1)))
    printed = [tmp_path / "stdout", tmp_path / "stderr"]
    for one in printed:
        one.touch()
    ranks = [os.environ | place | {"RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]
    leader, other = (Forked(command, "train", "-c", file, env=env, files=printed) for env in ranks)
    run = RunFolder(Path(config.runs_dir) / config.name)
    try:
        while len(list_checkpoints(run.last)) < 2:
            assert leader.poll() is None, printed[1].read_text()
            try:
                leader.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
        other.kill()
        leader.wait(60)
    finally:
        for process in (leader, other):
            process.kill()
            process.stdout.close()
    assert leader.returncode == 2, printed[1].read_text()
    (line,) = printed[1].read_text().splitlines()
    assert line.startswith("raytraced: another process of this run has ended, or cannot be reached; step-")
    assert line.endswith(f"is whole; start all processes again: raytraced resume {run.path}")
    assert load_checkpoint(list_checkpoints(run.last)[0]).step > 0
