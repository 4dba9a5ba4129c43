"""The routing network: entry rates and an active set -> the firing rate of every node.

Axes: B batch, L layers, N experts per layer, O = N + 1 outlets of a gate (the next layer's N nodes, then the output node),
K inputs of a node (1 in the first layer, N in the others), D width, R rank of the input-conditioned gates.
"""

from contextlib import nullcontext
from numbers import Real
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raytraced.errors import require, require_one_of

GateInit = Literal["normal", "uniform"]


class Rates(NamedTuple):
    """Firing rates under an active set.

    The rates of the inactive nodes and of the output node sum to 1: they are the probabilities of the candidates.
    """

    nodes: Tensor  # (B, L, N)
    output: Tensor  # (B,)


def entry_rates(hidden_BD: Tensor, weight_ND: Tensor, bias_N: Tensor) -> Tensor:
    """The entry gate: the softmax of a linear map of the hidden vector.

    Args:
        hidden_BD: Hidden vectors (B, D).
        weight_ND: Weight of the gate (N, D).
        bias_N: Bias of the gate (N,).

    Returns:
        The rates that enter the first layer (B, N), at least in float32; each row sums to 1.
    """
    if hidden_BD.dtype != weight_ND.dtype and not torch.is_autocast_enabled(hidden_BD.device.type):
        raise ValueError(
            f"hidden is {hidden_BD.dtype}: must be {weight_ND.dtype} as the parameters; convert one, or use autocast"
        )
    logits_BN = F.linear(hidden_BD, weight_ND, bias_N)
    return logits_BN.softmax(-1, dtype=torch.promote_types(logits_BN.dtype, torch.float32))


def input_logits(hidden_BD: Tensor, weight_RD: Tensor, weight_LNOR: Tensor) -> Tensor:
    """Input-conditioned gates: what the hidden vector adds to the logits of all gates, through a map of rank R.

    Args:
        hidden_BD: Hidden vectors (B, D).
        weight_RD: The map down to rank R (R, D), stored as ``sight_in``.
        weight_LNOR: The map up to the logits (L − 1, N, O, R), stored as ``sight_out``.

    Returns:
        Terms of the logits (B, L − 1, N, O).
    """
    reduced_BR = F.linear(hidden_BD, weight_RD)
    return F.linear(reduced_BR, weight_LNOR.flatten(0, 2)).view(-1, *weight_LNOR.shape[:3])


def check_gate_options(gate_init: GateInit, scale_init: bool, output_logit_offset: float) -> None:
    """Refuse options of fresh gates that have no meaning."""
    require_one_of("gate_init", gate_init, get_args(GateInit))
    require(isinstance(scale_init, bool), "scale_init", repr(scale_init), "must be True or False")
    is_number = isinstance(output_logit_offset, Real) and not isinstance(output_logit_offset, bool)
    fits = is_number and abs(output_logit_offset) < float("inf")
    require(fits, "output_logit_offset", repr(output_logit_offset), "must be finite, a number; the paper has 0")


class RoutingNetwork(nn.Module):
    """The paper's routing network: one softmax gate per node passes firing rate from the entry to the output node.

    A node's firing rate is the sum of its inputs. An active node divides its rate by a softmax of a linear map of its
    inputs among the N nodes of the next layer and the output node. An inactive node keeps its rate. Nodes of the last
    layer send everything to the output node.

    Args:
        num_layers: Number of expert layers L.
        num_experts: Number of experts per layer N.
        gate_init: Distribution of the fresh gates' weights: "normal" as in the paper, or "uniform" as in nn.Linear.
        scale_init: Whether the standard deviation is multiplied by √(N + 1), as in the paper's appendix A.
        output_logit_offset: Amount by which the fresh weights towards the output node are lowered; 0 in the paper.

    Returns (from ``forward``):
        Rates with ``nodes`` (B, L, N) and ``output`` (B,).
    """

    gate_first: nn.Parameter | None
    gate_inner: nn.Parameter | None

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        *,
        gate_init: GateInit = "normal",
        scale_init: bool = True,
        output_logit_offset: float = 0.0,
    ) -> None:
        super().__init__()
        check_gate_options(gate_init, scale_init, output_logit_offset)
        for name, value in (("num_layers", num_layers), ("num_experts", num_experts)):
            if value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        self.num_layers, self.num_experts = num_layers, num_experts
        self.gate_init, self.scale_init, self.output_logit_offset = gate_init, scale_init, output_logit_offset
        N, O = num_experts, num_experts + 1
        # The last layer has no gates: its nodes send all they have to the output node.
        self.gate_first = nn.Parameter(torch.empty(N, O)) if num_layers > 1 else None
        self.gate_inner = nn.Parameter(torch.empty(num_layers - 2, N, O, N)) if num_layers > 2 else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the gates: W ~ Normal(0, N + 1), so that their logits have about unit variance (appendix A).

        "uniform" multiplies nn.Linear's initialisation, uniform within ±1/√inputs, by the same √(N + 1): the gates after
        the first layer then split more evenly, and sequences are longer.

        Weights towards the output node are lowered by `output_logit_offset`. Without it, fresh gates send about the same
        to every outlet and the output node collects a share from each: a greedy sequence ends before it reaches deep
        nodes, which then never learn.
        """
        scale = (self.num_experts + 1) ** 0.5 if self.scale_init else 1.0
        for weight in self.parameters():
            if self.gate_init == "normal":
                nn.init.normal_(weight, std=scale)
            else:
                bound = scale * (1 if weight is self.gate_first else self.num_experts) ** -0.5
                nn.init.uniform_(weight, -bound, bound)
        with torch.no_grad():
            if self.gate_first is not None:
                self.gate_first[:, -1] -= self.output_logit_offset
            if self.gate_inner is not None:
                self.gate_inner[:, :, -1] -= self.output_logit_offset

    @property
    def num_nodes(self) -> int:
        """Number of nodes M = L·N."""
        return self.num_layers * self.num_experts

    def gates(self) -> list[Tensor]:
        """The weights of the first layer's gates (N, O) and of the others (L − 2, N, O, N), as far as they exist."""
        names = ("gate_first", "gate_inner")[: self.num_layers - 1]
        found = self._parameters  # Hot path at batch size 1: nn.Module's own look-ups take ten times as long.
        return [found[name] if name in found else getattr(self, name) for name in names]  # type: ignore[misc]

    def gate_weight(self, layer: int) -> Tensor:
        """The weights of all gates of one layer.

        Args:
            layer: Number of the layer, 0 … L − 2.

        Returns:
            Weights (N, O, K): from K inputs of each of N nodes to O outlets.
        """
        if layer == 0:
            assert self.gate_first is not None
            return self.gate_first[:, :, None]
        assert self.gate_inner is not None
        return self.gate_inner[layer - 1]

    def forward(self, entry_BN: Tensor, active_BLN: Tensor, input_logits_BLNO: Tensor | None = None) -> Rates:
        """Pass the entry rates through the active nodes.

        Args:
            entry_BN: Rates that enter the first layer (B, N).
            active_BLN: Active set (B, L, N), 0 or 1.
            input_logits_BLNO: Terms that input-conditioned gates add to their logits (B, L − 1, N, O), or None.

        Returns:
            Rates with ``nodes`` (B, L, N) and ``output`` (B,), at least in float32 whatever the precision of the inputs.
        """
        self.check_entry(entry_BN)
        expected = (entry_BN.shape[0], self.num_layers, self.num_experts)
        if active_BLN.shape != expected:
            raise ValueError(
                f"active has shape {tuple(active_BLN.shape)}: must be {expected}, as the entry and the grid"
            )
        dtype = torch.promote_types(entry_BN.dtype, torch.float32)
        with nullcontext() if entry_BN.is_meta else torch.autocast(entry_BN.device.type, enabled=False):
            inputs_BNK = entry_BN.to(dtype)[:, :, None]
            active_BLN = active_BLN.to(dtype)
            layers, output_B = [], entry_BN.new_zeros(entry_BN.shape[0], dtype=dtype)
            for layer in range(self.num_layers):
                rates_BN = inputs_BNK.sum(-1)
                passed_BN = rates_BN * active_BLN[:, layer]
                layers.append(rates_BN)
                if layer == self.num_layers - 1:
                    output_B = output_B + passed_BN.sum(-1)
                else:
                    logits_BNO = torch.einsum("nok,bnk->bno", self.gate_weight(layer).to(dtype), inputs_BNK)
                    if input_logits_BLNO is not None:
                        logits_BNO = logits_BNO + input_logits_BLNO[:, layer].to(dtype)
                    sent_BNO = passed_BN[:, :, None] * logits_BNO.softmax(-1)
                    output_B = output_B + sent_BNO[:, :, -1].sum(-1)
                    inputs_BNK = sent_BNO[:, :, :-1].transpose(1, 2)
            return Rates(torch.stack(layers, 1), output_B)

    def check_entry(self, entry_BN: Tensor) -> None:
        """Raise a ValueError unless there is one rate per expert of the first layer."""
        if entry_BN.ndim != 2 or entry_BN.shape[1] != self.num_experts:
            raise ValueError(
                f"entry has shape {tuple(entry_BN.shape)}: must be (batch, {self.num_experts}), "
                "one rate per expert of the first layer"
            )

    def extra_repr(self) -> str:
        return f"num_layers={self.num_layers}, num_experts={self.num_experts}"
