"""top-k: every layer runs the k experts with the largest gate logits (Shazeer et al. 2017).

The weights are the softmax over the chosen k. For k = 1 that would be the constant 1, without a gradient for the gate:
there the weight is the probability among all experts, as in Switch (Fedus et al. 2021).

Axes: B batch, N experts per layer, D width.
"""

from typing import Literal, get_args

from torch import Tensor

from raytraced.errors import require, require_one_of
from raytraced.router import Choice, Draws, Router
from raytraced.routers.choosing import balance_loss, softmax_over, top_mask

Total = Literal["one", "count"]


class TopK(Router):
    """Run k experts per layer.

    Args:
        dim: Width of the hidden vectors.
        num_layers: Number of expert layers.
        num_experts: Number of experts per layer.
        k: Number of experts that run in each layer.
        balance: Weight of the auxiliary load-balancing loss of Switch and GShard, in training only.
        total: Sum of the weights of the chosen experts: "one", or "count" for k, as in raytraced experts. For k = 1 the
            weight is the probability of the expert in both cases.

    Returns (from ``route``):
        Choice with ``active`` (B, N), ``weights`` (B, N) and, with `balance` in training, ``loss``.
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
        chosen_BN = draws.recall(step, top_mask(logits_BN.detach(), self.k))
        weights_BN = softmax_over(logits_BN, chosen_BN) if self.k > 1 else logits_BN.softmax(-1) * chosen_BN
        if self.total == "count":
            weights_BN = weights_BN * self.k
        return self.with_balance(logits_BN, chosen_BN, weights_BN)

    def with_balance(self, logits_BN: Tensor, chosen_BN: Tensor, weights_BN: Tensor) -> Choice:
        """The choice with its load-balancing loss, in training and where there is one."""
        active_BN = chosen_BN.to(weights_BN.dtype)
        if not (self.balance and self.training):
            return Choice(active_BN, weights_BN)
        return Choice(active_BN, weights_BN, self.balance * balance_loss(logits_BN.softmax(-1), active_BN))
