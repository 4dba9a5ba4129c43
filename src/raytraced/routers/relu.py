"""relu: experts run where their gate is positive, and weigh what it says (ReMoE, Wang et al. 2024).

Axes: B batch, L layers, N experts a layer, D width.
"""

import torch
from torch import Tensor

from raytraced.layer import Choice, Draws, Router
from raytraced.routers.choosing import global_load
from raytraced.words import require

START = 1e-8  # the penalty before the first step, as in the reference


class ReLURouting(Router):
    """k experts a layer on the mean, by a penalty on positive gates; a layer where more run raises it, else it falls.

    Each training step moves a layer's penalty by the factor `pace`. It weighs an expert by its share of the load, which
    evens out the load as well.
    """

    penalty: Tensor  # (L,)

    def __init__(self, dim: int, num_layers: int, num_experts: int, *, k: float = 2.0, pace: float = 1.2) -> None:
        super().__init__(dim, num_layers, num_experts)
        require(0 < k <= num_experts, "k", k, f"must lie in 0 … num_experts={num_experts} (0 excluded)")
        require(pace >= 1, "pace", pace, "must be at least 1")
        self.k, self.pace = k, pace
        # A buffer, not an attribute: a resumed run must go on with the same penalty.
        self.register_buffer("penalty", torch.full((num_layers,), START))

    def route(self, step: int, hidden_BD: Tensor, draws: Draws) -> Choice:
        weights_BN = self.gate_logits(step, hidden_BD).relu()
        active_BN = (weights_BN > 0).to(weights_BN.dtype)
        if not self.training:
            return Choice(active_BN, weights_BN)
        # The load of all processes, and how many rows they have.
        *load, num_rows = global_load(torch.cat((active_BN, torch.ones_like(active_BN[:, :1])), -1)).unbind()
        share_N = torch.stack(load) / num_rows.clamp_min(1)
        mean = (share_N * self.num_experts / self.k * weights_BN).sum() / max(len(weights_BN), 1)
        loss = self.penalty[step].clone() * mean  # of this step: it moves before the backward pass
        self.move_penalty(step, share_N.sum())
        return Choice(active_BN, weights_BN, loss)

    @torch.no_grad()
    def move_penalty(self, layer: int, mean_active: Tensor) -> None:
        """One step of the penalty of a layer towards k experts a row."""
        self.penalty[layer] *= self.pace ** (mean_active - self.k).sign()
