"""Experts in a store, run by the compiled library straight from the memory that they were read into.

The experts of a layer run as they arrive; their results are added up at the end, in the experts' order. Outputs are those of
`cpp_experts`, bit for bit. Axes: B batch, L layers, N experts per layer, P pairs (row, expert), D width.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from raytraced.experts import Stream
from raytraced.kernels import cpp_library as library
from raytraced.kernels.cpp_experts import STREAMS, ExpertsArgs, sort_pairs
from raytraced.kernels.cpp_library import Int, Pointer, PointerArray, point
from raytraced.store.experts import StoredExperts, StoredLayer

# A library that was built before these functions were written lacks them.
_is_built = hasattr(library.cpu, "raytraced_experts_run")
_arguments = ctypes.POINTER(ExpertsArgs), ctypes.POINTER(Int), PointerArray, Int
_run_some = library.bind("raytraced_experts_run", *_arguments) if _is_built else None
_join = library.bind("raytraced_experts_join", ctypes.POINTER(ExpertsArgs)) if _is_built else None


def unsupported_reason(
    experts: Any, hidden_BD: Tensor, active_BLN: Tensor, weights_BLN: Tensor, stream: Stream, exits: bool = False
) -> str | None:
    """Why the library cannot run this grid from a store, None if it can."""
    if not isinstance(experts, StoredExperts | StoredLayer):
        return "experts are not in a store"
    grid = experts if isinstance(experts, StoredExperts) else experts.experts
    grid.check(hidden_BD)
    if hidden_BD.dtype not in library.PRECISIONS:
        return "hidden vectors in half precision"
    if torch.is_autocast_enabled("cpu"):
        return "autocast is on"
    if grid.dtype is not hidden_BD.dtype:
        return "hidden vectors of another precision than the experts"
    if library.cpu is not None and not _is_built:
        return "the compiled kernels are older than this file: build them again"
    return library.unfit_reason((hidden_BD, weights_BLN))


def run(
    experts: Any, hidden_BD: Tensor, active_BLN: Tensor, weights_BLN: Tensor, stream: Stream, exits: bool = False
) -> Tensor:
    """What `raytraced.experts.run_sparse` computes."""
    if isinstance(experts, StoredLayer):
        return _run_layers(experts.unstacked(), hidden_BD, active_BLN, weights_BLN, stream, exits)
    with experts.reading(active_BLN):
        return _run_layers(experts.unstacked(), hidden_BD, active_BLN, weights_BLN, stream, exits)


def _run_layers(
    layers: list[StoredLayer], hidden_BD: Tensor, active_BLN: Tensor, weights_BLN: Tensor, stream: Stream, exits: bool
) -> Tensor:
    """Hidden vectors through all layers, one call of the library for each and for each group of experts that arrives."""
    outputs, x_BD = [], hidden_BD.detach().contiguous()
    active_BLN, weights_BLN = active_BLN.detach().to(x_BD.dtype), weights_BLN.detach().to(x_BD.dtype)
    for number, layer in enumerate(layers):
        x_BD = run_layer(layer, x_BD, active_BLN[:, number], weights_BLN[:, number], stream.within_layer)
        outputs.append(x_BD)
    if not exits:
        return stream.combine(outputs)
    above = torch.stack(outputs)[:-1]
    start_BD = stream.start(hidden_BD).answer
    above = above.cumsum(0) if stream is Stream.SKIP_SUM else above
    return torch.cat((start_BD[None], above, stream.combine(outputs)[None]))


def run_layer(layer: StoredLayer, hidden_BD: Tensor, active_BN: Tensor, weights_BN: Tensor, stream: Stream) -> Tensor:
    """One layer, its experts in the order in which they come into memory."""
    grid, (B, N), D = layer.experts, active_BN.shape, hidden_BD.shape[-1]
    J, is_double = len(grid.widths) - 1, hidden_BD.dtype == torch.float64
    num_pairs, rows, offsets = sort_pairs(active_BN.contiguous(), max(B, 1), 1)
    mix_BN, out_BD = weights_BN.contiguous(), torch.empty_like(hidden_BD)
    # What does not arrive in time adds nothing.
    new = hidden_BD.new_empty if grid.limit is None else hidden_BD.new_zeros
    results_PD, bounds = new(num_pairs, D), offsets[0].tolist()
    numbers = (B, 1, N, J, is_double, STREAMS.index(stream), torch.get_num_threads(), max(B, 1), 1)
    named = point(
        ("hidden", "mix", "out", "rows", "offsets", "results"), (hidden_BD, mix_BN, out_BD, rows, offsets, results_PD)
    )
    args = ExpertsArgs(*numbers, widths=(Int * (J + 1))(*grid.widths), **named)
    places = [place * grid.dtype.itemsize for place in grid.places()]
    for experts in layer.arrivals([expert for expert in range(N) if bounds[expert] < bounds[expert + 1]]):
        starts = [ctypes.addressof(ctypes.c_char.from_buffer(layer.slot(expert))) for expert in experts]
        pointers = (Pointer * (2 * J * len(experts)))(*[start + place for start in starts for place in places])
        library.run(_run_some, "experts", args, (Int * len(experts))(*experts), pointers, len(experts))
    library.run(_join, "experts", args)
    return out_BD
