"""Every failure is one line, and nothing is lost."""

import resource
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import forked
from raytraced.training.config import write_config
from raytraced.training.evaluation import Diverged
from raytraced.training.loop import train
from raytraced.training.objective import Objective
from raytraced.training.run_folder import RunFolder
from raytraced.training.state import list_checkpoints, load_checkpoint
from training.runs import assert_same_run


def run_command(config, tmp_path, *, limit: int | None = None) -> subprocess.CompletedProcess:
    """`raytraced train` in a separate process, whose files may not be larger than a limit."""
    file = tmp_path / "config.yaml"
    file.write_text(write_config(config))

    return forked.run(restricted, limit, "train", "-c", file)


def restricted(limit: int | None, *words: object) -> int:
    if limit:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    return forked.command(*words)


def test_nan_names_step_and_tensor_and_keeps_the_last_checkpoint(config, no_pictures, monkeypatch):
    compute, calls = Objective.forward, []

    def poisoned(self, batch, *rest):
        calls.append(1)
        if len(calls) == 10:  # the ninth step, after the rehearsal
            with torch.no_grad():
                self.model.head.weight[0, 0] = float("nan")
        return compute(self, batch, *rest)

    monkeypatch.setattr(Objective, "forward", poisoned)
    with pytest.raises(Diverged, match=r"step 9 \(epoch 2\): loss nan, first not finite: head.weight; the last good"):
        train(replace(config, checkpoint_steps=4))
    run = RunFolder(config_path(config))
    newest = load_checkpoint(list_checkpoints(run.last)[0])
    assert newest.step == 8
    assert all(bool(tensor.isfinite().all()) for tensor in newest.tensors.values())
    monkeypatch.setattr(Objective, "forward", compute)
    train(config, run)
    assert_same_run(run, train(replace(config, name="whole")))


def config_path(config):
    return Path(config.runs_dir) / config.name


def test_full_disk_is_one_line_and_the_run_can_be_resumed(config, no_pictures, tmp_path):
    """Files may not grow past a size that the second checkpoint exceeds, as its history has grown."""
    config = replace(config, checkpoint_steps=1)
    whole = train(replace(config, name="whole"))
    size = max(path.stat().st_size for path in list_checkpoints(whole.last))
    done = run_command(config, tmp_path, limit=size - 100)
    assert done.returncode == 2, done.stdout + done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "File too large" in done.stderr
    run = RunFolder(config_path(config))
    assert f"raytraced resume {run.path}" in done.stderr
    assert load_checkpoint(list_checkpoints(run.last)[0]).step >= 1
    assert not list(run.path.rglob("*.tmp"))
    train(config, run)
    assert_same_run(run, whole)


def test_really_full_disk_is_one_line_and_the_run_can_be_resumed(config, no_pictures, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "none", small], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs more rights than this user has")
    try:
        done = run_command(replace(config, runs_dir=str(small), epochs=400, checkpoint_steps=1), tmp_path)
        assert done.returncode == 2, done.stdout + done.stderr
        assert "No space left on device" in done.stderr
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert load_checkpoint(list_checkpoints(small / "run" / "last")[0]).step > 0
    finally:
        subprocess.run(["umount", small], check=True)


def test_model_that_cannot_be_compiled_is_one_line(train_with, tmp_path, monkeypatch):
    def refuse(self, *rest):
        raise RuntimeError("no working compiler found\nin any of these places:\n…")

    monkeypatch.setattr(Objective, "forward", refuse)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: None)
    with pytest.raises(ValueError, match=r"compile=True: .* here \(no working compiler found\); leave it out$"):
        train_with(compile=True, runs_dir=str(tmp_path / "runs"))
    assert not (tmp_path / "runs").exists()
    with pytest.raises(RuntimeError, match="no working"):  # without compile=True it is not a user's mistake
        train_with()
