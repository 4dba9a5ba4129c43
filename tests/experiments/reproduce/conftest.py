"""Made-up records: a run's figures as they would be, without the run."""

import pytest

import tiny_runs as tiny
from experiments.reproduce.records import Record
from raytraced.training.config import TrainConfig


def make_record(data="mnist", label="mre", seed=0, group="main", **figures):
    """A record with plausible figures, and those given in their place."""
    accuracy, experts = figures.pop("accuracy", 0.9), figures.pop("experts", 3.0)
    curve, steps = (
        figures.pop("curve", [accuracy]),
        figures.pop("prefixes", [accuracy - 0.05, accuracy - 0.01, accuracy]),
    )
    lr, family = figures.pop("lr", 5e-3), figures.pop("family", label)
    config = figures.pop("config", TrainConfig(data=data, seed=seed, epochs=len(curve), lr=lr))
    macs = {
        "total": 13_004.0 + 768 * experts,
        "input": 12_544.0,
        "routing": 300.0,
        "experts": 768.0 * experts,
        "head": 160.0,
    }
    own = {
        "history": {name: list(curve) for name in ("train_loss", "train_accuracy", "validation_accuracy", "validation_experts")}
        | {"seconds": [2.0] * len(curve)},
        "validation": {"accuracy": figures.pop("validation", accuracy), "mean_experts": experts},
        "test": {
            "accuracy": accuracy,
            "mean_experts": experts,
            "expert_load": [[0.5] * 8] * 4,
            "experts_per_class": [1.0, 2.0, 3.0],
            "accuracy_per_class": [0.99, 0.95, 0.8],
            "used_parameters": 20_000.0,
            "macs": macs,
        },
        "parameters": 40_202,
        "seconds": 2.0 * len(curve),
        "versions": {"raytraced": "0"},
    }  # fmt: skip
    if family in ("mre", "mre-paper"):
        own["test"] |= {
            "lengths": {"1": {"num": 30, "accuracy": [0.8, 0.99]}, "2": {"num": 70, "accuracy": [0.7, 0.8, 0.9]}},
            "class_load": [[[0.5] * 8] * 4] * 3,
            "gallery": {"1": [0, 1], "2": [2]},
        }
        own["budgets"] = [
            {"validation_accuracy": value, "validation_macs": 12_704.0 + 768 * at, "accuracy": value, "experts": float(at), "macs": 12_704.0 + 768 * at, "expert_macs": 768.0 * at}
            for at, value in enumerate(steps)
        ]  # fmt: skip
    return Record(**{"group": group, "label": label, "config": config, "family": family} | own | figures)


@pytest.fixture
def record():
    return make_record


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """The folder of two small runs that no one disturbed, and what their runner printed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    process = tiny.start(folder, 2)
    output, _ = process.communicate(timeout=tiny.SECONDS)
    assert process.returncode == 0, output
    return folder, output
