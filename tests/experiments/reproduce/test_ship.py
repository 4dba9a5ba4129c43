"""Models for the package: the right seed, a card, a limit."""

from dataclasses import replace

import pytest
import torch

import raytraced
from experiments.reproduce import ship as shipping
from experiments.reproduce.records import Results
from experiments.reproduce.ship import ship_all
from raytraced.io.finding import PRETRAINED
from raytraced.models.registry import SHIPPED


def write_model(folder, record):
    side = 8 if record.data == "digits" else 28
    model = raytraced.build("mre", image_shape=(1, side, side), num_classes=10)
    model.card = replace(model.card, training={"seed": record.seed})
    (folder / record.folder).mkdir(parents=True)
    raytraced.save(model, folder / record.folder / "model.safetensors")


def test_the_seed_that_did_best_on_validation_is_shipped_with_its_card(tmp_path, record):
    records = [
        record("digits", "mre", seed, validation=validation, accuracy=accuracy)
        for seed, (validation, accuracy) in enumerate([(0.88, 0.99), (0.89, 0.871), (0.87, 0.98)])
    ]
    for one in records:
        write_model(tmp_path / "runs", one)
    (path,) = ship_all(Results(records), tmp_path / "runs", tmp_path / "package")
    assert path.name == "mre-digits.safetensors"
    shipped = raytraced.load(path)
    assert shipped.card.training == {"seed": 1}
    trained = raytraced.load(tmp_path / "runs" / records[1].folder / "model.safetensors")
    assert all(torch.equal(tensor, shipped.state_dict()[key]) for key, tensor in trained.state_dict().items())
    card = (tmp_path / "package" / "mre-digits.md").read_text()
    for part in (
        "digits",
        "87.10 %",
        "40,202 parameters",
        "3.00 of 32",
        'raytraced.load("mre-digits")',
        "seed 1",
        "lr: 0.005",
        "python -m experiments.reproduce --only ship",
    ):
        assert part in card
    assert str(tmp_path) not in card
    assert card.endswith("ship\n")


def test_a_shipped_model_knows_its_budgets_unless_it_draws_its_experts(tmp_path, record):
    greedy, drawn = record("digits", "mre"), record("digits", "mre", seed=1)
    drawn = replace(drawn, config=replace(drawn.config, select="sample"))
    for one in (greedy, drawn):
        write_model(tmp_path / "runs", one)
        (path,) = ship_all(Results([one]), tmp_path / "runs", tmp_path / str(one.seed))
        rows, card = raytraced.load(path).card.dial.get("rows", []), path.with_suffix(".md").read_text()
        assert bool(rows) == ("## Dial" in card) == ("--experts" in card) == (one is greedy)
        for row in rows:
            assert f"| {row['stop']:.4g} | {row['experts']:.2f} | {row['macs']:,.0f} | {row['loss']:.4f} |" in card


@pytest.mark.parametrize("name", SHIPPED)
def test_models_of_the_package_understand_budgets(name):
    model = raytraced.load(name)
    rows, is_drawn = model.card.dial.get("rows", []), "paper" in name
    assert bool(rows) != is_drawn
    assert bool(rows) == ("| `stop` |" in (PRETRAINED / f"{name}.md").read_text())
    if rows:
        assert rows[-1]["stop"] < model.resolve_budget(None, 4.0, None) < rows[0]["stop"]
        assert model.resolve_budget(None, None, 1.0) == pytest.approx(rows[-1]["stop"])


def test_a_model_that_is_too_large_is_not_shipped(tmp_path, record, monkeypatch):
    one = record("mnist", "mre")
    write_model(tmp_path / "runs", one)
    monkeypatch.setattr(shipping, "MOST_BYTES", 1000)
    with pytest.raises(ValueError, match="a shipped model must stay under 1,000"):
        ship_all(Results([one]), tmp_path / "runs", tmp_path / "package")


def test_the_error_for_missing_weights_names_the_command_that_trains_them(tmp_path, record):
    with pytest.raises(ValueError, match=r"python -m experiments.reproduce --only ship"):
        ship_all(Results([record("mnist", "mre")]), tmp_path / "runs", tmp_path / "package")
