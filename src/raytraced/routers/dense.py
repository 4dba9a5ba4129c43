"""dense, mlp: expert blocks with no routing at all, what the routed models must be read against.

Axes: B batch, L blocks, D width.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from raytraced.grid import Stream, make_grid, run_stream
from raytraced.layer import Call, Choice, LayerOutput, RoutedLayer, Router, looked
from raytraced.sequence import Route
from raytraced.words import require


class Everyone(Router):
    """No gate and nothing to decide: every sample runs every block."""

    def __init__(self, dim: int, num_blocks: int) -> None:
        super().__init__(dim, num_blocks, 1, num_outlets=0)

    def plan(self, hidden_BD: Tensor, call: Call) -> Choice:
        super().plan(hidden_BD, call)
        # At least float32, as masks everywhere: sums of ones over a batch must be exact.
        dtype = torch.promote_types(hidden_BD.dtype, torch.float32)
        ones_BL1 = hidden_BD.new_ones(hidden_BD.shape[0], self.num_layers, 1, dtype=dtype)
        return Choice(ones_BL1, ones_BL1)


class DenseBlocks(RoutedLayer):
    """A grid of one expert a layer, which every sample runs; `active` (…, L, 1) is all ones."""

    def __init__(
        self,
        dim: int,
        num_blocks: int = 4,
        *,
        expert: Callable[[], nn.Module] | None = None,
        hidden: int | None = None,
        num_hidden: int = 2,
        stream: Stream = "residual",
    ) -> None:
        require(num_blocks >= 1, "num_blocks", num_blocks, "must be at least 1")
        router, grid = Everyone(dim, num_blocks), make_grid(dim, num_blocks, 1, expert, hidden, num_hidden)
        super().__init__(router, grid, dim, stream=stream)
        self.num_blocks = num_blocks

    def run(self, hidden_BD: Tensor, call: Call) -> LayerOutput:
        """Every block on every row: nothing to sort and nothing to weigh."""
        active_BL1 = self.router.plan(hidden_BD, call).active  # type: ignore[union-attr]
        answer = run_stream(self.stream, self.num_blocks, hidden_BD, self.run_block, call.looks)
        return looked(self.see(answer), call, Route(active_BL1, None, active_BL1.sum((-1, -2)).long(), None))

    def run_block(self, block: int, hidden_BD: Tensor) -> Tensor:
        """One block on all rows."""
        return self.experts.run_expert(block, 0, hidden_BD)


class MLPLayers(DenseBlocks):
    """The paper's plain MLP: hidden layers D → D with ReLU around each, no stream beside them unless asked for."""

    def __init__(self, dim: int, num_layers: int = 8, *, stream: Stream = "last") -> None:
        require(num_layers >= 1, "num_layers", num_layers, "must be at least 1")
        # ReLU first, so that the input block's output is rectified once and another stream can pass it by.
        super().__init__(dim, num_layers, expert=lambda: nn.Sequential(nn.ReLU(), nn.Linear(dim, dim)), stream=stream)

    def see(self, hidden: Tensor) -> Tensor:
        return torch.relu(hidden)
