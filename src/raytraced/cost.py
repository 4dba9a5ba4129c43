"""What an answer costs: parameters and multiply-adds, counted sample by sample from what was activated.

Only matrix products count, one multiply-add for each pair of a weight and an input that meet; additions, activations,
softmaxes and comparisons do not, for any model. Every layer states its own work: docs/models.md says what routing is
charged with.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from raytraced.models.output import Model, Output, num_parameters


class SampleCost(NamedTuple):
    """What each answer took, (B,) or (B, T) each."""

    experts: Tensor  # how many expert runs
    parameters: Tensor  # how many parameters took part
    input_multiply_adds: Tensor
    routing_multiply_adds: Tensor
    expert_multiply_adds: Tensor
    head_multiply_adds: Tensor

    @property
    def multiply_adds(self) -> Tensor:
        return (
            self.input_multiply_adds + self.routing_multiply_adds + self.expert_multiply_adds + self.head_multiply_adds
        )


@dataclass(frozen=True)
class Cost:
    """The account of a model: its size, and means over samples."""

    parameters: int
    used_parameters: float
    experts: float
    multiply_adds: float
    routing_multiply_adds: float
    expert_multiply_adds: float


def sample_cost(model: Model, inputs: Tensor, out: Output, mask: Tensor | None = None) -> SampleCost:
    """What each answer of `out = model(inputs)` took; where the mask is False there is padding, which costs nothing."""
    real = torch.ones_like(out.num_experts) if mask is None else mask.long()
    work = model.work(inputs, out)
    parameters = sum((part.parameters * real for part in work.values()), torch.zeros_like(real))
    parts = (work[name].multiply_adds * real for name in ("input", "routing", "experts", "head"))
    return SampleCost(out.num_runs, parameters, *parts)


@torch.no_grad()
def measure(model: Model, inputs: Tensor, batch_size: int = 1000) -> Cost:
    """Run a model on inputs as a user would, and account for what it did."""
    if not len(inputs):
        raise ValueError("inputs: none given; the cost of an adaptive model depends on its inputs")
    was_training = model.training
    model.eval()
    costs = [sample_cost(model, part, model(part)) for part in inputs.split(batch_size)]
    model.train(was_training)

    def mean(name: str) -> float:
        return float(torch.cat([getattr(cost, name) for cost in costs]).double().mean())

    names = ("experts", "multiply_adds", "routing_multiply_adds", "expert_multiply_adds")
    return Cost(num_parameters(model), mean("parameters"), *map(mean, names))
