"""Stages of convolution, ReLU and pooling as a PyTorch function: one call for all of them forward, one backward.

Axes: B batch, S stages, C and K a stage's input and output channels, H × W its pixels.
"""

import struct
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.nn.modules import module as nn_module

from raytraced.kernels import library

_LANES = 8  # cpu/convolution.h: what is kept has room for a multiple of this many samples
_ORDINARY = (Tensor, nn.Parameter)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

if library.cpu is not None:
    _forward, _backward = library.bind("raytraced_convolution_forward"), library.bind("raytraced_convolution_backward")


class Sizes(NamedTuple):
    """How large a call's answer is, and for each sample what the backward pass reads."""

    channels: list[int]  # (S + 1)
    out: tuple[int, int, int]  # (K, H, W)
    num_inputs: int
    num_winners: int


def _sizes(images: Tensor, weights: tuple[Tensor, ...]) -> Sizes:
    _, C, H, W = images.shape
    channels = [C, *(weight.shape[0] for weight in weights)]
    stages = [(K, H >> s, W >> s) for s, K in enumerate(channels)][1:]
    num_inputs = sum(K * (H + 2) * (W + 2) for K, H, W in stages[:-1])
    num_winners = sum(K * H * -(-W // 4) for K, H, W in stages)
    return Sizes(channels, stages[-1], num_inputs, num_winners)


def _call(function, images, channels, tensors, pointers) -> None:  # type: ignore[no-untyped-def]
    B, _, H, W = images.shape
    S = len(channels) - 1
    args = struct.pack(  # struct ConvolutionArgs of cpu/convolution.h
        f"5q6Q{S + 1}q{4 * S}Q",
        *(B, S, H, W, torch.get_num_threads()),
        *(0 if tensor is None else tensor.data_ptr() for tensor in (images, *tensors)),
        *channels,
        *(0 if tensor is None else tensor.data_ptr() for tensor in pointers),
    )
    if function(args):
        raise MemoryError(f"convolutions on images of shape {tuple(images.shape)}: no memory for the kernel's scratch")


def forward(
    images: Tensor, weights: tuple[Tensor, ...], biases: tuple[Tensor, ...], keep: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Images (B, C, H, W) through all stages -> (B, K, H, W), with the stages' inputs and winners; all contiguous."""
    sizes = _sizes(images, weights)
    B = images.shape[0]
    room = -(-B // _LANES) * _LANES if keep else 0
    out = images.new_empty(B, *sizes.out)
    inputs = images.new_empty(room * sizes.num_inputs) if keep else None
    winners = torch.empty(room * sizes.num_winners, dtype=torch.int32) if keep else None
    pointers = (*weights, *biases, *[None] * (2 * len(weights)))
    _call(_forward, images, sizes.channels, (out, inputs, winners, None, None), pointers)
    return out, inputs, winners


def backward(
    grad_out: Tensor,
    images: Tensor,
    weights: tuple[Tensor, ...],
    inputs: Tensor,
    winners: Tensor,
    with_images: bool,
) -> tuple[Tensor | None, list[Tensor], list[Tensor]]:
    """Gradients of the images (where wanted), the weights and the biases."""
    grad_images = torch.empty_like(images) if with_images else None
    grad_weights = [torch.empty_like(weight) for weight in weights]
    grad_biases = [weight.new_empty(weight.shape[0]) for weight in weights]
    pointers = (*weights, *[None] * len(weights), *grad_weights, *grad_biases)
    channels = _sizes(images, weights).channels
    _call(_backward, images, channels, (None, inputs, winners, grad_out, grad_images), pointers)
    return grad_images, grad_weights, grad_biases


class FusedConvolution(torch.autograd.Function):
    """Forward and backward in one library call each."""

    @staticmethod
    def forward(ctx, images, *parameters):  # type: ignore[no-untyped-def]
        S = len(parameters) // 2
        out, inputs, winners = forward(images, parameters[:S], parameters[S:], keep=True)
        ctx.save_for_backward(images, *parameters[:S], inputs, winners)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):  # type: ignore[no-untyped-def]
        images, *weights, inputs, winners = ctx.saved_tensors
        # A parameter is kept itself, and may have been given other memory since.
        weights = tuple(weight.contiguous() for weight in weights)
        grads = backward(grad_out.contiguous(), images, weights, inputs, winners, ctx.needs_input_grad[0])
        return grads[0], *grads[1], *grads[2]


def can_run(images: Tensor, parameters: Iterable[Tensor]) -> bool:
    """Whether `run` can stand in for the plain path: ordinary CPU tensors of single precision, and nobody looking on."""
    if library.cpu is None or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    if (
        torch.is_autocast_enabled("cpu")
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    ):
        return False
    # A mode sees PyTorch's own operators, to count them, say.
    if torch._C._len_torch_dispatch_stack():
        return False
    return all(type(t) in _ORDINARY and t.is_cpu and t.dtype == torch.float32 for t in (images, *parameters))


def run(images: Tensor, weights: Iterable[Tensor], biases: Iterable[Tensor]) -> Tensor:
    """Images (B, C, H, W), weights (K, C, 3, 3) and biases (K,) of each stage -> (B, K, H, W) of the last."""
    weights, biases = tuple(w.contiguous() for w in weights), tuple(b.contiguous() for b in biases)
    images = images.contiguous()
    if torch.is_grad_enabled() and any(t.requires_grad for t in (images, *weights, *biases)):
        return FusedConvolution.apply(images, *weights, *biases)
    return forward(images, weights, biases, keep=False)[0]


def _is_stage(convolution: nn.Module, relu: nn.Module, pooling: nn.Module) -> bool:
    return (
        (type(convolution), type(relu), type(pooling)) == (nn.Conv2d, nn.ReLU, nn.MaxPool2d)
        and (convolution.kernel_size, convolution.stride, convolution.padding) == ((3, 3), (1, 1), (1, 1))
        and (convolution.dilation, convolution.groups, convolution.padding_mode) == ((1, 1), 1, "zeros")
        and convolution.bias is not None
        and (pooling.kernel_size, pooling.stride, pooling.padding, pooling.dilation) == (2, 2, 0, 1)
        and not (pooling.ceil_mode or pooling.return_indices)
    )


class ConvolutionBlock(nn.Sequential):
    """A Sequential that runs the convolutions, each with ReLU and pooling, at its beginning in one call where it can."""

    def forward(self, images: Tensor) -> Tensor:
        modules = list(self)
        start = 0 if torch.compiler.is_compiling() or library.cpu is None else self._num_fused(modules, images)
        if start:
            convolutions = modules[:start:3]
            images = run(images, [m.weight for m in convolutions], [m.bias for m in convolutions])  # type: ignore[misc]
        for module in modules[start:]:
            images = module(images)
        return images

    @staticmethod
    def _num_fused(modules: list[nn.Module], images: Tensor) -> int:
        """How many modules one call can replace; none where one of them is listened to."""
        num = 0
        while num + 3 <= len(modules) and _is_stage(*modules[num : num + 3]):
            num += 3
        fused = modules[:num]
        if not num or nn_module._has_any_global_hook():
            return 0
        if any("forward" in vars(m) or any(getattr(m, hooks) for hooks in _HOOKS) for m in fused):
            return 0
        convolutions = [m for m in fused if isinstance(m, nn.Conv2d)]
        channels = [images.shape[1] if images.ndim == 4 else -1, *(m.out_channels for m in convolutions)]
        fits = all(
            m.weight.shape == (wanted, given, 3, 3) and m.bias is not None and m.bias.shape == (wanted,)
            for m, (given, wanted) in zip(convolutions, pairwise(channels), strict=True)
        )
        if not fits or min(images.shape[2:]) >> len(convolutions) < 1:
            return 0
        return num if can_run(images, [p for m in convolutions for p in m.parameters()]) else 0
