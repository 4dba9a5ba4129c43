"""aux-free: top-k with a bias that balances the load without an auxiliary loss (Wang et al. 2024).

Axes: B batch, L layers, N experts per layer, D width.
"""

from typing import get_args

import torch
from torch import Tensor

from raytraced.errors import require, require_one_of
from raytraced.router import Choice, Draws, Router
from raytraced.routers.choosing import global_load, softmax_over, top_mask
from raytraced.routers.top_k import Total


class AuxFree(Router):
    """Run k experts per layer, selected by score + bias and weighted by the scores alone.

    Each training step adds `update_rate`·sign(mean load − load) to the bias of every expert; it has no gradient.

    Args:
        dim: Width of the hidden vectors.
        num_layers: Number of expert layers.
        num_experts: Number of experts per layer.
        k: Number of experts that run in each layer.
        update_rate: Change of the bias per training step.
        total: Sum of the weights of the chosen experts: "one", or "count" for k, as in raytraced experts.

    Returns (from ``route``):
        Choice with ``active`` (B, N) and ``weights`` (B, N).
    """

    bias: Tensor  # (L, N)

    def __init__(
        self,
        dim: int,
        num_layers: int,
        num_experts: int,
        *,
        k: int = 2,
        update_rate: float = 1e-3,
        total: Total = "one",
    ) -> None:
        super().__init__(dim, num_layers, num_experts)
        require(1 <= k <= num_experts, "k", k, f"must lie in 1 … num_experts={num_experts}")
        require(update_rate >= 0, "update_rate", update_rate, "must not be negative")
        require_one_of("total", total, get_args(Total))
        self.k, self.update_rate, self.total = k, update_rate, total
        self.register_buffer("bias", torch.zeros(num_layers, num_experts))

    def route(self, step: int, hidden_BD: Tensor, draws: Draws) -> Choice:
        logits_BN = self.gate_logits(step, hidden_BD)
        scores_BN = logits_BN.detach().softmax(-1)
        chosen_BN = draws.recall(step, top_mask(scores_BN + self.bias[step], self.k))
        # The scores renormalised over the chosen experts are their softmax: without a bias this is top-k.
        weights_BN = softmax_over(logits_BN, chosen_BN) * (self.k if self.total == "count" else 1)
        active_BN = chosen_BN.to(weights_BN.dtype)
        if self.training:
            self.move_bias(step, global_load(active_BN))
        return Choice(active_BN, weights_BN)

    @torch.no_grad()
    def move_bias(self, layer: int, load_N: Tensor) -> None:
        """Move the bias of a layer by one step towards equal load (N,)."""
        self.bias[layer] += self.update_rate * (load_N.mean() - load_N).sign()
