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
from raytraced.operations.cpp_library import Int, Pointer
from raytraced.routing import RoutingNetwork
from raytraced.sequence import WEIGHTINGS, Route, rates_to_one_weights, rates_weights, unit_weights

_MOST_ROWS = 64  # beyond, the calls of the separate parts matter little, and they use all threads
_MOST_WIDTHS = 18  # as cpu/raytrace.h has places
_MOST_WEIGHTS = 2**14  # of one expert: larger ones are not what takes the time in the calls
# The numbers of cpu/raytrace.h.
_WEIGHTINGS: dict[Callable[..., Tensor] | None, int] = {
    unit_weights: 0,
    rates_to_one_weights: 1,
    rates_weights: 2,
}


class Traced(NamedTuple):
    """What a raytraced layer is made of."""

    routing: RoutingNetwork
    grid: Experts
    # of the hidden vector: the entry gate's (N, D) and (N,); if gates see it, (R, D) and (L−1, N, O, R)
    maps: tuple[Tensor, ...]
    weighting: str
    stream: Stream

    def parameters(self) -> tuple[Tensor, ...]:
        """Maps, gates, weights and biases of a grid of MLPs."""
        assert isinstance(self.grid, MLPExperts)
        weights, biases = self.grid.stacks()
        return *self.maps, *self.routing.gates(), *weights, *biases


class Args(ctypes.Structure):
    """struct RaytraceArgs of cpu/raytrace.h."""

    _fields_ = [
        ("sequence", cpp_sequence.Args),
        ("experts", cpp_experts.Args),
        ("weighting", Int),
        ("maps", Pointer * 4),
    ]


_OWN = ("hidden", "out", *cpp_sequence.ROUTE, *cpp_sequence.DATA)  # what every call brings of its own
_raytrace = library.bind("raytraced_raytrace", ctypes.POINTER(Args), Int, *[Pointer] * len(_OWN))


def unless(layer: Traced, hidden_BD: Tensor, **options: Any) -> str | None:
    """Why the parts one by one are better."""
    if torch.compiler.is_compiling():
        return "torch.compile and torch.export see the parts as operators"
    if not 1 <= hidden_BD.shape[0] <= _MOST_ROWS:
        return f"not 1 to {_MOST_ROWS} rows: the parts use all threads"
    return too_large(layer.grid)


def too_large(grid: Experts) -> str | None:
    """Why experts are better run by themselves."""
    if isinstance(grid, MLPExperts) and grid.num_weights > _MOST_WEIGHTS:
        return f"experts of more than {_MOST_WEIGHTS:,} weights: the calls cost little beside them"
    return None


def cannot(layer: Traced, hidden_BD: Tensor, *, looks: bool = False, **options: Any) -> str | None:
    """Why it is not possible."""
    if looks:
        return "looks are wanted"
    if torch.is_grad_enabled():
        return "gradients may be wanted"
    return unfit(layer, hidden_BD)


def unfit(layer: Traced, hidden_BD: Tensor) -> str | None:
    """Why the library cannot do it, with or without gradients."""
    grid = layer.grid
    if torch.is_autocast_enabled("cpu"):
        return "autocast is on"
    if WEIGHTINGS.get(layer.weighting) not in _WEIGHTINGS:
        return "a weighting that the library does not know"
    if not isinstance(grid, MLPExperts):
        return "experts of one's own"
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


class Told(NamedTuple):
    """What the library was told about a grid last, to be told again while the key is the same."""

    key: tuple[Any, ...]
    args: Args
    numbers: tuple[Any, ...]  # stream, weighting, N, rank of what gates see, an expert's widths, the spec of a sequence
    parameters: tuple[Tensor, ...]  # maps, gates, weights, biases
    held: list[Tensor]  # what the key and the arguments speak of: no other tensor gets its name or its memory


_told: WeakKeyDictionary[Experts, Told] = WeakKeyDictionary()
_whole = torch.empty(0, dtype=torch.int64, device="cpu")  # to make others of: a dtype that is named takes longer


def tell(layer: Traced, hidden_BD: Tensor, options: dict[str, Any]) -> Told | None:
    """What the library is told about a grid, None where it cannot run it; the options are those of a sequence."""
    routing, grid, maps, weighting, stream = layer
    if torch.is_autocast_enabled("cpu") or not isinstance(grid, MLPExperts):
        return None
    if library.why_unfit((hidden_BD,)) is not None:
        return None
    parameters = layer.parameters()
    try:
        places = [(id(parameter), parameter.data_ptr(), parameter.is_contiguous()) for parameter in parameters]
    except RuntimeError:  # inside a transform of torch.func
        return None
    key = hidden_BD.shape[1], hidden_BD.dtype, WEIGHTINGS.get(weighting), stream, options, places
    told = _told.get(grid)
    if told is None or told.key != key:
        if unfit(layer, hidden_BD) is not None:
            return None
        like_BN = hidden_BD.new_empty(1, routing.num_experts)
        spec, _, gates = cpp_sequence.describe(routing, like_BN, seed=None, rows_B=None, **options)
        kinds = cpp_experts.STREAMS.index(stream), _WEIGHTINGS[WEIGHTINGS[weighting]]
        rank = len(maps[2]) if maps[2:] else 0
        numbers = (*kinds, routing.num_experts, rank, *grid.widths, *spec)
        args = describe(spec, *kinds, maps, gates, parameters[len(maps) + len(gates) - 1 :])
        held = [*parameters, *(parameter.detach() for parameter in parameters)]
        told = _told[grid] = Told(key, args, numbers, parameters, held)
    return told


def run(
    layer: Traced,
    hidden_BD: Tensor,
    *,
    seed: Tensor | None,
    rows_B: Tensor | None,
    looks: bool = False,
    **options: Any,
) -> tuple[Tensor, Route]:
    """Hidden vectors (B, D) -> hidden vectors (B, D) and what was activated."""
    if looks or torch.is_grad_enabled():
        return NotImplemented
    told = tell(layer, hidden_BD, options)
    if told is None:
        return NotImplemented
    hidden_BD = hidden_BD.contiguous()
    (B, D), L, N, real = hidden_BD.shape, layer.routing.num_layers, layer.routing.num_experts, hidden_BD.new_empty
    route = cpp_sequence.empty_route(B, L, N, options["num_steps"], real, _whole.new_empty)
    own = hidden_BD, real(B, D), *route, *cpp_sequence.draws(seed, rows_B)
    pointers = [one.data_ptr() for one in own]
    library.run(_raytrace, "raytraced experts", told.args, B, *pointers, *[None] * (len(_OWN) - len(own)))
    return own[1], cpp_sequence.as_route(route)


def describe(
    spec: Sequence[float],
    stream: int,
    weighting: int,
    maps: Sequence[Tensor],
    gates: Sequence[Tensor],
    parameters: Sequence[Tensor],
) -> Args:
    """What stays the same from call to call: spec and gates are those of a sequence, its entry first, as for one row."""
    (_, N), L = gates[0].shape, int(spec[0])
    sequence = cpp_sequence.make_args(spec, (), gates)
    sequence.rank = len(maps[2]) if maps[2:] else 0
    experts = cpp_experts.make_args((1, L, N), stream, 1, parameters)
    return Args(sequence, experts, weighting, (Pointer * 4)(*[one.data_ptr() for one in maps]))
