"""mixture-of-depths: in each layer a share of the vectors runs all experts, the others skip them (Raposo et al. 2024).

The reference takes the highest scores among the tokens of a text, which later tokens can change. This is its causal version:
in training the choice is made among all vectors of the batch, and a second loss teaches the gate to predict it from the
vector alone; in evaluation the prediction decides. The reference skips attention too; here only experts are skipped.

Axes: B batch, N experts per layer, D width.
"""

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from raytraced.errors import require
from raytraced.router import Choice, Draws, Router


class MixtureOfDepths(Router):
    """Run all experts of a layer for some vectors, and none for the others.

    Args:
        dim: Width of the hidden vectors.
        num_layers: Number of expert layers.
        num_experts: Number of experts per layer.
        capacity: Share of the vectors that run each layer's experts in training, above 0 and at most 1. In evaluation the
            share comes near it, as far as the gate predicts well.
        prediction: Weight of the loss that teaches the gate to predict the choice, in training only.

    Returns (from ``route``):
        Choice with ``active`` (B, N), ``weights`` (B, N), which are twice the sigmoid of the score, and in training
        ``loss``. A score of 0, where a vector begins to run, has weight 1.
    """

    def __init__(
        self, dim: int, num_layers: int, num_experts: int, *, capacity: float = 0.5, prediction: float = 0.01
    ) -> None:
        super().__init__(dim, num_layers, num_experts, num_outlets=1)
        require(0 < capacity <= 1, "capacity", capacity, "must lie in 0 … 1 (0 excluded), it is a share of the vectors")
        require(prediction >= 0, "prediction", prediction, "must not be negative")
        self.capacity, self.prediction = capacity, prediction

    def route(self, step: int, hidden_BD: Tensor, draws: Draws) -> Choice:
        scores_B1 = self.gate_logits(step, hidden_BD)
        runs_B1 = top_share(scores_B1.detach(), self.capacity) if self.training else scores_B1 > 0
        active_BN = draws.recall(step, runs_B1.expand(-1, self.num_experts)).to(scores_B1.dtype)
        weights_BN = 2 * scores_B1.sigmoid() * active_BN
        if not (self.training and self.prediction):
            return Choice(active_BN, weights_BN)
        errors_B1 = binary_cross_entropy_with_logits(scores_B1, runs_B1.to(scores_B1.dtype), reduction="sum")
        return Choice(active_BN, weights_BN, self.prediction * errors_B1 / max(len(scores_B1), 1))


def top_share(scores_B1: Tensor, share: float) -> Tensor:
    """Mark the largest scores, a share of all of them, rounded and at least one: booleans (B, 1)."""
    num = min(max(1, round(share * len(scores_B1))), len(scores_B1))
    order_B1 = scores_B1.argsort(dim=0, descending=True, stable=True)
    return torch.zeros_like(scores_B1, dtype=torch.bool).scatter(0, order_B1[:num], True)
