"""The shipped language model, out of the box: its card states what it measures; it writes, plans, and is served with a budget."""

import json
import re

import openai
import pytest
import torch

import raytraced
from experiments import ship_text
from raytraced.cli.main import main
from raytraced.io.saving import PRETRAINED
from raytraced.serve.app import Server
from raytraced.serve.models import serve_model
from raytraced.tasks.registry import find_task
from raytraced.training.calibration import measure_means
from raytraced.training.run_folder import RunFolder
from serve.conftest import running


@pytest.fixture(scope="module")
def model():
    return raytraced.load("mre-text").eval()


def test_the_card_states_the_bits_that_the_model_measures(model):
    task = find_task("shakespeare")
    found = measure_means(model, task, task.load_for(model, "shakespeare", None), "test")
    text = (PRETRAINED / "mre-text.md").read_text(encoding="utf-8")
    bits = float(re.search(r"bits per byte: ([\d.]+)", text)[1])
    experts = float(re.search(r"all blocks together: ([\d.]+)", text)[1])
    assert found["loss"] / torch.tensor(2.0).log().item() == pytest.approx(bits, abs=1e-3)
    assert found["experts"] == pytest.approx(experts, abs=0.01)
    assert "public domain" in text


def test_it_continues_a_text_with_words_and_with_the_budget_that_is_asked_for(model, capsys):
    texts = {}
    least, most = (model.card.dial["rows"][at]["experts"] for at in (0, -1))
    for budget in (least, most):
        words = ["generate", "mre-text", "To be, or ", "--length", "120", "--experts", f"{budget:.3f}", "--json"]
        assert main(words) == 0
        texts[budget] = json.loads(capsys.readouterr().out)
    means = {budget: sum(one["experts"]) / 120 for budget, one in texts.items()}
    assert means[least] < means[most]
    letters = [char for char in texts[least]["text"] if char.isalpha() or char.isspace()]
    assert len(letters) > 0.8 * 120  # a fresh model draws all bytes alike
    assert main(["generate", "mre-text", "To", "--effort", "0.01"]) == 2
    assert "mre-text.safetensors" not in capsys.readouterr().err


def test_its_paths_are_a_table(model):
    assert model.paths().active.shape == (256, 4, 8)
    assert model.plan(torch.tensor([list(b"To be")])).num_active.min() >= 1


def test_it_is_served_with_budgets(model):
    for address in running(Server([serve_model("mre-text")])):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
        options = {"model": "mre-text", "prompt": "To be, or ", "max_tokens": 12, "temperature": 0}
        (plain,) = client.completions.create(**options).choices
        (full,) = client.completions.create(**options, extra_body={"effort": 1}).choices
    drawn = list(model.generate(torch.tensor([list(b"To be, or ")]), 12, temperature=0))
    assert plain.text == bytes(int(one.tokens) for one in drawn).decode()
    assert full.experts >= plain.experts


def test_a_run_is_shipped_with_its_dial_and_a_card_and_not_before_it_is_complete(tmp_path, monkeypatch):
    small = {"context": 16, "steps": 2, "eval_tokens": 256}
    tiny = {"epochs": 1, "warmup": 0.0, "batch_size": 2, "data_options": small}
    sizes = {"dim": 16, "hidden": 8, "depth": 4, "num_experts": 8, "num_heads": 2, "stop_range": [0.02, 1]}
    monkeypatch.setattr(ship_text, "TRAINING", ship_text.TRAINING | tiny | {"model_options": sizes})
    with pytest.raises(ValueError, match=r"no epoch is complete; `python -m experiments.ship_text` continues it"):
        ship_text.ship(RunFolder(tmp_path / "mre-text"), tmp_path)
    run, package = ship_text.train(ship_text.make_config(tmp_path)), tmp_path / "package"
    package.mkdir()
    path = ship_text.ship(run, package)
    shipped, card = raytraced.load(path), (package / "mre-text.md").read_text()
    assert shipped.card.dial["rows"]
    assert f"| {shipped.card.dial['rows'][0]['stop']:.4g} |" in card
    assert f"- bits per byte: {run.read_summary()['test']['bits_per_byte']:.3f} (" in card
    assert "- 2 steps of 2 windows of 16 bytes, seed 0\n" in card
    assert str(tmp_path) not in card
    monkeypatch.setitem(ship_text.TRAINING, "epochs", 3)
    (run.path / "model.safetensors").unlink()  # as of a run that was stopped: the best epoch so far is shipped
    ship_text.ship(run, package)
    assert "seed 0; the recipe has 6 steps, for which there was no time yet" in (package / "mre-text.md").read_text()
    monkeypatch.setattr(ship_text, "MOST_BYTES", 1000)
    with pytest.raises(ValueError, match="must stay under 1,000"):
        ship_text.ship(RunFolder(tmp_path / "mre-text"), tmp_path / "package")
    assert not path.exists()


def test_the_committed_model_is_of_the_recipe(model, tmp_path):
    config = ship_text.make_config(tmp_path)
    assert (model.card.model, model.card.data) == (config.model, config.data)
    shared = ("model_options", "data_options", "batch_size", "lr", "lr_routing", "seed")
    assert {name: model.card.training[name] for name in shared} == {name: getattr(config, name) for name in shared}
