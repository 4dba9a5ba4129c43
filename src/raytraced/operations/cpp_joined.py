"""Entry gate, sequence, weights and experts as one function of PyTorch's, with gradients: what training runs.

One by one they are three functions and some twenty small operators between, forward and back, which take longer than the
library's arithmetic. Axes: B batch, L layers, N experts a layer, R rank of what gates see, P pairs (row, expert), D width.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from raytraced.grid import Experts, Stream
from raytraced.operations import cpp_experts, cpp_raytrace, cpp_sequence
from raytraced.operations import cpp_library as library
from raytraced.operations.cpp_library import Int, LibraryCall, Pointer, Table, fields, table
from raytraced.operations.cpp_raytrace import Maps
from raytraced.routing import RoutingNetwork
from raytraced.sequence import Route


class Call(ctypes.Structure):
    """struct RaytraceCall of cpu/raytrace.h."""

    _fields_ = [
        *fields("batch threads chunk num_chunks", Int),
        *fields("seed rows active rates output nodes num_active", Pointer),
        *fields("hidden entry seen mix pair_rows pair_offsets out states results", Pointer),
        ("inner", Table),
        *fields("grad_out grad_states grad_output grad_active grad_rates", Pointer),
        *fields("grad_hidden grad_mix grad_results grad_entry grad_seen grad_first grad_inner", Pointer),
        ("grad_maps", Pointer * 4),
        ("gradients", Table),
        ("start", Pointer),
    ]


_route = library.bind("raytraced_raytrace_route", ctypes.POINTER(cpp_raytrace.Args), ctypes.POINTER(Call), result=Int)
_run = library.bind("raytraced_raytrace_run", ctypes.POINTER(cpp_raytrace.Args), ctypes.POINTER(Call))
_back = library.bind("raytraced_raytrace_back", ctypes.POINTER(cpp_raytrace.Args), ctypes.POINTER(Call))

# What a call is given and gives: spec (looks, stream, weighting, N, R, *an expert's widths, *that of a sequence),
# data (seed, rows), tensors (hidden, *maps, *gates, *weights, *biases); the experts' answer, and the tensors of a route.
_SEQUENCE = -7  # where the spec of a sequence begins

_whole, _short = (torch.empty(0, dtype=dtype, device="cpu") for dtype in (torch.int64, torch.int32))
_told: dict[tuple[Any, ...], cpp_raytrace.Args] = {}  # what the library was told last


def _tell(spec, tensors) -> cpp_raytrace.Args:  # type: ignore[no-untyped-def]
    """What stays the same from call to call: a function of the sizes, and of where the parameters are."""
    key = (spec, tensors[0].dtype, tuple([tensor.data_ptr() for tensor in tensors[1:]]))
    args = _told.get(key)
    if args is None:
        maps, gates, parameters = _parts(spec, tensors)
        gates = [tensors[0].new_empty(1, int(spec[3])), *gates]
        if len(_told) >= 64:
            _told.clear()
        args = cpp_raytrace.describe(spec[_SEQUENCE:], int(spec[1]), int(spec[2]), maps, gates, parameters)
        _told[key] = args
    return args


def _parts(spec, tensors) -> tuple[Sequence[Tensor], ...]:  # type: ignore[no-untyped-def]
    """Maps, gates and the experts' parameters."""
    first = 5 if spec[4] else 3
    second = first + min(int(spec[_SEQUENCE]) - 1, 2)
    return tensors[1:first], tensors[first:second], tensors[second:]


def _pointers(*tensors: Tensor | None) -> list[int | None]:
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


def _make_call(spec, data, hidden_BD, chunk, route, between, answer, states) -> Call:  # type: ignore[no-untyped-def]
    """What both passes tell; `between`: entry, seen, mix, the pairs' rows and offsets."""
    (B, D), L = hidden_BD.shape, int(spec[_SEQUENCE])
    place, above = answer.data_ptr(), states.data_ptr()
    if spec[0]:  # with looks the answer has a place for the start, and then for all states
        layer = B * D * hidden_BD.itemsize
        place, above = place + L * layer, place + layer
    pointers = _pointers(*data, *[None] * (2 - len(data)), *route, hidden_BD, *between)
    return Call(B, torch.get_num_threads(), chunk, len(between[-1]), *pointers, place, above)


def forward(spec, data, tensors, keep) -> list[Tensor]:  # type: ignore[no-untyped-def]
    """The experts' answer and the route; kept besides: what passes from one part to the next, and what the experts keep."""
    hidden_BD, widths = tensors[0], spec[5:_SEQUENCE]
    (B, D), (N, R, L, T) = hidden_BD.shape, (int(number) for number in (*spec[3:5], *spec[_SEQUENCE:][:2]))
    chunk = cpp_experts.chunk_rows(B, L, tensors[1 - 2 * len(widths) : 1 - len(widths)])
    M, num_chunks = L * N, max(1, -(-B // chunk))
    real, args = hidden_BD.new_empty, _tell(spec, tensors)
    route = cpp_sequence.empty_route(B, L, N, T, real, _whole.new_empty)
    between = [real(B, N), real(B, R), real(B, L, N)]
    between += [_short.new_empty(B * M), _whole.new_empty(num_chunks, M + 1)]
    answer = real(L + 1, B, D) if spec[0] else real(B, D)
    states = real(0 if spec[0] else L if cpp_experts.STREAMS[int(spec[1])] == "skip-sum" else L - 1, B, D)
    call = _make_call(spec, data, hidden_BD, chunk, route, between, answer, states)
    call.start = answer.data_ptr() if spec[0] else None
    num_pairs = _route(args, call)
    if num_pairs < 0:
        raise MemoryError("raytraced experts: no memory for the library's scratch")
    results = real(num_pairs, D)
    inner = [real(num_pairs, -(-int(width) // 16) * 16) for width in widths[1:-1]] if keep else []
    call.results, call.inner = results.data_ptr(), table(inner) if keep else None
    library.run(_run, "raytraced experts", args, call)
    return [answer, *route, *route[:3], *between, answer, states, results, *inner] if keep else [answer, *route]


def backward(spec, data, tensors, kept, grads) -> list[Tensor]:  # type: ignore[no-untyped-def]
    """Gradients of hidden, maps, gates, weights and biases."""
    hidden_BD, *others = tensors
    nodes_BT, num_active_B, active_BLN, rates_BLN, output_B, *between, answer, states, results = kept[:13]
    route, inner = (active_BLN, rates_BLN, output_B, nodes_BT, num_active_B), kept[13:]
    entry_BN, seen_BR, mix_BLN, _, offsets = between
    grad_answer, grad_active, grad_rates, grad_output = grads
    (B, D), L, real = hidden_BD.shape, int(spec[_SEQUENCE]), torch.empty_like
    if grad_answer is None:
        grad_answer = torch.zeros_like(answer)
    place, above, start = grad_answer.data_ptr(), None, None
    if spec[0]:
        layer = B * D * hidden_BD.itemsize
        place, above, start = place + L * layer, place + layer, place
    # the library adds to these
    grad_rates = torch.zeros_like(rates_BLN) if grad_rates is None else grad_rates.clone()
    if cpp_sequence.ESTIMATORS[int(spec[_SEQUENCE + 2])] == "none":
        grad_active = None
    else:
        grad_active = torch.zeros_like(active_BLN) if grad_active is None else grad_active.clone()
    gradients = [real(hidden_BD), *[one.new_empty(one.shape) for one in others]]
    grad_maps, grad_gates, grad_parameters = _parts(spec, gradients)
    chunk = max(B, 1) if len(offsets) == 1 else cpp_experts.chunk_rows(B, L, ())  # several: experts are small
    call = _make_call(spec, data, hidden_BD, chunk, route, between, answer, states)
    call.results, call.inner, call.gradients = results.data_ptr(), table(inner), table(grad_parameters)
    call.grad_out, call.grad_states, call.start = place, above, start
    own = real(mix_BLN), real(results), real(entry_BN), real(seen_BR)
    call.grad_output, call.grad_active, call.grad_rates = _pointers(grad_output, grad_active, grad_rates)
    call.grad_hidden, call.grad_mix, call.grad_results, call.grad_entry, call.grad_seen = _pointers(gradients[0], *own)
    call.grad_first, call.grad_inner = [*_pointers(*grad_gates), None, None][:2]
    call.grad_maps = (Pointer * 4)(*_pointers(*grad_maps))
    library.run(_back, "raytraced experts", _tell(spec, tensors), call)
    return gradients


def _empty(spec, data, tensors) -> list[Tensor]:  # type: ignore[no-untyped-def]
    hidden_BD, (L, T) = tensors[0], (int(number) for number in spec[_SEQUENCE:][:2])
    like, B = hidden_BD.new_empty, len(hidden_BD)
    answer = like(L + 1, *hidden_BD.shape) if spec[0] else like(hidden_BD.shape)
    return [
        answer,
        *cpp_sequence.empty_route(B, L, int(spec[3]), T, like, hidden_BD.new_empty(0, dtype=torch.int64).new_empty),
    ]


call = LibraryCall("raytraced_experts", forward, backward, _empty, num_answers=4, num_returned=6)


def cannot(
    routing: RoutingNetwork,
    grid: Experts,
    hidden_BD: Tensor,
    maps: Maps,
    *,
    weighting: str,
    stream: Stream,
    looks: bool = False,
    **options: Any,
) -> str | None:
    """Why the library cannot do it."""
    if looks and stream == "skip-sum":
        return "looks at a sum"
    return cpp_raytrace.unfit(routing, grid, hidden_BD, maps, weighting)


def unless(routing: RoutingNetwork, grid: Experts, hidden_BD: Tensor, maps: Maps, **options: Any) -> str | None:
    """Why the parts one by one are better."""
    if torch.compiler.is_compiling():
        return "torch.compile and torch.export see the parts as operators"
    if not torch.is_grad_enabled():
        return "no gradient is wanted"
    return cpp_raytrace.too_large(grid)


def run(
    routing: RoutingNetwork,
    grid: Experts,
    hidden_BD: Tensor,
    maps: Maps,
    *,
    weighting: str,
    stream: Stream,
    seed: Tensor | None,
    rows_B: Tensor | None,
    looks: bool = False,
    **options: Any,
) -> tuple[Tensor, Route]:
    """Hidden vectors (B, D) -> hidden vectors (B, D), after 0, 1, … layers (L + 1, B, D) with `looks`, and the route."""
    if looks and stream == "skip-sum":
        return NotImplemented
    told = cpp_raytrace.tell(routing, grid, hidden_BD, maps, weighting, stream, options)
    if told is None:
        return NotImplemented
    data = cpp_sequence.draws(seed, rows_B)
    answer, *route = call((looks, *told.numbers), data, hidden_BD, *told.parameters)
    if options["estimator"] == "none":
        route[0] = route[0].detach()
    return answer, cpp_sequence.as_route(route)
