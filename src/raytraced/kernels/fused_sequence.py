"""The fused activation sequence as a PyTorch function: one call forward, one backward, only the draws kept between.

Axes: B batch, L layers, N experts a layer, M = L·N nodes, O = N + 1 outlets, T steps.
"""

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from raytraced.kernels import library
from raytraced.sequence import RATE_FLOOR

ESTIMATORS = ("straight-through", "reinmax", "gumbel")  # the numbers of cpu/sequence.h
STOPS = ("drawn", "dominant")

# struct SequenceArgs of cpu/sequence.h
_ARGS = struct.Struct("8q2d16Q")


class Options(NamedTuple):
    """What a call computes, as plain numbers."""

    num_layers: int
    num_steps: int
    estimator: int
    stop: int
    temperature: float


class Result(NamedTuple):
    """The five tensors of a Sequence."""

    active: Tensor  # (B, L, N)
    nodes: Tensor  # (B, T)
    num_active: Tensor  # (B,)
    rates: Tensor  # (B, L, N)
    output: Tensor  # (B,)


class Gradient(NamedTuple):
    """Of the entry rates and of the two gates."""

    entry: Tensor
    first: Tensor | None
    inner: Tensor | None


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


if library.cpu is not None:
    _forward, _backward = library.bind("raytraced_sequence_forward"), library.bind("raytraced_sequence_backward")


def forward(
    entry: Tensor,
    first: Tensor | None,
    inner: Tensor | None,
    seed: Tensor | None,
    rows: Tensor | None,
    options: Options,
) -> Result:
    """Contiguous entry rates (B, N), gates (N, O) and (L − 2, N, O, N) -> what each sample activates."""
    (B, N), (L, T, estimator, stop, temperature) = entry.shape, options
    result = Result(
        entry.new_empty(B, L, N),
        torch.empty(B, T, dtype=torch.int64),
        torch.empty(B, dtype=torch.int64),
        entry.new_empty(B, L, N),
        entry.new_empty(B),
    )
    is_double, threads = entry.dtype == torch.float64, torch.get_num_threads()
    inputs = map(_pointer, (entry, seed, rows))
    # fmt: off
    args = _ARGS.pack(
        B, L, N, T, is_double, estimator, stop, threads, temperature, RATE_FLOOR,
        _pointer(first), _pointer(inner), *inputs, *map(_pointer, result), 0, 0, 0, 0, 0, 0,
    )
    # fmt: on
    if _forward(args):
        raise MemoryError(f"activation sequence of {B} samples on a {L}x{N} grid: no memory for the kernel's scratch")
    return result


def backward(
    entry: Tensor,
    first: Tensor | None,
    inner: Tensor | None,
    seed: Tensor | None,
    rows: Tensor | None,
    nodes: Tensor,
    num_active: Tensor,
    grads: tuple[Tensor | None, ...],
    options: Options,
) -> Gradient:
    """The gradients of active, rates and output (each may be None), contiguous, back through every draw."""
    (B, N), (L, T, estimator, stop, temperature) = entry.shape, options
    result = Gradient(
        torch.empty_like(entry),
        None if first is None else torch.empty_like(first),
        None if inner is None else torch.empty_like(inner),
    )
    is_double, threads = entry.dtype == torch.float64, torch.get_num_threads()
    # fmt: off
    args = _ARGS.pack(
        B, L, N, T, is_double, estimator, stop, threads, temperature, RATE_FLOOR,
        _pointer(first), _pointer(inner), *map(_pointer, (entry, seed, rows)),
        0, nodes.data_ptr(), num_active.data_ptr(), 0, 0, *map(_pointer, grads),
        _pointer(result.first), _pointer(result.inner), result.entry.data_ptr(),
    )
    # fmt: on
    if _backward(args):
        raise MemoryError(f"activation sequence of {B} samples on a {L}x{N} grid: no memory for the kernel's scratch")
    return result
