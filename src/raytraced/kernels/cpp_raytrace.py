"""Entry gate, sequence, weights and experts as one function of PyTorch's, with gradients or without.

One by one they are three functions and some twenty small operators between, forward and back, which take longer than the
library's arithmetic: in training, and for batches so small that the calls would cost the most.
Axes: B batch, L layers, N experts per layer, R rank of the input maps of the gates, T steps, D width.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raytraced.experts import Experts, MLPExperts, ModuleExperts, Stream
from raytraced.kernels import cpp_experts, cpp_sequence
from raytraced.kernels import cpp_library as library
from raytraced.kernels.cpp_function import first_derivatives
from raytraced.kernels.cpp_library import Float, Int, Pointer, PointerArray, fields
from raytraced.kernels.cpp_sequence import RouteTensors
from raytraced.kernels.operation import forced_reason
from raytraced.replay import ordered_nodes
from raytraced.routing import RoutingNetwork
from raytraced.sequence import (
    RATE_FLOOR,
    WEIGHTINGS,
    Estimator,
    Route,
    Stop,
    StopPerRow,
    rates_to_one_weights,
    rates_weights,
    relative_weights,
    unit_weights,
)
from raytraced.store.experts import StoredExperts

_MOST_ROWS = 64  # without gradients: beyond, the calls of the separate parts matter little, and they use all threads
_MOST_WIDTHS = 18  # MOST_WIDTHS of cpu/raytrace.h
_MOST_WEIGHTS = 2**14  # of one expert: larger ones are not what takes the time in the calls
_NO_MEMORY = "raytraced experts: no memory for the library's scratch"
COMPILING = "torch.compile and torch.export see the parts as operators"
# The numbers of cpu/raytrace.h, cpu/sequence.h and cpu/experts.h.
_WEIGHTINGS: dict[Callable[..., Tensor] | None, int] = {
    unit_weights: 0,
    rates_to_one_weights: 1,
    rates_weights: 2,
    relative_weights: 3,
}
_ESTIMATORS = {name: number for number, name in enumerate(cpp_sequence.ESTIMATORS)}
_STREAMS = {Stream(name): number for number, name in enumerate(cpp_experts.STREAMS)}
# to make others of: a dtype that is named takes longer
INT64, UINT8 = (torch.empty(0, dtype=dtype, device="cpu") for dtype in (torch.int64, torch.uint8))


class LayerParameters(NamedTuple):
    """The parameters of a raytraced layer whose experts are MLPs, in the order in which the library reads them."""

    # the maps of KernelArgs; gates; of each linear layer of the experts the weights, the biases
    tensors: tuple[Tensor, ...]
    num_linears: int  # 0 where the experts are in a store

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """The weights of the experts' linear layers, (L, N, O, K) each."""
        return self.tensors[-2 * self.num_linears : -self.num_linears]


@dataclass(eq=False)  # not frozen: every call builds one, and that would take three times as long
class KernelArgs:
    """What a raytraced layer is made of."""

    routing: RoutingNetwork
    grid: Experts | StoredExperts
    # of the hidden vector: the entry gate's (N, D) and (N,); if gates depend on it, (R, D) and (L−1, N, O, R)
    maps: tuple[Tensor, ...]
    weighting: str
    stream: Stream
    weight_scale: float = 1.0
    _parameters: LayerParameters | None = field(default=None, init=False, repr=False)

    @property
    def parameters(self) -> LayerParameters:
        """All parameters in memory, where the grid is one of MLPs; gathered once, when they are first asked for."""
        if self._parameters is None:
            assert not isinstance(self.grid, ModuleExperts)
            weights, biases = self.grid.stacks() if isinstance(self.grid, MLPExperts) else ([], [])
            self._parameters = LayerParameters((*self.maps, *self.routing.gates(), *weights, *biases), len(weights))
        return self._parameters


class RaytraceOptions(NamedTuple):
    """Options of one call."""

    stop: StopPerRow  # a tensor (B,) has a number for each row
    estimator: Estimator
    temperature: float
    num_steps: int
    seed: Tensor | None = None
    rows_B: Tensor | None = None  # noqa: N815
    exits: bool = False
    followed: Route | None = None  # a recorded route
    nodes_BT: Tensor | None = None  # noqa: N815  # of the latter, as the library reads them

    @classmethod
    def of(cls, hidden_BD: Tensor, options: dict[str, Any]) -> "RaytraceOptions":
        """The options of an operation, with tensors as the library reads them."""
        made = cls(**options)
        if isinstance(made.stop, Tensor):
            made = made._replace(stop=made.stop.to(hidden_BD).contiguous())
        if made.rows_B is not None:
            made = made._replace(rows_B=cpp_sequence.as_rows(made.seed, made.rows_B))
        if made.followed is not None:
            nodes_BT = ordered_nodes(made.followed)
            made = made._replace(nodes_BT=nodes_BT, num_steps=nodes_BT.shape[1])
        return made

    def as_route(self, tensors: RouteTensors) -> Route:
        """The operation's answer."""
        route = tensors.as_route(self.estimator)
        return route if self.followed is None else route._replace(nodes=self.followed.nodes)


@library.mirrors
class RaytraceLayer(ctypes.Structure):
    """struct RaytraceLayer of cpu/raytrace.h."""

    _fields_ = [
        *fields("layers experts steps is_double estimator dominant rank linears stream weighting", Int),
        *fields("temperature rate_floor output_counts weight_scale", Float),
        ("widths", Int * _MOST_WIDTHS),
        ("parameters", PointerArray),
    ]


@library.mirrors
class RaytraceCall(ctypes.Structure):
    """struct RaytraceCall of cpu/raytrace.h."""

    _fields_ = [
        *fields("batch threads chunk num_chunks", Int),
        *fields("active rates output nodes num_active hidden stops seed rows followed out states start", Pointer),
        *fields("memory pairs grad_out grad_states grad_start grad_output grad_active grad_rates grad_hidden", Pointer),
        ("gradients", PointerArray),
    ]


_KINDS = ctypes.POINTER(RaytraceLayer), ctypes.POINTER(RaytraceCall)
_once = library.bind("raytraced_raytrace", *_KINDS)
_bytes = library.bind("raytraced_raytrace_bytes", *_KINDS, result=Int)
_route = library.bind("raytraced_raytrace_route", *_KINDS, result=Int)
_run = library.bind("raytraced_raytrace_run", *_KINDS)
_back = library.bind("raytraced_raytrace_back", *_KINDS)


def slower_reason(layer: KernelArgs, hidden_BD: Tensor, **options: Any) -> str | None:
    """Why the parts one by one are better, None if they are not."""
    if torch.compiler.is_compiling():
        return COMPILING
    if not torch.is_grad_enabled() and not 1 <= hidden_BD.shape[0] <= _MOST_ROWS:
        return f"not 1 to {_MOST_ROWS} rows, and no gradient is wanted: the parts use all threads"
    return too_large(layer.grid) or forced_reason("sequence", "experts")


def too_large(grid: Experts | StoredExperts) -> str | None:
    """Why experts are better run by themselves."""
    if not isinstance(grid, ModuleExperts) and grid.num_weights > _MOST_WEIGHTS:
        return f"experts of more than {_MOST_WEIGHTS:,} weights: the calls cost little beside them"
    return None


def unsupported_reason(layer: KernelArgs, hidden_BD: Tensor, *, exits: bool = False, **options: Any) -> str | None:
    """Why the library cannot run this layer, None if it can."""
    grid = layer.grid
    if not isinstance(grid, MLPExperts) or not library.is_unchanged(grid, MLPExperts, *cpp_experts.GRID_METHODS):
        return COMPILING if torch.compiler.is_compiling() else "custom experts"
    return unsupported_parts(layer, hidden_BD, exits)


def unsupported_parts(layer: KernelArgs, hidden_BD: Tensor, exits: bool) -> str | None:
    """Why the library cannot run this layer around a grid of MLPs, None if it can."""
    if torch.compiler.is_compiling():
        return COMPILING
    if exits and (layer.stream is Stream.SKIP_SUM or not torch.is_grad_enabled()):
        return "exits of a sum, or without gradients"
    if torch.is_autocast_enabled("cpu"):
        return "autocast is on"
    if torch.is_grad_enabled() and torch._C._are_functorch_transforms_active():  # there is no public name for it
        return "inside a transform of torch.func only operators may run"
    if WEIGHTINGS.get(layer.weighting) not in _WEIGHTINGS:
        return "a weighting that the library does not know"
    if not library.is_unchanged(layer.routing, RoutingNetwork, *cpp_sequence.ROUTING_METHODS):
        return "a custom routing network"
    if hidden_BD.dtype not in library.PRECISIONS:
        return "hidden vectors in half precision"
    tensors, num_linears = layer.parameters
    assert not isinstance(layer.grid, ModuleExperts)
    if len(layer.grid.widths) > _MOST_WIDTHS:
        return "experts of many layers"
    rank = layer.maps[2].shape[0] if len(layer.maps) > 2 else 0
    widths = layer.grid.widths[: num_linears + 1]
    shapes = _parameter_shapes(layer.routing.num_layers, layer.routing.num_experts, rank, widths)
    if hidden_BD.shape[1] != widths[0] or [tensor.shape for tensor in tensors] != shapes:
        return "a gate or experts of another width, or of another grid"
    tensors = hidden_BD, *tensors
    if library.are_ordinary(tensors, hidden_BD.dtype):  # Hot path at batch size 1: one question for all of them.
        return None
    if not all(map(Tensor.is_contiguous, tensors[1:])):
        return "parameters that are not contiguous"
    return library.unfit_reason(tensors, hidden_BD.dtype)


@lru_cache
def _parameter_shapes(L: int, N: int, rank: int, widths: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The shapes of all parameters of a layer, in the order of LayerParameters; a single layer has no input maps."""
    O, D = N + 1, widths[0]
    input_maps = [(rank, D), (L - 1, N, O, rank)] if rank and L > 1 else []
    gates = [(N, O), (L - 2, N, O, N)][: L - 1]
    linears = list(pairwise(widths))
    return [(N, D), (N,), *input_maps, *gates, *((L, N, O, K) for K, O in linears), *((L, N, O) for _, O in linears)]


def describe_layer(layer: KernelArgs, parameters: LayerParameters, options: RaytraceOptions) -> RaytraceLayer:
    """A layer with these parameters, as the library reads it."""
    assert not isinstance(layer.grid, ModuleExperts)
    numbers = _layer_numbers(
        layer.routing.num_layers,
        layer.routing.num_experts,
        layer.grid.widths[: parameters.num_linears + 1],
        layer.maps[2].shape[0] if len(layer.maps) > 2 else 0,
        parameters.tensors[0].dtype is torch.float64,
        layer.stream,
        layer.weighting,
        layer.weight_scale,
        options.num_steps,
        options.estimator,
        options.temperature,
        1.0 if isinstance(options.stop, Tensor) else options.stop,
    )
    described = RaytraceLayer.from_buffer_copy(numbers)
    described.parameters = library.pointer_array(parameters.tensors)
    return described


@lru_cache
def _layer_numbers(
    num_layers: int,
    num_experts: int,
    widths: tuple[int, ...],
    rank: int,
    is_double: bool,
    stream: Stream,
    weighting: str,
    weight_scale: float,
    num_steps: int,
    estimator: Estimator,
    temperature: float,
    stop: Stop,
) -> RaytraceLayer:
    """A layer without its parameters. Kept: at batch size 1, filling in the fields takes as long as running the experts."""
    return RaytraceLayer(
        num_layers,
        num_experts,
        num_steps,
        is_double,
        _ESTIMATORS[estimator],
        stop == "dominant",
        rank,
        len(widths) - 1,
        _STREAMS[stream],
        _WEIGHTINGS[WEIGHTINGS[weighting]],
        temperature,
        RATE_FLOOR,
        1.0 if isinstance(stop, str) else stop,
        weight_scale,
        (Int * _MOST_WIDTHS)(*widths),
    )


def _answer_pointers(answer: Tensor | None) -> tuple[int | None, int | None, int | None]:
    """Where the last vectors are, those after each layer before, and the first input; the latter two with exits.

    The answer is (B, D), or with exits (L + 1, B, D); None where experts run elsewhere.
    """
    if answer is None:
        return None, None, None
    first = answer.data_ptr()
    if answer.ndim == 2:
        return first, None, None
    exit_bytes = answer.nbytes // len(answer)
    return first + (len(answer) - 1) * exit_bytes, first + exit_bytes, first


def make_call(
    options: RaytraceOptions,
    hidden_BD: Tensor,
    route: RouteTensors,
    answer: Tensor | None,
    weights: Sequence[Tensor] | None,
) -> RaytraceCall:
    """The part of the call that both passes share; without the experts' weights, one thread runs all rows in one chunk."""
    B = chunk = hidden_BD.shape[0]
    threads = num_chunks = 1
    if weights is not None:
        chunk = cpp_experts.chunk_rows(B, route.active.shape[1], weights)
        threads, num_chunks = torch.get_num_threads(), max(1, -(-B // chunk))
    stop, seed, rows_B, nodes_BT = options.stop, options.seed, options.rows_B, options.nodes_BT
    return RaytraceCall(
        B,
        threads,
        chunk,
        num_chunks,
        *map(Tensor.data_ptr, route),
        hidden_BD.data_ptr(),
        stop.data_ptr() if isinstance(stop, Tensor) else None,
        None if seed is None else seed.data_ptr(),
        None if rows_B is None else rows_B.data_ptr(),
        None if nodes_BT is None else nodes_BT.data_ptr(),
        *_answer_pointers(answer),
    )


class _Result(NamedTuple):
    """What a forward pass gives."""

    answer: Tensor
    route: RouteTensors
    between: tuple[Tensor, ...]  # what passes from one part to the next: the backward pass reads it


def _run_forward(layer: KernelArgs, options: RaytraceOptions, hidden_BD: Tensor, keep: bool) -> _Result:
    (B, D), L, N = hidden_BD.shape, layer.routing.num_layers, layer.routing.num_experts
    route = RouteTensors.empty(B, L, N, options.num_steps, hidden_BD.new_empty, INT64.new_empty)
    answer = hidden_BD.new_empty((L + 1, B, D) if options.exits else (B, D))
    described = describe_layer(layer, layer.parameters, options)
    if not keep and 1 <= B <= _MOST_ROWS:
        if _once(described, make_call(options, hidden_BD, route, answer, None)):
            raise MemoryError(_NO_MEMORY)
        return _Result(answer, route, ())
    call = make_call(options, hidden_BD, route, answer, layer.parameters.weights)
    memory = UINT8.new_empty(_bytes(described, call))
    call.memory = memory.data_ptr()
    num_bytes = _route(described, call)
    if num_bytes < 0:
        raise MemoryError(_NO_MEMORY)
    pairs = UINT8.new_empty(num_bytes)
    call.pairs = pairs.data_ptr()
    if _run(described, call):
        raise MemoryError(_NO_MEMORY)
    return _Result(answer, route, (memory, pairs))


def _run_backward(
    layer: KernelArgs,
    options: RaytraceOptions,
    hidden_BD: Tensor,
    parameters: LayerParameters,
    result: _Result,
    grads: Sequence[Tensor | None],
) -> list[Tensor]:
    """Gradients of the hidden vectors and of all parameters, from those of answer, active set, rates and output rate."""
    grad_answer, grad_active, grad_rates, grad_output = [None if g is None else g.contiguous() for g in grads]
    answer, route, (memory, pairs) = result
    if grad_answer is None:
        grad_answer = torch.zeros_like(answer)
    # the library adds to these
    grad_rates = torch.zeros_like(route.rates) if grad_rates is None else grad_rates.clone()
    if options.estimator == "none":
        grad_active = None
    else:
        grad_active = torch.zeros_like(route.active) if grad_active is None else grad_active.clone()
    grad_hidden = hidden_BD.new_empty(hidden_BD.shape)
    gradients = [tensor.new_empty(tensor.shape) for tensor in parameters.tensors]
    call = make_call(options, hidden_BD, route, answer, parameters.weights)
    call.memory, call.pairs = memory.data_ptr(), pairs.data_ptr()
    call.gradients = (Pointer * len(gradients))(*map(Tensor.data_ptr, gradients))
    call.grad_out, call.grad_states, call.grad_start = _answer_pointers(grad_answer)
    call.grad_output = None if grad_output is None else grad_output.data_ptr()
    call.grad_active = None if grad_active is None else grad_active.data_ptr()
    call.grad_rates, call.grad_hidden = grad_rates.data_ptr(), grad_hidden.data_ptr()
    if _back(describe_layer(layer, parameters, options), call):
        raise MemoryError(_NO_MEMORY)
    return [grad_hidden, *gradients]


class _Raytrace(torch.autograd.Function):
    """One library call forward, one backward."""

    @staticmethod
    def forward(ctx, layer, options, hidden_BD, *parameters):  # type: ignore[no-untyped-def]
        answer, route, between = _run_forward(layer, options, hidden_BD, keep=True)
        ctx.layer, ctx.options, ctx.num_parameters = layer, options, len(parameters)
        ctx.save_for_backward(hidden_BD, *parameters, answer, *route, *between)
        ctx.mark_non_differentiable(route.nodes, route.num_active)
        ctx.set_materialize_grads(False)
        return answer, *route

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        # Read once: checkpointing computes them when asked, and refuses to be asked again.
        hidden_BD, *stored = ctx.saved_tensors
        parameters, (answer, *rest) = stored[: ctx.num_parameters], stored[ctx.num_parameters :]
        num_route = len(RouteTensors._fields)
        result = _Result(answer, RouteTensors(*rest[:num_route]), tuple(rest[num_route:]))

        def gradients(*grads):  # type: ignore[no-untyped-def]
            # A parameter is kept itself, and may have been given other memory since.
            present = LayerParameters(tuple([p.contiguous() for p in parameters]), ctx.layer.parameters.num_linears)
            return _run_backward(ctx.layer, ctx.options, hidden_BD, present, result, grads[:4])

        return None, None, *first_derivatives(gradients, grads, (hidden_BD, *parameters))


def run(layer: KernelArgs, hidden_BD: Tensor, **options: Any) -> tuple[Tensor, Route]:
    """Hidden vectors (B, D) -> hidden vectors (B, D), after 0, 1, … layers (L + 1, B, D) with `exits`, and the route."""
    asked, hidden_BD = RaytraceOptions.of(hidden_BD, options), hidden_BD.contiguous()
    if torch.is_grad_enabled():
        tensors = hidden_BD, *layer.parameters.tensors
        if any([tensor.requires_grad for tensor in tensors]):
            answer, *route = _Raytrace.apply(layer, asked, *tensors)
            return answer, asked.as_route(RouteTensors(*route))
    answer, found, _ = _run_forward(layer, asked, hidden_BD, keep=False)
    return answer, asked.as_route(found)
