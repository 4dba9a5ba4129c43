"""relu: an expert runs where its gate logit is positive, and the logit is its weight (ReMoE, Wang et al. 2024).

Axes: B batch, L layers, N experts per layer, D width.
"""

import torch
from torch import Tensor

from raytraced.errors import require
from raytraced.router import Choice, Draws, Router
from raytraced.routers.choosing import global_load

START = 1e-8  # the penalty at the first step, as in the reference


class ReLURouting(Router):
    """Run about k experts per layer on the mean, controlled by a penalty on positive gates.

    After each training step the penalty of a layer is multiplied by `pace` if more than k experts ran on the mean, and
    divided by it if fewer ran. The penalty on an expert is proportional to its share of the load, which also balances the load.

    Args:
        dim: Width of the hidden vectors.
        num_layers: Number of expert layers.
        num_experts: Number of experts per layer.
        k: Mean number of experts per layer to reach; need not be whole.
        pace: Factor of the penalty per training step, at least 1.

    Returns (from ``route``):
        Choice with ``active`` (B, N), ``weights`` (B, N) and, in training, ``loss``.
    """

    penalty: Tensor  # (L,)

    def __init__(self, dim: int, num_layers: int, num_experts: int, *, k: float = 2.0, pace: float = 1.2) -> None:
        super().__init__(dim, num_layers, num_experts)
        require(0 < k <= num_experts, "k", k, f"must lie in 0 … num_experts={num_experts} (0 excluded)")
        require(pace >= 1, "pace", pace, "must be at least 1")
        self.k, self.pace = k, pace
        # A buffer, not an attribute: a resumed run must continue with the same penalty.
        self.register_buffer("penalty", torch.full((num_layers,), START))

    def route(self, step: int, hidden_BD: Tensor, draws: Draws) -> Choice:
        gates_BN = self.gate_logits(step, hidden_BD).relu()
        active_BN = draws.recall(step, gates_BN > 0).to(gates_BN.dtype)
        weights_BN = gates_BN * active_BN
        if not self.training:
            return Choice(active_BN, weights_BN)
        # The load and the number of rows of all processes together.
        *load, num_rows = global_load(torch.cat((active_BN, torch.ones_like(active_BN[:, :1])), -1)).unbind()
        share_N = torch.stack(load) / num_rows.clamp_min(1)
        mean = (share_N * self.num_experts / self.k * weights_BN).sum() / max(len(weights_BN), 1)
        loss = self.penalty[step].clone() * mean  # a copy: the penalty changes before the backward pass
        self.move_penalty(step, share_N.sum())
        return Choice(active_BN, weights_BN, loss)

    @torch.no_grad()
    def move_penalty(self, layer: int, mean_active: Tensor) -> None:
        """Change the penalty of a layer by one step, so that `mean_active`, its experts per row, comes nearer to k."""
        self.penalty[layer] *= self.pace ** (mean_active - self.k).sign()
