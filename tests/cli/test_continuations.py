"""A run continues as it was started, or with stated changes; a refused continuation changes nothing."""

import json
import os

import numpy as np
import pytest

import raytraced as rt
from raytraced.cli.main import main
from raytraced.training.run_folder import RunFolder
from training.stripes import GRID, write_stripes


@pytest.fixture
def run(tmp_path):
    """A small finished run of one epoch on a file of the user."""
    words = ["--data", str(write_stripes(tmp_path / "stripes.npz")), "--runs-dir", str(tmp_path), "--name", "one"]
    options = [word for name, value in GRID.items() for word in (f"--model_options.{name}", str(value))]
    assert main(["train", *words, *options, "--epochs", "1", "--batch-size", "16", "--quiet"]) == 0
    return RunFolder(tmp_path / "one")


def content(run):
    return {str(path): path.read_bytes() for path in run.path.rglob("*") if path.is_file() and path.name != ".lock"}


def changed(run, name, **arrays):
    path = run.path.parent / f"{name}.npz"
    np.savez(path, **dict(np.load(run.config.data)) | arrays)
    return str(path)


def test_a_refused_continuation_leaves_the_run_as_it_was(run, capsys):
    before = content(run)
    names, other_names = np.array(["0", "1", "2"]), np.array(["cat", "dog", "emu"])
    for data, expected in (
        (str(run.path / "nowhere"), "no such data set, file or folder"),
        (changed(run, "renamed", class_names=other_names), "its class_names differ from what the run began with"),
        (changed(run, "reordered", class_names=names[::-1]), "its class_names differ from what the run began with"),
    ):
        assert main(["resume", str(run.path), "--epochs", "3", "--data", data, "--quiet"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert expected in line
        assert content(run) == before


def test_other_images_of_the_same_classes_are_reported(run, capsys):
    images = np.load(run.config.data)["x_train"] // 2
    words = ["resume", str(run.path), "--epochs", "2", "--data", changed(run, "darker", x_train=images), "--quiet"]
    assert main(words) == 0
    assert "is not what the run began with (mean, std differ)" in capsys.readouterr().err
    (stated,) = run.read_continuations()
    assert stated["changes"].keys() == {"epochs", "data"}
    assert main(["resume", str(run.path), "--epochs", "3", "--quiet"]) == 0
    assert capsys.readouterr().err == ""  # what was stated is what it continues with


def test_only_options_that_a_command_has_are_its_remedy(run, capsys):
    run.model.unlink()
    (run.path / "summary.json").unlink()
    for command, has_weights in (("evaluate", True), ("calibrate", False)):
        assert main([command, str(run.path)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "continues it" in line
        assert ("--weights best" in line) == has_weights


@pytest.mark.parametrize("words", [["evaluate"], ["generate", "text"]])
@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_that_no_generator_takes_is_one_line(words, seed, capsys):
    assert main([words[0], "mre-digits", *words[1:], "--seed", str(seed)]) == 2
    assert capsys.readouterr().err == f"raytraced: seed={seed}: must lie in 0 … 2**63 - 1\n"


def test_weights_that_are_not_finite_neither_predict_nor_are_calibrated(run, tmp_path, capsys):
    from PIL import Image

    model = rt.load(run.path)
    model.head.bias.data[0] = float("nan")
    rt.save(model, run.model)
    before = content(run)
    Image.new("L", (8, 8), 40).save(tmp_path / "mine.png")
    for words in (["predict", str(run.path), str(tmp_path / "mine.png")], ["calibrate", str(run.path)]):
        assert main(words) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        reason = "the model's answers are not finite: the weights diverged, or are damaged"
        assert printed.err == f"raytraced: {run.path}: {reason}\n"
    assert content(run) == before
    assert main(["explore", str(run.path), "--output", str(tmp_path / "page.html")]) == 2
    reason = "its weights are not finite: training diverged, or the file is damaged; train it again"
    assert capsys.readouterr().err == f"raytraced: {run.path}: {reason}\n"
    assert not (tmp_path / "page.html").exists()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes in folders")
def test_a_pipe_in_place_of_a_model_is_called_a_pipe(run, tmp_path, capsys):
    run.model.unlink()
    os.mkfifo(run.model)
    os.mkfifo(tmp_path / "pipe")
    for place, file in ((run.path, run.model), (tmp_path / "pipe", tmp_path / "pipe")):
        assert main(["evaluate", str(place), "--data", run.config.data]) == 2
        reason = "foreign: is a pipe, a device or a folder; must be a regular file"
        assert capsys.readouterr().err == f"raytraced: {file}: {reason}\n"


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "summary.json",
            '{"test": {}}',
            "summary.json or metrics.jsonl is not what training wrote (KeyError: 'parameters')",
        ),
        ("summary.json", "{", "summary.json: is not what training wrote"),
        ("metrics.jsonl", "3\n", "summary.json or metrics.jsonl is not what training wrote (TypeError"),
        ("metrics.jsonl", "{}\n", "(KeyError: 'seconds')"),
        ("metrics.jsonl", "words\n", "metrics.jsonl: is not what training wrote"),
    ],
)
def test_a_damaged_file_of_a_run_hides_no_other_run(run, name, text, expected, capsys):
    other = run.path.with_name("other")
    other.mkdir()
    (other / "config.yaml").write_bytes((run.path / "config.yaml").read_bytes())
    (other / name).write_text(text)
    assert main(["runs", "--runs-dir", str(run.path.parent), "--json"]) == 0
    shown = capsys.readouterr()
    assert str(run.path) in [json.loads(line)["run"] for line in shown.out.splitlines()]
    assert expected in shown.err
    assert len(shown.err.splitlines()) == 1


def test_a_task_that_does_not_exist_is_one_line(run, tmp_path, capsys):
    from dataclasses import replace

    model = rt.load(run.path)
    model.card = replace(model.card, task="imagse")
    rt.save(model, tmp_path / "odd.safetensors")
    (tmp_path / "mine.png").touch()
    assert main(["predict", str(tmp_path / "odd.safetensors"), str(tmp_path / "mine.png")]) == 2
    assert capsys.readouterr().err == "raytraced: task=imagse: no such task; did you mean images?\n"


def test_an_empty_folder_holds_no_images(tmp_path, capsys):
    (tmp_path / "texts" / "below").mkdir(parents=True)
    assert main(["train", "--data", str(tmp_path / "texts"), "--model", "gpt-mre"]) == 2
    assert "texts: the folder holds no files" in capsys.readouterr().err
