"""What a trained model does with every test image: cost, answers along the sequence, who uses which expert.

Axes: B samples of a batch, n of a split, L layers, N experts a layer, K budgets.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from raytraced.analysis.load import accuracy_by_length, load_by_class
from raytraced.classifier import RaytracedClassifier
from raytraced.cost import sample_cost
from raytraced.data import Dataset, Loader, Split
from raytraced.saving import ModelCard

MOST_BUDGETS = 20
NUM_SHOWN = 12  # images of each number of experts in the gallery


class Pass(NamedTuple):
    """Sample by sample over a split, (n, …)."""

    correct: Tensor
    active: Tensor  # (n, L, N)
    macs: dict[str, Tensor]
    parameters: Tensor

    @property
    def experts(self) -> Tensor:
        return self.active.flatten(1).sum(1)


@torch.no_grad()
def run_over(model: nn.Module, split: Split, card: ModelCard, budgets: Sequence[int | None] = (None,)) -> list[Pass]:
    """Run a model over a split as a user would, once for each budget of experts (None: no budget)."""
    parts: list[list[Pass]] = [[] for _ in budgets]
    for batch in Loader(split, 1000, mean=card.mean, std=card.std, shuffle=False).epoch(0):
        # the input block is the same for every budget, and for colour images nearly all of the work
        hidden_BD = model.input_block(batch.images) if isinstance(model, RaytracedClassifier) else None
        for part, budget in zip(parts, budgets, strict=True):
            if isinstance(model, RaytracedClassifier) and hidden_BD is not None:
                out = model.classify(hidden_BD, max_experts=budget)
            else:
                out = model(batch.images)
            cost = sample_cost(model, batch.images, out)
            macs = {
                "total": cost.multiply_adds,
                "input": cost.input_multiply_adds,
                "routing": cost.routing_multiply_adds,
                "experts": cost.expert_multiply_adds,
                "head": cost.head_multiply_adds,
            }
            part.append(Pass(out.logits.argmax(-1) == batch.labels, out.active, macs, cost.parameters))
    return [join(part) for part in parts]


def join(parts: list[Pass]) -> Pass:
    """Batches one after the other."""
    return Pass(
        torch.cat([one.correct for one in parts]),
        torch.cat([one.active for one in parts]),
        {name: torch.cat([one.macs[name] for one in parts]) for name in parts[0].macs},
        torch.cat([one.parameters for one in parts]),
    )


def measure_run(model: nn.Module, card: ModelCard, dataset: Dataset) -> dict[str, Any]:
    """The fields of a record that need the model itself."""
    (final,) = run_over(model, dataset.test, card)
    figures: dict[str, Any] = {
        "used_parameters": mean(final.parameters),
        "macs": {name: mean(value) for name, value in final.macs.items()},
    }
    if not isinstance(model, RaytracedClassifier):
        return figures
    longest = min(int(final.experts.max()), MOST_BUDGETS)
    tests = run_over(model, dataset.test, card, range(longest + 1))
    validations = run_over(model, dataset.validation, card, range(longest + 1))
    budgets = [
        {
            "validation_accuracy": mean(validation.correct),
            "validation_macs": mean(validation.macs["total"]),
            "accuracy": mean(test.correct),
            "experts": mean(test.experts),
            "macs": mean(test.macs["total"]),
            "expert_macs": mean(test.macs["experts"]),
        }
        for test, validation in zip(tests, validations, strict=True)
    ]
    num_active_n = final.experts.long()
    counts = torch.bincount(num_active_n)
    curves = accuracy_by_length(torch.stack([test.correct for test in tests], 1), num_active_n)
    labels_n = dataset.test.labels
    return figures | {
        "budgets": budgets,
        "lengths": {str(length): {"num": int(counts[length]), "accuracy": curve} for length, curve in curves.items()},
        "class_load": load_by_class(final.active, labels_n, dataset.num_classes).tolist(),
        "gallery": choose_gallery(num_active_n, final.correct),
    }


def choose_gallery(num_active_n: Tensor, correct_n: Tensor) -> dict[str, list[int]]:
    """The first correctly classified images of each number of experts: no picking by looks."""
    shown = {}
    for length in sorted(set(num_active_n.tolist())):
        rows = ((num_active_n == length) & correct_n).nonzero()[:, 0]
        if len(rows):
            shown[str(length)] = rows[:NUM_SHOWN].tolist()
    return shown


def mean(values: Tensor) -> float:
    """The mean as a Python number."""
    return float(values.double().mean())
