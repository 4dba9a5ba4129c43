"""dense, mlp: blocks without routing, the baselines to compare every routed model with.

Axes: B batch, L blocks, D width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from raytraced.errors import require
from raytraced.experts import StreamName, make_grid, run_stream
from raytraced.layer import LayerOutput, RoutedLayer
from raytraced.router import Call, Choice, Router
from raytraced.sequence import Route


class AllBlocks(Router):
    """A router without gates: every sample runs every block with weight 1.

    Args:
        dim: Width of the hidden vectors.
        num_blocks: Number of blocks.

    Returns (from ``plan``):
        Choice with ``active`` and ``weights`` (B, L, 1), all ones.
    """

    def __init__(self, dim: int, num_blocks: int) -> None:
        super().__init__(dim, num_blocks, 1, num_outlets=0)

    def plan(self, hidden_BD: Tensor, call: Call) -> Choice:
        super().plan(hidden_BD, call)
        # At least float32, as all active sets: sums of ones over a batch must be exact.
        dtype = torch.promote_types(hidden_BD.dtype, torch.float32)
        ones_BL1 = hidden_BD.new_ones(hidden_BD.shape[0], self.num_layers, 1, dtype=dtype)
        return Choice(ones_BL1, ones_BL1)


class DenseBlocks(RoutedLayer):
    """A stack of dense blocks: a grid with one expert per layer that every sample runs.

    Args:
        dim: Width of the input and output vectors.
        num_blocks: Number of blocks.
        expert: Function that makes one block, an nn.Module from width dim to width dim; an MLP if None.
        hidden: Width of the MLP's hidden layers; dim if None.
        num_hidden: Number of the MLP's hidden layers.
        stream: How blocks are connected: "residual", "skip-sum" or "last".

    Returns (from ``forward``):
        LayerOutput with ``hidden`` (..., dim) and a route whose ``active`` (..., L, 1) is all ones.
    """

    def __init__(
        self,
        dim: int,
        num_blocks: int = 4,
        *,
        expert: Callable[[], nn.Module] | None = None,
        hidden: int | None = None,
        num_hidden: int = 2,
        stream: StreamName = "residual",
    ) -> None:
        require(num_blocks >= 1, "num_blocks", num_blocks, "must be at least 1")
        router, grid = AllBlocks(dim, num_blocks), make_grid(dim, num_blocks, 1, expert, hidden, num_hidden)
        super().__init__(router, grid, dim, stream=stream)
        self.num_blocks = num_blocks

    def run(self, hidden_BD: Tensor, call: Call) -> LayerOutput:
        """Run every block on all rows (B, D), without sorting and weights."""
        active_BL1 = self.router.plan(hidden_BD, call).active  # type: ignore[union-attr]
        answer = run_stream(self.stream, self.num_blocks, hidden_BD, self.run_block, call.exits)
        route = Route(active_BL1, None, active_BL1.sum((-1, -2)).long(), None)
        return self.output(hidden_BD, self.read_out(answer), route)

    def run_step(self, layer: Any, hidden_nD: Tensor, active_nN: Tensor, weights_nN: Tensor) -> Tensor:
        result_nD: Tensor = layer.run_expert(0, 0, hidden_nD)
        return result_nD

    def run_block(self, block: int, hidden_BD: Tensor) -> Tensor:
        """Run one block on all rows (B, D)."""
        return self.experts.run_expert(block, 0, hidden_BD)


class MLPLayers(DenseBlocks):
    """The paper's plain MLP: hidden layers D → D with ReLU before and after each.

    Args:
        dim: Width of the layers.
        num_layers: Number of hidden layers.
        stream: How layers are connected; "last" is the plain MLP.

    Returns (from ``forward``):
        LayerOutput with ``hidden`` (..., dim) and a route whose ``active`` (..., L, 1) is all ones.
    """

    def __init__(self, dim: int, num_layers: int = 8, *, stream: StreamName = "last") -> None:
        require(num_layers >= 1, "num_layers", num_layers, "must be at least 1")
        # ReLU first: it rectifies the input block's output once, and a residual stream can bypass it.
        super().__init__(dim, num_layers, expert=lambda: nn.Sequential(nn.ReLU(), nn.Linear(dim, dim)), stream=stream)

    def read_out(self, hidden: Tensor) -> Tensor:
        return torch.relu(hidden)
