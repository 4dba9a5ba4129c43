"""What every model returns, and what every model offers.

Axes: B batch, T tokens, Y classes or words.
"""

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from raytraced.draws import DrawsFrom, SameDraws, check_generator
from raytraced.layer import Call, LayerOutput, Looks, RoutedLayer, Work, flat, flat_mask
from raytraced.models.card import ModelCard
from raytraced.models.sure import Sure, answer_when_sure, check_sure, uncompiled
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

    card = ModelCard("", {}, {})  # of a model made by hand, that of nobody
    answers_along_the_way = False
    layer_defaults: ClassVar[dict[str, Any]] = {}
    """options of its layers where they differ from the layer's own"""

    def forward(
        self,
        inputs: Tensor,
        *,
        select: Select | None = None,
        max_experts: int | None = None,
        budgets: tuple[int, ...] = (),
        looks: bool = False,
        judge: Judge | None = None,
        generator: DrawsFrom = None,
        rows: Tensor | None = None,
        mask: Tensor | None = None,
        sure: Sure | Literal["calibrated"] | None = None,
        max_ms: float | None = None,
        look: LookAt | None = None,
        **own: Any,
    ) -> Output:
        """Answer, with at most `max_experts` experts; for each of `budgets` also the answer that so many would give.

        `looks` asks for the logits after each layer too. `judge` is given in training, to models that learn from more than
        their last answer. What else a model takes goes to its `answer`.

        With `sure` each sample stops at the first answer whose largest probability reaches it, or the one that was found on
        validation data ("calibrated"); after `max_ms` milliseconds all do. `look` says after what an answer is looked at.
        """
        call = Call(select, max_experts, generator, rows, looks)
        if sure is not None or max_ms is not None:
            for name, given in (("budgets", budgets), ("judge", judge)):
                require(not given, name, given, "must be left out with sure or max_ms: they ask for one answer")
            out: Output = uncompiled(self._stop)(inputs, call, sure, max_ms, look, mask, **own)
            return out
        if look is not None:
            raise ValueError(f"look={look}: says where to look for who stops; give sure or max_ms too")
        encoded = self.encode(inputs)
        if not budgets:
            return self.answer(encoded, call, mask, judge, **own)
        draws = SameDraws(generator)
        answer = self.answer(encoded, call._replace(generator=draws), mask, judge, **own)
        early = (Call(select, budget, draws.again(), rows) for budget in budgets)
        return answer._replace(answers=tuple(self.answer(encoded, each, mask) for each in early))

    def encode(self, inputs: Tensor) -> Tensor:
        """What all answers to some inputs have in common: hidden vectors, or the inputs themselves."""
        return inputs

    def answer(self, encoded: Tensor, call: Call, mask: Tensor | None = None, judge: Judge | None = None) -> Output:
        """One answer."""
        raise NotImplementedError

    def _stop(
        self,
        inputs: Tensor,
        call: Call,
        sure: Sure | Literal["calibrated"] | None,
        max_ms: float | None,
        look: LookAt | None,
        mask: Tensor | None,
        **own: Any,
    ) -> Output:
        """The first answer of each sample that is sure enough, or there at the deadline."""
        started = perf_counter()
        check_generator(call.generator)
        if call.rows is not None:
            call = call._replace(rows=flat("rows", call.rows, inputs.shape[:1]))
        mask = None if mask is None else flat_mask(mask, inputs.shape[:1])
        if sure == "calibrated":
            found = self.card.calibration
            require(bool(found), "sure", sure, f"{self.name} is not calibrated; do that with raytraced calibrate")
            sure, look = found["sure"], look or found["look"]
        require(max_ms is None or max_ms > 0, "max_ms", max_ms, "must be above 0")
        deadline = None if max_ms is None else started + max_ms / 1000
        thresholds = check_sure(1.0 if sure is None else sure)  # type: ignore[arg-type]
        return self.until_sure(inputs, call, thresholds, look or "layer", mask, deadline, **own)

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
        """The first answer of each sample that reaches its look's threshold; a deadline, in perf_counter's time, ends all."""
        return answer_when_sure(self.looks(inputs, look, **call._asdict(), **own), sure, mask, deadline)

    def looks(self, inputs: Tensor, look: LookAt = "layer", **options: Any) -> Looks[Output]:
        """The answers after no layer (or expert), after the first, the second, …, of samples that go on."""
        raise ValueError(f"{self.name}: has one answer only, it cannot stop when it is sure")

    def prefixes(
        self,
        inputs: Tensor,
        most: int | None = None,
        *,
        mask: Tensor | None = None,
        generator: torch.Generator | None = None,
        **options: Any,
    ) -> Iterator[Output]:
        """The answers with at most 0, 1, 2, … experts a routed layer, until every sample's sequence has ended."""
        if not self.answers_along_the_way:
            raise ValueError(f"{self.name}: has one answer only; prefixes are for models that answer along the way")
        return self._prefixes(inputs, most, SameDraws(generator), mask=mask, **options)

    def _prefixes(self, inputs: Tensor, most: int | None, draws: SameDraws, **options: Any) -> Iterator[Output]:
        num_nodes = max(layer.experts.num_layers * layer.experts.num_experts for layer in self.routed_layers())
        for budget in range(1 + (num_nodes if most is None else min(most, num_nodes))):
            out = self(inputs, max_experts=budget, generator=draws.again(), **options)
            yield out
            if not any(bool((route.num_active == budget).any()) for route in out.routes):
                return

    @property
    def own_sure(self) -> float | None:
        """Of a model that stops when sure without being asked: how sure."""
        return None

    def check_select(self, select: Select | None) -> None:
        """Refuse a way to choose experts that this model does not know."""

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
        return self.card.model or type(self).__name__

    def routed_layers(self) -> list[RoutedLayer]:
        """All routed layers, from the input to the output."""
        return [module for module in self.modules() if isinstance(module, RoutedLayer)]


def gathered(logits: Tensor, layers: Sequence[LayerOutput], judge: Judge | None = None) -> Output:
    """An answer (B, Y) or (B, T, Y), and what routed layers did for it; decisions are judged by what they led to."""
    losses = [out.loss for out in layers if out.loss is not None]
    if judge is not None and any(out.judge for out in layers):
        # what a token runs changes the answers to all that follow: it is judged by its whole text
        each = judge(logits.detach()).repeat_interleave(prod(logits.shape[1:-1]))
        losses += [out.judge(each) for out in layers if out.judge]
    return Output(logits, tuple([out.route for out in layers]), torch.stack(losses).sum() if losses else None)


def num_parameters(module: nn.Module) -> int:
    """How many numbers a part has."""
    return sum(parameter.numel() for parameter in module.parameters())


def linear_work(linear: nn.Linear) -> Work:
    """A linear layer on one vector."""
    return Work(linear.weight.numel(), num_parameters(linear))
