"""top-any: each expert has a direction and a threshold, and runs where the input is similar enough (DynMoE, Guo et al. 2024).

Axes: B batch, L layers, N experts a layer, D width.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raytraced.layer import Choice, Draws, Router, Work
from raytraced.routers.choosing import global_load
from raytraced.words import require


class TopAny(Router):
    """An expert runs where σ(cosine similarity) exceeds σ(its threshold), the nearest if none does; outputs are averaged.

    Directions start orthogonal. An expert that no sample opened in `removal` training steps is removed for good (0: none
    is); the reference's adding of experts is left out. `diversity` weighs its loss, which keeps directions apart and short.
    """

    removed: Tensor  # (L, N)
    opened: Tensor  # (L, N), samples since experts were last removed
    num_calls: Tensor

    def __init__(
        self, dim: int, num_layers: int, num_experts: int, *, diversity: float = 0.01, removal: int = 100
    ) -> None:
        super().__init__(dim, num_layers, num_experts, num_outlets=0)
        require(diversity >= 0, "diversity", diversity, "must not be negative")
        require(removal >= 0, "removal", removal, "must not be negative, it is a number of steps")
        self.diversity, self.removal = diversity, removal
        self.directions = nn.Parameter(torch.zeros(num_layers, num_experts, dim))
        self.thresholds = nn.Parameter(torch.zeros(num_layers, num_experts))
        self.register_buffer("removed", torch.zeros(num_layers, num_experts, dtype=torch.bool))
        self.register_buffer("opened", torch.zeros(num_layers, num_experts))
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))

    def reset_parameters(self) -> None:
        for directions_ND in self.directions:
            nn.init.orthogonal_(directions_ND)

    def route(self, step: int, hidden_BD: Tensor, draws: Draws) -> Choice:
        directions_ND = F.normalize(self.directions[step], dim=-1)
        similarity_BN = F.linear(F.normalize(hidden_BD, dim=-1), directions_ND)
        similarity_BN = similarity_BN.to(torch.promote_types(similarity_BN.dtype, torch.float32))
        # A margin lies in -1 … 1: the removed are further away than anyone.
        margin_BN = (similarity_BN.sigmoid() - self.thresholds[step].sigmoid()).masked_fill(self.removed[step], -2.0)
        nearest_BN = margin_BN.argmax(-1, keepdim=True) == torch.arange(self.num_experts, device=margin_BN.device)
        open_BN = (margin_BN > 0) | (nearest_BN & (margin_BN.amax(-1, keepdim=True) <= 0))
        # Straight through: the difference is exactly 0, so the mask stays exactly 0 or 1.
        active_BN = open_BN.to(margin_BN.dtype) + (margin_BN - margin_BN.detach())
        weights_BN = active_BN / open_BN.sum(-1, keepdim=True)
        if self.training and self.removal:
            self.remove_unused(step, global_load(active_BN))
        if not (self.diversity and self.training):
            return Choice(active_BN, weights_BN)
        return Choice(active_BN, weights_BN, self.diversity * diversity_loss(self.directions[step]))

    @torch.no_grad()
    def remove_unused(self, layer: int, load_N: Tensor) -> None:
        """Count whom a layer's samples opened; after the last layer of every so many steps, remove whom nobody did."""
        self.opened[layer] += load_N
        if layer == self.num_layers - 1:
            self.num_calls += 1
            due = self.num_calls % self.removal == 0  # not looked at: values may not be there
            # Not in place: the backward pass needs the old one.
            self.removed = self.removed | (due & (self.opened == 0))
            self.opened *= ~due

    def step_work(self) -> Work:
        return Work(self.directions[0].numel(), self.directions[0].numel() + self.thresholds[0].numel())


def diversity_loss(directions_ND: Tensor) -> Tensor:
    """How far the directions are from orthogonal, ‖ŴŴᵀ − I‖, plus their mean length."""
    unit_ND = F.normalize(directions_ND, dim=-1)
    excess_NN = unit_ND @ unit_ND.mT - torch.eye(len(unit_ND), dtype=unit_ND.dtype, device=unit_ND.device)
    return torch.linalg.matrix_norm(excess_NN) + directions_ND.norm(dim=-1).mean()
