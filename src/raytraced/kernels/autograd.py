"""The fused sequence for PyTorch's two ways of looking at a function: autograd in eager mode, and a registered operator.

Eager mode calls the library straight from a small autograd function: a registered operator's dispatch takes longer than
a batch of one. torch.compile and torch.export see the operator instead. Axes: as in fused_sequence.py beside this file.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from raytraced.kernels.fused_sequence import Gradient, Options, Result, backward, forward


class FusedSequence(torch.autograd.Function):
    """Forward and backward in one library call each."""

    @staticmethod
    def forward(ctx, entry, first, inner, seed, rows, options):  # type: ignore[no-untyped-def]
        result = forward(entry, first, inner, seed, rows, options)
        ctx.save_for_backward(entry, first, inner, seed, rows, result.nodes, result.num_active)
        ctx.options = options
        ctx.mark_non_differentiable(result.nodes, result.num_active)
        ctx.set_materialize_grads(False)
        return tuple(result)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_active, _nodes, _num_active, grad_rates, grad_output):  # type: ignore[no-untyped-def]
        entry, first, inner, seed, rows, nodes, num_active = ctx.saved_tensors
        # A parameter is kept itself, and may have been given other memory since.
        first, inner = _contiguous(first, inner)
        grads = _contiguous(grad_active, grad_rates, grad_output)
        gradient = backward(entry, first, inner, seed, rows, nodes, num_active, grads, ctx.options)
        return (*gradient, None, None, None)


def _contiguous(*grads: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(None if grad is None else grad.contiguous() for grad in grads)


@torch.library.custom_op("raytraced::activation_sequence", mutates_args=())
def activation_sequence_op(
    entry: Tensor,
    first: Tensor | None,
    inner: Tensor | None,
    seed: Tensor | None,
    rows: Tensor | None,
    num_layers: int,
    num_steps: int,
    estimator: int,
    stop: int,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The operator that torch.compile and torch.export see; seed None means greedy."""
    options = Options(num_layers, num_steps, estimator, stop, temperature)
    entry, first, inner, seed, rows = _contiguous(entry, first, inner, seed, rows)  # type: ignore[assignment]
    return tuple(forward(entry, first, inner, seed, rows, options))  # type: ignore[return-value]


@activation_sequence_op.register_fake
def _(entry, first, inner, seed, rows, num_layers, num_steps, estimator, stop, temperature):  # type: ignore[no-untyped-def]
    B, N = entry.shape
    return (
        entry.new_empty(B, num_layers, N),
        entry.new_empty(B, num_steps, dtype=torch.int64),
        entry.new_empty(B, dtype=torch.int64),
        entry.new_empty(B, num_layers, N),
        entry.new_empty(B),
    )


@torch.library.custom_op("raytraced::activation_sequence_backward", mutates_args=())
def activation_sequence_backward_op(
    entry: Tensor,
    first: Tensor | None,
    inner: Tensor | None,
    seed: Tensor | None,
    rows: Tensor | None,
    nodes: Tensor,
    num_active: Tensor,
    grad_active: Tensor | None,
    grad_rates: Tensor | None,
    grad_output: Tensor | None,
    num_layers: int,
    num_steps: int,
    estimator: int,
    stop: int,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the entry and of the two gates, empty where there is no such gate."""
    options = Options(num_layers, num_steps, estimator, stop, temperature)
    entry, first, inner, seed, rows = _contiguous(entry, first, inner, seed, rows)  # type: ignore[assignment]
    grads = _contiguous(grad_active, grad_rates, grad_output)
    gradient = backward(entry, first, inner, seed, rows, nodes.contiguous(), num_active.contiguous(), grads, options)
    return tuple(entry.new_empty(0) if grad is None else grad for grad in gradient)  # type: ignore[return-value]


@activation_sequence_backward_op.register_fake
def _(entry, first, inner, *args):  # type: ignore[no-untyped-def]
    return tuple(
        entry.new_empty(0) if gate is None else torch.empty_like(gate, memory_format=torch.contiguous_format)
        for gate in (entry, first, inner)
    )


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs[:5], output[1], output[2])
    ctx.options = inputs[5:]


def _backward(ctx, grad_active, _nodes, _num_active, grad_rates, grad_output):  # type: ignore[no-untyped-def]
    saved = ctx.saved_tensors
    gradient = Gradient(*activation_sequence_backward_op(*saved, grad_active, grad_rates, grad_output, *ctx.options))
    first = gradient.first if saved[1] is not None else None
    inner = gradient.inner if saved[2] is not None else None
    return (gradient.entry, first, inner, *[None] * 7)


activation_sequence_op.register_autograd(_backward, setup_context=_setup)


def fused(
    entry: Tensor,
    first: Tensor | None,
    inner: Tensor | None,
    seed: Tensor | None,
    rows: Tensor | None,
    options: Options,
) -> Result:
    """Whichever way fits: the operator for a compiler, autograd where a gradient is wanted, else the bare call."""
    if torch.compiler.is_compiling():
        rows = None if rows is None else rows.to(torch.int64)
        return Result(*activation_sequence_op(entry, first, inner, seed, rows, *options))
    entry = entry.contiguous()
    first = None if first is None else first.contiguous()
    inner = None if inner is None else inner.contiguous()
    rows = None if rows is None else rows.to("cpu", torch.int64).contiguous()
    wanted = torch.is_grad_enabled() and (
        entry.requires_grad
        or (first is not None and first.requires_grad)
        or (inner is not None and inner.requires_grad)
    )
    if wanted:
        return Result(*FusedSequence.apply(entry, first, inner, seed, rows, options))
    return forward(entry, first, inner, seed, rows, options)
