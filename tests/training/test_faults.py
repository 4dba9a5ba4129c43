"""What goes wrong is told in one line, and nothing is lost."""

import os
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from raytraced.cli import main
from raytraced.data import Dataset, Split
from raytraced.training.checkpoint import list_checkpoints, load_checkpoint
from raytraced.training.config import write_config
from raytraced.training.faults import check_classes
from raytraced.training.loop import train
from raytraced.training.objective import Objective
from raytraced.training.run_folder import RunFolder

from .runs import assert_same_run


def run_command(config, tmp_path, *, limit: int | None = None) -> subprocess.CompletedProcess:
    """`raytraced train` in a process of its own, whose files may be no larger than a limit."""
    file = tmp_path / "config.yaml"
    file.write_text(write_config(config))

    def restrict() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return subprocess.run(
        [sys.executable, "-m", "raytraced.cli", "train", "-c", str(file)],
        capture_output=True,
        text=True,
        preexec_fn=restrict if limit else None,
    )


def test_nan_tells_step_and_tensor_and_keeps_the_last_checkpoint(config, no_pictures, monkeypatch):
    compute, calls = Objective.forward, []

    def poisoned(self, images, *rest):
        calls.append(1)
        if len(calls) == 9:
            with torch.no_grad():
                self.model.head.weight[0, 0] = float("nan")
        return compute(self, images, *rest)

    monkeypatch.setattr(Objective, "forward", poisoned)
    with pytest.raises(ValueError, match=r"step 9 \(epoch 2\): loss nan, first not finite: head.weight; the last good"):
        train(replace(config, checkpoint_steps=4))
    run = RunFolder(config_path(config))
    newest = load_checkpoint(list_checkpoints(run.last)[0])
    assert newest.step == 8
    assert all(bool(tensor.isfinite().all()) for tensor in newest.tensors.values())
    monkeypatch.setattr(Objective, "forward", compute)
    train(config, run)
    assert_same_run(run, train(replace(config, name="whole")))


def config_path(config):
    return Path(config.output) / config.name


def test_full_disk_is_one_line_and_the_run_can_go_on(config, no_pictures, tmp_path):
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


def test_really_full_disk_is_one_line_and_the_run_can_go_on(config, no_pictures, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "none", small], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs more rights than this user has")
    try:
        done = run_command(replace(config, output=str(small), epochs=400, checkpoint_steps=1), tmp_path)
        assert done.returncode == 2, done.stdout + done.stderr
        assert "No space left on device" in done.stderr
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert load_checkpoint(list_checkpoints(small / "run" / "last")[0]).step > 0
    finally:
        subprocess.run(["umount", small], check=True)


@pytest.mark.parametrize("where", ["/proc/here", "{tmp}/file/below"])
def test_folder_that_cannot_be_made_is_one_line(config, tmp_path, capsys, where):
    (tmp_path / "file").write_text("not a folder")
    output = where.format(tmp=tmp_path)
    code = main(["train", "--data", config.data, "--output", output, "--epochs", "0"])
    assert code == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert error.startswith(f"raytraced: {output}")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folder_without_the_right_to_write_is_one_line(config, tmp_path, capsys):
    (tmp_path / "closed").mkdir(mode=0o500)
    assert main(["train", "--data", config.data, "--output", str(tmp_path / "closed")]) == 2
    assert capsys.readouterr().err == f"raytraced: {tmp_path / 'closed'}: Permission denied\n"


def test_missing_class_is_named():
    split = Split(torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 0, 2, 2]))
    dataset = Dataset("pets", split, split, split, ("cat", "dog", "newt"), (0.5,), (0.5,))
    with pytest.raises(ValueError, match="pets: class 'dog' has no training image"):
        check_classes(dataset)


def test_missing_class_in_a_file_is_one_line_and_makes_no_run(tmp_path, capsys):
    images, labels = np.random.default_rng(0).integers(0, 255, (30, 8, 8)).astype(np.uint8), np.arange(30) % 3
    labels[labels == 1] = 2
    np.savez(tmp_path / "x.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    assert main(["train", "--data", str(tmp_path / "x.npz"), "--output", str(tmp_path / "runs")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--device", "cuda"], "device=cuda: no GPU is available; use cpu"),
        (["--device", "abacus"], "device=abacus: must be auto, cpu, cuda or another device that torch knows"),
        (["--model-options.no-such", "1"], "no_such"),
        (["--model-options.num-layers", "0"], "num_layers=0"),
    ],
)
def test_wrong_option_is_one_line_and_makes_no_run(config, tmp_path, capsys, words, expected):
    if "cuda" in expected and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(["train", "--data", config.data, "--output", str(tmp_path / "runs"), *words]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert expected in error
    assert not (tmp_path / "runs").exists()
