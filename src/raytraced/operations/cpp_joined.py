"""Entry gate, sequence, weights and experts as one function of PyTorch's, with gradients: what training runs.

One by one they are three functions and some twenty small operators between, forward and back, which take longer than the
library's arithmetic. Axes: B batch, L layers, N experts a layer, R rank of what gates see, P pairs (row, expert), D width.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from raytraced.operations import cpp_experts, cpp_raytrace, cpp_sequence
from raytraced.operations import cpp_library as library
from raytraced.operations.cpp_library import Int, LibraryCall, Pointer, Table, fields, table
from raytraced.operations.cpp_raytrace import Traced
from raytraced.sequence import Route


class Call(ctypes.Structure):
    """struct RaytraceCall of cpu/raytrace.h."""

    _fields_ = [
        *fields("batch threads chunk num_chunks", Int),
        *fields("active rates output nodes num_active hidden seed rows", Pointer),
        *fields("out states start memory pairs", Pointer),
        *fields("grad_out grad_states grad_start grad_output grad_active grad_rates", Pointer),
        *fields("grad_hidden grad_first grad_inner", Pointer),
        ("grad_maps", Pointer * 4),
        ("gradients", Table),
    ]


_KINDS = ctypes.POINTER(cpp_raytrace.Args), ctypes.POINTER(Call)
_bytes = library.bind("raytraced_raytrace_bytes", *_KINDS, result=Int)
_route = library.bind("raytraced_raytrace_route", *_KINDS, result=Int)
_run = library.bind("raytraced_raytrace_run", *_KINDS)
_back = library.bind("raytraced_raytrace_back", *_KINDS)

# What a call is given and gives: spec (looks, stream, weighting, N, R, *an expert's widths, *that of a sequence),
# data (seed, rows), tensors (hidden, *maps, *gates, *weights, *biases); the experts' answer, and the tensors of a route.
_SEQUENCE = -7  # where the spec of a sequence begins

_whole, _byte = (torch.empty(0, dtype=dtype, device="cpu") for dtype in (torch.int64, torch.uint8))
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


def _make_call(spec, data, tensors, route) -> Call:  # type: ignore[no-untyped-def]
    """What both passes tell."""
    B, num_linears = len(tensors[0]), len(spec) + _SEQUENCE - 6
    chunk = cpp_experts.chunk_rows(B, int(spec[_SEQUENCE]), tensors[-2 * num_linears : -num_linears])
    pointers = [tensor.data_ptr() for tensor in (*route, tensors[0], *data)]
    return Call(B, torch.get_num_threads(), chunk, max(1, -(-B // chunk)), *pointers)


def _places(spec, hidden_BD: Tensor, answer: Tensor) -> tuple[int | None, ...]:  # type: ignore[no-untyped-def]
    """Where the last vectors are, those after each layer before, and what they began with; the latter two with looks."""
    first, size = answer.data_ptr(), hidden_BD.nbytes
    return (first + int(spec[_SEQUENCE]) * size, first + size, first) if spec[0] else (first, None, None)


def forward(spec, data, tensors, keep) -> list[Tensor]:  # type: ignore[no-untyped-def]
    """The experts' answer and the route; kept besides: what passes from one part to the next."""
    hidden_BD = tensors[0]
    (B, D), (N, L, T) = hidden_BD.shape, (int(number) for number in (spec[3], *spec[_SEQUENCE:][:2]))
    real, args = hidden_BD.new_empty, _tell(spec, tensors)
    route = cpp_sequence.empty_route(B, L, N, T, real, _whole.new_empty)
    answer = real(L + 1, B, D) if spec[0] else real(B, D)
    call = _make_call(spec, data, tensors, route)
    call.out, call.states, call.start = _places(spec, hidden_BD, answer)
    memory = _byte.new_empty(_bytes(args, call))
    call.memory = memory.data_ptr()
    num_bytes = _route(args, call)
    if num_bytes < 0:
        raise MemoryError("raytraced experts: no memory for the library's scratch")
    pairs = _byte.new_empty(num_bytes)
    call.pairs = pairs.data_ptr()
    library.run(_run, "raytraced experts", args, call)
    return [answer, *route, *route[:3], answer, memory, pairs] if keep else [answer, *route]


def backward(spec, data, tensors, kept, grads) -> list[Tensor]:  # type: ignore[no-untyped-def]
    """Gradients of hidden, maps, gates, weights and biases."""
    hidden_BD = tensors[0]
    nodes_BT, num_active_B, active_BLN, rates_BLN, output_B, answer, memory, pairs = kept
    grad_answer, grad_active, grad_rates, grad_output = grads
    if grad_answer is None:
        grad_answer = torch.zeros_like(answer)
    # the library adds to these
    grad_rates = torch.zeros_like(rates_BLN) if grad_rates is None else grad_rates.clone()
    if cpp_sequence.ESTIMATORS[int(spec[_SEQUENCE + 2])] == "none":
        grad_active = None
    else:
        grad_active = torch.zeros_like(active_BLN) if grad_active is None else grad_active.clone()
    gradients = [tensor.new_empty(tensor.shape) for tensor in tensors]
    maps, gates, parameters = _parts(spec, gradients)
    call = _make_call(spec, data, tensors, (active_BLN, rates_BLN, output_B, nodes_BT, num_active_B))
    call.memory, call.pairs, call.gradients = memory.data_ptr(), pairs.data_ptr(), table(parameters)
    call.out, call.states, _ = _places(spec, hidden_BD, answer)
    call.grad_out, call.grad_states, call.grad_start = _places(spec, hidden_BD, grad_answer)
    call.grad_output = None if grad_output is None else grad_output.data_ptr()
    call.grad_active = None if grad_active is None else grad_active.data_ptr()
    call.grad_rates, call.grad_hidden = grad_rates.data_ptr(), gradients[0].data_ptr()
    call.grad_first, call.grad_inner = [*[gate.data_ptr() for gate in gates], None, None][:2]
    call.grad_maps = (Pointer * 4)(*[one.data_ptr() for one in maps])
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


def cannot(layer: Traced, hidden_BD: Tensor, *, looks: bool = False, **options: Any) -> str | None:
    """Why the library cannot do it."""
    if looks and layer.stream == "skip-sum":
        return "looks at a sum"
    return cpp_raytrace.unfit(layer, hidden_BD)


def unless(layer: Traced, hidden_BD: Tensor, **options: Any) -> str | None:
    """Why the parts one by one are better."""
    if torch.compiler.is_compiling():
        return "torch.compile and torch.export see the parts as operators"
    if not torch.is_grad_enabled():
        return "no gradient is wanted"
    return cpp_raytrace.too_large(layer.grid)


def run(
    layer: Traced,
    hidden_BD: Tensor,
    *,
    seed: Tensor | None,
    rows_B: Tensor | None,
    looks: bool = False,
    **options: Any,
) -> tuple[Tensor, Route]:
    """Hidden vectors (B, D) -> hidden vectors (B, D), after 0, 1, … layers (L + 1, B, D) with `looks`, and the route."""
    if looks and layer.stream == "skip-sum":
        return NotImplemented
    told = cpp_raytrace.tell(layer, hidden_BD, options)
    if told is None:
        return NotImplemented
    data = cpp_sequence.draws(seed, rows_B)
    answer, *route = call((looks, *told.numbers), data, hidden_BD, *told.parameters)
    if options["estimator"] == "none":
        route[0] = route[0].detach()
    return answer, cpp_sequence.as_route(route)
