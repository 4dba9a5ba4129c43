"""Loaded models, changed so that a row's answer is the same, bit for bit, whatever other rows share its batch.

Axes: B batch, K inputs of a linear layer, O its outputs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raytraced import kernels
from raytraced.early_exit import ExitEvery, Exits, MappedExits
from raytraced.experts import Stream
from raytraced.io.saving import load
from raytraced.models.caches import multiply_apart
from raytraced.models.classifier import Classifier, InputBlock
from raytraced.models.gpt import GPT
from raytraced.models.output import Model, Output, num_parameters
from raytraced.router import Call
from raytraced.routers.prefixes import FEW_ROWS
from raytraced.routers.raytraced import RaytracedExperts
from raytraced.tasks.images.task import known_classes
from raytraced.tasks.registry import is_catalogued
from raytraced.tasks.text.tokens import Codec


class RowLinear(nn.Linear):
    """A linear layer that multiplies each row by itself.

    The order in which PyTorch sums a product depends on the number of rows, and may depend on where they are in memory: so
    each row is a product of its own, in memory of its own.
    """

    def forward(self, x_BK: Tensor) -> Tensor:
        if len(x_BK) == 1:
            return F.linear(x_BK, self.weight, self.bias)
        return torch.cat([F.linear(x_1K.clone(), self.weight, self.bias) for x_1K in x_BK.split(1)])


@dataclass(frozen=True)
class Served:
    """A model, the name that requests call it by, and where it was loaded from."""

    name: str
    model: Model
    source: str

    @cached_property
    def codec(self) -> Codec | None:
        """Text to tokens and back; None where the model is not a language model."""
        return Codec(self.model) if isinstance(self.model, GPT) else None

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """What an answer may be: the classes, or the tokens as text."""
        if self.codec is not None:
            return tuple(content.decode(errors="replace") for content in self.codec.bytes_of)
        return known_classes(self.model)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(channels, height, width)."""
        channels, height, width = self.model.card.spec["image_shape"]
        return channels, height, width

    @cached_property
    def exit_every(self) -> ExitEvery:
        """Where a model can exit: after every expert where experts have an order, else after every layer."""
        in_order = isinstance(self.model, Classifier) and isinstance(self.model.layer, RaytracedExperts)
        return "expert" if in_order or self.codec else "layer"

    @cached_property
    def num_rows(self) -> int:
        """How many rows one call may take without an effect on each other's answers."""
        return FEW_ROWS if rows_are_independent(self.model) else 1

    @cached_property
    def num_texts(self) -> int:
        """How many texts one call may continue without an effect on each other's bytes."""
        return FEW_ROWS if isinstance(self.model, GPT) and texts_are_independent(self.model) else 1

    def run(self, inputs: Tensor, max_experts: int | None, **draws: Any) -> Output:
        """The answer at the end."""
        out: Output = self.model(inputs, max_experts=max_experts, **draws)
        return last_token(out) if self.codec else out

    def exits(self, inputs: Tensor, exit_every: ExitEvery, max_experts: int | None, **draws: Any) -> Exits[Output]:
        """The answers with at most 0, 1, 2, … experts, or after each layer, for the rows that continue."""
        if self.codec is not None:
            return MappedExits(self.model.budget_exits(inputs, max_experts, **draws), last_token)
        # each prefix is computed from the start, so that an answer is that of `max_experts`, bit for bit
        return self.model.exits(inputs, exit_every, max_experts=max_experts, rerun=exit_every == "expert", **draws)

    def description(self) -> dict[str, Any]:
        """The model's entry in /api/models."""
        card, about = self.model.card, {"name": self.name, "parameters": num_parameters(self.model)}
        about |= {"model": card.model, "task": card.task, "data": card.data if is_catalogued(card.data) else None}
        about |= {"answers_along_the_way": self.model.answers_along_the_way, "calibrated": bool(card.calibration)}
        if isinstance(self.model, GPT):
            return about | {"context": self.model.context, "vocab_size": self.model.vocab_size}
        return about | {"image_shape": list(self.image_shape), "labels": list(self.labels)}


def last_token(out: Output) -> Output:
    """The answer after the last token; the routes stay those of all tokens."""
    return out._replace(logits=out.logits[:, -1])


@torch.no_grad()
def rows_are_independent(model: Model) -> bool:
    """Whether no row has an effect on another once linear layers multiply row by row: that holds for the compiled library."""
    if not (isinstance(model, Classifier) and isinstance(model.layer, RaytracedExperts)):
        return False
    if not (model.fuses and model.layer.fuses and model.layer.router.fuses):  # a subclass runs step by step
        return False
    layer, router, block = model.layer, model.layer.router, model.input_block
    if type(block) is not InputBlock or not all(type(linear) is RowLinear for linear in (block.linear, model.head)):
        return False  # parts of a subclass may do anything
    hidden_BD = router.gate["weight"].new_zeros(FEW_ROWS, layer.dim)
    if kernels.raytrace.explain(layer.kernel_args(layer.router), hidden_BD).name != "cpp":
        return False
    if not block.convolves:
        return True
    pixels = hidden_BD.new_zeros(FEW_ROWS, *block.image_shape)
    return kernels.convolution.explain(pixels, list(block.weights), list(block.biases)).name == "cpp"


def multiply_by_rows(model: Classifier) -> None:
    """Let the linear layers before and after a classifier's routed layer multiply row by row.

    A layer of another class, with a method of its own or with hooks stays as it is: such a model answers one image at a time.
    """
    for linear in (getattr(model.input_block, "linear", None), model.head):
        if type(linear) is nn.Linear and "forward" not in vars(linear) and not has_hooks(linear):
            linear.__class__ = RowLinear  # the same parameters under the same names


def has_hooks(module: nn.Module) -> bool:
    """Whether something is called before or after a module's forward pass."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


@torch.no_grad()
def texts_are_independent(model: GPT) -> bool:
    """Whether no text has an effect on another in one call.

    That holds where paths are looked up by token, the compiled library runs the experts, and PyTorch's batches of products
    sum as its products of one row do, which is tried.
    """
    if not model.path_follows_token or not model.layer.router.alike(Call("greedy")):
        return False
    weight = model.embedding.weight
    for num in (1, FEW_ROWS):
        hidden_nD = weight.new_zeros(num, model.layer.dim)
        active_n1N = weight.new_zeros(num, 1, model.layer.router.num_experts)
        layer = kernels.unstacked(model.layer.experts, hidden_nD)[0]
        if kernels.experts.explain(layer, hidden_nD, active_n1N, active_n1N, Stream.LAST).name != "cpp":
            return False
    return all(sums_alike(weight) for weight in (weight, *(linear.weight for linear in attention_layers(model))))


def attention_layers(model: GPT) -> Iterator[nn.Linear]:
    """The linear layers of all blocks."""
    return (part for part in model.blocks.modules() if isinstance(part, nn.Linear))


def sums_alike(weight_OK: Tensor) -> bool:
    """Whether vectors have the same products with a matrix, bit for bit, alone and in batches of several sizes."""
    generator = torch.Generator().manual_seed(0)
    x_n1K = torch.randn(FEW_ROWS, 1, weight_OK.shape[1], generator=generator).to(weight_OK)
    alone_n1O = torch.cat([F.linear(x_11K.clone(), weight_OK) for x_11K in x_n1K.split(1)])
    return all(torch.equal(multiply_apart(x_n1K[:num], weight_OK), alone_n1O[:num]) for num in (2, 3, 17, FEW_ROWS))


def serve_model(source: str, name: str | None = None, memory: str | None = None) -> Served:
    """Load a model.

    Args:
        source: A run folder, a file or a shipped model's name.
        name: The name that requests call it by; by default that of its run folder, file or shipped model.
        memory: Of a store: the most memory that its experts may take.

    Returns:
        The model, ready to answer.
    """
    path = Path(source)
    if name is None:
        name = path.resolve().name.removesuffix(".safetensors") if path.exists() else source
        if name in ("model", "best"):  # the file in a run folder
            name = path.resolve().parent.name
    model = load(source, memory=memory)
    if model.card.task is None and not isinstance(model, GPT):
        raise ValueError(f"{source}: its card states no task; save it with one, as raytraced train does")
    if not isinstance(model, GPT) and model.card.task != "images":
        raise ValueError(f"{source}: its task is {model.card.task}; the server takes models of images and of text")
    if isinstance(model, Classifier):
        multiply_by_rows(model)
    served = Served(name, model, source)
    _ = served.labels  # so that a tokenizer that cannot be opened is refused now
    return served
