"""Loaded models, made so that a row's answer is its own: bit for bit the same whatever other rows it is answered with.

Axes: B batch, K inputs of a linear layer, O its outputs.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raytraced import operations
from raytraced.layer import Look, Looks
from raytraced.models.classifier import Classifier
from raytraced.models.gpt import GPT
from raytraced.models.output import LookAt, Model, Output, num_parameters
from raytraced.routers.prefixes import FEW_ROWS
from raytraced.routers.raytraced import RaytracedExperts
from raytraced.saving import load
from raytraced.tasks.images.task import known_classes
from raytraced.tasks.text.tokens import Codec


class RowLinear(nn.Linear):
    """A linear layer that multiplies each row alone.

    The order in which PyTorch sums a product depends on how many rows there are, and may depend on where they lie in memory:
    so each is a product, and memory, of its own.
    """

    def forward(self, x_BK: Tensor) -> Tensor:
        if len(x_BK) == 1:
            return F.linear(x_BK, self.weight, self.bias)
        return torch.cat([F.linear(x_1K.clone(), self.weight, self.bias) for x_1K in x_BK.split(1)])


@dataclass(frozen=True)
class Served:
    """A model under the name that requests call it by."""

    name: str
    model: Model

    @cached_property
    def codec(self) -> Codec | None:
        """Text to tokens and back, of a language model."""
        return Codec(self.model) if isinstance(self.model, GPT) else None

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """What an answer may be: the classes, or the tokens as far as they are text."""
        if self.codec is not None:
            return tuple(content.decode(errors="replace") for content in self.codec.bytes_of)
        return known_classes(self.model)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(channels, height, width)."""
        channels, height, width = self.model.card.spec["image_shape"]
        return channels, height, width

    @cached_property
    def look(self) -> LookAt:
        """After what there is an answer along the way: every expert where they come in an order, else every layer."""
        in_order = isinstance(self.model, Classifier) and isinstance(self.model.layer, RaytracedExperts)
        return "expert" if in_order or self.codec else "layer"

    @cached_property
    def num_rows(self) -> int:
        """How many rows one call may take with none of them noticing the others."""
        return FEW_ROWS if rows_are_apart(self.model) else 1

    def run(self, inputs: Tensor, max_experts: int | None, **draws: Any) -> Output:
        """The answer, at once."""
        out: Output = self.model(inputs, max_experts=max_experts, **draws)
        return last_token(out) if self.codec else out

    def looks(self, inputs: Tensor, look: LookAt, max_experts: int | None, **draws: Any) -> Looks[Output]:
        """The answers with at most 0, 1, 2, … experts, or after each layer, of rows that go on."""
        if self.codec is not None:
            return text_looks(self.model, inputs, max_experts, **draws)
        # each prefix anew, in one call of the library: an answer is that of `max_experts`, bit for bit
        again = {"again": True} if look == "expert" else {}
        return self.model.looks(inputs, look, max_experts=max_experts, **again, **draws)

    def told(self) -> dict[str, Any]:
        """What /api/models says of it."""
        card, about = self.model.card, {"name": self.name, "parameters": num_parameters(self.model)}
        about |= {"model": card.model, "task": card.task, "data": card.data}
        about |= {"answers_along_the_way": self.model.answers_along_the_way, "calibrated": bool(card.calibration)}
        if isinstance(self.model, GPT):
            return about | {"context": self.model.context, "vocabulary": self.model.vocabulary}
        return about | {"image_shape": list(self.image_shape), "labels": list(self.labels)}


def text_looks(model: Model, tokens_1T: Tensor, max_experts: int | None, **draws: Any) -> Looks[Output]:
    """The answers with at most 0, 1, 2, … experts a block, for the token after a text."""
    num_nodes = max(layer.experts.num_layers * layer.experts.num_experts for layer in model.routed_layers())
    most = num_nodes if max_experts is None else min(max_experts, num_nodes)
    for budget, out in enumerate(model.prefixes(tokens_1T, most, **draws)):
        going = budget < most and any(bool((route.num_active == budget).any()) for route in out.routes)
        yield Look(last_token(out), torch.tensor([not going]))


def last_token(out: Output) -> Output:
    """The answer to the last token alone; its routes stay those of all tokens."""
    return out._replace(logits=out.logits[:, -1])


@torch.no_grad()
def rows_are_apart(model: Model) -> bool:
    """Whether all that a model computes is a row's own, once its linear layers are: so is what the compiled library does."""
    if not isinstance(model, Classifier) or type(model.layer) is not RaytracedExperts:
        return False
    layer, router, block = model.layer, model.layer.router, model.input_block
    hidden_BD = router.gate["weight"].new_zeros(FEW_ROWS, layer.dim)
    if operations.raytrace.explain(layer.traced(layer.router), hidden_BD).name != "cpp":
        return False
    if not block.convolves:
        return True
    pixels = hidden_BD.new_zeros(FEW_ROWS, *block.image_shape)
    return operations.convolution.explain(pixels, list(block.weights), list(block.biases)).name == "cpp"


def serve_model(source: str) -> Served:
    """Load a model; its name is that of its run folder, file or shipped model."""
    path = Path(source)
    name = path.resolve().name.removesuffix(".safetensors") if path.exists() else source
    if name in ("model", "best"):  # the file in a run folder
        name = path.resolve().parent.name
    model = load(source)
    if model.card.task is None and not isinstance(model, GPT):
        raise ValueError(f"{source}: its card names no task, so nobody knows what to ask it")
    if not isinstance(model, GPT) and model.card.task != "images":
        raise ValueError(f"{source}: is of the task {model.card.task}; the server answers images and text")
    if isinstance(model, Classifier):
        for linear in (model.input_block.linear, model.head):
            linear.__class__ = RowLinear  # the same parameters under the same names
    served = Served(name, model)
    _ = served.labels  # a tokenizer that cannot be opened is told now
    return served
