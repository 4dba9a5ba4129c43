"""hash: a fixed random choice of experts, which nothing learns (hash layers, Roller et al. 2021).

It is the baseline of every router that plans from the token: whatever they learn must be better than chance.

Axes: B batch, L layers, N experts per layer, D width.
"""

import torch
from torch import Tensor

from raytraced.errors import require
from raytraced.router import Call, Choice, Cost, Router
from raytraced.routers.choosing import top_mask


class HashRouting(Router):
    """Run k experts per layer, those with the largest scores of a random map that is never trained.

    Equal vectors always take the same experts. In a language model whose routers read one vector per word of the
    vocabulary this is a random table with a row for each word.

    Args:
        dim: Width of the hidden vectors.
        num_layers: Number of expert layers.
        num_experts: Number of experts per layer.
        k: Number of experts that run in each layer, each with weight 1.

    Returns (from ``plan``):
        Choice with ``active`` (B, L, N) and ``weights`` (B, L, N), which are equal.
    """

    plans, learns = True, False
    directions: Tensor  # (L, N, D)

    def __init__(self, dim: int, num_layers: int, num_experts: int, *, k: int = 1) -> None:
        super().__init__(dim, num_layers, num_experts, num_outlets=0)
        require(1 <= k <= num_experts, "k", k, f"must lie in 1 … num_experts={num_experts}")
        self.k = k
        # A buffer: saved with the model, never trained.
        self.register_buffer("directions", torch.randn(num_layers, num_experts, dim))

    def alike(self, call: Call) -> bool:
        return True

    def plan(self, hidden_BD: Tensor, call: Call) -> Choice:
        """Choose for all steps; see `raytraced.router.Router.plan`."""
        super().plan(hidden_BD, call)
        vectors_BD = hidden_BD.detach().to(self.directions.dtype)
        scores_BLN = torch.einsum("lnd,bd->bln", self.directions, vectors_BD)
        chosen_BLN = top_mask(scores_BLN, self.k) if call.route is None else call.route.active != 0
        active_BLN = chosen_BLN.to(torch.promote_types(scores_BLN.dtype, torch.float32))
        return Choice(active_BLN, active_BLN)

    def step_cost(self) -> Cost:
        """The cost of choosing for one step: the scores of its experts; nothing is a parameter."""
        return Cost(self.directions[0].numel(), 0)
