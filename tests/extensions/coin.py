"""coin: in training every sample runs one expert per layer, drawn at random; in evaluation all of them, averaged.

A new router, as it would stand in raytraced/routers. Axes: B batch, N experts per layer, D width.
"""

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from raytraced.errors import require
from raytraced.router import Choice, Draws, Router


class Coin(Router):
    """Nothing to learn; `kept` is the share of samples that run an expert at all."""

    def __init__(self, dim: int, num_layers: int, num_experts: int, *, kept: float = 1.0) -> None:
        super().__init__(dim, num_layers, num_experts, num_outlets=0)
        require(0 < kept <= 1, "kept", kept, "must lie in 0 … 1 (0 excluded)")
        self.kept = kept

    def route(self, step: int, hidden_BD: Tensor, draws: Draws) -> Choice:
        if not self.training:
            active_BN = hidden_BD.new_ones(len(hidden_BD), self.num_experts, dtype=torch.float32)
            return Choice(active_BN, active_BN / self.num_experts)
        toss_B = draws.uniform(step) / self.kept * self.num_experts
        active_BN = one_hot(toss_B.long().clamp(max=self.num_experts), self.num_experts + 1)[:, :-1].float()
        return Choice(active_BN, active_BN)
