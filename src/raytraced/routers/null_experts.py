"""null-experts: top-k over the experts and some that do nothing and cost nothing (AdaMoE, Zeng et al. 2024).

Axes: B batch, N experts a layer, A = N + null experts, D width.
"""

import torch
from torch import Tensor

from raytraced.layer import Choice, Draws, Router
from raytraced.routers.choosing import balance_loss, top_mask
from raytraced.words import require


class NullExperts(Router):
    """Of the k chosen the true experts run, their weights renormalised; a sample that chose null experts only runs none.

    `balance` weighs the loss that sets how often null experts are chosen: it asks for an equal share of each.
    """

    def __init__(
        self,
        dim: int,
        num_layers: int,
        num_experts: int,
        *,
        k: int = 4,
        num_null: int | None = None,
        balance: float = 0.01,
    ) -> None:
        num_null = num_experts if num_null is None else num_null
        require(num_null >= 0, "num_null", num_null, "must not be negative")
        super().__init__(dim, num_layers, num_experts, num_outlets=num_experts + num_null)
        require(
            1 <= k <= num_experts + num_null, "k", k, f"must lie in 1 … {num_experts + num_null}, null ones included"
        )
        require(balance >= 0, "balance", balance, "must not be negative")
        self.k, self.num_null, self.balance = k, num_null, balance

    def route(self, step: int, hidden_BD: Tensor, draws: Draws) -> Choice:
        probs_BA = self.gate_logits(step, hidden_BD).softmax(-1)
        chosen_BA = top_mask(probs_BA.detach(), self.k).to(probs_BA.dtype)
        active_BN = chosen_BA[:, : self.num_experts]
        passed_BN = probs_BA[:, : self.num_experts] * active_BN
        # The floor matters only where all are null: there the sum is 0, and so is every weight.
        weights_BN = passed_BN / passed_BN.sum(-1, keepdim=True).clamp_min(torch.finfo(probs_BA.dtype).tiny)
        if not (self.balance and self.training):
            return Choice(active_BN, weights_BN)
        return Choice(active_BN, weights_BN, self.balance * balance_loss(probs_BA, chosen_BA, self.num_null))
