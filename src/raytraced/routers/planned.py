"""planned: top-k whose gates all read the layer's input, so that the whole path is known before any expert runs.

It is a control experiment for raytraced experts, which also plan the whole path.

Axes: B batch, S steps, N experts per layer, D width.
"""

import torch
from torch import Tensor

from raytraced.router import Call, Choice, Draws
from raytraced.routers.top_k import TopK


class PlannedTopK(TopK):
    """Run k experts per layer, chosen for all layers at once. The arguments are those of `TopK`.

    Returns (from ``plan``):
        Choice with ``active`` (B, S, N), ``weights`` (B, S, N) and the sum of the layers' losses.
    """

    plans = True

    def alike(self, call: Call) -> bool:
        return not self.training  # the balance loss counts tokens, not words

    def plan(self, hidden_BD: Tensor, call: Call) -> Choice:
        super().plan(hidden_BD, call)
        draws = Draws(call, hidden_BD)
        steps = [self.route(step, hidden_BD, draws) for step in range(self.num_layers)]
        losses = [choice.loss for choice in steps if choice.loss is not None]
        active_BSN, weights_BSN = (
            torch.stack([getattr(choice, name) for choice in steps], 1) for name in ("active", "weights")
        )
        return Choice(active_BSN, weights_BSN, torch.stack(losses).sum() if losses else None)
