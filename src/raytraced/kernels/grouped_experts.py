"""Sparse experts on a GPU: a layer's pairs (row, expert) sorted by expert on the device, one grouped product per linear layer.

Nothing is asked of the device, so that work can be queued ahead and captured: a layer has places for all of its B·N pairs,
those of active experts first, and the products stop where these end. What lies beyond is never read. A pair has one place and
sums follow the order of rows and experts, so that results do not depend on timing.

Axes: B batch, L layers, N experts per layer, D width, S = B·N places, O and K a linear layer's outputs and inputs.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from raytraced.experts import MLPS, Grid, Stream, run_stream
from raytraced.kernels.cpp_experts import is_custom
from raytraced.kernels.cpp_library import unreadable_reason

_PRECISIONS = (torch.bfloat16, torch.float16, torch.float32)
_ALIGNED_BYTES = 16  # of every row of an operand


class Places(NamedTuple):
    """Where the pairs of one layer are, sorted by expert; those that do not run come last."""

    order: Tensor  # (S,), the pair row · N + expert at each place
    place: Tensor  # (S,), the place of each pair
    active: Tensor  # (B, N, 1), bool
    ends: Tensor  # (N,), int32: where the places of each expert end

    @classmethod
    def of(cls, active_BN: Tensor) -> "Places":
        B, N = active_BN.shape
        runs_BN = active_BN.detach() > 0
        key_BN = torch.where(runs_BN, torch.arange(N, device=active_BN.device), N)
        order_S = key_BN.flatten().argsort(stable=True)
        place_S = torch.empty_like(order_S).scatter_(0, order_S, torch.arange(B * N, device=active_BN.device))
        ends_N = runs_BN.sum(0, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return cls(order_S, place_S, runs_BN[:, :, None], ends_N)


class _ToPlaces(torch.autograd.Function):
    """What a pair needs, at its place: its row of the hidden vectors (axis 0 of pairs), or its expert's bias (axis 1)."""

    @staticmethod
    def forward(ctx, source, order_S, place_S, active_BN1, axis):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(place_S, active_BN1)
        ctx.axis, N = axis, active_BN1.shape[1]
        return source.index_select(0, order_S // N if axis == 0 else order_S % N)

    @staticmethod
    def backward(ctx, grad_SD):  # type: ignore[no-untyped-def]
        place_S, active_BN1 = ctx.saved_tensors
        return _from_places(grad_SD, place_S, active_BN1).sum(1 - ctx.axis), None, None, None, None


def _from_places(values_SD: Tensor, place_S: Tensor, active_BN1: Tensor) -> Tensor:
    """What each pair has at its place (B, N, D); zero where an expert did not run, whatever lies there."""
    values_BND = values_SD.index_select(0, place_S).view(*active_BN1.shape[:2], values_SD.shape[1])
    return torch.where(active_BN1, values_BND, 0)


def _update(
    weights: Sequence[Tensor], biases: Sequence[Tensor], hidden_BD: Tensor, mix_BN: Tensor, active_BN: Tensor
) -> Tensor:
    """The weighted sum of a layer's experts, each run on its own rows only (B, D)."""
    places, dtype = Places.of(active_BN), _precision(hidden_BD)
    x_SK = _ToPlaces.apply(hidden_BD.to(dtype), places.order, places.place, places.active, 0)
    for index, (weight_NOK, bias_NO) in enumerate(zip(weights, biases, strict=True)):
        product_SO = F.grouped_mm(F.relu(x_SK) if index else x_SK, weight_NOK.to(dtype).mT, offs=places.ends)
        x_SK = product_SO + _ToPlaces.apply(bias_NO.to(dtype), places.order, places.place, places.active, 1)
    result_BND = _from_places(x_SK, places.place, places.active)
    return torch.einsum("bn,bnd->bd", mix_BN.to(hidden_BD.dtype), result_BND.to(hidden_BD.dtype))


def _precision(hidden_BD: Tensor) -> torch.dtype:
    """What the products are computed in."""
    kind = hidden_BD.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_BD.dtype


def run(
    experts: Grid, hidden_BD: Tensor, active_BLN: Tensor, weights_BLN: Tensor, stream: Stream, exits: bool = False
) -> Tensor:
    """What `raytraced.experts.run_sparse` computes."""
    layers = experts.unstacked()

    def update(layer: int, hidden_BD: Tensor) -> Tensor:
        weights, biases = layers[layer].stacks()  # type: ignore[union-attr]
        return _update(weights, biases, hidden_BD, weights_BLN[:, layer], active_BLN[:, layer])

    return run_stream(stream, experts.num_layers, hidden_BD, update, exits)


def unsupported_reason(
    experts: Grid, hidden_BD: Tensor, active_BLN: Tensor, weights_BLN: Tensor, stream: Stream, exits: bool = False
) -> str | None:
    """Why grouped products cannot run this grid, None if they can."""
    if is_custom(experts):
        return "custom experts"
    assert isinstance(experts, MLPS)
    (weights, biases), dtype = experts.stacks(), _precision(hidden_BD)
    if dtype not in _PRECISIONS:
        return f"grouped products have no {dtype}"
    if torch.compiler.is_compiling() and dtype != torch.bfloat16:
        return f"under torch.compile grouped products have no {dtype}"
    if any([size * dtype.itemsize % _ALIGNED_BYTES for weight in weights for size in weight.shape[-2:]]):
        return f"an expert's widths are no multiples of {_ALIGNED_BYTES // dtype.itemsize}"
    if not torch.is_autocast_enabled(hidden_BD.device.type) and any([weight.dtype is not dtype for weight in weights]):
        return "hidden vectors of another precision than the experts"
    return unreadable_reason((hidden_BD, weights_BLN, *weights, *biases))


def slower_reason(experts: Grid, hidden_BD: Tensor, *rest: object) -> str | None:
    """Why another way is better for these vectors."""
    if not hidden_BD.is_cuda:
        return "grouped products are for a GPU"
    # PyTorch documents one kernel, in bfloat16; in other precisions it may ask the device for every expert's rows.
    return None if _precision(hidden_BD) == torch.bfloat16 else "grouped products are fast in bfloat16 alone"
