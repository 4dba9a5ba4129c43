"""planned: top-k whose gates all see the layer's input, a control: it too knows its whole path before any expert runs.

Axes: B batch, S steps, N experts a layer, D width.
"""

import torch
from torch import Tensor

from raytraced.layer import Call, Choice, Draws
from raytraced.routers.top_k import TopK


class PlannedTopK(TopK):
    """k experts a layer, chosen for all layers at once."""

    def plan(self, hidden_BD: Tensor, call: Call) -> Choice:
        super().plan(hidden_BD, call)
        draws = Draws(call, hidden_BD)
        steps = [self.route(step, hidden_BD, draws) for step in range(self.num_layers)]
        losses = [choice.loss for choice in steps if choice.loss is not None]
        active_BSN, weights_BSN = (
            torch.stack([getattr(choice, name) for choice in steps], 1) for name in ("active", "weights")
        )
        return Choice(active_BSN, weights_BSN, torch.stack(losses).sum() if losses else None)
