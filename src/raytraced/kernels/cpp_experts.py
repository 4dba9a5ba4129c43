"""Sparse experts in the compiled library: one call for the whole grid (or one layer) forward, one backward.

Only active experts run and only their rows; the sums have a fixed order, so that neither the threads nor the other rows of
a batch change a result. Axes: B batch, L layers, N experts per layer, J linear layers of an expert, P pairs (row, expert),
D width, O and K a linear layer's outputs and inputs.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from raytraced.experts import MLPS, Grid, MLPExperts, MLPLayer, Stream
from raytraced.kernels import cpp_library as library
from raytraced.kernels.cpp_function import Inputs, LibraryFunction, Outputs
from raytraced.kernels.cpp_gradients import GradientHome, empty_gradient
from raytraced.kernels.cpp_library import Int, Pointer, PointerArray, fields, point, pointer_array

GRID_METHODS = ("run_layer", "run_expert", "stacks")  # of a grid, which the library replaces
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

_SAVED = ("states", "results", "rows", "offsets")  # (L − 1 or L, B, D), (P, D), (P or more,), (chunks, M + 1)


class ExpertsOptions(NamedTuple):
    """Numbers of one call, and in eager mode where the gradients of large weights belong."""

    stream: int  # its place in STREAMS
    homes: Sequence[GradientHome | None] = ()  # for each linear layer's weights, whose layers are run one by one
    layer: int = 0  # the number of the layer that runs

    def numbers(self) -> list[float]:
        return [float(self.stream)]

    @classmethod
    def from_numbers(cls, numbers: Sequence[float]) -> "ExpertsOptions":
        return cls(int(numbers[0]))

    def num_states(self, num_layers: int) -> int:
        """After how many layers the hidden vectors are kept: a sum needs the last one's, too."""
        return num_layers if STREAMS[self.stream] == "skip-sum" else num_layers - 1


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


class SparseExperts(LibraryFunction[ExpertsOptions]):
    """Hidden vectors through all layers, each expert on its own rows and weighted.

    Data: the active set. Tensors: hidden (B, D), the experts' weights in the sum (B, L, N), J weights (L, N, O, K), J biases
    (L, N, O); parameters of one layer have no axis L. Answers: the last vectors (B, D), and what each layer gave.
    """

    name: ClassVar[str] = "experts"
    num_answers: ClassVar[int] = 2
    options_type = ExpertsOptions

    def empty(self, inputs: Inputs[ExpertsOptions]) -> Outputs:
        hidden, mix = inputs.tensors[:2]
        out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        return Outputs([out, hidden.new_empty(inputs.options.num_states(mix.shape[1]), *hidden.shape)])

    def forward(self, inputs: Inputs[ExpertsOptions], keep: bool) -> Outputs:
        """Saved: what each layer gave, the results of all pairs, the pairs, and hidden activations of all pairs."""
        hidden, mix, *parameters = inputs.tensors
        (active,), stream = inputs.data, inputs.options.stream
        assert active is not None
        (B, L, N), D, weights = mix.shape, hidden.shape[-1], parameters[: len(parameters) // 2]
        chunk = chunk_rows(B, L, weights)
        num_pairs, rows, offsets = sort_pairs(active.view(B, L * N), chunk, max(1, -(-B // chunk)))

        (out, states), _, _ = self.empty(inputs)
        saved = [states, hidden.new_empty(num_pairs, D), rows, offsets]
        pointers: dict[str, Any] = point(("hidden", "mix", "out", *_SAVED), (hidden, mix, out, *saved))
        inner = []
        if keep:
            inner = [hidden.new_empty(num_pairs, -(-weight.shape[-2] // 16) * 16) for weight in weights[:-1]]
            pointers["inner"] = pointer_array(inner)
        library.run(_forward, "experts", make_args((B, L, N), stream, chunk, parameters, **pointers))
        return Outputs([out, states], saved=[*saved, *inner] if keep else [])

    def backward(
        self, inputs: Inputs[ExpertsOptions], saved: Sequence[Tensor], grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Gradients of hidden, mix, weights and biases; experts without rows get zeros."""
        (hidden, mix, *parameters), options = inputs.tensors, inputs.options
        weights, biases = parameters[: len(parameters) // 2], parameters[len(parameters) // 2 :]
        grad_hidden, grad_mix, grad_results = map(torch.empty_like, (hidden, mix, saved[1]))
        homes = options.homes or [None] * len(weights)
        gradients = [
            empty_gradient(weight) if home is None else home.place(options.layer)
            for weight, home in zip(weights, homes, strict=True)
        ]
        gradients += [empty_gradient(bias) for bias in biases]
        grad_out = torch.zeros_like(hidden) if grads[0] is None else grads[0]
        pointers: dict[str, Any] = point(("hidden", "mix", *_SAVED), (hidden, mix, *saved[:4]))
        names = ("grad_out", "grad_states", "grad_hidden", "grad_mix", "grad_results")
        pointers |= point(names, (grad_out, grads[1], grad_hidden, grad_mix, grad_results))
        pointers |= {"inner": pointer_array(saved[4:]), "gradients": pointer_array(gradients)}
        chunk = chunk_rows(mix.shape[0], mix.shape[1], weights)
        library.run(_backward, "experts", make_args(mix.shape, options.stream, chunk, parameters, **pointers))
        return [grad_hidden, grad_mix, *gradients]


call = SparseExperts()


def is_custom(experts: Grid) -> bool:
    """Whether a grid is no grid of MLPs, or a subclass of one runs its experts in its own way."""
    if not isinstance(experts, MLPS):
        return True
    base = MLPLayer if isinstance(experts, MLPLayer) else MLPExperts
    return not library.is_unchanged(experts, base, *GRID_METHODS)


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
    return library.unfit_reason((hidden_BD, weights_BLN, *weights, *biases))


def run(
    experts: Grid, hidden_BD: Tensor, active_BLN: Tensor, weights_BLN: Tensor, stream: Stream, exits: bool = False
) -> Tensor:
    """What `raytraced.experts.run_dense` computes, with each expert on its own rows."""
    assert isinstance(experts, MLPS)
    active_BLN, weights_BLN = active_BLN.detach().to(hidden_BD.dtype), weights_BLN.to(hidden_BD.dtype)
    weights, biases = experts.stacks()
    options = ExpertsOptions(STREAMS.index(stream))
    if isinstance(experts, MLPLayer):
        homes = [weight if isinstance(weight, GradientHome) else None for weight in experts.all_weights]
        options = options._replace(homes=homes, layer=experts.layer) if any(homes) else options
    out_BD, states = call(options, (active_BLN,), hidden_BD, weights_BLN, *weights, *biases)
    if not exits:
        return out_BD
    above = states[: experts.num_layers - 1]
    start_BD = stream.start(hidden_BD).answer
    return torch.cat((start_BD[None], above.cumsum(0) if stream is Stream.SKIP_SUM else above, out_BD[None]))
