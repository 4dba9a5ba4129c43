"""Sequence, weights and experts in one library call, for batches so small that the calls would cost the most.

Axes: B batch, L layers, N experts a layer, D width.
"""

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from raytraced.grid import Experts, MLPExperts, Stream
from raytraced.operations import cpp_experts, cpp_sequence
from raytraced.operations import cpp_library as library
from raytraced.operations.cpp_library import Int
from raytraced.routing import RoutingNetwork
from raytraced.sequence import WEIGHTINGS, Route, rates_to_one_weights, rates_weights, unit_weights

_MOST_ROWS = 64  # beyond, the calls of the separate parts matter little, and they use all threads
_MOST_WEIGHTS = 2**14  # of one expert: larger ones are not what takes the time in the calls
# The numbers of cpu/raytrace.cpp.
_WEIGHTINGS: dict[Callable[..., Tensor] | None, int] = {unit_weights: 0, rates_to_one_weights: 1, rates_weights: 2}

_raytrace = library.bind("raytraced_raytrace", ctypes.POINTER(cpp_sequence.Args), ctypes.POINTER(cpp_experts.Args), Int)


def unless(routing: RoutingNetwork, grid: Experts, hidden_BD: Tensor, entry_BN: Tensor, **options: Any) -> str | None:
    """Why the parts one by one are better."""
    if torch.compiler.is_compiling():
        return "torch.compile and torch.export see the parts as operators"
    if not 1 <= hidden_BD.shape[0] <= _MOST_ROWS:
        return f"not 1 to {_MOST_ROWS} rows: the parts use all threads"
    if isinstance(grid, MLPExperts) and grid.num_weights > _MOST_WEIGHTS:
        return f"experts of more than {_MOST_WEIGHTS:,} weights: the calls cost little beside them"
    return None


def cannot(
    routing: RoutingNetwork, grid: Experts, hidden_BD: Tensor, entry_BN: Tensor, *, weighting: str, **options: Any
) -> str | None:
    """Why it is not possible."""
    if torch.is_grad_enabled():
        return "gradients may be wanted"
    if torch.is_autocast_enabled("cpu"):
        return "autocast is on"
    if WEIGHTINGS.get(weighting) not in _WEIGHTINGS:
        return "a weighting that the library does not know"
    if not isinstance(grid, MLPExperts):
        return "experts of one's own"
    if hidden_BD.dtype not in library.PRECISIONS:
        return "hidden vectors in half precision"
    weights, biases = grid.stacks()
    parameters = [t for t in (*weights, *biases, routing.gate_first, routing.gate_inner) if t is not None]
    if not all([parameter.is_contiguous() for parameter in parameters]):
        return "parameters that are not contiguous"
    return library.why_unfit((hidden_BD, entry_BN, *parameters), hidden_BD.dtype)


class _Told(NamedTuple):
    """What the library was told about a grid last, to be told again while the key is the same."""

    key: tuple[Any, ...]
    parameters: list[Tensor]
    sequence: cpp_sequence.Args
    experts: cpp_experts.Args


_told: WeakKeyDictionary[Experts, _Told] = WeakKeyDictionary()


def run(
    routing: RoutingNetwork,
    grid: Experts,
    hidden_BD: Tensor,
    entry_BN: Tensor,
    *,
    weighting: str,
    stream: Stream,
    **options: Any,
) -> tuple[Tensor, Route]:
    """Hidden vectors (B, D) and entry rates (B, N) -> hidden vectors (B, D) and what was activated."""
    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or not isinstance(grid, MLPExperts):
        return NotImplemented
    spec, data, tensors = cpp_sequence.describe(routing, entry_BN, **options)
    weights, biases = grid.stacks()
    parameters, number = [*weights, *biases, *tensors[1:]], _WEIGHTINGS.get(WEIGHTINGS.get(weighting))
    if library.why_unfit((hidden_BD, entry_BN), hidden_BD.dtype) is not None:
        return NotImplemented
    try:
        places = [(id(parameter), parameter.data_ptr(), parameter.is_contiguous()) for parameter in parameters]
    except RuntimeError:  # inside a transform of torch.func
        return NotImplemented
    told, key = _told.get(grid), (entry_BN.shape, hidden_BD.dtype, number, stream, spec, places)
    if told is None or told.key != key:
        if cannot(routing, grid, hidden_BD, entry_BN, weighting=weighting) is not None:
            return NotImplemented
        sequence, (B, N) = cpp_sequence.make_args(spec, [], tensors), entry_BN.shape
        shape, stream_number = (B, routing.num_layers, N), cpp_experts.STREAMS.index(stream)
        experts = cpp_experts.make_args(shape, stream_number, B, [*weights, *biases])
        sequence.threads = experts.threads = 1
        told = _told[grid] = _Told(key, parameters, sequence, experts)
    sequence = cpp_sequence.Args.from_buffer_copy(told.sequence)
    experts = cpp_experts.Args.from_buffer_copy(told.experts)
    hidden_BD, entry_BN = hidden_BD.contiguous(), entry_BN.contiguous()
    out_BD, route = torch.empty_like(hidden_BD), cpp_sequence.empty(spec, data, tensors)
    sequence.entry, experts.hidden, experts.out = entry_BN.data_ptr(), hidden_BD.data_ptr(), out_BD.data_ptr()
    for name, tensor in zip((*cpp_sequence.ROUTE, *cpp_sequence.DATA), (*route, *data), strict=False):
        setattr(sequence, name, tensor.data_ptr())
    library.run(_raytrace, "raytraced experts", sequence, experts, number)
    return out_BD, cpp_sequence.as_route(route)
