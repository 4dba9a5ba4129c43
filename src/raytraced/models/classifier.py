"""Images -> input block -> a routed layer -> logits: the paper's model, around any layer.

Axes: B batch, C channels, H × W pixels, D width, Y classes.
"""

from collections.abc import Callable, Iterator, Sequence
from numbers import Integral
from typing import Any, get_args

import torch
from torch import Tensor, nn

from raytraced import kernels
from raytraced.early_exit import ExitEvery, ExitPolicy, Exits, MappedExits
from raytraced.errors import require, require_one_of
from raytraced.layer import LayerOutput, RoutedLayer
from raytraced.models.output import Model, Output, SampleLossFn, gathered, linear_cost, num_parameters
from raytraced.router import Call, Cost, Fusable
from raytraced.routers.prefixes import expert_exits, prefixes
from raytraced.routers.raytraced import RaytracedExperts

STAGES = (4, 8, 16)  # channels after each convolution
PLAIN = Call()


class InputBlock(nn.Module):
    """Images -> hidden vectors: a linear layer for grey images; three convolutions with pooling and a linear layer for colour.

    Images are uint8, or floats in 0 … 1. They are normalised by the mean and standard deviation of each channel (of pixels
    scaled to 0 … 1); without those, they pass as they are.
    """

    scale: Tensor
    shift: Tensor

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        dim: int,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        if len(image_shape) != 3 or not all(isinstance(size, Integral) and size > 0 for size in image_shape):
            raise ValueError(f"image_shape={image_shape}: must be three positive numbers (channels, height, width)")
        channels, height, width = self.image_shape = tuple(image_shape)
        self.weights, self.biases, self.convolves = nn.ParameterList(), nn.ParameterList(), channels > 1
        if channels == 1:
            self.linear = nn.Linear(height * width, dim)
        else:
            if min(height, width) < 8:
                raise ValueError(
                    f"image_shape={image_shape}: colour images must be at least 8 by 8, they are halved three times"
                )
            for in_channels, out_channels in zip((channels, *STAGES), STAGES, strict=False):
                convolution = nn.Conv2d(in_channels, out_channels, 3, padding=1)
                self.weights.append(convolution.weight)
                self.biases.append(convolution.bias)
            self.linear = nn.Linear(STAGES[-1] * (height // 8) * (width // 8), dim)
        require((mean is None) == (std is None), "mean, std", (mean, std), "must be given both, or neither")
        self.normalises = mean is not None
        mean, std = tuple(mean or [0.0] * channels), tuple(std or [1.0] * channels)
        if len(mean) != channels or len(std) != channels:
            raise ValueError(f"mean={mean}, std={std}: one value per channel is needed, the images have {channels}")
        require(min(std) > 0, "std", std, "must be above 0")
        mean_C, std_C = torch.tensor(mean, dtype=torch.float64), torch.tensor(std, dtype=torch.float64)
        # (pixel / 255 - mean) / std as one multiplication and one addition
        self.register_buffer("scale", (1 / (255 * std_C)).float().view(-1, 1, 1))
        self.register_buffer("shift", (-mean_C / std_C).float().view(-1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, D)."""
        pixels = self.normalise(images)
        if self.convolves:
            pixels = kernels.convolution(pixels, list(self.weights), list(self.biases))
        return self.linear(pixels.flatten(1))

    def normalise(self, images: Tensor) -> Tensor:
        """Images as they are -> the input of the first layer."""
        if images.shape[1:] != self.image_shape:
            raise ValueError(
                f"images have shape {tuple(images.shape)}: must be (batch, {', '.join(map(str, self.image_shape))})"
            )
        if images.dtype == torch.uint8:
            scale = self.scale  # Hot path at batch size 1: look it up once.
            return images.to(scale.dtype).mul_(scale).add_(self.shift)
        if not images.is_floating_point():
            raise ValueError(f"images are {images.dtype}: must be uint8, or floats in 0 … 1")
        if not self.normalises:
            return images
        if images.numel() and not torch.compiler.is_compiling():
            lowest, highest = (float(value) for value in images.detach().aminmax())
            if not (lowest >= 0 and highest <= 1):  # NaN too
                raise ValueError(
                    f"images have values {lowest:g} … {highest:g}: must be fractions in 0 … 1, or uint8; "
                    "the model normalises them itself"
                )
        return (images * 255).mul(self.scale).add(self.shift)

    def cost(self) -> Cost:
        """What one image takes."""
        _, height, width = self.image_shape
        stages = sum(weight.numel() * (height >> s) * (width >> s) for s, weight in enumerate(self.weights))
        return Cost(stages + self.linear.weight.numel(), num_parameters(self))


class Classifier(Fusable, Model):
    """An input block, a routed layer of any kind, and a linear output layer.

    Args:
        make_layer: Makes the routed layer.
        dim: Width of the hidden vectors.
        image_shape: (channels, height, width) of the images.
        num_classes: Number of classes.
        mean: Mean of each channel, of pixels scaled to 0 … 1. Default: images are not normalised.
        std: Standard deviation of each channel.
    """

    fuses = True

    def __init__(
        self,
        make_layer: Callable[[], RoutedLayer],
        dim: int,
        image_shape: tuple[int, int, int],
        num_classes: int,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        require(num_classes >= 1, "num_classes", num_classes, "must be at least 1")
        layer = make_layer()
        self.input_block, self.layer = InputBlock(image_shape, dim, mean, std), layer
        self.head = nn.Linear(dim, num_classes)
        self.answers_along_the_way = self.layer.answers_along_the_way

    def encode(self, inputs: Tensor) -> Tensor:
        hidden_BD: Tensor = self.input_block(inputs)
        return hidden_BD

    def answer(
        self, encoded: Tensor, call: Call, mask: Tensor | None = None, sample_loss_fn: SampleLossFn | None = None
    ) -> Output:
        plain = mask is None and call == PLAIN  # Hot path at batch size 1: every option costs time.
        out = self.layer(encoded) if plain else self.layer(encoded, mask=mask, **call._asdict())
        return self.answer_of(out, sample_loss_fn)

    def answer_of(self, out: LayerOutput, sample_loss_fn: SampleLossFn | None = None) -> Output:
        """The model's output from that of its layer."""
        if out.exits is None:
            return gathered(self.head(out.hidden), (out,), sample_loss_fn)
        logits_SBY = self.head(out.exits)
        return gathered(logits_SBY[-1], (out,), sample_loss_fn)._replace(exits=logits_SBY)

    def fused_early_exit(self, encoded: Tensor, call: Call, policy: ExitPolicy, mask: Tensor | None) -> Output | None:
        if not (self.fuses and isinstance(self.layer, RaytracedExperts)):
            return None
        found = self.layer.fused_early_exit(encoded, call, self.head, policy, mask)
        return None if found is None else Output(found.logits, (found.route,), num_exits=found.num_exits)

    def exits_of(self, encoded: Tensor, exit_every: ExitEvery, call: Call, rerun: bool = False) -> Exits[Output]:
        require_one_of("exit_every", exit_every, get_args(ExitEvery))
        if exit_every == "layer":
            return MappedExits(self.layer.exits(encoded, call), self.answer_of)
        if not isinstance(self.layer, RaytracedExperts):
            raise ValueError(f"exit_every=expert: {self.name} has no order of experts; use exit_every=layer")
        steps = expert_exits(self.layer, encoded, call._replace(max_experts=None), call.max_experts, rerun)
        return MappedExits(steps, self.answer_of)

    def prefixes(self, inputs: Tensor, max_experts: int | None = None, **options: Any) -> Iterator[Output]:
        if not isinstance(self.layer, RaytracedExperts):
            return super().prefixes(inputs, max_experts, **options)
        mask = options.pop("mask", None)
        return map(self.answer_of, prefixes(self.layer, self.encode(inputs), max_experts, Call(**options), mask))

    def cost(self, inputs: Tensor, out: Output) -> dict[str, Cost]:
        (route,), head, num_steps = out.routes, linear_cost(self.head), None
        if out.num_exits is not None:
            num_steps = (out.num_exits - 1).clamp_min(0)
            head = Cost(head.macs * out.num_exits, head.parameters)  # the same one at every exit
        return {"input": self.input_block.cost(), **self.layer.cost(route, num_steps), "head": head}
