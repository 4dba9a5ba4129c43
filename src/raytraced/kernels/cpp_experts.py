"""Sparse experts in the compiled library: one call for the whole grid (or one layer) forward, one backward.

Only active experts run and only their rows; the sums have a fixed order, so that neither the threads nor the other rows of
a batch change a result. Axes: B batch, L layers, N experts per layer, J linear layers of an expert, P pairs (row, expert),
D width, O and K a linear layer's outputs and inputs.
"""

import ctypes
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from raytraced.experts import MLPS, Grid, MLPExperts, MLPLayer, Stream
from raytraced.kernels import cpp_library as library
from raytraced.kernels.cpp_gradients import GradientHome, empty_gradient
from raytraced.kernels.cpp_library import Int, LibraryCall, Pointer, PointerArray, fields, point, pointer_array

STREAMS = ("residual", "skip-sum", "last")  # the numbers of cpu/experts.h
# Experts whose layer is larger than this are shared out over threads; below, rows are, and each chunk of rows keeps its
# own copy of the weights' gradients.
_LARGE_LAYER_BYTES = 2**20
_CHUNK, _MOST_CHUNKS = 256, 16


@library.mirrors
class ExpertsArgs(ctypes.Structure):
    """struct ExpertsArgs of cpu/experts.h."""

    _fields_ = [
        *fields("batch layers experts linears is_double stream threads chunk num_chunks", Int),
        *fields(
            "rows offsets mix hidden states out results grad_out grad_states grad_hidden grad_mix grad_results", Pointer
        ),
        ("widths", ctypes.POINTER(Int)),
        *fields("parameters inner gradients", PointerArray),
    ]


_forward = library.bind("raytraced_experts_forward", ctypes.POINTER(ExpertsArgs))
_backward = library.bind("raytraced_experts_backward", ctypes.POINTER(ExpertsArgs))
_plan = library.bind("raytraced_experts_plan", Int, Int, Int, Pointer, Int, Int, Pointer, Pointer, result=Int)

# What a call is given and gives: spec (stream, and perhaps where the gradients go), data (active,), tensors (hidden, mix,
# *weights, *biases): (B, D), (B, L, N), J of (L, N, O, K), J of (L, N, O), the latter of one layer without the axis L.
_KEPT = ("states", "results", "rows", "offsets")  # (L − 1 or L, B, D), (P, D), (P or more,), (chunks, M + 1)


def make_args(shape: Sequence[int], stream: int, chunk: int, parameters: Sequence[Tensor], **rest: Any) -> ExpertsArgs:
    """The arguments of a library call; the shape is (B, L, N)."""
    (B, L, N), J, is_double = shape, len(parameters) // 2, parameters[0].dtype == torch.float64
    widths = (Int * (J + 1))(parameters[0].shape[-1], *[weight.shape[-2] for weight in parameters[:J]])
    numbers = (B, L, N, J, is_double, stream, torch.get_num_threads(), chunk, max(1, -(-B // chunk)))
    return ExpertsArgs(*numbers, widths=widths, parameters=pointer_array(parameters), **rest)


def chunk_rows(batch: int, num_layers: int, weights: Sequence[Tensor]) -> int:
    """How many rows go down the layers together."""
    large = sum([weight.nbytes for weight in weights]) > num_layers * _LARGE_LAYER_BYTES
    return max(batch, 1) if large else max(_CHUNK, -(-batch // (16 * _MOST_CHUNKS)) * 16)


def sort_pairs(active_BM: Tensor, chunk: int, num_chunks: int) -> tuple[int, Tensor, Tensor]:
    """Who runs where: how many pairs there are, the rows of each expert, and where each expert's begin.

    The rows are sorted by chunk, expert and row; they begin at the places (chunks, M + 1).
    """
    B, M = active_BM.shape
    rows = torch.empty(B * M, dtype=torch.int32)
    offsets = torch.empty(num_chunks, M + 1, dtype=torch.int64)
    is_double = active_BM.dtype == torch.float64
    num_pairs = _plan(B, M, is_double, active_BM.data_ptr(), chunk, num_chunks, rows.data_ptr(), offsets.data_ptr())
    return num_pairs, rows, offsets


def forward(spec, data, tensors, keep) -> list[Tensor]:  # type: ignore[no-untyped-def]
    """Hidden vectors through all layers, each expert weighted; what is kept besides: hidden activations of all pairs."""
    (hidden, mix, *parameters), active, stream = tensors, data[0], int(spec[0])
    (B, L, N), D, weights = mix.shape, hidden.shape[-1], parameters[: len(parameters) // 2]
    chunk = chunk_rows(B, L, weights)
    num_pairs, rows, offsets = sort_pairs(active.view(B, L * N), chunk, max(1, -(-B // chunk)))

    out, like = torch.empty_like(hidden), hidden.new_empty
    kept = [like(L if STREAMS[stream] == "skip-sum" else L - 1, B, D), like(num_pairs, D), rows, offsets]
    inner = [like(num_pairs, -(-weight.shape[-2] // 16) * 16) for weight in weights[:-1]] if keep else []
    rest = point(("hidden", "mix", "out", *_KEPT), (hidden, mix, out, *kept))
    if keep:
        rest["inner"] = pointer_array(inner)
    library.run(_forward, "experts", make_args((B, L, N), stream, chunk, parameters, **rest))
    return [out, kept[0], *kept, *inner] if keep else [out, kept[0]]


def backward(spec, data, tensors, kept, grads) -> list[Tensor]:  # type: ignore[no-untyped-def]
    """Gradients of hidden, mix, weights and biases; experts without rows get zeros."""
    hidden, mix, *parameters = tensors
    gradients = [torch.empty_like(hidden), torch.empty_like(mix), torch.empty_like(kept[1])]
    homes, layer = spec[1] if len(spec) > 1 else ((), 0)
    weights, biases = parameters[: len(parameters) // 2], parameters[len(parameters) // 2 :]
    for weight, home in zip_longest(weights, homes):
        gradients.append(empty_gradient(weight) if home is None else home.place(layer))
    gradients += [empty_gradient(bias) for bias in biases]
    names = ("hidden", "mix", *_KEPT, "grad_out", "grad_states", "grad_hidden", "grad_mix", "grad_results")
    grads = [torch.zeros_like(hidden) if grads[0] is None else grads[0], grads[1]]
    rest = point(names, (hidden, mix, *kept[:4], *grads, *gradients[:3]))
    rest |= {"inner": pointer_array(kept[4:]), "gradients": pointer_array(gradients[3:])}
    chunk = chunk_rows(mix.shape[0], mix.shape[1], weights)
    library.run(_backward, "experts", make_args(mix.shape, int(spec[0]), chunk, parameters, **rest))
    return [*gradients[:2], *gradients[3:]]


def _empty(spec, data, tensors) -> list[Tensor]:  # type: ignore[no-untyped-def]
    hidden, num_layers = tensors[0], tensors[1].shape[1]
    num_states = num_layers if STREAMS[int(spec[0])] == "skip-sum" else num_layers - 1
    return [
        torch.empty_like(hidden, memory_format=torch.contiguous_format),
        hidden.new_empty(num_states, *hidden.shape),
    ]


call = LibraryCall("experts", forward, backward, _empty, num_answers=2, num_returned=2)


def is_custom(experts: Grid) -> bool:
    """Whether a grid is no grid of MLPs, or a subclass of one runs its experts in its own way."""
    if not isinstance(experts, MLPS):
        return True
    base = MLPLayer if isinstance(experts, MLPLayer) else MLPExperts
    return not library.is_unchanged(experts, base, "run_layer", "run_expert", "stacks")


def unsupported_reason(
    experts: Grid, hidden_BD: Tensor, active_BLN: Tensor, weights_BLN: Tensor, stream: Stream, exits: bool = False
) -> str | None:
    """Why the library cannot run this grid, None if it can."""
    if is_custom(experts):
        return "custom experts"
    assert isinstance(experts, MLPS)
    if hidden_BD.dtype not in library.PRECISIONS:
        return "hidden vectors in half precision"
    if torch.is_autocast_enabled("cpu"):
        return "autocast is on"
    weights, biases = experts.stacks()
    if any([parameter.dtype is not hidden_BD.dtype for parameter in (*weights, *biases)]):
        return "hidden vectors of another precision than the experts"
    return library.why_unfit((hidden_BD, weights_BLN, *weights, *biases))


def run(
    experts: Grid, hidden_BD: Tensor, active_BLN: Tensor, weights_BLN: Tensor, stream: Stream, exits: bool = False
) -> Tensor:
    """What `raytraced.experts.run_dense` computes, with each expert on its own rows."""
    assert isinstance(experts, MLPS)
    active_BLN, weights_BLN = active_BLN.detach().to(hidden_BD.dtype), weights_BLN.to(hidden_BD.dtype)
    weights, biases = experts.stacks()
    spec: tuple[Any, ...] = (STREAMS.index(stream),)
    if isinstance(experts, MLPLayer):
        homes = [weight if isinstance(weight, GradientHome) else None for weight in experts.all_weights]
        spec = (*spec, (homes, experts.layer)) if any(homes) else spec
    out_BD, states = call(spec, (active_BLN,), hidden_BD, weights_BLN, *weights, *biases)
    if not exits:
        return out_BD
    above = states[: experts.num_layers - 1]
    start_BD = stream.start(hidden_BD).answer
    return torch.cat((start_BD[None], above.cumsum(0) if stream is Stream.SKIP_SUM else above, out_BD[None]))
