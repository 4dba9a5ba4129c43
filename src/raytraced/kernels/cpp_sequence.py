"""The activation sequence in the compiled library: one call forward, one backward, only the draws kept between.

Axes: B batch, L layers, N experts per layer, M = L·N nodes, O = N + 1 outlets, T steps.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from raytraced.kernels import cpp_library as library
from raytraced.kernels.cpp_gradients import empty_block
from raytraced.kernels.cpp_library import Float, Int, LibraryCall, Pointer, fields, point
from raytraced.routing import Rates, RoutingNetwork
from raytraced.sequence import RATE_FLOOR, Estimator, Route, StopPerRow

ESTIMATORS = ("straight-through", "reinmax", "gumbel", "none")  # the numbers of cpu/sequence.h
_LARGE_BYTES = 2**22  # of a gradient, from which fresh pages cost more than the arithmetic on them


@library.mirrors
class SequenceArgs(ctypes.Structure):
    """struct SequenceArgs of cpu/sequence.h."""

    _fields_ = [
        *fields("batch layers experts steps is_double estimator dominant threads rank", Int),
        *fields("temperature rate_floor output_counts", Float),
        *fields(
            "first inner entry input_logits seen factor seed rows stops active nodes num_active rates output", Pointer
        ),
        *fields(
            "grad_active grad_rates grad_output grad_first grad_inner grad_entry grad_input_logits grad_seen grad_factor",
            Pointer,
        ),
    ]


_forward = library.bind("raytraced_sequence_forward", ctypes.POINTER(SequenceArgs))
_backward = library.bind("raytraced_sequence_backward", ctypes.POINTER(SequenceArgs))

# What a call is given and gives: spec (L, T, estimator, dominant, temperature, sees, what the output counts, has stops), data,
# tensors, and those of a route.
DATA = {False: ("seed", "rows"), True: ("stops", "seed", "rows")}  # no seed: greedy; no rows: 0 … B − 1
# (B, N), (N, O), (L − 2, N, O, N), gates as far as there are any; and, if gates see the input, (B, L − 1, N, O)
_TENSORS = {False: ("entry", "first", "inner"), True: ("entry", "input_logits", "first", "inner")}
ROUTE = ("active", "rates", "output", "nodes", "num_active")


def arrange(
    routing: RoutingNetwork,
    entry_BN: Tensor,
    *,
    stop: StopPerRow,
    estimator: Estimator,
    temperature: float,
    num_steps: int,
    seed: Tensor | None,
    rows_B: Tensor | None,
    input_logits_BLNO: Tensor | None = None,
) -> tuple[tuple[Any, ...], list[Tensor], list[Tensor]]:
    """The arguments of the operation as spec, data and tensors."""
    routing.check_entry(entry_BN)
    stops = [stop.to(entry_BN)] if isinstance(stop, Tensor) else []
    numbers = routing.num_layers, num_steps, ESTIMATORS.index(estimator), int(not stops and stop == "dominant")
    seen = [] if input_logits_BLNO is None or routing.num_layers == 1 else [input_logits_BLNO]
    counts = 1.0 if isinstance(stop, str | Tensor) else float(stop)
    spec = (*numbers, float(temperature), bool(seen), counts, bool(stops))
    tensors = [tensor.to(entry_BN.dtype) for tensor in (entry_BN, *seen, *routing.gates())]
    return spec, [*stops, *draws(seed, rows_B)], tensors


def draws(seed: Tensor | None, rows_B: Tensor | None) -> list[Tensor]:
    """The data of a call's draws."""
    if seed is None or rows_B is None:
        return [] if seed is None else [seed]
    return [seed, rows_B.to(seed.device, torch.int64).contiguous()]


def make_args(
    spec: Sequence[float], data: Sequence[Tensor], tensors: Sequence[Tensor], **pointers: int
) -> SequenceArgs:
    """The arguments of a library call."""
    (L, T, estimator, dominant), (temperature, sees, output_counts, has_stops) = map(int, spec[:4]), spec[4:]
    (B, N), is_double = tensors[0].shape, tensors[0].dtype == torch.float64
    return SequenceArgs(
        *(B, L, N, T, is_double, estimator, dominant, torch.get_num_threads(), 0),
        *(temperature, RATE_FLOOR, output_counts),
        **point(DATA[bool(has_stops)], data),
        **point(_TENSORS[bool(sees)], tensors),
        **pointers,
    )


def empty(spec: Sequence[float], data: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of a route, not filled in."""
    (B, N), like = tensors[0].shape, tensors[0].new_empty
    return empty_route(B, int(spec[0]), N, int(spec[1]), like, partial(like, dtype=torch.int64))


def empty_route(
    B: int, L: int, N: int, T: int, real: Callable[..., Tensor], whole: Callable[..., Tensor]
) -> list[Tensor]:
    """The same, of what makes tensors of real numbers and of whole ones."""
    return [real(B, L, N), real(B, L, N), real(B), whole(B, T), whole(B)]


def forward(spec, data, tensors, keep) -> list[Tensor]:  # type: ignore[no-untyped-def]
    """What each sample activates."""
    route = empty(spec, data, tensors)
    args = make_args(spec, data, tensors, **point(ROUTE, route))
    library.run(_forward, "activation sequence", args)
    return route


def _empty_gradient(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor) if tensor.nbytes < _LARGE_BYTES else torch.from_numpy(empty_block(tensor))


def backward(spec, data, tensors, kept, grads) -> list[Tensor]:  # type: ignore[no-untyped-def]
    """Gradients of the entry and of the gates, back through every draw, or through the final set's rates alone."""
    gradients = [_empty_gradient(tensor) for tensor in tensors]
    names = (*(f"grad_{name}" for name in ROUTE[:3]), *(f"grad_{name}" for name in _TENSORS[bool(spec[5])]))
    args = make_args(spec, data, tensors, **point(ROUTE[3:], kept), **point(names, (*grads, *gradients)))
    library.run(_backward, "activation sequence", args)
    return gradients


call = LibraryCall("activation_sequence", forward, backward, empty, num_answers=3, num_returned=5)


def as_route(tensors: Sequence[Tensor], estimator: Estimator) -> Route:
    """What a call gives as the operation's answer."""
    active_BLN, rates_BLN, output_B, nodes_BT, num_active_B = tensors
    if estimator == "none" and active_BLN.requires_grad:
        active_BLN = active_BLN.detach()
    return Route(active_BLN, nodes_BT, num_active_B, Rates(rates_BLN, output_B))


def is_custom(routing: RoutingNetwork) -> bool:
    """Whether a subclass computes the rates in its own way."""
    return not library.is_unchanged(routing, RoutingNetwork, "forward", "gates", "gate_weight")


def unsupported_reason(
    routing: RoutingNetwork, entry_BN: Tensor, *, input_logits_BLNO: Tensor | None = None, **options: object
) -> str | None:
    """Why the library cannot find these sequences, None if it can."""
    if is_custom(routing):
        return "a custom routing network"
    if entry_BN.dtype not in library.PRECISIONS:
        return "entry rates in half precision"
    return library.why_unfit((entry_BN, input_logits_BLNO, *routing.gates()))


def run(routing: RoutingNetwork, entry_BN: Tensor, **options: Any) -> Route:
    """What `raytraced.sequence.unroll` computes."""
    spec, data, tensors = arrange(routing, entry_BN, **options)
    return as_route(call(spec, data, *tensors), options["estimator"])
