"""Other ways to choose a path, tried against the activation sequence by `python -m experiments.depth`.

- within-layer: a node is active if its rate is a share of the largest of its layer; the output node takes no part.
- last-layer-gates: the last layer's nodes have gates too, to the inactive nodes beside them and to the output node.
- moving-thresholds: sigmoid gates, each active above a threshold of its own that moves towards a mean load.

Axes: B batch, L layers, N experts per layer, O = N + 1 outlets, D width.
"""

from typing import Any

import torch
from torch import Tensor, nn

from raytraced import plugins
from raytraced.models.registry import GRID, ModelInfo
from raytraced.router import Call, Choice, Router
from raytraced.routers.choosing import global_load, top_mask
from raytraced.routers.raytraced import RaytracedRouter
from raytraced.routers.raytraced_config import RaytracedConfig
from raytraced.routing import Rates, RoutingNetwork
from raytraced.sequence import expert_weights, unroll

# The start of our decoder; its `stop` and weights are options of the routers below.
START: dict[str, Any] = {
    "entry_scale": 16.0,
    "input_init_std": 3.0,
    "input_rank": 16,
    "output_logit_offset": 8.0,
    "weighting": "relative",
}


class WithinLayer(Router):
    """MRE's gates, whose rates are compared within each layer.

    Args:
        dim: Width of the hidden vectors.
        num_layers: Number of expert layers.
        num_experts: Number of experts per layer.
        share: A node is active if its rate is at least this share of the largest rate of its layer.
        weight_scale: Factor of all weights, which are rates over the largest of the layer.
    """

    plans = True

    def __init__(
        self, dim: int, num_layers: int, num_experts: int, *, share: float = 0.5, weight_scale: float = 2.0
    ) -> None:
        super().__init__(dim, num_layers, num_experts, num_outlets=0)
        self.share, self.weight_scale = share, weight_scale
        self.network = RaytracedRouter(dim, num_layers, num_experts, RaytracedConfig(**START))

    def alike(self, call: Call) -> bool:
        return True

    def plan(self, hidden_BD: Tensor, call: Call) -> Choice:
        super().plan(hidden_BD, call)
        entry_BN, logits_BLNO = self.network.entry(hidden_BD), self.network.input_logits(hidden_BD)
        active_BLN = entry_BN.new_zeros(len(entry_BN), self.num_layers, self.num_experts)
        for layer in range(self.num_layers):
            with torch.no_grad():
                rates_BN = self.network.routing(entry_BN, active_BLN, logits_BLNO).nodes[:, layer]
            largest_B1 = rates_BN.amax(-1, keepdim=True)
            chosen_BN = (rates_BN >= self.share * largest_B1).to(active_BLN)
            active_BLN = active_BLN.index_copy(1, torch.tensor([layer]), chosen_BN[:, None])
        rates_BLN = self.network.routing(entry_BN, active_BLN, logits_BLNO).nodes
        return Choice(active_BLN, expert_weights("relative", active_BLN, rates_BLN, self.weight_scale))


class LastLayerGates(RoutingNetwork):
    """A routing network whose last layer has gates: to the inactive nodes of the layer, and to the output node.

    A node sends nothing to itself or to active nodes, so what a node receives from beside it stays there until it is active
    itself. The rates of inactive nodes and of the output node still sum to one.
    """

    def __init__(self, num_layers: int, num_experts: int, output_logit_offset: float) -> None:
        super().__init__(num_layers, num_experts, output_logit_offset=output_logit_offset)
        self.gate_last = nn.Parameter(torch.randn(num_experts, num_experts + 1))
        with torch.no_grad():
            self.gate_last[:, -1] -= output_logit_offset

    def forward(self, entry_BN: Tensor, active_BLN: Tensor, input_logits_BLNO: Tensor | None = None) -> Rates:
        rates = super().forward(entry_BN, active_BLN, input_logits_BLNO)
        active_BN, received_BN = active_BLN[:, -1], rates.nodes[:, -1]
        passed_BN = received_BN * active_BN  # all of it is part of the output node's rate here
        closed_BNO = torch.cat((active_BN, torch.zeros_like(active_BN[:, :1])), -1)[:, None].expand(
            -1, self.num_experts, -1
        )
        shares_BNO = self.gate_last.masked_fill(closed_BNO > 0, float("-inf")).softmax(-1)
        sent_BO = (passed_BN[:, :, None] * shares_BNO).sum(1)
        beside_BN = received_BN + sent_BO[:, :-1]
        nodes_BLN = torch.cat((rates.nodes[:, :-1], beside_BN[:, None]), 1)
        return Rates(nodes_BLN, rates.output - passed_BN.sum(-1) + sent_BO[:, -1])


class GatedLastLayer(Router):
    """The activation sequence on a network whose last layer has gates.

    Args:
        dim: Width of the hidden vectors.
        num_layers: Number of expert layers.
        num_experts: Number of experts per layer.
        stop: Factor of the output node's rate in the choice.
        weight_scale: Factor of all weights, which are rates over the largest of the layer.
    """

    plans = True

    def __init__(
        self, dim: int, num_layers: int, num_experts: int, *, stop: float = 0.2, weight_scale: float = 2.0
    ) -> None:
        super().__init__(dim, num_layers, num_experts, num_outlets=0)
        self.stop, self.weight_scale = stop, weight_scale
        self.network = RaytracedRouter(dim, num_layers, num_experts, RaytracedConfig(**START))
        self.network.routing = LastLayerGates(num_layers, num_experts, START["output_logit_offset"])

    def alike(self, call: Call) -> bool:
        return True

    def plan(self, hidden_BD: Tensor, call: Call) -> Choice:
        super().plan(hidden_BD, call)
        routing = self.network.routing
        route = unroll(
            routing,
            self.network.entry(hidden_BD),
            stop=self.stop,
            estimator="none",
            temperature=1.0,
            num_steps=routing.num_nodes,
            seed=None,
            rows_B=None,
            input_logits_BLNO=self.network.input_logits(hidden_BD),
        )
        assert route.rates is not None
        weights_BLN = expert_weights("relative", route.active, route.rates.nodes, self.weight_scale)
        return Choice(route.active, weights_BLN)


class MovingThresholds(Router):
    """Sigmoid gates, active above thresholds that move; weights are the gates over the largest active one of the layer.

    Args:
        dim: Width of the hidden vectors.
        num_layers: Number of expert layers.
        num_experts: Number of experts per layer.
        k: Mean number of experts per layer that the thresholds move towards.
        update_rate: Change of a threshold per training step, in logits.
        sharpness: Factor of the fresh gates.
        weight_scale: Factor of all weights.
    """

    plans = True
    thresholds: Tensor  # (L, N), in logits

    def __init__(
        self,
        dim: int,
        num_layers: int,
        num_experts: int,
        *,
        k: float = 1.5,
        update_rate: float = 0.02,
        sharpness: float = 4.0,
        weight_scale: float = 2.0,
    ) -> None:
        super().__init__(dim, num_layers, num_experts)
        self.k, self.update_rate, self.weight_scale = k, update_rate, weight_scale
        self.register_buffer("thresholds", torch.zeros(num_layers, num_experts))
        with torch.no_grad():
            for parameter in self.gates.parameters():
                parameter.mul_(sharpness)

    def alike(self, call: Call) -> bool:
        return not self.training  # the load counts tokens, not words

    def plan(self, hidden_BD: Tensor, call: Call) -> Choice:
        super().plan(hidden_BD, call)
        logits_BLN = torch.stack([self.gate_logits(layer, hidden_BD) for layer in range(self.num_layers)], 1)
        above_BLN = logits_BLN.detach() - self.thresholds
        best_BLN = torch.stack([top_mask(each_BN, 1) for each_BN in above_BLN.unbind(1)], 1)
        active_BLN = ((above_BLN > 0) | best_BLN).to(logits_BLN)  # at least one per layer
        if self.training:
            self.move(active_BLN)
        return Choice(active_BLN, expert_weights("relative", active_BLN, logits_BLN.sigmoid(), self.weight_scale))

    @torch.no_grad()
    def move(self, active_BLN: Tensor) -> None:
        """Move every threshold by one step towards the mean load."""
        aim = self.k / self.num_experts * len(active_BLN)
        load_LN = torch.stack([global_load(each_BN) for each_BN in active_BLN.unbind(1)])
        self.thresholds += self.update_rate * (load_LN - aim).sign()


ROUTERS: dict[str, type[Router]] = {
    "within-layer": WithinLayer,
    "last-layer-gates": GatedLastLayer,
    "moving-thresholds": MovingThresholds,
}


def register() -> None:
    """Make the routers known by their names, in this process."""
    for name, router in ROUTERS.items():
        plugins.register("router", name, ModelInfo(router, GRID, "experiments/path_routers.py", routing_input="token"))
