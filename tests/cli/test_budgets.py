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
        "experts=4.0: the card of gpt-mre has no table of budgets; run `raytraced calibrate ": [plain, "a", "--experts", "4"],
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


@pytest.fixture(scope="module")
def others(model):
    """Models without a budget, one with a table of another kind of paths, and a store."""
    sizes = {"dim": 16, "hidden": 8, "depth": 2, "num_heads": 2, "context": 16}
    for name in ("gpt-planned", "gpt-top-k"):
        made = raytraced.build(name, **sizes)
        made.card = ModelCard(made.card.model, made.card.spec, made.card.options, task="text")
        raytraced.save(made, model / f"{name}.safetensors")
    raytraced.save(raytraced.load(model / "plain.safetensors"), model / "store.safetensors", store=True)
    return model


@pytest.mark.parametrize("name", ["gpt-planned", "gpt-top-k"])
@pytest.mark.parametrize("option", ["experts", "effort", "stop"])
def test_a_model_without_a_budget_says_so_with_the_option_and_its_value(others, name, option, capsys):
    rule = f"{option}=0.5: only for models that answer along the way, {name} does not; leave it out"
    file = others / f"{name}.safetensors"
    assert rule in refusal(capsys, "evaluate", file, "--data", others / "own.txt", f"--{option}", "0.5")
    assert rule in refusal(capsys, "generate", file, "a", f"--{option}", "0.5")


def test_the_remedy_for_a_missing_table_works(others, tmp_path, capsys):
    file, data = tmp_path / "best.safetensors", ["--data", others / "own.txt"]
    file.write_bytes((others / "plain.safetensors").read_bytes())
    line = refusal(capsys, "evaluate", file, *data, "--effort", "1")
    command = line.partition("`")[2].partition("`")[0].split()
    assert command == ["raytraced", "calibrate", str(file)]
    assert main([*command[1:], *map(str, data)]) == 0
    assert main([*map(str, ["evaluate", file, *data, "--effort", "1"])]) == 0


def test_an_option_beside_a_recorded_route_is_refused_by_its_own_name(others, capsys):
    words = [
        "evaluate",
        others / "dial.safetensors",
        "--data",
        others / "own.txt",
        "--routes",
        others / "r.safetensors",
    ]
    for option in ("experts", "effort", "stop"):
        rule = f"{option}=0.5: must be left out with --routes, which says what runs"
        assert rule in refusal(capsys, *words, f"--{option}", "0.5")
    rule = "experts=4.0: must be left out with --route, which says what runs"
    assert rule in refusal(capsys, "export", "mre-digits", "--route", "--experts", "4")


def test_calibration_refuses_before_it_measures_and_leaves_nothing(others, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("raytraced.training.calibration.measure_dial", lambda *_: pytest.fail("measured"))
    data = ["--data", others / "own.txt"]
    plain, stored = others / "plain.safetensors", others / "store.safetensors"
    cases = [
        (plain, "output", tmp_path / "no" / "x.safetensors", "its folder does not exist; make it first"),
        (plain, "output", tmp_path / "x.txt", "must end in .safetensors"),
        (plain, "output", tmp_path, "must end in .safetensors"),
        (plain, "within", "-1.0", "must be at least 0 points"),
        (plain, "within", "0.5", "is for models with exits, gpt-mre has none; leave it out"),
        (plain, "exit-every", "layer", "is for models with exits, gpt-mre has none; leave it out"),
    ]
    for file, option, value, rule in cases:
        line = refusal(capsys, "calibrate", file, *data, f"--{option}", value)
        assert f"{option.replace('-', '_')}={value}: {rule}" in line
    rule = "is a store, which is not changed; calibrate the run, then write the store"
    assert f"run={stored}: {rule}" in refusal(capsys, "calibrate", stored, *data)
    (tmp_path / "folder.safetensors").mkdir()
    line = refusal(capsys, "calibrate", plain, *data, "--output", tmp_path / "folder.safetensors")
    assert "folder.safetensors: is a folder; give the name of a file" in line
    assert [file.name for file in tmp_path.iterdir()] == ["folder.safetensors"]


def test_options_of_training_that_paths_cannot_have_are_named(others, tmp_path, capsys):
    words = [
        "train",
        "--data",
        others / "own.txt",
        "--model",
        "gpt-mre",
        "--epochs",
        "1",
        "--runs-dir",
        tmp_path / "runs",
    ]
    line = refusal(capsys, *words, "--model-options.path_tokens", "2", "--target-experts", "3")
    assert (
        "target_experts=3.0: is for paths with an order, those of one token; set the model option path_tokens to 1"
        in line
    )
    assert "exit_loss=0.5: model 'gpt-mre' has no exits; leave it at 0" in refusal(capsys, *words, "--exit-loss", "0.5")
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())
