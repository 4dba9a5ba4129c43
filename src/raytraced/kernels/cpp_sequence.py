"""The activation sequence in the compiled library: one call forward, one backward, only the draws kept between.

Axes: B batch, L layers, N experts per layer, M = L·N nodes, O = N + 1 outlets, T steps.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from raytraced.kernels import cpp_library as library
from raytraced.kernels.cpp_function import Inputs, LibraryFunction, Outputs
from raytraced.kernels.cpp_gradients import empty_block
from raytraced.kernels.cpp_library import Float, Int, Pointer, fields, point
from raytraced.replay import ordered_nodes
from raytraced.routing import Rates, RoutingNetwork
from raytraced.sequence import RATE_FLOOR, Estimator, Route, StopPerRow

ROUTING_METHODS = ("forward", "gates", "gate_weight")  # of a routing network, which the library replaces
ESTIMATORS = ("straight-through", "reinmax", "gumbel", "none")  # the numbers of cpu/sequence.h
_LARGE_BYTES = 2**22  # of a gradient, from which fresh pages cost more than the arithmetic on them


@library.mirrors
class SequenceArgs(ctypes.Structure):
    """struct SequenceArgs of cpu/sequence.h."""

    _fields_ = [
        *fields("batch layers experts steps is_double estimator dominant threads rank", Int),
        *fields("temperature rate_floor output_counts", Float),
        *fields(
            "first inner entry input_logits projected factor seed rows stops followed active nodes num_active rates output",
            Pointer,
        ),
        *fields(
            "grad_active grad_rates grad_output grad_first grad_inner grad_entry grad_input_logits grad_projected grad_factor",
            Pointer,
        ),
    ]


_forward = library.bind("raytraced_sequence_forward", ctypes.POINTER(SequenceArgs))
_backward = library.bind("raytraced_sequence_backward", ctypes.POINTER(SequenceArgs))


class SequenceOptions(NamedTuple):
    """Numbers of one call."""

    num_layers: int
    num_steps: int
    estimator: int  # its place in ESTIMATORS
    temperature: float
    output_counts: float  # how much the output node's rate counts in the choice
    dominant: bool  # whether a sequence ends only when that rate exceeds all others
    input_conditioned: bool  # whether gates also depend on the input

    def numbers(self) -> list[float]:
        return [float(number) for number in self]

    @classmethod
    def from_numbers(cls, numbers: Sequence[float]) -> "SequenceOptions":
        num_layers, num_steps, estimator, temperature, output_counts, dominant, input_conditioned = numbers
        whole = int(num_layers), int(num_steps), int(estimator)
        return cls(*whole, temperature, output_counts, bool(dominant), bool(input_conditioned))


# (B,), the stop of each row; no seed: greedy; no rows: 0 … B − 1; (B, T), the nodes of a recorded route to follow
DATA = ("stops", "seed", "rows", "followed")


def tensor_names(options: SequenceOptions) -> tuple[str, ...]:
    """The names of the tensors: (B, N), (B, L − 1, N, O), then gates (N, O) and (L − 2, N, O, N), as far as there are any."""
    gates = ("first", "inner")[: options.num_layers - 1]
    return ("entry", "input_logits", *gates) if options.input_conditioned else ("entry", *gates)


class RouteTensors(NamedTuple):
    """What the library writes of a route."""

    active: Tensor  # (B, L, N)
    rates: Tensor  # (B, L, N)
    output: Tensor  # (B,)
    nodes: Tensor  # (B, T)
    num_active: Tensor  # (B,)

    @classmethod
    def empty(
        cls, B: int, L: int, N: int, T: int, real: Callable[..., Tensor], whole: Callable[..., Tensor]
    ) -> "RouteTensors":
        """Not filled in, of what makes tensors of real numbers and of whole ones."""
        return cls(real(B, L, N), real(B, L, N), real(B), whole(B, T), whole(B))

    def as_route(self, estimator: Estimator) -> Route:
        """The operation's answer."""
        active_BLN = self.active
        if estimator == "none" and active_BLN.requires_grad:
            active_BLN = active_BLN.detach()
        return Route(active_BLN, self.nodes, self.num_active, Rates(self.rates, self.output))


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
    followed: Route | None = None,
) -> Inputs[SequenceOptions]:
    """The arguments of the operation as a library function takes them."""
    routing.check_entry(entry_BN)
    nodes_BT = None if followed is None else ordered_nodes(followed)
    num_steps = num_steps if nodes_BT is None else nodes_BT.shape[1]
    stops_B = stop.to(entry_BN) if isinstance(stop, Tensor) else None
    input_logits = [] if input_logits_BLNO is None or routing.num_layers == 1 else [input_logits_BLNO]
    options = SequenceOptions(
        routing.num_layers,
        num_steps,
        ESTIMATORS.index(estimator),
        float(temperature),
        *stop_numbers(stop),
        bool(input_logits),
    )
    tensors = [tensor.to(entry_BN.dtype) for tensor in (entry_BN, *input_logits, *routing.gates())]
    return Inputs(options, [stops_B, seed, as_rows(seed, rows_B), nodes_BT], tensors)


def stop_numbers(stop: StopPerRow) -> tuple[float, bool]:
    """How much the output node's rate counts (1 where rows have a stop each), and whether it must dominate."""
    if isinstance(stop, Tensor):
        return 1.0, False
    return (1.0, stop == "dominant") if isinstance(stop, str) else (float(stop), False)


def as_rows(seed: Tensor | None, rows_B: Tensor | None) -> Tensor | None:
    """Row numbers as the library reads them; none are needed where nothing is drawn."""
    return None if seed is None or rows_B is None else rows_B.to(seed.device, torch.int64).contiguous()


def make_args(inputs: Inputs[SequenceOptions], **pointers: int) -> SequenceArgs:
    """The arguments of a library call."""
    options, data, tensors = inputs
    (B, N), is_double = tensors[0].shape, tensors[0].dtype == torch.float64
    return SequenceArgs(
        *(B, options.num_layers, N, options.num_steps, is_double, options.estimator, options.dominant),
        *(torch.get_num_threads(), 0, options.temperature, RATE_FLOOR, options.output_counts),
        **point(DATA, data),
        **point(tensor_names(options), tensors),
        **pointers,
    )


class ActivationSequence(LibraryFunction[SequenceOptions]):
    """What each sample activates. Answers: active set, rates, output rate; besides: nodes, number of active experts."""

    name: ClassVar[str] = "activation_sequence"
    num_answers: ClassVar[int] = 3
    options_type = SequenceOptions

    def empty(self, inputs: Inputs[SequenceOptions]) -> Outputs:
        (B, N), like = inputs.tensors[0].shape, inputs.tensors[0].new_empty
        sizes = B, inputs.options.num_layers, N, inputs.options.num_steps
        route = RouteTensors.empty(*sizes, like, partial(like, dtype=torch.int64))
        return Outputs(list(route[:3]), list(route[3:]))

    def forward(self, inputs: Inputs[SequenceOptions], keep: bool) -> Outputs:
        outputs = self.empty(inputs)
        route = point(RouteTensors._fields, (*outputs.answers, *outputs.others))
        library.run(_forward, "activation sequence", make_args(inputs, **route))
        return outputs

    def backward(
        self, inputs: Inputs[SequenceOptions], saved: Sequence[Tensor], grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Gradients of the entry and of the gates, back through every draw, or through the final set's rates alone."""
        gradients = [_empty_gradient(tensor) for tensor in inputs.tensors]
        names = ("active", "rates", "output", *tensor_names(inputs.options))
        pointers = point([f"grad_{name}" for name in names], (*grads, *gradients))
        args = make_args(inputs, **point(("nodes", "num_active"), saved), **pointers)
        library.run(_backward, "activation sequence", args)
        return list(gradients)


def _empty_gradient(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor) if tensor.nbytes < _LARGE_BYTES else torch.from_numpy(empty_block(tensor))


call = ActivationSequence()


def is_custom(routing: RoutingNetwork) -> bool:
    """Whether a subclass computes the rates in its own way."""
    return not library.is_unchanged(routing, RoutingNetwork, *ROUTING_METHODS)


def unsupported_reason(
    routing: RoutingNetwork, entry_BN: Tensor, *, input_logits_BLNO: Tensor | None = None, **options: object
) -> str | None:
    """Why the library cannot find these sequences, None if it can."""
    if is_custom(routing):
        return "a custom routing network"
    if entry_BN.dtype not in library.PRECISIONS:
        return "entry rates in half precision"
    return library.unfit_reason((entry_BN, input_logits_BLNO, *routing.gates()))


def run(routing: RoutingNetwork, entry_BN: Tensor, **options: Any) -> Route:
    """What `raytraced.sequence.unroll` computes."""
    inputs = arrange(routing, entry_BN, **options)
    route = RouteTensors(*call(inputs.options, inputs.data, *inputs.tensors)).as_route(options["estimator"])
    followed = options.get("followed")
    return route if followed is None else route._replace(nodes=followed.nodes)
