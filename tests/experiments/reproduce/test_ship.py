"""Models for the package: the right seed, a card, a limit."""

from dataclasses import replace

import pytest

import raytraced
from experiments.reproduce import ship as shipping
from experiments.reproduce.records import Results
from experiments.reproduce.ship import ship_all


def write_model(folder, record):
    model = raytraced.build("mre", image_shape=(1, 28, 28), num_classes=10)
    model.card = replace(model.card, training={"seed": record.seed})
    (folder / record.folder).mkdir(parents=True)
    raytraced.save(model, folder / record.folder / "model.safetensors")


def test_the_seed_that_did_best_on_validation_is_shipped_with_its_card(tmp_path, record):
    records = [
        record("fashion-mnist", "mre", seed, validation=validation, accuracy=accuracy)
        for seed, (validation, accuracy) in enumerate([(0.88, 0.99), (0.89, 0.871), (0.87, 0.98)])
    ]
    for one in records:
        write_model(tmp_path / "runs", one)
    (path,) = ship_all(Results(records), tmp_path / "runs", tmp_path / "package")
    assert path.name == "mre-fashion-mnist.safetensors"
    assert raytraced.load(path).card.training == {"seed": 1}
    card = (tmp_path / "package" / "mre-fashion-mnist.md").read_text()
    for part in (
        "fashion-mnist",
        "87.10 %",
        "40,202 parameters",
        "3.00 of 32",
        'raytraced.load("mre-fashion-mnist")',
        "seed 1",
        "lr: 0.005",
        "python -m experiments.reproduce --only ship",
    ):
        assert part in card
    assert str(tmp_path) not in card
    assert card.endswith("ship\n")


def test_a_model_that_is_too_large_is_not_shipped(tmp_path, record, monkeypatch):
    one = record("mnist", "mre")
    write_model(tmp_path / "runs", one)
    monkeypatch.setattr(shipping, "MOST_BYTES", 1000)
    with pytest.raises(ValueError, match="a shipped model must stay under 1,000"):
        ship_all(Results([one]), tmp_path / "runs", tmp_path / "package")


def test_the_error_for_missing_weights_names_the_command_that_trains_them(tmp_path, record):
    with pytest.raises(ValueError, match=r"python -m experiments.reproduce --only ship"):
        ship_all(Results([record("mnist", "mre")]), tmp_path / "runs", tmp_path / "package")
