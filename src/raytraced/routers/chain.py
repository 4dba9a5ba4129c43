"""chain: each layer runs its experts in several rounds, each with its own gate (Chain-of-Experts, Wang et al. 2025).

Axes: B batch, L layers, N experts per layer, D width.
"""

from torch import Tensor

from raytraced.errors import require
from raytraced.router import Choice, Draws, Router
from raytraced.routers.choosing import balance_loss, top_mask


class ChainOfExperts(Router):
    """Run k experts per round, weighted by their probabilities, which are not renormalised.

    A round is a step of the stream: with "residual" each round adds to its input, as the reference's inner residual does.
    The layer's ``active`` has one row per round (..., L·num_rounds, N).

    Args:
        dim: Width of the hidden vectors.
        num_layers: Number of expert layers.
        num_experts: Number of experts per layer.
        k: Number of experts that run in each round.
        num_rounds: Number of rounds per layer.
        balance: Weight of the auxiliary load-balancing loss of Switch, in training only.

    Returns (from ``route``):
        Choice with ``active`` (B, N), ``weights`` (B, N) and, with `balance` in training, ``loss``.
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
        active_BN = draws.recall(step, top_mask(probs_BN.detach(), self.k)).to(probs_BN.dtype)
        loss = self.balance * balance_loss(probs_BN, active_BN) if self.balance and self.training else None
        return Choice(active_BN, probs_BN * active_BN, loss)
