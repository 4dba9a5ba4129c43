"""mlp-total and mlp-avg: the paper's plain MLPs, with as many parameters as MRE has, or as it uses on average.

Axes: B batch, D width.
"""

from typing import Any

import torch
from torch import Tensor, nn

from raytraced.baselines.dense import DenseBlocks
from raytraced.experts import Stream
from raytraced.layer import LayerOutput


class MLPLayers(DenseBlocks):
    """Hidden layers D → D with ReLU around each, no stream beside them unless asked for; `active` (…, L, 1) is all ones."""

    def __init__(self, dim: int, num_layers: int = 8, *, stream: Stream = "last") -> None:
        if num_layers < 1:
            raise ValueError(f"num_layers={num_layers}: must be at least 1")
        # ReLU first, so that the input block's output is rectified once and another stream can pass it by.
        super().__init__(dim, num_layers, expert=lambda: nn.Sequential(nn.ReLU(), nn.Linear(dim, dim)), stream=stream)

    def forward(self, hidden: Tensor, **options: Any) -> LayerOutput:
        out = super().forward(hidden, **options)
        return out._replace(hidden=torch.relu(out.hidden))
