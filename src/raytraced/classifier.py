"""Images -> input block -> a routed layer -> logits, and the paper's models as presets.

Axes: B batch, C channels, H × W pixels, D width, Y classes.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from raytraced.draws import new_seed
from raytraced.kernels.fused_convolution import ConvolutionBlock
from raytraced.layer import RaytracedExperts
from raytraced.sequence import Select, Sequence, check_options, check_rows


class Output(NamedTuple):
    """What every classifier returns: a LayerOutput and the logits."""

    logits: Tensor  # (B, Y)
    hidden: Tensor  # (B, D)
    active: Tensor  # (B, L, N), 0 or 1
    sequence: Sequence | None = None
    loss: Tensor | None = None


def input_block(image_shape: tuple[int, int, int], dim: int) -> nn.Sequential:
    """The paper's: one linear layer on grey images; three convolutions with pooling, then linear, on colour images."""
    channels, height, width = image_shape
    if channels == 1:
        return nn.Sequential(nn.Flatten(), nn.Linear(height * width, dim))
    if min(height, width) < 8:
        raise ValueError(
            f"image_shape={image_shape}: colour images must be at least 8 by 8, they are halved three times"
        )
    blocks: list[nn.Module] = []
    for given, wanted in ((channels, 4), (4, 8), (8, 16)):
        blocks += [nn.Conv2d(given, wanted, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return ConvolutionBlock(*blocks, nn.Flatten(), nn.Linear(16 * (height // 8) * (width // 8), dim))


class RoutedClassifier(nn.Module):
    """An input block, any layer with the routed interface (hidden -> LayerOutput), and a linear output layer."""

    def __init__(self, input_block: nn.Module, layer: nn.Module, num_classes: int) -> None:
        super().__init__()
        if num_classes < 1:
            raise ValueError(f"num_classes={num_classes}: must be at least 1")
        self.input_block, self.layer = input_block, layer
        self.head = nn.Linear(int(layer.dim), num_classes)  # type: ignore[arg-type]

    def forward(
        self, images: Tensor, *, generator: torch.Generator | None = None, rows: Tensor | None = None
    ) -> Output:
        out = self.layer(self.input_block(images), generator=generator, rows=rows)
        return Output(self.head(out.hidden), out.hidden, out.active, out.sequence, out.loss)


class RaytracedClassifier(RoutedClassifier):
    """A classifier around raytraced experts, which can choose otherwise or stop at a budget when asked to."""

    layer: RaytracedExperts

    def __init__(self, input_block: nn.Module, layer: RaytracedExperts, num_classes: int) -> None:
        super().__init__(input_block, layer, num_classes)

    def forward(
        self,
        images: Tensor,
        *,
        select: Select | None = None,
        max_experts: int | None = None,
        generator: torch.Generator | None = None,
        rows: Tensor | None = None,
    ) -> Output:
        """Classify normalised images (B, C, H, W), with at most `max_experts` experts a sample."""
        out = self._in_one_call(images, select, max_experts, generator, rows)
        if out is not None:
            return out
        return self.classify(
            self.input_block(images), select=select, max_experts=max_experts, generator=generator, rows=rows
        )

    def _in_one_call(
        self,
        images: Tensor,
        select: Select | None,
        max_experts: int | None,
        generator: torch.Generator | None,
        rows: Tensor | None,
    ) -> Output | None:
        """The whole model as one call of the compiled kernels, where only an answer for few images is wanted; else None."""
        from raytraced.kernels import fused_classifier  # here, not above: it builds on the layer

        parts = fused_classifier.parts_of(self, images) if type(self) is RaytracedClassifier else None
        if parts is None:
            return None
        layer = parts.layer
        select = select or (layer.train_select if layer.training else "greedy")
        check_options(select=select, stop=layer.stop, estimator=layer.estimator, max_experts=max_experts)
        check_rows(rows, images.shape[0])
        seed = new_seed(generator, images.device) if select == "sample" else None
        answer = fused_classifier.run(parts, images, seed, rows, max_experts)
        return Output(answer.logits, answer.hidden, answer.sequence.active, answer.sequence)

    def classify(self, hidden_BD: Tensor, **options: Any) -> Output:
        """The layer and the output layer on what the input block made; options as for the layer."""
        out = self.layer(hidden_BD, **options)
        return Output(self.head(out.hidden), out.hidden, out.active, out.sequence, out.loss)


class Preset(NamedTuple):
    """The sizes of a model."""

    image_shape: tuple[int, int, int]
    num_classes: int
    dim: int
    num_layers: int
    num_experts: int


PRESETS = {
    "paper-mnist": Preset((1, 28, 28), 10, 16, 4, 8),
    "paper-fashion-mnist": Preset((1, 28, 28), 10, 16, 4, 8),
    "paper-cifar10": Preset((3, 32, 32), 10, 16, 4, 8),
    "digits": Preset((1, 8, 8), 10, 16, 4, 8),
    "tiny": Preset((1, 8, 8), 10, 8, 2, 3),
}


def preset(name: str, **layer_options: Any) -> RaytracedClassifier:
    """A model of the paper's sizes ("paper-mnist", "paper-fashion-mnist", "paper-cifar10") or smaller ("digits", "tiny")."""
    if name not in PRESETS:
        raise ValueError(f"preset {name!r}: must be one of {', '.join(PRESETS)}")
    sizes = PRESETS[name]
    layer = RaytracedExperts(sizes.dim, sizes.num_layers, sizes.num_experts, **layer_options)
    return RaytracedClassifier(input_block(sizes.image_shape, sizes.dim), layer, sizes.num_classes)
