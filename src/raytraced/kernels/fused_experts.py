"""Sparse experts as a PyTorch function: one call for the whole grid (or one layer) forward, one backward.

Only active experts run and only their rows; the sums have a fixed order, so that neither the threads nor the other rows of
a batch change a result. Axes: B batch, L layers, N experts a layer, J linear layers of an expert, P pairs (row, expert),
D width, O and K a linear layer's outputs and inputs.
"""

import ctypes
import struct
import threading
import weakref
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakTensorKeyDictionary

from raytraced.kernels import library

STREAMS = ("residual", "skip-sum", "last")  # the numbers of cpu/experts.h

# struct ExpertsArgs of cpu/experts.h, without its tail
_HEAD = "9q11Q"
# Experts whose layer is larger than this are shared out over threads; below, rows are, and each chunk of rows keeps its
# own copy of the weights' gradients.
_LARGE_LAYER_BYTES = 2**20
_CHUNK, _MOST_CHUNKS = 128, 16
_HUGE_BYTES = 2**25
_ORDINARY = (Tensor, torch.nn.Parameter)

if library.cpu is not None:
    _forward, _backward = library.bind("raytraced_experts_forward"), library.bind("raytraced_experts_backward")
    _plan = library.cpu.raytraced_experts_plan
    _plan.restype = ctypes.c_longlong
    _plan.argtypes = (*[ctypes.c_longlong] * 3, ctypes.c_void_p, *[ctypes.c_longlong] * 2, *[ctypes.c_void_p] * 2)


class Pairs(NamedTuple):
    """Who runs where: the rows of each expert, sorted by chunk of rows, layer, expert and row."""

    rows: Tensor  # (P or more,) int32
    offsets: Tensor  # (chunks, M + 1)
    num_pairs: int
    chunk: int
    num_chunks: int


def plan(active: Tensor, layer_bytes: int) -> Pairs:
    """Sort the pairs of a contiguous 0/1 tensor (B, L, N)."""
    B, L, N = active.shape
    large = layer_bytes > _LARGE_LAYER_BYTES
    chunk = max(B, 1) if large else max(_CHUNK, -(-B // (16 * _MOST_CHUNKS)) * 16)
    num_chunks = max(1, -(-B // chunk))
    rows = torch.empty(active.numel(), dtype=torch.int32)
    offsets = torch.empty(num_chunks, L * N + 1, dtype=torch.int64)
    is_double = active.dtype == torch.float64
    num_pairs = _plan(B, L * N, is_double, active.data_ptr(), chunk, num_chunks, rows.data_ptr(), offsets.data_ptr())
    return Pairs(rows, offsets, num_pairs, chunk, num_chunks)


class _Memory:
    """Memory for a large parameter's gradient, used again once nobody holds the gradient before.

    Fresh pages cost more than the arithmetic on them, every step anew, since so large a block goes back to the system as
    soon as it is free. numpy's memory, because it asks for huge pages and because its views tell when they are let go.
    """

    def __init__(self, parameter: Tensor) -> None:
        dtype = np.float64 if parameter.dtype == torch.float64 else np.float32
        self.block = np.empty(tuple(parameter.shape), dtype)
        self.lent: weakref.ref[np.ndarray] | None = None

    def lend(self, parameter: Tensor) -> Tensor | None:
        """A gradient in this memory, None where it is in use or does not fit."""
        in_use = self.lent is not None and self.lent() is not None
        if in_use or self.block.shape != parameter.shape or self.block.itemsize != parameter.itemsize:
            return None
        view = self.block[:]
        self.lent = weakref.ref(view)
        return torch.from_numpy(view)


_memories, _memories_lock = WeakTensorKeyDictionary(), threading.Lock()


def empty_gradient(parameter: Tensor) -> Tensor:
    """A tensor for the gradient of a parameter, not filled in."""
    if parameter.nbytes < _HUGE_BYTES:
        return torch.empty(parameter.shape, dtype=parameter.dtype)
    with _memories_lock:
        memory = _memories.get(parameter)
        gradient = memory.lend(parameter) if memory is not None else None
        if gradient is None:
            memory = _memories[parameter] = _Memory(parameter)
            gradient = memory.lend(parameter)
        assert gradient is not None
        return gradient


class GradientHome:
    """One place for the gradient of a large stacked parameter whose layers are run by calls of their own.

    Each call writes its layer's gradient where it belongs; putting separate ones together would copy them all.
    """

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = parameter
        self.gradient: Tensor | None = None
        self.lent: set[int] = set()

    @classmethod
    def for_parameter(cls, parameter: Tensor) -> "GradientHome | None":
        """A home where one pays: nothing is gained for small parameters, or where no gradient is wanted."""
        large = parameter.nbytes >= _HUGE_BYTES and parameter.is_cpu and type(parameter) in _ORDINARY
        wanted = parameter.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        return cls(parameter) if large and wanted and not torch._C._are_functorch_transforms_active() else None

    def unstack(self) -> tuple[Tensor, ...]:
        """The layers of the parameter, as views."""
        layers: tuple[Tensor, ...] = _Unstack.apply(self.parameter, self)
        return layers

    def place(self, layer: int) -> Tensor:
        """Where a call may write the gradient (1, …) of one layer; a second call for the same layer gets its own."""
        if self.gradient is None:
            self.gradient, self.lent = empty_gradient(self.parameter), set()
        if layer in self.lent:
            return torch.empty_like(self.gradient[layer : layer + 1])
        self.lent.add(layer)
        return self.gradient[layer : layer + 1]


class _Unstack(torch.autograd.Function):
    """unbind(0) whose gradients are at home already, or are copied there."""

    @staticmethod
    def forward(ctx, parameter, home):  # type: ignore[no-untyped-def]
        ctx.home = home
        return parameter.unbind(0)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        home = ctx.home
        whole, home.gradient = home.gradient, None
        if whole is None:
            whole = empty_gradient(home.parameter)
        for place, grad in zip(whole.unbind(0), grads, strict=True):
            if grad is None:
                place.zero_()
            elif grad.data_ptr() != place.data_ptr():
                place.copy_(grad)
        return whole, None


# Where the gradients of the weights of one layer are to be written: a home (or none) for each linear layer, and the layer.
Places = tuple[list[GradientHome | None], int] | None


class Forward(NamedTuple):
    """What a forward pass leaves: the answer, and what the backward pass reads."""

    out: Tensor  # (B, D)
    states: Tensor  # (L - 1 or L, B, D)
    results: Tensor  # (P, D)
    inner: list[Tensor]  # hidden activations (P, O padded to 16); none where no gradient is wanted


def _call(function, mix, pairs, stream, widths, tensors, pointers) -> None:  # type: ignore[no-untyped-def]
    B, L, N = mix.shape
    J, is_double = len(widths) - 1, mix.dtype == torch.float64
    args = struct.pack(
        f"{_HEAD}{J + 1}q{5 * J}Q",
        *(B, L, N, J, is_double, stream, torch.get_num_threads(), pairs.chunk, pairs.num_chunks),
        *(0 if tensor is None else tensor.data_ptr() for tensor in (pairs.rows, pairs.offsets, mix, *tensors)),
        *widths,
        *(0 if tensor is None else tensor.data_ptr() for tensor in pointers),
    )
    if function(args):
        raise MemoryError(f"experts on {B} rows of a {L}x{N} grid: no memory for the kernel's scratch")


def _widths(weights: tuple[Tensor, ...]) -> list[int]:
    return [weights[0].shape[-1], *(weight.shape[-2] for weight in weights)]


def forward(
    hidden: Tensor,
    mix: Tensor,
    pairs: Pairs,
    stream: int,
    weights: tuple[Tensor, ...],
    biases: tuple[Tensor, ...],
    keep: bool,
) -> Forward:
    """Hidden vectors (B, D) through all layers, each expert weighted by mix (B, L, N); everything contiguous."""
    (B, D), L, J = hidden.shape, mix.shape[1], len(weights)
    widths = _widths(weights)
    out = torch.empty_like(hidden)
    states = hidden.new_empty(L if STREAMS[stream] == "skip-sum" else L - 1, B, D)
    results = hidden.new_empty(pairs.num_pairs, D)
    inner = [hidden.new_empty(pairs.num_pairs, -(-width // 16) * 16) for width in widths[1:-1]] if keep else []
    tensors = (hidden, states, out, results, None, None, None, None)
    pointers = (*weights, *biases, *inner, *[None] * (3 * J - len(inner)))
    _call(_forward, mix, pairs, stream, widths, tensors, pointers)
    return Forward(out, states, results, inner)


def backward(
    grad_out: Tensor,
    hidden: Tensor,
    mix: Tensor,
    pairs: Pairs,
    stream: int,
    weights: tuple[Tensor, ...],
    biases: tuple[Tensor, ...],
    kept: Forward,
    places: Places = None,
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Gradients of hidden, mix, weights and biases; experts without rows get zeros."""
    J = len(weights)
    grad_hidden, grad_mix = torch.empty_like(hidden), torch.empty_like(mix)
    homes, layer = places or ([None] * J, 0)
    grad_weights = [
        empty_gradient(w) if home is None else home.place(layer) for w, home in zip(weights, homes, strict=True)
    ]
    grad_biases = [empty_gradient(b) for b in biases]
    grad_results = torch.empty_like(kept.results)
    tensors = (hidden, kept.states, kept.out, kept.results, grad_out, grad_hidden, grad_mix, grad_results)
    pointers = (*weights, *biases, *kept.inner, *[None] * (J - len(kept.inner)), *grad_weights, *grad_biases)
    _call(_backward, mix, pairs, stream, _widths(weights), tensors, pointers)
    return grad_hidden, grad_mix, grad_weights, grad_biases


class FusedExperts(torch.autograd.Function):
    """Forward and backward in one library call each."""

    @staticmethod
    def forward(ctx, hidden, mix, pairs, stream, places, *parameters):  # type: ignore[no-untyped-def]
        J = len(parameters) // 2
        kept = forward(hidden, mix, pairs, stream, parameters[:J], parameters[J:], keep=True)
        ctx.save_for_backward(hidden, mix, *parameters, *kept[:3], *kept.inner)
        ctx.pairs, ctx.stream, ctx.J, ctx.places = pairs, stream, J, places
        return kept.out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):  # type: ignore[no-untyped-def]
        J = ctx.J
        hidden, mix, *rest = ctx.saved_tensors
        weights, biases, kept = rest[:J], rest[J : 2 * J], rest[2 * J :]
        grad_hidden, grad_mix, grad_weights, grad_biases = backward(
            grad_out.contiguous(),
            hidden,
            mix,
            ctx.pairs,
            ctx.stream,
            weights,
            biases,
            Forward(kept[0], kept[1], kept[2], kept[3:]),
            ctx.places,
        )
        return grad_hidden, grad_mix, None, None, None, *grad_weights, *grad_biases


@torch.library.custom_op("raytraced::experts", mutates_args=())
def experts_op(
    hidden: Tensor, active: Tensor, mix: Tensor, stream: int, weights: list[Tensor], biases: list[Tensor]
) -> Tensor:
    """The operator that torch.compile and torch.export see. It keeps nothing: how many pairs there are is not known then."""
    parameters = tuple(w.contiguous() for w in weights), tuple(b.contiguous() for b in biases)
    pairs = plan(active.contiguous(), _layer_bytes(weights))
    return forward(hidden.contiguous(), mix.contiguous(), pairs, stream, *parameters, keep=False).out


@torch.library.custom_op("raytraced::experts_backward", mutates_args=())
def experts_backward_op(
    grad_out: Tensor,
    hidden: Tensor,
    active: Tensor,
    mix: Tensor,
    stream: int,
    weights: list[Tensor],
    biases: list[Tensor],
) -> list[Tensor]:
    """Gradients of hidden, mix, every weight and every bias; the forward pass is run again for what it would have kept."""
    given = hidden.contiguous(), mix.contiguous(), plan(active.contiguous(), _layer_bytes(weights)), stream
    parameters = tuple(w.contiguous() for w in weights), tuple(b.contiguous() for b in biases)
    kept = forward(*given, *parameters, keep=True)
    grad_hidden, grad_mix, grad_weights, grad_biases = backward(grad_out.contiguous(), *given, *parameters, kept)
    return [grad_hidden, grad_mix, *grad_weights, *grad_biases]


@experts_op.register_fake
def _(hidden, active, mix, stream, weights, biases):  # type: ignore[no-untyped-def]
    return torch.empty_like(hidden, memory_format=torch.contiguous_format)


@experts_backward_op.register_fake
def _(grad_out, hidden, active, mix, stream, weights, biases):  # type: ignore[no-untyped-def]
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (hidden, mix, *weights, *biases)]


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    hidden, active, mix, ctx.stream, weights, biases = inputs
    ctx.J = len(weights)
    ctx.save_for_backward(hidden, active, mix, *weights, *biases)


def _op_backward(ctx, grad_out):  # type: ignore[no-untyped-def]
    hidden, active, mix, *parameters = ctx.saved_tensors
    J = ctx.J
    grads = experts_backward_op(grad_out, hidden, active, mix, ctx.stream, parameters[:J], parameters[J:])
    return grads[0], None, grads[1], None, grads[2 : 2 + J], grads[2 + J :]


experts_op.register_autograd(_op_backward, setup_context=_setup)


def _layer_bytes(weights: Iterable[Tensor]) -> int:
    return sum(weight[0].nbytes for weight in weights)


def can_run(hidden: Tensor, mix: Tensor, weights: Iterable[Tensor], biases: Iterable[Tensor]) -> bool:
    """Whether `run` can stand in for the plain path: ordinary CPU tensors of one precision, single or double."""
    dtype = hidden.dtype
    if library.cpu is None or not hidden.is_cpu or dtype not in (torch.float32, torch.float64):
        return False
    if torch.is_autocast_enabled("cpu"):
        return False
    if torch.compiler.is_compiling():
        return all(t.dtype == dtype and t.is_cpu for t in (*weights, *biases))
    # A tensor inside torch.func's transforms, or of another class, has no memory of its own to point to.
    if torch._C._are_functorch_transforms_active() or type(hidden) not in _ORDINARY or type(mix) not in _ORDINARY:
        return False
    return all(type(t) in _ORDINARY and t.dtype == dtype and t.is_cpu for t in (*weights, *biases))


def run(
    hidden: Tensor,
    active: Tensor,
    mix: Tensor,
    stream: str,
    weights: Iterable[Tensor],
    biases: Iterable[Tensor],
    places: Places = None,
) -> Tensor:
    """Hidden vectors (B, D), who is active and with which weight (B, L, N), parameters (L, N, O, K) and (L, N, O)."""
    number = STREAMS.index(stream)
    active, mix = active.detach().to(hidden.dtype), mix.to(hidden.dtype)
    if torch.compiler.is_compiling():
        result: Tensor = experts_op(hidden, active, mix, number, list(weights), list(biases))
        return result
    weights, biases = tuple(w.contiguous() for w in weights), tuple(b.contiguous() for b in biases)
    hidden, mix = hidden.contiguous(), mix.contiguous()
    pairs = plan(active.contiguous(), _layer_bytes(weights))
    wanted = torch.is_grad_enabled() and any(t.requires_grad for t in (hidden, mix, *weights, *biases))
    if wanted:
        return FusedExperts.apply(hidden, mix, pairs, number, places, *weights, *biases)
    return forward(hidden, mix, pairs, number, weights, biases, keep=False).out
