"""threshold: experts in order of their probability until the sum reaches ϑ, the one that crosses included (Huang et al. 2024).

Axes: B batch, N experts a layer, D width.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from raytraced.layer import Choice, Draws, Router
from raytraced.routers.choosing import balance_loss
from raytraced.words import require, require_one_of

SumsTo = Literal["gate", "count"]


class Threshold(Router):
    """As many experts as the gate is unsure of; their weights are the probabilities, not renormalised.

    With `total="count"` they sum to the number of experts, as those of raytraced experts may.
    `entropy` weighs the reference's loss against gates that stay flat to run more, `balance` the auxiliary loss of Switch.
    """

    def __init__(
        self,
        dim: int,
        num_layers: int,
        num_experts: int,
        *,
        threshold: float = 0.5,
        entropy: float = 0.0,
        balance: float = 0.0,
        total: SumsTo = "gate",
    ) -> None:
        super().__init__(dim, num_layers, num_experts)
        require(0 <= threshold <= 1, "threshold", threshold, "must lie in 0 … 1, it is a sum of probabilities")
        require(entropy >= 0, "entropy", entropy, "must not be negative")
        require(balance >= 0, "balance", balance, "must not be negative")
        require_one_of("total", total, get_args(SumsTo))
        self.threshold, self.entropy, self.balance, self.total = threshold, entropy, balance, total

    def route(self, step: int, hidden_BD: Tensor, draws: Draws) -> Choice:
        logits_BN = self.gate_logits(step, hidden_BD)
        probs_BN = logits_BN.softmax(-1)
        active_BN = reach(probs_BN.detach(), self.threshold).to(probs_BN.dtype)
        loss = None
        if self.training and self.entropy:
            entropy_B = -(probs_BN * logits_BN.log_softmax(-1)).sum(-1)
            loss = self.entropy * entropy_B.sum() / max(len(entropy_B), 1)
        if self.training and self.balance:
            balance = self.balance * balance_loss(probs_BN, active_BN)
            loss = balance if loss is None else loss + balance
        weights_BN = probs_BN * active_BN
        if self.total == "count":
            weights_BN = weights_BN * (active_BN.sum(-1, keepdim=True) / weights_BN.sum(-1, keepdim=True))
        return Choice(active_BN, weights_BN, loss)


def reach(probs_BN: Tensor, threshold: float) -> Tensor:
    """The fewest of the likeliest whose probabilities sum to the threshold, one at least, as booleans (B, N)."""
    sorted_BN, order_BN = probs_BN.sort(dim=-1, descending=True, stable=True)
    # What is reached before an expert decides, so that the one that crosses is kept.
    before_BN = sorted_BN.cumsum(-1).roll(1, -1)
    before_BN[:, 0] = -1.0
    return torch.zeros_like(probs_BN, dtype=torch.bool).scatter(-1, order_BN, before_BN < threshold)
