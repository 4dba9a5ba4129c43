"""What a run leaves behind, and the commands that read it."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import raytraced
from raytraced.cli import main
from raytraced.saving import load_with_card
from raytraced.training.config import write_config
from raytraced.training.loop import train
from raytraced.training.run_folder import RunFolder, create_run_folder, open_run

from .conftest import GRID, write_data

FILES = {"config.yaml", "metrics.jsonl", "model.safetensors", "best", "last", "summary.json", "curves.png"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> RunFolder:
    """One run through the command line, pictures and all."""
    folder = tmp_path_factory.mktemp("finished")
    data = write_data(folder / "stripes.npz")
    file = folder / "config.yaml"
    file.write_text(f"data: {data}\nmodel_options: {json.dumps(GRID)}\nthreads: 1\ndevice: cpu\n")
    words = ["-c", str(file), "--output", str(folder / "runs"), "--epochs", "3", "--batch-size", "16", "--name", "one"]
    assert main(["train", *words]) == 0
    return RunFolder(folder / "runs" / "one")


def test_folder_holds_what_is_promised(finished):
    names = {path.name for path in finished.path.iterdir()}
    assert names >= FILES | {"sequences.png"}
    assert names - FILES <= {"sequences.png", "events"}
    for picture in ("curves.png", "sequences.png"):
        with Image.open(finished.path / picture) as image:
            assert min(image.size) > 200
            assert np.array(image.convert("L")).std() > 10  # something is drawn


def test_metrics_tell_every_epoch(finished):
    lines = finished.read_metrics()
    assert [line["epoch"] for line in lines] == [1, 2, 3]
    told = {"train_loss", "train_accuracy", "train_experts", "validation_loss", "validation_accuracy"}
    told |= {"validation_experts", "expert_load", "seconds", "samples_per_second", "learning_rate", "step"}
    assert told <= lines[0].keys()
    assert np.array(lines[0]["expert_load"]).shape == (2, 3)
    assert lines[0]["train_loss"] > lines[2]["train_loss"]


def test_loaded_model_answers_as_the_summary_says(finished, capsys):
    model = raytraced.load(finished.path)
    card = load_with_card(finished.path)[1]
    assert "weighting" not in finished.config.model_options
    assert card.options["weighting"] == "rates-to-one"  # a default, written down: it may be another one some day
    pixels = torch.from_numpy(np.load(finished.config.data)["x_test"])[:, None] / 255
    labels = torch.from_numpy(np.load(finished.config.data)["y_test"])
    logits = model((pixels - card.mean[0]) / card.std[0]).logits
    accuracy = (logits.argmax(-1) == labels).double().mean()
    assert accuracy.item() == pytest.approx(finished.read_summary()["test"]["accuracy"])
    assert main(["evaluate", str(finished.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == finished.read_summary()["test"]


def test_every_way_to_name_a_model_leads_to_it(finished):
    expected = raytraced.load(finished.path).state_dict()
    for source in (str(finished.path), finished.model):
        found = raytraced.load(source).state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert raytraced.load(finished.path / "best").training is False


def test_evaluate_takes_a_name_a_budget_and_a_seed(finished, capsys):
    output = str(finished.path.parent)

    def evaluate(*words: str) -> dict:
        assert main(["evaluate", "one", "--output", output, "--json", *words]) == 0
        return json.loads(capsys.readouterr().out)

    by_prefix = finished.read_summary()["test"]["accuracy_by_prefix"]
    assert evaluate("--max-experts", "1")["accuracy"] == pytest.approx(by_prefix[1])
    drawn = [evaluate("--select", "sample", "--seed", seed)["mean_experts"] for seed in ("1", "1", "2")]
    assert drawn[0] == drawn[1] != drawn[2]
    assert evaluate("--split", "validation")["num_samples"] == 9
    assert main(["evaluate", "one", "--output", output]) == 0
    assert "calibration error" in capsys.readouterr().out


def test_predict_answers_for_image_files(finished, tmp_path, capsys):
    arrays = np.load(finished.config.data)
    files = []
    for number in range(4):
        files.append(str(tmp_path / f"{number}.png"))
        Image.fromarray(arrays["x_test"][number]).save(files[-1])
    # a tall colour image whose middle is the first one
    tall = np.zeros((14, 8), np.uint8)
    tall[3:11] = arrays["x_test"][0]
    Image.fromarray(tall).convert("RGB").save(files[3])
    assert main(["predict", str(finished.path), *files, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    logits = predict_by_hand(finished, arrays["x_test"][:3])
    for row, own in zip(rows, logits[[0, 1, 2, 0]], strict=True):
        assert row["answer"] == str(int(own.argmax()))
        assert row["probability"] == pytest.approx(own.softmax(-1).max().item(), abs=1e-5)
    assert [row["image"] for row in rows] == files
    (tmp_path / "text.png").write_text("no image")
    assert main(["predict", str(finished.path), str(tmp_path / "text.png")]) == 2
    assert "text.png: is not an image that can be read" in capsys.readouterr().err
    assert main(["predict", str(finished.path), files[0]]) == 0


def predict_by_hand(run: RunFolder, images: np.ndarray) -> torch.Tensor:
    model, card = load_with_card(run.path)
    with torch.no_grad():
        return model((torch.from_numpy(images)[:, None] / 255 - card.mean[0]) / card.std[0]).logits


def test_runs_and_compare_tell_what_happened(finished, tmp_path, capsys):
    output = finished.path.parent
    half = create_run_folder(replace(finished.config, name="half", output=str(output)), "")
    half.write_metrics(finished.read_metrics()[:1])
    assert main(["runs", "--output", str(output)]) == 0
    table = capsys.readouterr().out
    assert "3/3" in table
    assert "1/3" in table
    assert "can be resumed" in table
    picture = tmp_path / "both.png"
    assert main(["compare", "one", "half", "--output", str(output), "--picture", str(picture)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(picture)
    with Image.open(picture) as image:
        assert image.width > 800
    assert main(["runs", "--output", str(tmp_path / "none")]) == 0
    assert "no runs in" in capsys.readouterr().out


def test_resume_of_a_complete_run_says_so(finished, capsys):
    before = finished.model.read_bytes()
    assert main(["resume", str(finished.path)]) == 0
    assert "is complete" in capsys.readouterr().out
    assert finished.model.read_bytes() == before


def test_run_never_overwrites_another(config, no_pictures):
    first = train(config)
    content = first.model.read_bytes()
    second = train(replace(config, seed=3))
    assert second.path.name == "run-2"
    assert first.model.read_bytes() == content
    unnamed = [create_run_folder(replace(config, name=None), "now").path.name for _ in range(2)]
    assert unnamed == ["now-stripes-mre", "now-stripes-mre-2"]


def test_last_line_is_the_run_folder_and_quiet_prints_nothing_else(config, no_pictures, tmp_path, capsys):
    file = tmp_path / "config.yaml"
    file.write_text(write_config(config))
    assert main(["train", "-c", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == str(Path(config.output) / "run")
    assert len([line for line in lines if line.startswith("epoch")]) == 3
    assert main(["train", "-c", str(file), "--quiet"]) == 0
    assert capsys.readouterr().out.splitlines() == [str(Path(config.output) / "run-2")]


def test_mistaken_run_name_gets_a_suggestion(finished):
    with pytest.raises(ValueError, match="did you mean one"):
        open_run("oone", str(finished.path.parent))


def test_unfinished_run_has_no_model_yet_and_says_how_to_get_one(config):
    run = create_run_folder(config, "")
    with pytest.raises(ValueError, match="raytraced resume"):
        raytraced.load(run.path)


def test_folder_appears_with_its_configuration_inside(config, monkeypatch):
    """Whoever sees the folder can resume it: it is filled under another name first."""
    seen = []
    replace_path = Path.replace
    monkeypatch.setattr(Path, "replace", lambda self, to: (seen.append((self, to)), replace_path(self, to))[1])
    run = create_run_folder(config, "")
    hidden, shown = seen[-1]
    assert shown == run.path
    assert hidden.name.startswith(".")
    assert run.config == config
