"""dense: the same stream and the same expert blocks with no routing at all: what the routed models must be read against.

Axes: B batch, L blocks, D width.
"""

from collections.abc import Callable
from typing import get_args

import torch
from torch import Tensor, nn

from raytraced.baselines.routed import flat_rows, require
from raytraced.experts import MLPExperts, ModuleExperts, Stream, run_stream
from raytraced.layer import LayerOutput


class DenseBlocks(nn.Module):
    """A grid of one expert a layer, which every sample runs; `active` (…, L, 1) is all ones."""

    routing_multiply_adds = 0
    routing_parameters = 0

    def __init__(
        self,
        dim: int,
        num_blocks: int = 4,
        *,
        expert: Callable[[], nn.Module] | None = None,
        stream: Stream = "residual",
    ) -> None:
        super().__init__()
        require(dim >= 1, "dim", dim, "must be at least 1")
        require(num_blocks >= 1, "num_blocks", num_blocks, "must be at least 1")
        require(stream in get_args(Stream), "stream", repr(stream), f"must be one of {', '.join(get_args(Stream))}")
        self.dim, self.num_blocks, self.stream = dim, num_blocks, stream
        self.experts = MLPExperts(num_blocks, 1, dim) if expert is None else ModuleExperts(num_blocks, 1, expert)

    def forward(
        self, hidden: Tensor, *, generator: torch.Generator | None = None, rows: Tensor | None = None
    ) -> LayerOutput:
        hidden_BD = flat_rows(hidden, self.dim)
        hidden_BD = run_stream(self.stream, self.num_blocks, hidden_BD, self.run_block)
        # At least float32, as masks everywhere: sums of ones over a batch must be exact.
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        active = hidden.new_ones(*hidden.shape[:-1], self.num_blocks, 1, dtype=dtype)
        return LayerOutput(hidden_BD.view(hidden.shape), active)

    def run_block(self, block: int, hidden_BD: Tensor) -> Tensor:
        """One block on all rows."""
        return self.experts.run_expert(block, 0, hidden_BD)

    def extra_repr(self) -> str:
        return f"num_blocks={self.num_blocks}, stream={self.stream}"
