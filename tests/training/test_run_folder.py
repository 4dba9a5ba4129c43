"""The folder of a run, and the model in it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import raytraced
from raytraced.training.loop import train
from raytraced.training.run_folder import RunFolder, create_run_folder, open_run
from raytraced.training.state import newest_checkpoint


def test_loaded_model_takes_images_as_they_are_and_answers_as_the_summary_says(train_with):
    run = train_with()
    model = raytraced.load(run.path)
    assert "weighting" not in run.config.model_options
    # What the default, "auto", stands for in a grid of two layers is written down: it may be another one some day.
    assert model.card.options["weighting"] == "relative"
    assert model.card.data == "stripes"
    assert model.card.spec["class_names"] == ["0", "1", "2"]
    assert not model.card.training.keys() & {"data", "runs_dir", "name", "data_root", "device"}  # of this machine alone
    arrays = np.load(run.config.data)
    images, labels = torch.from_numpy(arrays["x_test"])[:, None], torch.from_numpy(arrays["y_test"])
    with torch.no_grad():
        as_bytes, as_fractions = model(images).logits, model(images / 255).logits
    torch.testing.assert_close(as_bytes, as_fractions, rtol=1e-4, atol=1e-5)
    accuracy = (as_bytes.argmax(-1) == labels).double().mean()
    assert accuracy.item() == pytest.approx(run.read_summary()["test"]["accuracy"])


def test_every_way_to_name_a_model_leads_to_it(train_with):
    run = train_with(epochs=1)
    expected = raytraced.load(run.path).state_dict()
    for source in (str(run.path), run.model):
        found = raytraced.load(source).state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert raytraced.load(run.path / "best").training is False


def test_run_never_overwrites_another(config, no_pictures):
    first = train(config)
    content = first.model.read_bytes()
    second = train(replace(config, seed=3))
    assert second.path.name == "run-2"
    assert first.model.read_bytes() == content
    unnamed = [create_run_folder(replace(config, name=None), "now").path.name for _ in range(2)]
    assert unnamed == ["now-stripes-mre", "now-stripes-mre-2"]


def test_mistaken_run_name_gets_a_suggestion(config):
    run = create_run_folder(config, "")
    with pytest.raises(ValueError, match="did you mean run"):
        open_run("rnu", str(run.path.parent))


def test_unfinished_run_has_no_model_yet_and_says_how_to_get_one(config):
    run = create_run_folder(config, "")
    with pytest.raises(ValueError, match="raytraced resume"):
        raytraced.load(run.path)


def test_a_writer_removes_what_a_killed_writer_left_and_a_reader_does_not(config):
    """A reader would take the file of a writer that is at work from under it."""
    run = create_run_folder(config, "")
    left = [
        run.path / ".metrics.jsonl.77.tmp",
        run.last / ".step-1.safetensors.77.tmp",
        run.best.with_name(".m.77.tmp"),
    ]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"half")
    events = run.path / ".events-abc.tmp"
    events.mkdir()
    (events / "events.out").write_bytes(b"half")
    assert open_run("run", str(run.path.parent)).path == run.path
    assert newest_checkpoint(run.last) == (None, [])
    assert all(path.exists() for path in (*left, events))
    with run.writing():
        assert not list(run.path.rglob("*.tmp"))


def test_folder_appears_with_its_configuration_inside(config, monkeypatch):
    """A folder that exists can be resumed: it is filled under another name first."""
    seen = []
    replace_path = Path.replace
    monkeypatch.setattr(Path, "replace", lambda self, to: (seen.append((self, to)), replace_path(self, to))[1])
    run = create_run_folder(config, "")
    hidden, shown = seen[-1]
    assert shown == run.path
    assert hidden.name.startswith(".")
    assert run.config == config


def test_line_of_metrics_that_a_crash_cut_short_is_left_out(config):
    run = create_run_folder(config, "")
    run.write_metrics([{"epoch": 1}, {"epoch": 2}])
    with (run.path / "metrics.jsonl").open("a") as stream:
        stream.write('{"epoch": 3, "train_lo')
    assert [line["epoch"] for line in run.read_metrics()] == [1, 2]


def test_a_damaged_config_is_one_line_in_plain_words(tmp_path):
    (tmp_path / "config.yaml").write_text("epochs: many")
    with pytest.raises(ValueError, match=r"is not the configuration of a run .epochs='many': must be a whole number"):
        _ = RunFolder(tmp_path).config
