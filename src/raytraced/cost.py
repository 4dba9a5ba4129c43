"""What an answer costs: parameters and multiply-adds, counted sample by sample from what was activated.

Only matrix products count, one multiply-add for each pair of a weight and an input that meet; additions, activations,
softmaxes and comparisons do not, for any model. docs/models.md says what the routing of each model is charged with.

Axes: B batch, C channels, H × W pixels, L layers, N experts a layer, O = N + 1 outlets of a gate, T steps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from raytraced.baselines.multi_exit import MultiExitClassifier
from raytraced.baselines.routed import RoutedExperts
from raytraced.classifier import Output
from raytraced.layer import RaytracedExperts
from raytraced.routing import RoutingNetwork


class SampleCost(NamedTuple):
    """What each sample's answer took, (B,) each."""

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


class Work(NamedTuple):
    """Multiply-adds and parameters of some part of a model, for each sample (B,) or for any."""

    multiply_adds: Tensor | int
    parameters: Tensor | int


def count_multiply_adds(run: Callable[[], object]) -> int:
    """The multiply-adds of all matrix products and convolutions that PyTorch executes in a call."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        run()
    return counter.get_total_flops() // 2


def num_parameters(module: nn.Module) -> int:
    """How many numbers a module learns."""
    return sum(parameter.numel() for parameter in module.parameters())


def gate_multiply_adds(routing: RoutingNetwork) -> list[int]:
    """The multiply-adds of one node's gate, W·x with W (O, K), in each layer; also its parameters. The last has none."""
    N, L = routing.num_experts, routing.num_layers
    return [(N + 1) * (1 if layer == 0 else N) if layer < L - 1 else 0 for layer in range(L)]


def raytraced_work(routing: RoutingNetwork, nodes_BT: Tensor) -> Work:
    """The gates that sequences evaluate, each step redoing no more than it changed.

    A new node evaluates its own gate, and those of the active nodes in all layers below it, whose inputs it has changed.
    Nodes beside it and above it keep theirs. Inactive nodes need none: their firing rate is a sum.
    """
    N, L = routing.num_experts, routing.num_layers
    gate_L = torch.tensor(gate_multiply_adds(routing), device=nodes_BT.device)
    layers_L = torch.arange(L, device=nodes_BT.device)
    count_BL = torch.zeros(len(nodes_BT), L, dtype=torch.int64, device=nodes_BT.device)
    work_B = count_BL.new_zeros(len(nodes_BT))
    for node_B in nodes_BT.unbind(1):
        drawn_B1 = (node_B >= 0)[:, None]
        layer_B1 = (node_B // N)[:, None]
        count_BL = count_BL + (drawn_B1 & (layers_L == layer_B1))
        redone_BL = torch.where(layers_L == layer_B1, 1, count_BL) * (layers_L >= layer_B1) * drawn_B1
        work_B = work_B + (redone_BL * gate_L).sum(-1)
    return Work(work_B, (count_BL * gate_L).sum(-1))


def routing_work(model: nn.Module, out: Output) -> Work:
    """What it took to decide what to run."""
    layer = model.layer
    if isinstance(layer, RaytracedExperts):
        assert out.sequence is not None
        gates = raytraced_work(layer.routing, out.sequence.nodes)
        return Work(gates.multiply_adds + layer.gate.weight.numel(), gates.parameters + num_parameters(layer.gate))
    if isinstance(model, MultiExitClassifier):
        # Answers that were not sure enough; the one that was is the head.
        tried_B = out.active.flatten(1).sum(-1).long()
        head = model.heads[0]
        assert isinstance(head, nn.Linear)
        return Work(tried_B * head.weight.numel(), tried_B * num_parameters(head))
    return Work(layer.routing_multiply_adds, layer.routing_parameters)  # type: ignore[arg-type, union-attr]


def sample_cost(model: nn.Module, images: Tensor, out: Output) -> SampleCost:
    """What each answer of `out = model(images)` took, from its active set and, if it has one, its sequence."""
    layer, active_BLN = model.layer, out.active.detach()
    row_D = out.hidden.detach()[:1]
    head = model.heads[0] if isinstance(model, MultiExitClassifier) else model.head
    experts = layer.experts  # type: ignore[union-attr]
    assert isinstance(experts, nn.Module)
    runs_B = active_BLN.flatten(1).sum(-1).long()
    # An expert that runs in two rounds has its parameters once.
    num_rounds = layer.num_rounds if isinstance(layer, RoutedExperts) else 1
    used_B = active_BLN.unflatten(1, (-1, num_rounds)).amax(2).flatten(1).sum(-1).long()
    num_nodes = int(experts.num_layers) * int(experts.num_experts)  # type: ignore[arg-type]
    routing = routing_work(model, out)
    fixed = num_parameters(model.input_block) + num_parameters(head)  # type: ignore[arg-type]
    per_expert = count_multiply_adds(lambda: experts.run_expert(0, 0, row_D))  # type: ignore[operator]

    def for_all(value: Tensor | int) -> Tensor:
        return value + torch.zeros_like(runs_B)

    return SampleCost(
        experts=runs_B,
        parameters=fixed + routing.parameters + used_B * (num_parameters(experts) // num_nodes),
        input_multiply_adds=for_all(count_multiply_adds(lambda: model.input_block(images[:1]))),  # type: ignore[operator]
        routing_multiply_adds=for_all(routing.multiply_adds),
        expert_multiply_adds=runs_B * per_expert,
        head_multiply_adds=for_all(count_multiply_adds(lambda: head(row_D))),  # type: ignore[operator]
    )


@torch.no_grad()
def measure(model: nn.Module, images: Tensor, batch_size: int = 1000) -> Cost:
    """Run a model on normalised images (B, C, H, W) as a user would, and account for what it did."""
    if not len(images):
        raise ValueError("images: none given; the cost of an adaptive model depends on its inputs")
    was_training = model.training
    model.eval()
    costs = [sample_cost(model, part, model(part)) for part in images.split(batch_size)]
    model.train(was_training)

    def mean(values: list[Tensor]) -> float:
        return float(torch.cat(values).double().mean())

    return Cost(
        parameters=num_parameters(model),
        used_parameters=mean([cost.parameters for cost in costs]),
        experts=mean([cost.experts for cost in costs]),
        multiply_adds=mean([cost.multiply_adds for cost in costs]),
        routing_multiply_adds=mean([cost.routing_multiply_adds for cost in costs]),
        expert_multiply_adds=mean([cost.expert_multiply_adds for cost in costs]),
    )
