"""The cost of an answer: parameters used and multiply-adds (MACs), counted for each sample from its active experts.

Only matrix products count, one multiply-add per product of a weight and an input. Additions, activations, softmaxes and
comparisons are not counted, for any model. Every layer reports its own cost; docs/guides/models.md defines the cost of routing.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from raytraced.models.output import Model, Output, num_parameters


class SampleCost(NamedTuple):
    """The cost of each answer; every field has the shape (B,) or (B, T)."""

    experts: Tensor  # number of expert runs
    parameters: Tensor  # number of parameters used
    input_macs: Tensor  # multiply-adds of the input block; of a decoder, of attention
    routing_macs: Tensor  # multiply-adds of the routing
    expert_macs: Tensor  # multiply-adds of the experts that ran
    head_macs: Tensor  # multiply-adds of the output layer

    @property
    def macs(self) -> Tensor:
        """Multiply-adds of the input block, the routing, the experts and the head together."""
        return self.input_macs + self.routing_macs + self.expert_macs + self.head_macs


@dataclass(frozen=True)
class ModelCost:
    """The size of a model, and its mean cost per sample."""

    parameters: int  # of the whole model
    used_parameters: float  # number that an answer used
    experts: float  # number of expert runs
    macs: float  # multiply-adds in all
    routing_macs: float  # of these, those of the routing
    expert_macs: float  # of these, those of the experts


def sample_cost(model: Model, inputs: Tensor, out: Output, mask: Tensor | None = None) -> SampleCost:
    """Count the cost of each answer of ``out = model(inputs)``.

    Args:
        model: The model.
        inputs: Its inputs (B, ...).
        out: Its output for these inputs.
        mask: False where an input is padding, which costs nothing: (B,) or (B, T), or None.

    Returns:
        SampleCost, every field (B,) or (B, T).
    """
    real = torch.ones_like(out.num_experts) if mask is None else mask.long()
    cost = model.cost(inputs, out)
    parameters = sum((part.parameters * real for part in cost.values()), torch.zeros_like(real))
    parts = (cost[name].macs * real for name in ("input", "routing", "experts", "head"))
    return SampleCost(out.num_runs, parameters, *parts)


@torch.no_grad()
def measure(model: Model, inputs: Tensor, batch_size: int = 1000) -> ModelCost:
    """Run a model in evaluation mode and measure its mean cost.

    Args:
        model: The model; it returns to training mode if it was in it.
        inputs: Inputs (B, ...), at least one: the cost of an adaptive model depends on them.
        batch_size: Number of inputs per call of the model; it does not change the result.

    Returns:
        ModelCost with means over the inputs.
    """
    if not len(inputs):
        raise ValueError("inputs: is empty; the cost of an adaptive model depends on its inputs, give at least one")
    was_training = model.training
    model.eval()
    costs = [sample_cost(model, part, model(part)) for part in inputs.split(batch_size)]
    model.train(was_training)

    def mean(name: str) -> float:
        return float(torch.cat([getattr(cost, name) for cost in costs]).double().mean())

    names = ("experts", "macs", "routing_macs", "expert_macs")
    return ModelCost(num_parameters(model), mean("parameters"), *map(mean, names))
