"""threshold: the most probable experts whose probabilities sum to a threshold ϑ run, as in top-p sampling (Huang et al. 2024).

Axes: B batch, N experts per layer, D width.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from raytraced.errors import require, require_one_of
from raytraced.router import Choice, Draws, Router
from raytraced.routers.choosing import balance_loss

SumsTo = Literal["gate", "count"]


class Threshold(Router):
    """Run the smallest set of experts whose probabilities reach a threshold: the flatter the gate, the more experts.

    Args:
        dim: Width of the hidden vectors.
        num_layers: Number of expert layers.
        num_experts: Number of experts per layer.
        threshold: Sum of probabilities to reach, from 0 (one expert) to 1 (all experts).
        entropy: Weight of the reference's entropy loss, in training only. It keeps gates from staying flat.
        balance: Weight of the auxiliary load-balancing loss of Switch, in training only.
        total: Sum of the weights: "gate" uses the probabilities as they are, "count" scales them to sum to the number of
            chosen experts, as in raytraced experts.

    Returns (from ``route``):
        Choice with ``active`` (B, N), ``weights`` (B, N) and, in training, ``loss``.
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
        active_BN = draws.recall(step, nucleus_mask(probs_BN.detach(), self.threshold)).to(probs_BN.dtype)
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


def nucleus_mask(probs_BN: Tensor, threshold: float) -> Tensor:
    """Select the most probable experts until their probabilities reach the threshold, as in top-p (nucleus) sampling.

    Args:
        probs_BN: Probabilities of the experts (B, N).
        threshold: Sum to reach. The expert that crosses it is included, so at least one is selected.

    Returns:
        Booleans (B, N).
    """
    sorted_BN, order_BN = probs_BN.sort(dim=-1, descending=True, stable=True)
    # An expert is selected if the sum before it is below the threshold.
    before_BN = sorted_BN.cumsum(-1).roll(1, -1)
    before_BN[:, 0] = -1.0
    return torch.zeros_like(probs_BN, dtype=torch.bool).scatter(-1, order_BN, before_BN < threshold)
