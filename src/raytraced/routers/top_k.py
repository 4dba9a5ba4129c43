"""top-k: every layer runs the k experts its gate likes best, weighted by the softmax over those k (Shazeer et al. 2017).

Of a single expert that would be the constant 1, and no gradient would reach the gate: there the weight is the probability
among all experts, as in Switch (Fedus et al. 2021).

Axes: B batch, N experts a layer, D width.
"""

from typing import Literal, get_args

from torch import Tensor

from raytraced.layer import Choice, Draws, Router
from raytraced.routers.choosing import balance_loss, softmax_over, top_mask
from raytraced.words import require, require_one_of

Total = Literal["one", "count"]


class TopK(Router):
    """k experts a layer; `balance` weighs the classic auxiliary loss of Switch and GShard.

    Weights sum to one, or, with `total="count"`, to k as those of raytraced experts may.
    """

    def __init__(
        self,
        dim: int,
        num_layers: int,
        num_experts: int,
        *,
        k: int = 2,
        balance: float = 0.0,
        total: Total = "one",
    ) -> None:
        super().__init__(dim, num_layers, num_experts)
        require(1 <= k <= num_experts, "k", k, f"must lie in 1 … num_experts={num_experts}")
        require(balance >= 0, "balance", balance, "must not be negative")
        require_one_of("total", total, get_args(Total))
        self.k, self.balance, self.total = k, balance, total

    def route(self, step: int, hidden_BD: Tensor, draws: Draws) -> Choice:
        logits_BN = self.gate_logits(step, hidden_BD)
        chosen_BN = top_mask(logits_BN.detach(), self.k)
        weights_BN = softmax_over(logits_BN, chosen_BN) if self.k > 1 else logits_BN.softmax(-1) * chosen_BN
        if self.total == "count":
            weights_BN = weights_BN * self.k
        active_BN = chosen_BN.to(weights_BN.dtype)
        if not (self.balance and self.training):
            return Choice(active_BN, weights_BN)
        return Choice(active_BN, weights_BN, self.balance * balance_loss(logits_BN.softmax(-1), active_BN))
