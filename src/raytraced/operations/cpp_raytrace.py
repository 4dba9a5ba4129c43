"""Entry gate, sequence, weights and experts in one library call, for batches so small that the calls would cost the most.

Axes: B batch, L layers, N experts a layer, D width.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from raytraced.grid import Experts, MLPExperts, Stream
from raytraced.operations import cpp_experts, cpp_sequence
from raytraced.operations import cpp_library as library
from raytraced.operations.cpp_library import Int, Pointer, fields
from raytraced.routing import RoutingNetwork
from raytraced.sequence import WEIGHTINGS, Route, rates_to_one_weights, rates_weights, unit_weights

_MOST_ROWS = 64  # beyond, the calls of the separate parts matter little, and they use all threads
_MOST_WEIGHTS = 2**14  # of one expert: larger ones are not what takes the time in the calls
# The numbers of cpu/raytrace.cpp.
_WEIGHTINGS: dict[Callable[..., Tensor] | None, int] = {unit_weights: 0, rates_to_one_weights: 1, rates_weights: 2}

Maps = tuple[
    Tensor, ...
]  # of the hidden vector: the entry gate's (N, D) and (N,); if gates see it, (R, D) and (L−1, N, O, R)


class Args(ctypes.Structure):
    """struct RaytraceArgs of cpu/raytrace.cpp."""

    _fields_ = [
        ("sequence", cpp_sequence.Args),
        ("experts", cpp_experts.Args),
        *fields("weighting rank", Int),
        ("maps", Pointer * 4),
    ]


_OWN = ("hidden", "out", *cpp_sequence.ROUTE, *cpp_sequence.DATA)  # what every call brings of its own
_raytrace = library.bind("raytraced_raytrace", ctypes.POINTER(Args), Int, *[Pointer] * len(_OWN))


def unless(routing: RoutingNetwork, grid: Experts, hidden_BD: Tensor, maps: Maps, **options: Any) -> str | None:
    """Why the parts one by one are better."""
    if torch.compiler.is_compiling():
        return "torch.compile and torch.export see the parts as operators"
    if not 1 <= hidden_BD.shape[0] <= _MOST_ROWS:
        return f"not 1 to {_MOST_ROWS} rows: the parts use all threads"
    if isinstance(grid, MLPExperts) and grid.num_weights > _MOST_WEIGHTS:
        return f"experts of more than {_MOST_WEIGHTS:,} weights: the calls cost little beside them"
    return None


def cannot(
    routing: RoutingNetwork,
    grid: Experts,
    hidden_BD: Tensor,
    maps: Maps,
    *,
    weighting: str,
    **options: Any,
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
    (_, D), (L, N), (gate_ND, _, *seen) = hidden_BD.shape, (routing.num_layers, routing.num_experts), maps
    if gate_ND.shape != (N, D) or grid.widths[0] != D or (seen and seen[0].shape[1] != D):
        return "a gate or experts of another width"
    if seen and (L == 1 or seen[1].shape != (L - 1, N, N + 1, len(seen[0]))):
        return "gates of another grid"
    weights, biases = grid.stacks()
    parameters = (*weights, *biases, *maps, *routing.gates())
    if not all([parameter.is_contiguous() for parameter in parameters]):
        return "parameters that are not contiguous"
    return library.why_unfit((hidden_BD, *parameters), hidden_BD.dtype)


class _Told(NamedTuple):
    """What the library was told about a grid last, to be told again while the key is the same."""

    key: tuple[Any, ...]
    args: Args
    held: list[Tensor]  # what the key and the arguments speak of: no other tensor gets its name or its memory


_told: WeakKeyDictionary[Experts, _Told] = WeakKeyDictionary()
_whole = torch.empty(0, dtype=torch.int64, device="cpu")  # to make others of: a dtype that is named takes longer


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
    **options: Any,
) -> tuple[Tensor, Route]:
    """Hidden vectors (B, D) -> hidden vectors (B, D) and what was activated."""
    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or not isinstance(grid, MLPExperts):
        return NotImplemented
    if library.why_unfit((hidden_BD,)) is not None:
        return NotImplemented
    weights, biases = grid.stacks()
    parameters = (*weights, *biases, *maps, *routing.gates())
    try:
        places = [(id(parameter), parameter.data_ptr(), parameter.is_contiguous()) for parameter in parameters]
    except RuntimeError:  # inside a transform of torch.func
        return NotImplemented
    B, D = hidden_BD.shape
    key = D, hidden_BD.dtype, WEIGHTINGS.get(weighting), stream, options, places
    told = _told.get(grid)
    if told is None or told.key != key:
        if cannot(routing, grid, hidden_BD, maps, weighting=weighting) is not None:
            return NotImplemented
        args = _describe(routing, hidden_BD, maps, (*weights, *biases), weighting, stream, options)
        told = _told[grid] = _Told(key, args, [*parameters, *(parameter.detach() for parameter in parameters)])
    hidden_BD = hidden_BD.contiguous()
    L, N, T, real = routing.num_layers, routing.num_experts, options["num_steps"], hidden_BD.new_empty
    out_BD, route = real(B, D), cpp_sequence.empty_route(B, L, N, T, real, _whole.new_empty)
    own = hidden_BD, out_BD, *route, *cpp_sequence.draws(seed, rows_B)
    pointers = [one.data_ptr() for one in own]
    library.run(_raytrace, "raytraced experts", told.args, B, *pointers, *[None] * (len(_OWN) - len(own)))
    return out_BD, cpp_sequence.as_route(route)


def _describe(
    routing: RoutingNetwork,
    hidden_BD: Tensor,
    maps: Maps,
    parameters: Sequence[Tensor],
    weighting: str,
    stream: Stream,
    options: dict[str, Any],
) -> Args:
    """What stays the same from call to call."""
    L, N, rank, like = routing.num_layers, routing.num_experts, len(maps[2]) if maps[2:] else 0, hidden_BD.new_empty
    # As for one row; the library fills the batch in, and entry and sight, which lie in its own memory.
    seen = like(1, L - 1, N, N + 1) if rank else None
    given = cpp_sequence.describe(routing, like(1, N), sight_BLNO=seen, seed=None, rows_B=None, **options)
    sequence = cpp_sequence.make_args(*given)
    experts = cpp_experts.make_args((1, L, N), cpp_experts.STREAMS.index(stream), 1, parameters)
    sequence.threads = experts.threads = 1
    pointers = (Pointer * 4)(*[one.data_ptr() for one in maps])
    return Args(sequence, experts, _WEIGHTINGS[WEIGHTINGS[weighting]], rank, pointers)
