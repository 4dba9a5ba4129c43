"""null-experts: top-k among the experts and null experts, which compute nothing and cost nothing (AdaMoE, Zeng et al. 2024).

Axes: B batch, N experts per layer, A = N + null experts, D width.
"""

import torch
from torch import Tensor

from raytraced.errors import require
from raytraced.router import Choice, Draws, Router
from raytraced.routers.choosing import balance_loss, top_mask


class NullExperts(Router):
    """Choose k among experts and null experts; only the former run, so their number differs from sample to sample.

    The weights are the probabilities, renormalised over the experts that run. A sample with k null experts runs none.

    Args:
        dim: Width of the hidden vectors.
        num_layers: Number of expert layers.
        num_experts: Number of experts per layer.
        k: Number of choices per layer, null experts included.
        num_null: Number of null experts per layer; num_experts if None.
        balance: Weight of the load-balancing loss, in training only. It determines how often null experts are chosen,
            since it asks for an equal share of every expert.

    Returns (from ``route``):
        Choice with ``active`` (B, N), ``weights`` (B, N) and, with `balance` in training, ``loss``.
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
        active_BN = draws.recall(step, chosen_BA[:, : self.num_experts] != 0).to(probs_BA.dtype)
        passed_BN = probs_BA[:, : self.num_experts] * active_BN
        # The floor has an effect only where all choices are null: there the sum and all weights are 0.
        weights_BN = passed_BN / passed_BN.sum(-1, keepdim=True).clamp_min(torch.finfo(probs_BA.dtype).tiny)
        if not (self.balance and self.training):
            return Choice(active_BN, weights_BN)
        return Choice(active_BN, weights_BN, self.balance * balance_loss(probs_BA, chosen_BA, self.num_null))
