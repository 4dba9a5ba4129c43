"""Made-up records: a run's figures as they would be, without the run."""

import pytest

from raytraced.reproduce.records import Record


def make_record(data="mnist", label="mre", seed=0, group="main", **figures):
    """A record with plausible figures, and those given in their place."""
    accuracy = figures.pop("accuracy", 0.9)
    experts = figures.pop("experts", 3.0)
    curve = figures.pop("curve", [accuracy])
    expert_macs = figures.pop("expert_macs", 768.0 * experts)
    own = {
        "epochs": len(curve),
        "lr": 5e-3,
        "history": [
            {"epoch": at + 1, "validation_accuracy": value, "validation_experts": experts, "train_loss": 0.1, "train_accuracy": value, "seconds": 2.0}
            for at, value in enumerate(curve)
        ],
        "validation": {"accuracy": figures.pop("validation", accuracy), "mean_experts": experts},
        "test": {
            "accuracy": accuracy,
            "mean_experts": experts,
            "expert_load": [[0.5] * 8] * 4,
            "experts_per_class": [1.0, 2.0, 3.0],
            "accuracy_per_class": [0.99, 0.95, 0.8],
            "accuracy_by_prefix": [0.5, accuracy],
        },
        "parameters": 40_202,
        "used_parameters": 20_000.0,
        "macs": {"total": 12_704.0 + 300 + expert_macs, "input": 12_544.0, "head": 160.0, "routing": 300.0, "experts": expert_macs},
        "seconds": 2.0 * len(curve),
        "config": {"model_options": {}, "optimizer": "adam", "lr": 5e-3, "schedule": "cosine", "batch_size": 256},
    }  # fmt: skip
    if label.startswith("mre"):
        steps = figures.pop("prefixes", [accuracy - 0.05, accuracy - 0.01, accuracy])
        validated = figures.pop("validated_prefixes", steps)
        own |= {
            "budgets": [
                {"validation_accuracy": validated[at], "validation_macs": 12_704.0 + 768 * at, "accuracy": value, "experts": float(at), "macs": 12_704.0 + 768 * at, "expert_macs": 768.0 * at}
                for at, value in enumerate(steps)
            ],
            "lengths": {"1": {"num": 30, "accuracy": [0.8, 0.99]}, "2": {"num": 70, "accuracy": [0.7, 0.8, 0.9]}},
            "class_load": [[[0.5] * 8] * 4] * 3,
            "gallery": {"1": [0, 1], "2": [2]},
        }  # fmt: skip
    names = {
        "key": f"{group}-{data}-{label}-s{seed}",
        "digest": "0",
        "group": group,
        "data": data,
        "label": label,
        "seed": seed,
    }
    return Record(**names | own | figures)


@pytest.fixture
def record():
    return make_record
