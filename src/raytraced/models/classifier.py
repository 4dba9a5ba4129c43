"""Images -> input block -> a routed layer -> logits: the paper's model, around any layer.

Axes: B batch, C channels, H × W pixels, D width, Y classes.
"""

from collections.abc import Callable, Iterator, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from raytraced import operations
from raytraced.layer import Call, LayerOutput, Looks, RoutedLayer, Work, mapped
from raytraced.models.output import Judge, LookAt, Model, Output, gathered, linear_work, num_parameters
from raytraced.models.sure import answer_when_sure
from raytraced.routers.prefixes import expert_looks, prefixes
from raytraced.routers.raytraced import RaytracedExperts, RaytracedRouter
from raytraced.words import require, require_one_of

STAGES = (4, 8, 16)  # channels after each convolution
PLAIN = Call()


class InputBlock(nn.Module):
    """Normalised pixels -> hidden vectors: one linear layer on grey images; three convolutions with pooling, then linear.

    It takes images as they are, bytes or fractions in 0 … 1, and normalises them by the mean and deviation of each channel
    (of pixels scaled to 0 … 1) that it was given. Without those, images pass as they are.
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
            for given, wanted in zip((channels, *STAGES), STAGES, strict=False):
                convolution = nn.Conv2d(given, wanted, 3, padding=1)
                self.weights.append(convolution.weight)
                self.biases.append(convolution.bias)
            self.linear = nn.Linear(STAGES[-1] * (height // 8) * (width // 8), dim)
        require((mean is None) == (std is None), "mean, std", (mean, std), "must be given both, or neither")
        self.normalises = mean is not None
        mean, std = tuple(mean or [0.0] * channels), tuple(std or [1.0] * channels)
        if len(mean) != channels or len(std) != channels:
            raise ValueError(f"mean={mean}, std={std}: one value a channel is needed, the images have {channels}")
        require(min(std) > 0, "std", std, "must be above 0")
        mean_C, std_C = torch.tensor(mean, dtype=torch.float64), torch.tensor(std, dtype=torch.float64)
        # (pixel / 255 - mean) / std as one multiplication and one addition
        self.register_buffer("scale", (1 / (255 * std_C)).float().view(-1, 1, 1))
        self.register_buffer("shift", (-mean_C / std_C).float().view(-1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, D)."""
        pixels = self.normalise(images)
        if self.convolves:
            pixels = operations.convolution(pixels, list(self.weights), list(self.biases))
        return self.linear(pixels.flatten(1))

    def normalise(self, images: Tensor) -> Tensor:
        """Images as they are -> what the first layer sees."""
        if images.shape[1:] != self.image_shape:
            raise ValueError(
                f"images have shape {tuple(images.shape)}: must be (batch, {', '.join(map(str, self.image_shape))})"
            )
        if images.dtype == torch.uint8:
            return images.to(self.scale.dtype).mul_(self.scale).add_(self.shift)
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

    def work(self) -> Work:
        """What one image takes."""
        _, height, width = self.image_shape
        stages = sum(weight.numel() * (height >> s) * (width >> s) for s, weight in enumerate(self.weights))
        return Work(stages + self.linear.weight.numel(), num_parameters(self))


class Classifier(Model):
    """An input block, a routed layer of any kind, and a linear output layer."""

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

    def answer(self, encoded: Tensor, call: Call, mask: Tensor | None = None, judge: Judge | None = None) -> Output:
        plain = mask is None and call == PLAIN  # one image waits for every option
        out = self.layer(encoded) if plain else self.layer(encoded, mask=mask, **call._asdict())
        return self.answer_of(out, judge)

    def answer_of(self, out: LayerOutput, judge: Judge | None = None) -> Output:
        """What a layer's vectors say."""
        if out.looks is None:
            return gathered(self.head(out.hidden), (out,), judge)
        seen = self.head(out.looks)
        return gathered(seen[-1], (out,), judge)._replace(looks=seen)

    def until_sure(
        self,
        inputs: Tensor,
        call: Call,
        sure: list[float],
        look: LookAt,
        mask: Tensor | None,
        deadline: float | None,
        **own: Any,
    ) -> Output:
        # one call stands for these classes as they are: of others, any part may be another
        parts = type(self), type(self.layer), type(self.layer.router)
        ours = parts == (Classifier, RaytracedExperts, RaytracedRouter)
        if not ours or look != "layer" or deadline is not None or own:
            return super().until_sure(inputs, call, sure, look, mask, deadline, **own)
        assert isinstance(self.layer, RaytracedExperts)
        hidden_BD = self.encode(inputs)

        def in_looks() -> operations.Answered:
            out = answer_when_sure(self._looks(hidden_BD, look, call), sure, mask)
            return out.logits, out.routes[0], out.num_looks

        logits_BY, route, looks_B = self.layer.until_sure(hidden_BD, call, self.head, sure, mask, in_looks)
        return Output(logits_BY, (route,), num_looks=looks_B)

    def looks(self, inputs: Tensor, look: LookAt = "layer", again: bool = False, **options: Any) -> Looks[Output]:
        return self._looks(self.encode(inputs), look, Call(**options), again)

    def _looks(self, hidden_BD: Tensor, look: LookAt, call: Call, again: bool = False) -> Looks[Output]:
        if look == "layer":
            return mapped(self.layer.looks(hidden_BD, call), self.answer_of)
        require_one_of("look", look, ("layer", "expert"))
        if not isinstance(self.layer, RaytracedExperts):
            raise ValueError(f"look=expert: {self.name} has no order of experts; look after each layer")
        steps = expert_looks(self.layer, hidden_BD, call._replace(max_experts=None), call.max_experts, again)
        return mapped(steps, self.answer_of)

    def prefixes(
        self, inputs: Tensor, most: int | None = None, *, mask: Tensor | None = None, **options: Any
    ) -> Iterator[Output]:
        if not isinstance(self.layer, RaytracedExperts):
            return super().prefixes(inputs, most, mask=mask, **options)
        return map(self.answer_of, prefixes(self.layer, self.encode(inputs), most, Call(**options), mask))

    def work(self, inputs: Tensor, out: Output) -> dict[str, Work]:
        (route,), head, num_steps = out.routes, linear_work(self.head), None
        if out.num_looks is not None:
            num_steps = (out.num_looks - 1).clamp_min(0)
            head = Work(head.multiply_adds * out.num_looks, head.parameters)  # the same one at every look
        return {"input": self.input_block.work(), **self.layer.work(route, num_steps), "head": head}
