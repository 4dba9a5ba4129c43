"""Entry gate, sequence, weights and experts as one function of PyTorch's, with gradients or without.

One by one they are three functions and some twenty small operators between, forward and back, which take longer than the
library's arithmetic: in training, and for batches so small that the calls would cost the most.
Axes: B batch, L layers, N experts per layer, R rank of what gates see, T steps, D width.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from raytraced.experts import Experts, MLPExperts, Stream
from raytraced.kernels import cpp_experts, cpp_sequence
from raytraced.kernels import cpp_library as library
from raytraced.kernels.cpp_library import Float, Int, LibraryCall, Pointer, PointerArray, fields, pointer_array
from raytraced.routing import RoutingNetwork
from raytraced.sequence import (
    WEIGHTINGS,
    Route,
    StopPerRow,
    rates_to_one_weights,
    rates_weights,
    relative_weights,
    unit_weights,
)

_MOST_ROWS = 64  # without gradients: beyond, the calls of the separate parts matter little, and they use all threads
_MOST_WIDTHS = 18  # as cpu/raytrace.h has places
_MOST_WEIGHTS = 2**14  # of one expert: larger ones are not what takes the time in the calls
COMPILING = "torch.compile and torch.export see the parts as operators"
# The numbers of cpu/raytrace.h.
_WEIGHTINGS: dict[Callable[..., Tensor] | None, int] = {
    unit_weights: 0,
    rates_to_one_weights: 1,
    rates_weights: 2,
    relative_weights: 3,
}


class KernelArgs(NamedTuple):
    """What a raytraced layer is made of."""

    routing: RoutingNetwork
    grid: Experts
    # of the hidden vector: the entry gate's (N, D) and (N,); if gates see it, (R, D) and (L−1, N, O, R)
    maps: tuple[Tensor, ...]
    weighting: str
    stream: Stream
    weight_scale: float = 1.0

    def parameters(self) -> tuple[Tensor, ...]:
        """Maps, gates, weights and biases of a grid of MLPs."""
        assert isinstance(self.grid, MLPExperts)
        weights, biases = self.grid.stacks()
        return *self.maps, *self.routing.gates(), *weights, *biases


@library.mirrors
class RaytraceArgs(ctypes.Structure):
    """struct RaytraceArgs of cpu/raytrace.h."""

    _fields_ = [
        ("sequence", cpp_sequence.SequenceArgs),
        ("experts", cpp_experts.ExpertsArgs),
        ("weighting", Int),
        ("weight_scale", Float),
        ("maps", Pointer * 4),
    ]


@library.mirrors
class RaytraceCall(ctypes.Structure):
    """struct RaytraceCall of cpu/raytrace.h."""

    _fields_ = [
        *fields("batch threads chunk num_chunks", Int),
        *fields("active rates output nodes num_active hidden stops seed rows out states start memory pairs", Pointer),
        *fields("grad_out grad_states grad_start grad_output grad_active grad_rates", Pointer),
        *fields("grad_hidden grad_first grad_inner", Pointer),
        ("grad_maps", Pointer * 4),
        ("gradients", PointerArray),
    ]


_KINDS = ctypes.POINTER(RaytraceArgs), ctypes.POINTER(RaytraceCall)
_once = library.bind("raytraced_raytrace", *_KINDS)
_bytes = library.bind("raytraced_raytrace_bytes", *_KINDS, result=Int)
_route = library.bind("raytraced_raytrace_route", *_KINDS, result=Int)
_run = library.bind("raytraced_raytrace_run", *_KINDS)
_back = library.bind("raytraced_raytrace_back", *_KINDS)


def slower_reason(layer: KernelArgs, hidden_BD: Tensor, **options: Any) -> str | None:
    """Why the parts one by one are better."""
    if torch.compiler.is_compiling():
        return COMPILING
    if not torch.is_grad_enabled() and not 1 <= hidden_BD.shape[0] <= _MOST_ROWS:
        return f"not 1 to {_MOST_ROWS} rows, and no gradient is wanted: the parts use all threads"
    return too_large(layer.grid)


def too_large(grid: Experts) -> str | None:
    """Why experts are better run by themselves."""
    if isinstance(grid, MLPExperts) and grid.num_weights > _MOST_WEIGHTS:
        return f"experts of more than {_MOST_WEIGHTS:,} weights: the calls cost little beside them"
    return None


def unsupported_reason(layer: KernelArgs, hidden_BD: Tensor, *, exits: bool = False, **options: Any) -> str | None:
    """Why it is not possible."""
    if torch.compiler.is_compiling():
        return COMPILING
    if exits and _hides_exits(layer):
        return "exits of a sum, or without gradients"
    grid = layer.grid
    if torch.is_autocast_enabled("cpu"):
        return "autocast is on"
    if WEIGHTINGS.get(layer.weighting) not in _WEIGHTINGS:
        return "a weighting that the library does not know"
    if cpp_experts.is_custom(grid):
        return "custom experts"
    assert isinstance(grid, MLPExperts)
    if cpp_sequence.is_custom(layer.routing):
        return "a custom routing network"
    if len(grid.widths) > _MOST_WIDTHS:
        return "experts of many layers"
    if hidden_BD.dtype not in library.PRECISIONS:
        return "hidden vectors in half precision"
    (_, D), (gate_ND, _, *seen) = hidden_BD.shape, layer.maps
    L, N = layer.routing.num_layers, layer.routing.num_experts
    if gate_ND.shape != (N, D) or grid.widths[0] != D or (seen and seen[0].shape[1] != D):
        return "a gate or experts of another width"
    if seen and (L == 1 or seen[1].shape != (L - 1, N, N + 1, len(seen[0]))):
        return "gates of another grid"
    parameters = layer.parameters()
    if not all([parameter.is_contiguous() for parameter in parameters]):
        return "parameters that are not contiguous"
    return library.why_unfit((hidden_BD, *parameters), hidden_BD.dtype)


def _hides_exits(layer: KernelArgs) -> bool:
    return layer.stream is Stream.SKIP_SUM or not torch.is_grad_enabled()


class PreparedArgs(NamedTuple):
    """The arguments that describe a grid to the library, reused while the key is the same."""

    key: tuple[Any, ...]
    args: RaytraceArgs
    describe: Callable[[Sequence[Tensor]], RaytraceArgs]  # the same of parameters in another place
    sizes: tuple[int, int, int]  # L, N, T
    parameters: tuple[Tensor, ...]  # maps, gates, weights, biases
    cuts: tuple[int, int]  # where the gates begin, and the weights
    held: list[Tensor]  # what the key and the arguments speak of: no other tensor gets its name or its memory


_prepared: WeakKeyDictionary[Experts, PreparedArgs] = WeakKeyDictionary()
# to make others of: a dtype that is named takes longer
INT64, UINT8 = (torch.empty(0, dtype=dtype, device="cpu") for dtype in (torch.int64, torch.uint8))


def prepare(layer: KernelArgs, hidden_BD: Tensor, options: dict[str, Any]) -> PreparedArgs | None:
    """The arguments that describe a grid, None where the library cannot run it; the options are those of a sequence."""
    routing, grid, maps, weighting, stream, scale = layer
    if torch.is_autocast_enabled("cpu") or cpp_experts.is_custom(grid) or cpp_sequence.is_custom(routing):
        return None
    if library.why_unfit((hidden_BD,)) is not None:
        return None
    parameters = layer.parameters()
    try:
        places = [(id(parameter), parameter.data_ptr(), parameter.is_contiguous()) for parameter in parameters]
    except RuntimeError:  # inside a transform of torch.func
        return None
    key = hidden_BD.shape[1], hidden_BD.dtype, WEIGHTINGS.get(weighting), scale, stream, options, places
    prepared = _prepared.get(grid)
    if prepared is None or prepared.key != key:
        if unsupported_reason(layer, hidden_BD) is not None:
            return None
        like_BN = hidden_BD.new_empty(1, routing.num_experts)
        spec, _, gates = cpp_sequence.arrange(routing, like_BN, seed=None, rows_B=None, **options)
        kinds = cpp_experts.STREAMS.index(stream), _WEIGHTINGS[WEIGHTINGS[weighting]], scale
        cuts = len(maps), len(maps) + len(gates) - 1  # its entry is one of them
        describe = partial(_describe, spec, *kinds, cuts)
        sizes = routing.num_layers, routing.num_experts, options["num_steps"]
        held = [*parameters, *(parameter.detach() for parameter in parameters)]
        prepared = _prepared[grid] = PreparedArgs(key, describe(parameters), describe, sizes, parameters, cuts, held)
    return prepared


def _describe(
    spec: Sequence[float],
    stream: int,
    weighting: int,
    scale: float,
    cuts: tuple[int, int],
    parameters: Sequence[Tensor],
) -> RaytraceArgs:
    """What stays the same from call to call, as for one row; the spec is that of a sequence."""
    maps, gates, rest = _cut(parameters, cuts)
    L, N = int(spec[0]), len(maps[0])
    sequence = cpp_sequence.make_args(spec, (), (maps[0].new_empty(1, N), *gates))
    sequence.rank = len(maps[2]) if maps[2:] else 0
    experts = cpp_experts.make_args((1, L, N), stream, 1, rest)
    return RaytraceArgs(sequence, experts, weighting, scale, (Pointer * 4)(*[one.data_ptr() for one in maps]))


def _cut(tensors: Sequence[Tensor], cuts: tuple[int, int]) -> tuple[Sequence[Tensor], ...]:
    return tensors[: cuts[0]], tensors[cuts[0] : cuts[1]], tensors[cuts[1] :]


# What a call is given and gives: spec (prepared arguments, exits, stops), data (seed, rows), tensors (hidden, *maps, *gates,
# *weights, *biases); the experts' answer, and the tensors of a route.


def separate_stops(stop: StopPerRow, hidden_BD: Tensor) -> tuple[Any, Tensor | None]:
    """A rule for all rows, which the prepared arguments hold, and the numbers of each (B,), which a call brings."""
    if not isinstance(stop, Tensor):
        return stop, None
    return "drawn", stop.to(hidden_BD).contiguous()


def _make_call(prepared: PreparedArgs, stops_B, data, hidden_BD, route, answer, few: bool = False) -> RaytraceCall:  # type: ignore[no-untyped-def]
    """What both passes tell; few rows go through in one chunk on one thread."""
    B = chunk = hidden_BD.shape[0]
    threads = num_chunks = 1
    if not few:
        rest = prepared.parameters[prepared.cuts[1] :]
        chunk = cpp_experts.chunk_rows(B, prepared.sizes[0], rest[: len(rest) // 2])
        threads, num_chunks = torch.get_num_threads(), max(1, -(-B // chunk))
    pointers = [tensor.data_ptr() for tensor in (*route, hidden_BD)]
    pointers.append(None if stops_B is None else stops_B.data_ptr())
    pointers += [tensor.data_ptr() for tensor in data]
    drawn = [None] * (2 - len(data))  # no seed, or no rows
    return RaytraceCall(B, threads, chunk, num_chunks, *pointers, *drawn, *_places(prepared, hidden_BD, answer))


def _places(prepared: PreparedArgs, hidden_BD: Tensor, answer: Tensor) -> tuple[int | None, ...]:
    """Where the last vectors are, those after each layer before, and what they began with; the latter two with exits."""
    first = answer.data_ptr()
    if answer.ndim == 2:
        return first, None, None
    return first + prepared.sizes[0] * hidden_BD.nbytes, first + hidden_BD.nbytes, first


def forward(spec, data, tensors, keep) -> list[Tensor]:  # type: ignore[no-untyped-def]
    """The experts' answer and the route; kept besides: what passes from one part to the next."""
    (prepared, exits, stops_B), hidden_BD = spec, tensors[0]
    (B, D), (L, N, T), real = hidden_BD.shape, prepared.sizes, hidden_BD.new_empty
    route = cpp_sequence.empty_route(B, L, N, T, real, INT64.new_empty)
    answer, few = real(L + 1, B, D) if exits else real(B, D), not keep and 1 <= B <= _MOST_ROWS
    call = _make_call(prepared, stops_B, data, hidden_BD, route, answer, few)
    if few:
        library.run(_once, "raytraced experts", prepared.args, call)
        return [answer, *route]
    memory = UINT8.new_empty(_bytes(prepared.args, call))
    call.memory = memory.data_ptr()
    num_bytes = _route(prepared.args, call)
    if num_bytes < 0:
        raise MemoryError("raytraced experts: no memory for the library's scratch")
    pairs = UINT8.new_empty(num_bytes)
    call.pairs = pairs.data_ptr()
    library.run(_run, "raytraced experts", prepared.args, call)
    return [answer, *route, *route[:3], answer, memory, pairs] if keep else [answer, *route]


def backward(spec, data, tensors, kept, grads) -> list[Tensor]:  # type: ignore[no-untyped-def]
    """Gradients of hidden, maps, gates, weights and biases."""
    prepared, (hidden_BD, *parameters) = spec[0], tensors
    nodes_BT, num_active_B, active_BLN, rates_BLN, output_B, answer, memory, pairs = kept
    grad_answer, grad_active, grad_rates, grad_output = grads
    if grad_answer is None:
        grad_answer = torch.zeros_like(answer)
    # the library adds to these
    grad_rates = torch.zeros_like(rates_BLN) if grad_rates is None else grad_rates.clone()
    if prepared.args.sequence.estimator == cpp_sequence.ESTIMATORS.index("none"):
        grad_active = None
    else:
        grad_active = torch.zeros_like(active_BLN) if grad_active is None else grad_active.clone()
    grad_hidden, *gradients = [tensor.new_empty(tensor.shape) for tensor in tensors]
    maps, gates, rest = _cut(gradients, prepared.cuts)
    route = active_BLN, rates_BLN, output_B, nodes_BT, num_active_B
    call = _make_call(prepared, None, data, hidden_BD, route, answer)
    call.memory, call.pairs, call.gradients = memory.data_ptr(), pairs.data_ptr(), pointer_array(rest)
    call.grad_out, call.grad_states, call.grad_start = _places(prepared, hidden_BD, grad_answer)
    call.grad_output = None if grad_output is None else grad_output.data_ptr()
    call.grad_active = None if grad_active is None else grad_active.data_ptr()
    call.grad_rates, call.grad_hidden = grad_rates.data_ptr(), grad_hidden.data_ptr()
    call.grad_first, call.grad_inner = [*[gate.data_ptr() for gate in gates], None, None][:2]
    call.grad_maps = (Pointer * 4)(*[one.data_ptr() for one in maps])
    moved = [one.data_ptr() for one in parameters] != [place for _, place, _ in prepared.key[-1]]
    library.run(_back, "raytraced experts", prepared.describe(parameters) if moved else prepared.args, call)
    return [grad_hidden, *gradients]


_call = LibraryCall(None, forward, backward, num_answers=4, num_returned=6)


def run(
    layer: KernelArgs,
    hidden_BD: Tensor,
    *,
    seed: Tensor | None,
    rows_B: Tensor | None,
    stop: StopPerRow,
    exits: bool = False,
    **options: Any,
) -> tuple[Tensor, Route]:
    """Hidden vectors (B, D) -> hidden vectors (B, D), after 0, 1, … layers (L + 1, B, D) with `exits`, and the route."""
    if exits and _hides_exits(layer):
        return NotImplemented
    options["stop"], stops_B = separate_stops(stop, hidden_BD)
    prepared = prepare(layer, hidden_BD, options)
    if prepared is None:
        return NotImplemented
    spec, data = (prepared, exits, stops_B), cpp_sequence.draws(seed, rows_B)
    if torch.is_grad_enabled():
        found = _call(spec, data, hidden_BD, *prepared.parameters)
    else:  # straight to the library: one image waits for it
        found = forward(spec, data, (hidden_BD.contiguous(),), False)
    return found if found is NotImplemented else (found[0], cpp_sequence.as_route(found[1:], options["estimator"]))
