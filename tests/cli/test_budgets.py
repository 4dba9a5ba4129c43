"""Budgets on the command line: calibrate writes a table, and evaluate, predict and generate understand it."""

import json

import pytest
import torch

import raytraced
from raytraced.cli.main import main
from raytraced.models.card import ModelCard


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A language model, the text to calibrate it with, and the calibrated file."""
    folder = tmp_path_factory.mktemp("budgets")
    (folder / "own.txt").write_bytes(b"Sing, goddess, the anger of Peleus' son Achilles. " * 60)
    torch.manual_seed(0)
    sharp = {"entry_scale": 8.0, "input_init_std": 2.0, "weighting": "relative", "num_experts": 4}
    made = raytraced.build("gpt-mre", dim=16, hidden=8, depth=2, num_heads=2, context=16, **sharp)
    made.card = ModelCard(made.card.model, made.card.spec, made.card.options, task="text")
    raytraced.save(made, folder / "plain.safetensors")
    command = ["calibrate", str(folder / "plain.safetensors"), "--data", str(folder / "own.txt")]
    assert main([*command, "--output", str(folder / "dial.safetensors")]) == 0
    return folder


def test_a_calibrated_model_runs_the_experts_that_are_asked_for(model, capsys):
    dial = raytraced.load(model / "dial.safetensors").card.dial
    rows = dial["rows"]
    assert len(rows) > 3
    assert dial["split"] == "validation"
    assert all(one["stop"] > after["stop"] and one["macs"] < after["macs"] for one, after in zip(rows, rows[1:]))  # noqa: B905, RUF007
    wanted = round((rows[0]["experts"] + rows[-1]["experts"]) / 2, 2)
    words = ["--data", str(model / "own.txt"), "--split", "validation", "--json"]
    capsys.readouterr()
    assert main(["evaluate", str(model / "dial.safetensors"), *words, "--experts", str(wanted)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mean_experts"] == pytest.approx(wanted, abs=1.0)  # interpolated
    row = rows[1]
    assert main(["evaluate", str(model / "dial.safetensors"), *words, "--experts", str(row["experts"])]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mean_experts"] == pytest.approx(row["experts"], rel=1e-6)
    assert found["loss"] == pytest.approx(row["loss"], rel=1e-5)
    assert found["macs"]["total"] == pytest.approx(row["macs"], rel=1e-6)
    assert main(["evaluate", str(model / "dial.safetensors"), *words, "--stop", str(row["stop"])]) == 0
    assert json.loads(capsys.readouterr().out) == found
    few, many = [], []
    for effort, drawn in (("1", many), (str(rows[0]["macs"] / rows[-1]["macs"]), few)):
        prompt = [str(model / "dial.safetensors"), "Sing", "--length", "9", "--json", "--temperature", "0"]
        assert main(["generate", *prompt, "--effort", effort]) == 0
        drawn += json.loads(capsys.readouterr().out)["experts"]
    assert sum(few) < sum(many)


def test_budgets_that_cannot_be_met_are_refused_in_one_line(model, capsys):
    plain, dial = str(model / "plain.safetensors"), str(model / "dial.safetensors")
    cases = {
        "experts=4.0: the card of gpt-mre has no table of budgets; run raytraced calibrate first": [plain, "a", "--experts", "4"],
        "effort=0.5: the card of gpt-mre has no table of budgets": [plain, "a", "--effort", "0.5"],
        "experts=0: gpt-mre runs at least": [dial, "a", "--experts", "0"],
        "experts=900: gpt-mre runs at least": [dial, "a", "--experts", "900"],
        "effort=1.5: gpt-mre runs at least": [dial, "a", "--effort", "1.5"],
        "give either experts or effort": [dial, "a", "--effort", "1", "--experts", "3"],
        "give either stop or a budget, not both": [dial, "a", "--effort", "1", "--stop", "0.1"],
        "stop=0.0: must be": [dial, "a", "--stop", "0"],
    }  # fmt: skip
    for message, words in cases.items():
        assert main(["generate", *words]) == 2
        line = capsys.readouterr().err
        assert message in line
        assert line.count("\n") == 1


def refusal(capsys, *words):
    """The one line with which a command refuses."""
    assert main([*map(str, words)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_budget_does_not_go_with_draws(model, capsys):
    words = ["evaluate", model / "dial.safetensors", "--data", model / "own.txt", "--select", "sample"]
    assert "experts=4.0: must be left out with select=sample" in refusal(capsys, *words, "--experts", "4")
    assert "effort=0.5: must be left out with select=sample" in refusal(capsys, *words, "--effort", "0.5")
