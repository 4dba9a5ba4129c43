"""How good a model is, and what it used: deterministic, and the same whatever the batch size or the number of processes.

n samples of the split, B samples of a batch, L layers, N experts a layer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from raytraced.data import Loader
from raytraced.training.world import World

NUM_BINS = 15

Predict = Callable[..., Any]
"""predict(images, rows, seed, **options) -> Output, as Objective.predict"""


@dataclass(frozen=True)
class Evaluation:
    """Figures over a whole split; those of a class without samples are None."""

    num_samples: int
    accuracy: float
    loss: float
    calibration_error: float
    mean_experts: float
    accuracy_per_class: list[float | None]
    experts_per_class: list[float | None]
    expert_load: list[list[float]]  # (L, N): share of the samples that activated each node
    accuracy_by_prefix: list[float] | None  # with at most 0, 1, 2, … experts; None where a model has one answer only


@torch.no_grad()
def evaluate(
    predict: Predict,
    loader: Loader,
    world: World,
    num_classes: int,
    *,
    seed: int = 0,
    by_prefix: bool = False,
    **options: Any,
) -> Evaluation:
    """Evaluate on every sample of an unshuffled loader; options (select, max_experts) go to the model.

    Each sample's figures land in its own row of a table, which is summed in one order at the end: neither the batch
    size nor the number of processes has a say.
    """
    num = len(loader.labels)
    columns = torch.zeros(4, num, dtype=torch.float64, device=world.device)
    load_LN: Tensor | None = None
    for number, batch in enumerate(loader.epoch(0)):
        rows_B = batch.rows + number * loader.batch_size
        out = predict(batch.images, rows_B, seed, **options)
        logits = out.logits.float()
        confidence_B, answer_B = logits.softmax(-1).max(-1)
        loss_B = cross_entropy(logits, batch.labels, reduction="none")
        experts_B = out.active.sum((-1, -2))
        correct_B = answer_B == batch.labels
        columns[:, rows_B] = torch.stack([value.double() for value in (correct_B, loss_B, confidence_B, experts_B)])
        load = out.active.sum(0).double()
        load_LN = load if load_LN is None else load_LN + load
    assert load_LN is not None  # a loader has at least one sample
    correct_n, loss_n, confidence_n, experts_n = world.sum(columns)
    labels_n = loader.labels
    prefixes = accuracy_by_prefix(predict, loader, world, int(experts_n.max()), seed, options) if by_prefix else None
    return Evaluation(
        num_samples=num,
        accuracy=float(correct_n.mean()),
        loss=float(loss_n.mean()),
        calibration_error=calibration_error(confidence_n, correct_n),
        mean_experts=float(experts_n.mean()),
        accuracy_per_class=mean_per_class(correct_n, labels_n, num_classes),
        experts_per_class=mean_per_class(experts_n, labels_n, num_classes),
        expert_load=(world.sum(load_LN) / num).tolist(),
        accuracy_by_prefix=prefixes,
    )


def accuracy_by_prefix(
    predict: Predict, loader: Loader, world: World, longest: int, seed: int, options: dict[str, Any]
) -> list[float]:
    """The accuracy of the answers with at most 0, 1, …, longest experts."""
    num_correct = torch.zeros(longest + 1, dtype=torch.float64, device=world.device)
    for number, batch in enumerate(loader.epoch(0)):
        rows_B = batch.rows + number * loader.batch_size
        for budget in range(longest + 1):
            out = predict(batch.images, rows_B, seed, **options | {"max_experts": budget})
            num_correct[budget] += (out.logits.argmax(-1) == batch.labels).sum()
    return [float(value) for value in world.sum(num_correct) / len(loader.labels)]


def mean_per_class(values_n: Tensor, labels_n: Tensor, num_classes: int) -> list[float | None]:
    """The mean value of each class's samples."""
    counts = torch.bincount(labels_n, minlength=num_classes)
    sums = torch.zeros(num_classes, dtype=torch.float64, device=values_n.device).index_add_(0, labels_n, values_n)
    return [float(total / count) if count else None for total, count in zip(sums, counts, strict=True)]


def calibration_error(confidence_n: Tensor, correct_n: Tensor) -> float:
    """The expected calibration error: |accuracy − confidence|, averaged over samples in 15 equal bins of confidence."""
    bin_n = (confidence_n * NUM_BINS).long().clamp(max=NUM_BINS - 1)
    gaps = torch.zeros(NUM_BINS, dtype=torch.float64, device=confidence_n.device)
    gaps.index_add_(0, bin_n, correct_n - confidence_n)
    return float(gaps.abs().sum() / len(confidence_n))
