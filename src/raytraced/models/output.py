"""What every model returns, and what every model offers.

Axes: B batch, T tokens, Y classes or words.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from raytraced.layer import RoutedLayer, Work
from raytraced.models.card import ModelCard
from raytraced.sequence import Route, Select

Judge = Callable[[Tensor], Tensor]
"""logits -> the loss of each sample (B,)"""


class Output(NamedTuple):
    """An answer, and what every routed layer did for it."""

    logits: Tensor  # (B, Y) or (B, T, Y)
    routes: tuple[Route, ...]
    loss: Tensor | None = None  # the model's own, weighted, the mean over samples
    answers: tuple["Output", ...] = ()  # with at most so many experts, one for each of the budgets asked for

    @property
    def num_experts(self) -> Tensor:
        """How many experts ran for each sample (B,) or token (B, T), all routed layers together."""
        return torch.stack([route.num_active for route in self.routes]).sum(0)


class Model(nn.Module):
    """What training, evaluation and cost may ask of a model, whatever its inputs are."""

    card: ModelCard | None = None
    answers_along_the_way = False

    def forward(
        self,
        inputs: Tensor,
        *,
        select: Select | None = None,
        max_experts: int | None = None,
        budgets: tuple[int, ...] = (),
        judge: Judge | None = None,
        generator: torch.Generator | None = None,
        rows: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Output:
        """Answer, with at most `max_experts` experts; for each of `budgets` also the answer that so many would give.

        `judge` is given in training, to models that learn from more than their last answer.
        """
        raise NotImplementedError

    def prefixes(
        self, inputs: Tensor, most: int | None = None, *, mask: Tensor | None = None, **options: Any
    ) -> Iterator[Output]:
        """The answers with at most 0, 1, 2, … experts, until every sample's sequence has ended."""
        raise ValueError(f"{self.name}: has one answer only; prefixes are for models that answer along the way")

    def work(self, inputs: Tensor, out: Output) -> dict[str, Work]:
        """What each answer took: "input", "routing", "experts" and "head"."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """As the table of models has it, else that of its class."""
        return self.card.model if self.card else type(self).__name__

    def routed_layers(self) -> list[RoutedLayer]:
        """All routed layers, from the input to the output."""
        return [module for module in self.modules() if isinstance(module, RoutedLayer)]


def linear_work(linear: nn.Linear) -> Work:
    """A linear layer on one vector."""
    return Work(linear.weight.numel(), sum(parameter.numel() for parameter in linear.parameters()))
