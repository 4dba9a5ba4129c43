"""top-any: each expert has a direction and a threshold, and runs where the input is similar enough (DynMoE, Guo et al. 2024).

Axes: B batch, L layers, N experts a layer, D width.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raytraced.baselines.routed import Choice, Draws, RoutedExperts, require


class TopAnyExperts(RoutedExperts):
    """An expert runs where σ(cosine similarity) exceeds σ(its threshold), the nearest if none does; outputs are averaged.

    The grid is fixed: the reference's adding and removing of experts while training is left out. `diversity` weighs its
    loss, which keeps the directions apart and short.
    """

    def __init__(self, dim: int, num_layers: int, num_experts: int, *, diversity: float = 0.01, **grid: Any) -> None:
        super().__init__(dim, num_layers, num_experts, num_outlets=0, **grid)
        require(diversity >= 0, "diversity", diversity, "must not be negative")
        self.diversity = diversity
        bound = dim**-0.5
        self.directions = nn.Parameter(torch.empty(num_layers, num_experts, dim).uniform_(-bound, bound))
        self.thresholds = nn.Parameter(torch.zeros(num_layers, num_experts))

    def route(self, step: int, hidden_BD: Tensor, draws: Draws) -> Choice:
        directions_ND = F.normalize(self.directions[step], dim=-1)
        similarity_BN = F.linear(F.normalize(hidden_BD, dim=-1), directions_ND)
        similarity_BN = similarity_BN.to(torch.promote_types(similarity_BN.dtype, torch.float32))
        margin_BN = similarity_BN.sigmoid() - self.thresholds[step].sigmoid()
        nearest_BN = F.one_hot(margin_BN.argmax(-1), self.num_experts).bool()
        open_BN = (margin_BN > 0) | (nearest_BN & (margin_BN.amax(-1, keepdim=True) <= 0))
        # Straight through: the difference is exactly 0, so the mask stays exactly 0 or 1.
        active_BN = open_BN.to(margin_BN.dtype) + (margin_BN - margin_BN.detach())
        weights_BN = active_BN / open_BN.sum(-1, keepdim=True)
        if not (self.diversity and self.training):
            return Choice(weights_BN, active_BN)
        return Choice(weights_BN, active_BN, self.diversity * diversity_loss(self.directions[step]))

    @property
    def routing_multiply_adds(self) -> int:
        return self.directions.numel()

    @property
    def routing_parameters(self) -> int:
        return self.directions.numel() + self.thresholds.numel()

    def extra_repr(self) -> str:
        return f"diversity={self.diversity}, stream={self.stream}"


def diversity_loss(directions_ND: Tensor) -> Tensor:
    """How far the directions are from orthogonal, ‖ŴŴᵀ − I‖, plus their mean length."""
    unit_ND = F.normalize(directions_ND, dim=-1)
    excess_NN = unit_ND @ unit_ND.mT - torch.eye(len(unit_ND), dtype=unit_ND.dtype, device=unit_ND.device)
    return torch.linalg.matrix_norm(excess_NN) + directions_ND.norm(dim=-1).mean()
