"""Stages of convolution, ReLU and pooling in the compiled library: one call for all of them forward, one backward.

Axes: B batch, S stages, C and K a stage's input and output channels, H × W its pixels.
"""

import ctypes
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from raytraced.kernels import cpp_library as library
from raytraced.kernels.cpp_function import Inputs, LibraryFunction, Outputs
from raytraced.kernels.cpp_library import Int, Pointer, PointerArray, fields, point, pointer_array

_LANES = 8  # cpu/convolution.h: what is kept has room for a multiple of this many samples


@library.mirrors
class ConvolutionArgs(ctypes.Structure):
    """struct ConvolutionArgs of cpu/convolution.h."""

    _fields_ = [
        *fields("batch stages height width threads", Int),
        *fields("images out kept winners grad_out grad_images", Pointer),
        ("channels", ctypes.POINTER(Int)),
        *fields("parameters gradients", PointerArray),
    ]


_forward = library.bind("raytraced_convolution_forward", ctypes.POINTER(ConvolutionArgs))
_backward = library.bind("raytraced_convolution_backward", ctypes.POINTER(ConvolutionArgs))


def _run(function: Any, images: Tensor, parameters: Sequence[Tensor], **rest: Any) -> None:
    (B, C, H, W), S = images.shape, len(parameters) // 2
    channels = (Int * (S + 1))(C, *[weight.shape[0] for weight in parameters[:S]])
    numbers = (B, S, H, W, torch.get_num_threads(), images.data_ptr())
    library.run(
        function,
        "convolutions",
        ConvolutionArgs(*numbers, channels=channels, parameters=pointer_array(parameters), **rest),
    )


class ConvolutionOptions(NamedTuple):
    """Numbers of one call."""

    wants_image_gradient: bool

    def numbers(self) -> list[float]:
        return [float(self.wants_image_gradient)]

    @classmethod
    def from_numbers(cls, numbers: Sequence[float]) -> "ConvolutionOptions":
        return cls(bool(numbers[0]))


class Convolution(LibraryFunction[ConvolutionOptions]):
    """Images (B, C, H, W) through all stages -> (B, K, H, W). Tensors: the images, S weights, S biases."""

    name: ClassVar[str] = "convolution"
    options_type = ConvolutionOptions

    def empty(self, inputs: Inputs[ConvolutionOptions]) -> Outputs:
        images, S = inputs.tensors[0], len(inputs.tensors) // 2
        return Outputs(
            [images.new_empty(len(images), len(inputs.tensors[S]), images.shape[2] >> S, images.shape[3] >> S)]
        )

    def forward(self, inputs: Inputs[ConvolutionOptions], keep: bool) -> Outputs:
        """The images after all stages; saved: the stages' inputs, and the winner of each 2×2."""
        images, *parameters = inputs.tensors
        (B, _, H, W), S = images.shape, len(parameters) // 2
        (out,), _, saved = self.empty(inputs)
        if keep:
            stages = [(weight.shape[0], H >> s, W >> s) for s, weight in enumerate(parameters[:S], 1)]
            room = -(-B // _LANES) * _LANES
            saved = [
                images.new_empty(room * sum(K * (H + 2) * (W + 2) for K, H, W in stages[:-1])),
                torch.empty(room * sum(K * H * -(-W // 4) for K, H, W in stages), dtype=torch.int32),
            ]
        _run(_forward, images, parameters, **point(("out", "kept", "winners"), (out, *saved)))
        return Outputs([out], saved=saved)

    def backward(
        self, inputs: Inputs[ConvolutionOptions], saved: Sequence[Tensor], grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Gradients of the images (where wanted), the weights and the biases."""
        images, *parameters = inputs.tensors
        gradients = [torch.empty_like(parameter) for parameter in parameters]
        grad_images = torch.empty_like(images) if inputs.options.wants_image_gradient else None
        pointers = point(("kept", "winners", "grad_out", "grad_images"), (*saved, *grads, grad_images))
        _run(_backward, images, parameters, gradients=pointer_array(gradients), **pointers)
        return [grad_images, *gradients]


call = Convolution()


def unsupported_reason(images: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> str | None:
    """Why the library cannot run these stages."""
    if torch.compiler.is_compiling():
        return "torch.compile and torch.export see PyTorch's own convolutions"
    if torch.is_autocast_enabled("cpu"):
        return "autocast is on"
    if images.ndim != 4 or min(images.shape[2:]) >> len(weights) < 1:
        return "not a batch of images that are large enough"
    channels = [images.shape[1], *(weight.shape[0] for weight in weights)]
    shapes = [((out_channels, in_channels, 3, 3), (out_channels,)) for in_channels, out_channels in pairwise(channels)]
    if shapes != [(weight.shape, bias.shape) for weight, bias in zip(weights, biases, strict=True)]:
        return "not 3×3 convolutions, one on the other's channels"
    return library.unfit_reason((images, *weights, *biases), torch.float32)


def run(images: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """Images (B, C, H, W), weights (K, C, 3, 3) and biases (K,) of each stage -> (B, K, H, W) of the last."""
    return call(ConvolutionOptions(images.requires_grad), (), images, *weights, *biases)[0]
