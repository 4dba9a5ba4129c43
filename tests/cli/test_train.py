"""train and resume: what they print, what they leave behind, and that a refusal leaves nothing."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from raytraced.cli.main import main
from raytraced.training.run_folder import RunFolder, create_run_folder
from training.runs import assert_same_run

FILES = {"config.yaml", "metrics.jsonl", "model.safetensors", "best", "last", "summary.json", "curves.png"}
# Figures of each split in summary.json; the second line for models that answer along the way.
FIGURES = {
    *("num_samples", "accuracy", "loss", "calibration_error", "mean_experts", "accuracy_per_class"),
    *("experts_per_class", "expert_load", "accuracy_by_prefix", "used_parameters", "macs"),
}
ALONG_THE_WAY = {"budgets", "lengths", "class_load", "gallery"}


def test_folder_holds_what_is_promised(finished):
    names = {path.name for path in finished.path.iterdir()}
    assert names >= FILES | {"sequences.png"}
    assert names - FILES <= {"sequences.png", "events", ".lock"}
    for picture in ("curves.png", "sequences.png"):
        with Image.open(finished.path / picture) as image:
            assert min(image.size) > 200
            assert np.array(image.convert("L")).std() > 10  # something is drawn


def test_metrics_have_a_line_per_epoch(finished):
    lines = finished.read_metrics()
    assert [line["epoch"] for line in lines] == [1, 2, 3]
    names = {"train_loss", "train_accuracy", "train_experts", "validation_loss", "validation_accuracy"}
    names |= {"validation_experts", "expert_load", "seconds", "samples_per_second", "learning_rate", "step"}
    names |= {"gradient_norm", "epoch"}
    assert lines[0].keys() == names
    assert np.array(lines[0]["expert_load"]).shape == (2, 3)
    assert lines[0]["train_loss"] > lines[2]["train_loss"]


def test_summary_holds_all_figures_of_both_splits(finished, options, tmp_path):
    summary = finished.read_summary()
    for split in ("validation", "test"):
        assert summary[split].keys() == FIGURES | ALONG_THE_WAY
        assert summary[split]["macs"].keys() == {"total", "input", "routing", "experts", "head"}
        assert summary[split]["budgets"][0].keys() == {"accuracy", "experts", "macs", "expert_macs"}
        assert np.array(summary[split]["class_load"]).shape == (3, 2, 3)
    assert main(["train", *options, "--runs-dir", str(tmp_path), "--name", "k", "--model", "top-k", "--quiet"]) == 0
    assert RunFolder(tmp_path / "k").read_summary()["test"].keys() == FIGURES


def test_words_fit_a_narrow_terminal_and_the_last_line_is_the_run_folder(options, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)  # so that the folder's name is short
    assert main(["train", *options, "--name", "run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "runs/run"
    epochs = [line for line in lines if line.startswith("epoch")]
    assert [line.split()[1] for line in epochs] == ["1/3", "2/3", "3/3"]
    test = RunFolder(tmp_path / "runs" / "run").read_summary()["test"]
    assert f"test accuracy {test['accuracy']:.2%} with {test['mean_experts']:.2f} experts on average" in lines[4]
    assert lines[5].startswith(f"with at most 0, 1, 2 … experts: {test['budgets'][0]['accuracy']:.2%} ")
    assert max(map(len, lines[1:])) <= 80
    assert main(["train", *options, "--name", "run", "--quiet"]) == 0
    assert capsys.readouterr().out == "runs/run-2\n"  # quiet prints nothing else; another run is never overwritten


def test_resume_of_a_complete_run_says_so(finished, capsys):
    before = finished.model.read_bytes()
    assert main(["resume", str(finished.path)]) == 0
    assert "is complete" in capsys.readouterr().out
    assert finished.model.read_bytes() == before


def test_resume_of_a_run_that_has_just_begun_is_a_whole_run(finished, capsys):
    half = create_run_folder(finished.config, "")
    assert half.path.name == "one-2"
    assert main(["resume", "one-2", "--runs-dir", str(half.path.parent)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(half.path)
    assert_same_run(half, finished)


def refused(capsys, *words: str) -> str:
    """What the one line on stderr says."""
    assert main(["train", *words]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1, error
    assert error.startswith("raytraced: ")
    return error


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--device", "cuda"], "device=cuda: no GPU is available; use cpu"),
        (["--device", "abacus"], "device=abacus: must be auto, cpu, cuda or another device that torch knows"),
        (["--model-options.no-such", "1"], "no_such"),
        (["--model-options.num-layers", "0"], "num_layers=0"),
        (["--data-options.augmnet", "true"], "augmnet: images have no such option; did you mean augment?"),
        (["--model", "top-k", "--target-experts", "3"], "target_experts=3.0: model 'top-k' has no activation sequence"),
        (["--target-experts", "0"], "target_experts=0.0: must be positive and finite"),
        (["--model", "top-k", "--anytime-loss", "0.1"], "anytime_loss=0.1: model 'top-k' does not answer along"),
    ],
)
def test_wrong_option_is_one_line_and_makes_no_run(stripes, tmp_path, capsys, words, expected):
    if "cuda" in expected and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert expected in refused(capsys, "--data", str(stripes), "--runs-dir", str(tmp_path / "runs"), *words)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_model_that_cannot_be_compiled_is_one_line_and_makes_no_run(options, tmp_path):
    words = ["train", *options, "--runs-dir", str(tmp_path / "runs"), "--compile", "true"]
    nowhere = {"PATH": str(tmp_path), "CXX": str(tmp_path / "g++"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-m", "raytraced.cli.main", *words],
        capture_output=True,
        text=True,
        env=os.environ | nowhere,
        timeout=100,
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("raytraced: compile=True: the model cannot be compiled here")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("where", ["/proc/here", "{tmp}/file/below"])
def test_folder_that_cannot_be_made_is_one_line(stripes, tmp_path, capsys, where):
    (tmp_path / "file").write_text("not a folder")
    output = where.format(tmp=tmp_path)
    error = refused(capsys, "--data", str(stripes), "--runs-dir", output, "--epochs", "0")
    assert error.startswith(f"raytraced: {output}")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folder_without_the_right_to_write_is_one_line(stripes, tmp_path, capsys):
    (tmp_path / "closed").mkdir(mode=0o500)
    error = refused(capsys, "--data", str(stripes), "--runs-dir", str(tmp_path / "closed"))
    assert error == f"raytraced: {tmp_path / 'closed'}: Permission denied\n"


def test_missing_class_in_a_file_is_one_line_and_makes_no_run(tmp_path, capsys):
    images, labels = np.random.default_rng(0).integers(0, 255, (30, 8, 8)).astype(np.uint8), np.arange(30) % 3
    labels[labels == 1] = 2
    np.savez(tmp_path / "x.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    refused(capsys, "--data", str(tmp_path / "x.npz"), "--runs-dir", str(tmp_path / "runs"))
    assert not (tmp_path / "runs").exists()
