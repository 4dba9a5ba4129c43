"""aux-free: top-k whose selection is balanced by a bias that no gradient moves (Wang et al. 2024).

Axes: B batch, L layers, N experts a layer, D width.
"""

import torch
from torch import Tensor

from raytraced.layer import Choice, Draws, Router
from raytraced.routers.choosing import global_load, softmax_over, top_mask
from raytraced.words import require


class AuxFree(Router):
    """k experts a layer, selected on s + b and weighted by s alone; each training step moves b by u·sign(mean load − load)."""

    bias: Tensor  # (L, N)

    def __init__(self, dim: int, num_layers: int, num_experts: int, *, k: int = 2, update_rate: float = 1e-3) -> None:
        super().__init__(dim, num_layers, num_experts)
        require(1 <= k <= num_experts, "k", k, f"must lie in 1 … num_experts={num_experts}")
        require(update_rate >= 0, "update_rate", update_rate, "must not be negative")
        self.k, self.update_rate = k, update_rate
        self.register_buffer("bias", torch.zeros(num_layers, num_experts))

    def route(self, step: int, hidden_BD: Tensor, draws: Draws) -> Choice:
        logits_BN = self.gate_logits(step, hidden_BD)
        scores_BN = logits_BN.detach().softmax(-1)
        chosen_BN = top_mask(scores_BN + self.bias[step], self.k)
        # s renormalised over the chosen is the softmax over them: with b = 0 this is top-k.
        weights_BN = softmax_over(logits_BN, chosen_BN)
        active_BN = chosen_BN.to(weights_BN.dtype)
        if self.training:
            self.move_bias(step, global_load(active_BN))
        return Choice(active_BN, weights_BN)

    @torch.no_grad()
    def move_bias(self, layer: int, load_N: Tensor) -> None:
        """One step of the bias of a layer towards equal load."""
        self.bias[layer] += self.update_rate * (load_N.mean() - load_N).sign()
