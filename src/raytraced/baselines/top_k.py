"""top-k: every layer runs the k experts its gate likes best, weighted by the softmax over those k (Shazeer et al. 2017).

Axes: B batch, N experts a layer, D width.
"""

from typing import Any

from torch import Tensor

from raytraced.baselines.routed import Choice, Draws, RoutedExperts, balance_loss, require, softmax_over, top_mask


class TopKExperts(RoutedExperts):
    """k experts a layer; `balance` weighs the classic auxiliary loss of Switch and GShard."""

    def __init__(
        self, dim: int, num_layers: int, num_experts: int, *, k: int = 2, balance: float = 0.0, **grid: Any
    ) -> None:
        super().__init__(dim, num_layers, num_experts, **grid)
        require(1 <= k <= num_experts, "k", k, f"must lie in 1 … num_experts={num_experts}")
        require(balance >= 0, "balance", balance, "must not be negative")
        self.k, self.balance = k, balance

    def route(self, step: int, hidden_BD: Tensor, draws: Draws) -> Choice:
        logits_BN = self.gate_logits(step, hidden_BD)
        chosen_BN = top_mask(logits_BN.detach(), self.k)
        weights_BN = softmax_over(logits_BN, chosen_BN)
        active_BN = chosen_BN.to(weights_BN.dtype)
        if not (self.balance and self.training):
            return Choice(weights_BN, active_BN)
        return Choice(weights_BN, active_BN, self.balance * balance_loss(logits_BN.softmax(-1), active_BN))

    def extra_repr(self) -> str:
        return f"k={self.k}, balance={self.balance}, stream={self.stream}"
