"""chain: each layer goes several rounds over its experts, each round with its own gate (Chain-of-Experts, Wang et al. 2025).

Axes: B batch, N experts a layer, D width.
"""

from torch import Tensor

from raytraced.layer import Choice, Draws, Router
from raytraced.routers.choosing import balance_loss, top_mask
from raytraced.words import require


class ChainOfExperts(Router):
    """k experts a round, weighted by their probabilities, not renormalised; `active` has one row a round, (…, L·rounds, N).

    The stream runs through the rounds: with "residual" each round adds to what it got, the reference's inner residual.
    """

    def __init__(
        self,
        dim: int,
        num_layers: int,
        num_experts: int,
        *,
        k: int = 1,
        num_rounds: int = 2,
        balance: float = 0.0,
    ) -> None:
        super().__init__(dim, num_layers, num_experts, num_rounds=num_rounds)
        require(1 <= k <= num_experts, "k", k, f"must lie in 1 … num_experts={num_experts}")
        require(balance >= 0, "balance", balance, "must not be negative")
        self.k, self.balance = k, balance

    def route(self, step: int, hidden_BD: Tensor, draws: Draws) -> Choice:
        probs_BN = self.gate_logits(step, hidden_BD).softmax(-1)
        active_BN = top_mask(probs_BN.detach(), self.k).to(probs_BN.dtype)
        loss = self.balance * balance_loss(probs_BN, active_BN) if self.balance and self.training else None
        return Choice(active_BN, probs_BN * active_BN, loss)
