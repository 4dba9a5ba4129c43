"""What every model returns, and what every model offers.

Axes: B batch, T tokens, Y classes or words.
"""

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from raytraced.layer import Looks, RoutedLayer, Work
from raytraced.models.card import ModelCard
from raytraced.models.sure import Sure, answer_when_sure, check_sure
from raytraced.sequence import Route, Select
from raytraced.words import require

LookAt = Literal["layer", "expert"]
Judge = Callable[[Tensor], Tensor]
"""logits -> the loss of each sample (B,)"""


class Output(NamedTuple):
    """An answer, and what every routed layer did for it."""

    logits: Tensor  # (B, Y) or (B, T, Y)
    routes: tuple[Route, ...]
    loss: Tensor | None = None  # the model's own, weighted, the mean over samples
    answers: tuple["Output", ...] = ()  # with at most so many experts, one for each of the budgets asked for
    looks: Tensor | None = None  # (S + 1, B, Y), the logits after 0, 1, … S layers, if asked for; the last are `logits`
    num_looks: Tensor | None = None  # (B,), how many answers a sample was looked at for, where it stopped when sure

    @property
    def num_experts(self) -> Tensor:
        """How many experts are in the set of each sample (B,) or token (B, T), all routed layers together."""
        first, *rest = (route.num_active for route in self.routes)
        return sum(rest, first)

    @property
    def num_runs(self) -> Tensor:
        """How many experts ran for it: more than are in the set where some ran again for a later answer."""
        runs = [route.num_active if route.num_runs is None else route.num_runs for route in self.routes]
        return torch.stack(runs).sum(0)


class Model(nn.Module):
    """What training, evaluation and cost may ask of a model, whatever its inputs are."""

    card: ModelCard | None = None
    answers_along_the_way = False

    def forward(
        self,
        inputs: Tensor,
        *,
        sure: Sure | Literal["calibrated"] | None = None,
        max_ms: float | None = None,
        look: LookAt | None = None,
        mask: Tensor | None = None,
        **options: Any,
    ) -> Output:
        """Answer; the options are those of `run`.

        With `sure` each sample stops at the first answer whose largest probability reaches it, or the one that was found on
        validation data ("calibrated"); after `max_ms` milliseconds all do. `look` says after what an answer is looked at.
        """
        if sure is None and max_ms is None:
            return self.run(inputs, mask=mask, **options)
        started = perf_counter()
        if sure == "calibrated":
            found = self.card.calibration if self.card else {}
            require(bool(found), "sure", sure, f"{self.name} is not calibrated; do that with raytraced calibrate")
            sure, look = found["sure"], look or found["look"]
        require(max_ms is None or max_ms > 0, "max_ms", max_ms, "must be above 0")
        deadline = None if max_ms is None else started + max_ms / 1000
        thresholds = check_sure(1.0 if sure is None else sure)  # type: ignore[arg-type]
        return self.until_sure(inputs, thresholds, look or "layer", mask, deadline, **options)

    def until_sure(
        self,
        inputs: Tensor,
        sure: list[float],
        look: LookAt,
        mask: Tensor | None,
        deadline: float | None,
        **options: Any,
    ) -> Output:
        """The first answer of each sample that reaches its look's threshold; a deadline, in perf_counter's time, ends all."""
        return answer_when_sure(self.looks(inputs, look, **options), sure, mask, deadline)

    def run(
        self,
        inputs: Tensor,
        *,
        select: Select | None = None,
        max_experts: int | None = None,
        budgets: tuple[int, ...] = (),
        looks: bool = False,
        judge: Judge | None = None,
        generator: torch.Generator | None = None,
        rows: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Output:
        """Answer, with at most `max_experts` experts; for each of `budgets` also the answer that so many would give.

        `looks` asks for the logits after each layer too. `judge` is given in training, to models that learn from more than
        their last answer.
        """
        raise NotImplementedError

    def looks(self, inputs: Tensor, look: LookAt = "layer", **options: Any) -> Looks[Output]:
        """The answers after no layer (or expert), after the first, the second, …, of samples that go on."""
        raise ValueError(f"{self.name}: has one answer only, it cannot stop when it is sure")

    def prefixes(
        self, inputs: Tensor, most: int | None = None, *, mask: Tensor | None = None, **options: Any
    ) -> Iterator[Output]:
        """The answers with at most 0, 1, 2, … experts, until every sample's sequence has ended."""
        raise ValueError(f"{self.name}: has one answer only; prefixes are for models that answer along the way")

    def work(self, inputs: Tensor, out: Output) -> dict[str, Work]:
        """What each answer took: "input", "routing", "experts" and "head"."""
        raise NotImplementedError

    # Sharing is an edge of the package: it is imported when it is asked for.

    def save_pretrained(self, folder: str | Path, **options: Any) -> None:
        """Write a folder to share: weights, config, a page made of the card; the options are `raytraced.hub`'s."""
        import_module("raytraced.hub").save_pretrained(self, folder, **options)

    @classmethod
    def from_pretrained(cls, source: str | Path, **options: Any) -> Self:
        """The model of a folder or of a repository "owner/name" of the Hub, ready to evaluate; nothing is unpickled."""
        model = import_module("raytraced.hub").from_pretrained(source, **options)
        require(isinstance(model, cls), "source", source, f"is a {type(model).__name__}, not a {cls.__name__}")
        found: Self = model
        return found

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Upload what `save_pretrained` writes to a repository "owner/name"; returns the commit's address."""
        address: str = import_module("raytraced.hub").push_to_hub(self, repo_id, **options)
        return address

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
