"""top-any: an expert runs where the input is similar enough to its direction, by its own threshold (DynMoE, Guo et al. 2024).

Axes: B batch, L layers, N experts per layer, D width.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raytraced.errors import require
from raytraced.router import Choice, Cost, Draws, Router
from raytraced.routers.choosing import global_load


class TopAny(Router):
    """Run every expert whose σ(cosine similarity) exceeds σ(its threshold), or the most similar one if none does.

    The outputs of the chosen experts are averaged. Directions start orthogonal. The reference also adds experts during
    training; this implementation does not.

    Args:
        dim: Width of the hidden vectors.
        num_layers: Number of expert layers.
        num_experts: Number of experts per layer.
        diversity: Weight of the loss that keeps the directions orthogonal and short, in training only.
        removal: Training steps after which experts that no sample chose are removed permanently; 0 removes none.

    Returns (from ``route``):
        Choice with ``active`` (B, N), whose gradient is straight-through, ``weights`` (B, N) and, with `diversity` in
        training, ``loss``.
    """

    removed: Tensor  # (L, N)
    opened: Tensor  # (L, N), number of samples since the last removal
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
        # Margins lie in -1 … 1, so a removed expert is never the most similar.
        margin_BN = (similarity_BN.sigmoid() - self.thresholds[step].sigmoid()).masked_fill(self.removed[step], -2.0)
        nearest_BN = margin_BN.argmax(-1, keepdim=True) == torch.arange(self.num_experts, device=margin_BN.device)
        open_BN = (margin_BN > 0) | (nearest_BN & (margin_BN.amax(-1, keepdim=True) <= 0))
        open_BN = draws.recall(step, open_BN)
        # Straight through: the difference is exactly 0, so the mask stays exactly 0 or 1.
        active_BN = open_BN.to(margin_BN.dtype) + (margin_BN - margin_BN.detach())
        weights_BN = active_BN / open_BN.sum(-1, keepdim=True).clamp_min(1)  # a recorded route may leave a layer out
        if self.training and self.removal:
            self.remove_unused(step, global_load(active_BN))
        if not (self.diversity and self.training):
            return Choice(active_BN, weights_BN)
        return Choice(active_BN, weights_BN, self.diversity * diversity_loss(self.directions[step]))

    @torch.no_grad()
    def remove_unused(self, layer: int, load_N: Tensor) -> None:
        """Add a layer's load (N,) to the counts; after every `removal` steps, remove the experts without any sample."""
        self.opened[layer] += load_N
        if layer == self.num_layers - 1:
            self.num_calls += 1
            due = self.num_calls % self.removal == 0  # stays a tensor: torch.compile must not branch on it
            # Not in place: the backward pass needs the old values.
            self.removed = self.removed | (due & (self.opened == 0))
            self.opened *= ~due

    def step_cost(self) -> Cost:
        return Cost(self.directions[0].numel(), self.directions[0].numel() + self.thresholds[0].numel())


def diversity_loss(directions_ND: Tensor) -> Tensor:
    """The distance of the directions (N, D) from orthogonality, ‖ŴŴᵀ − I‖, plus their mean length."""
    unit_ND = F.normalize(directions_ND, dim=-1)
    excess_NN = unit_ND @ unit_ND.mT - torch.eye(len(unit_ND), dtype=unit_ND.dtype, device=unit_ND.device)
    return torch.linalg.matrix_norm(excess_NN) + directions_ND.norm(dim=-1).mean()
