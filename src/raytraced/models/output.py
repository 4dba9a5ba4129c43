"""What every model returns, and what every model offers.

Axes: B batch, T tokens, Y classes or tokens of the vocabulary, S steps of a routed layer.
"""

from collections.abc import Callable, Iterator, Sequence
from math import prod
from time import perf_counter
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from raytraced import early_exit
from raytraced.early_exit import BudgetExits, Confidence, ExitEvery, ExitPolicy, Exits
from raytraced.errors import require
from raytraced.layer import LayerOutput, RoutedLayer
from raytraced.models.card import ModelCard
from raytraced.models.dial import check_greedy, find_stop
from raytraced.rng import RandomSource, ReplayedGenerator, check_generator
from raytraced.router import Call, Cost
from raytraced.rows import flat, flat_mask, flat_stop
from raytraced.sequence import Route, Select, StopPerRow
from raytraced.store.experts import StoredExperts

SampleLossFn = Callable[[Tensor], Tensor]
"""logits -> the loss of each sample (B,)"""


class Output(NamedTuple):
    """A model's answer, and the route of every routed layer."""

    logits: Tensor  # (B, Y) or (B, T, Y)
    routes: tuple[Route, ...]  # one per routed layer
    loss: Tensor | None = None  # the model's own loss, weighted, the mean over samples
    answers: tuple["Output", ...] = ()  # one for each of `budgets`, with at most that many experts
    exits: Tensor | None = None  # (S + 1, B, Y), the logits after 0, 1, … S steps, if asked for; the last are `logits`
    num_exits: Tensor | None = None  # (B,), how many exits each sample took, where it could leave early

    @property
    def num_experts(self) -> Tensor:
        """How many experts are active for each sample (B,) or token (B, T), all routed layers together."""
        first, *rest = (route.num_active for route in self.routes)
        return sum(rest, first)

    @property
    def num_runs(self) -> Tensor:
        """How many experts ran: more than are active where some ran again for a later answer."""
        runs = [route.num_active if route.num_runs is None else route.num_runs for route in self.routes]
        return torch.stack(runs).sum(0)


class Model(nn.Module):
    """Base class of models: what training, evaluation, the server and cost need, whatever the inputs are."""

    card = ModelCard("", {}, {})  # of a model that `raytraced.build` did not make
    answers_along_the_way = False
    samples_paths = True  # False: a path is never drawn, so select="sample" is refused
    layer_defaults: ClassVar[dict[str, Any]] = {}
    """options of its layers where they differ from the layer's own"""

    def forward(
        self,
        inputs: Tensor,
        *,
        select: Select | None = None,
        max_experts: int | None = None,
        budgets: tuple[int, ...] = (),
        exits: bool = False,
        sample_loss_fn: SampleLossFn | None = None,
        generator: RandomSource = None,
        rows: Tensor | None = None,
        mask: Tensor | None = None,
        confidence: Confidence | Literal["calibrated"] | None = None,
        max_ms: float | None = None,
        exit_every: ExitEvery | None = None,
        stop: StopPerRow | None = None,
        experts: float | None = None,
        effort: float | None = None,
        routes: Route | Sequence[Route] | None = None,
        **own: Any,
    ) -> Output:
        """Answer a batch of inputs.

        Args:
            inputs: Images (B, channels, height, width) or tokens (B, T).
            select: How raytraced layers choose the next node: "greedy" or "sample". Default: greedy in evaluation.
            max_experts: At most this many experts run per sample; in a language model per token, all blocks together.
            budgets: For each of these numbers, also the answer with at most that many experts: `Output.answers`.
            exits: Whether to return the logits after each step too: `Output.exits`.
            sample_loss_fn: In training, for models that learn from more than their last answer: logits -> loss (B,).
            generator: Source of random numbers. Default: PyTorch's global generator.
            rows: Row number of each sample (B,); what a sample draws depends on the seed and on this number alone.
            mask: (B,) or (B, T), bool; False where there is padding.
            confidence: Early exit: each sample leaves at the first answer whose largest class probability reaches this
                threshold (or one threshold per exit). "calibrated": the threshold that `raytraced calibrate` found.
            max_ms: Early exit: every sample leaves before this many milliseconds are over.
            exit_every: Where the exits are: after every "layer" (default) or after every "expert".
            stop: How much the output node's rate counts in all raytraced layers, in place of their own `stop`: a number, or a
                tensor (B,), in a language model also (B, T), with one per sample or token. Smaller values run more experts.
            experts: In place of `stop`: the mean number of experts per sample or token that a calibrated model runs; turned
                into a `stop` by the table in its card.
            effort: In place of `stop`: a share of a calibrated model's full cost, up to 1.
            routes: `Output.routes` of an earlier call for these inputs: the same experts run again, in place of a choice,
                with the weights of the present gates under this set.
            **own: Further arguments of the model's own `answer`.

        Returns:
            Output with `logits` (B, Y) or (B, T, Y) and `routes`.
        """
        check_greedy(select, experts, effort)
        if routes is not None:
            others: dict[str, Any] = {"select": select, "max_experts": max_experts, "budgets": budgets or None}
            others |= {"confidence": confidence, "max_ms": max_ms, "stop": stop, "experts": experts, "effort": effort}
            for option, given in others.items():
                require(given is None, option, given, "must be left out with routes, which say what runs")
        stop = self.resolve_budget(stop, experts, effort)
        call = Call(select, max_experts, generator, rows, exits, stop)
        if routes is not None:
            call = call._replace(route=self._only_route(routes))
        if confidence is not None or max_ms is not None:
            for name, value in (("budgets", budgets), ("sample_loss_fn", sample_loss_fn)):
                require(not value, name, value, "must be left out with confidence or max_ms, which ask for one answer")
            out: Output = early_exit.uncompiled(self._exit_early)(
                inputs, call, confidence, max_ms, exit_every, mask, **own
            )
            return out
        if exit_every is not None:
            raise ValueError(f"exit_every={exit_every!r} has no effect without confidence= or max_ms=: set one of them")
        encoded = self.encode(inputs)
        if not budgets:
            return self.answer(encoded, call, mask, sample_loss_fn, **own)
        for name, value in own.items():
            require(
                value is None, name, "[…]", "must be left out with budgets, whose answers are computed from the start"
            )
        replayed = ReplayedGenerator(generator)
        answer = self.answer(encoded, call._replace(generator=replayed), mask, sample_loss_fn, **own)
        early = (Call(select, budget, replayed.restart(), rows, stop=stop) for budget in budgets)
        return answer._replace(answers=tuple(self.answer(encoded, each, mask) for each in early))

    def resolve_budget(self, stop: StopPerRow | None, experts: float | None, effort: float | None) -> StopPerRow | None:
        """The `stop` of a call: as given, or from the table in the card where `experts` or `effort` is given.

        Args:
            stop, experts, effort: As for `forward`; at most one of them.

        Returns:
            The factor of the output node's rate; None: the layers' own.
        """
        if experts is None and effort is None:
            return stop
        option, value = ("experts", experts) if experts is not None else ("effort", effort)
        require(stop is None, option, value, "give either stop or a budget, not both")
        return find_stop(self.name, self.card.dial, experts, effort)

    def _only_route(self, routes: Route | Sequence[Route]) -> Route:
        """The route of the model's one routed layer; a ValueError where there is none, or not one route."""
        rule = f"{self.name} has no router that could follow them; leave them out"
        require(len(self.routed_layers()) == 1, "routes", "[…]", rule)
        given = [routes] if isinstance(routes, Route) else list(routes)
        require(len(given) == 1, "routes", f"{len(given)} routes", "must be one, as in Output.routes")
        return given[0]

    def encode(self, inputs: Tensor) -> Tensor:
        """The part of the computation that all answers to an input share.

        Args:
            inputs: As for `forward`.

        Returns:
            Hidden vectors, or the inputs themselves.
        """
        return inputs

    def answer(
        self, encoded: Tensor, call: Call, mask: Tensor | None = None, sample_loss_fn: SampleLossFn | None = None
    ) -> Output:
        """Compute one answer to encoded inputs.

        Args:
            encoded: What `encode` returned.
            call: Options of the call.
            mask: (B,) or (B, T), bool; False where there is padding.
            sample_loss_fn: In training: logits -> loss of each sample (B,).

        Returns:
            Output with `logits` and `routes`.
        """
        raise NotImplementedError

    def _exit_early(
        self,
        inputs: Tensor,
        call: Call,
        confidence: Confidence | Literal["calibrated"] | None,
        max_ms: float | None,
        exit_every: ExitEvery | None,
        mask: Tensor | None,
        **own: Any,
    ) -> Output:
        """The answer with which each sample leaves."""
        started = perf_counter()
        check_generator(call.generator)
        if call.rows is not None:
            call = call._replace(rows=flat("rows", call.rows, inputs.shape[:1]))
        if call.stop is not None:
            call = call._replace(stop=flat_stop(call.stop, inputs.shape[:1]))
        mask = None if mask is None else flat_mask(mask, inputs.shape[:1])
        if confidence == "calibrated":
            found = self.card.calibration
            rule = f"{self.name} is not calibrated; run raytraced calibrate first"
            require(bool(found), "confidence", confidence, rule)
            confidence, exit_every = found["confidence"], exit_every or found["exit_every"]
        require(max_ms is None or max_ms > 0, "max_ms", max_ms, "must be above 0")
        deadline = None if max_ms is None else started + max_ms / 1000
        policy = ExitPolicy(confidence, call.max_experts, deadline, exit_every or "layer")  # type: ignore[arg-type]
        encoded = self.encode(inputs)
        fused = self.fused_early_exit(encoded, call, policy, mask, **own)
        if fused is not None:
            return fused
        out: Output = early_exit.run(lambda: self.exits_of(encoded, policy.exit_every, call, **own), policy, mask)
        return out

    def fused_early_exit(self, encoded: Tensor, call: Call, policy: ExitPolicy, mask: Tensor | None) -> Output | None:
        """The whole early exit in one compiled call; None where there is no such call for this model and policy."""
        return None

    def exits(
        self,
        inputs: Tensor,
        exit_every: ExitEvery = "layer",
        *,
        select: Select | None = None,
        max_experts: int | None = None,
        generator: RandomSource = None,
        rows: Tensor | None = None,
        stop: StopPerRow | None = None,
        rerun: bool = False,
    ) -> Exits[Output]:
        """The answers on the way, one after the other: the input of `raytraced.early_exit.answers` and `Walk`.

        Args:
            inputs: As for `forward`.
            exit_every: An exit after every "layer", or after every "expert" of the activation sequence.
            select, max_experts, generator, rows, stop: As for `forward`.
            rerun: With "expert": compute every answer from the start, so that it equals `max_experts=k` bit for bit.

        Returns:
            Exits, whose `current` holds the newest answer and whose `advance` computes the next one.
        """
        call = Call(select, max_experts, generator, rows, stop=stop)
        return self.exits_of(self.encode(inputs), exit_every, call, rerun)

    def exits_of(self, encoded: Tensor, exit_every: ExitEvery, call: Call, rerun: bool = False) -> Exits[Output]:
        """The answers on the way for inputs that are encoded already.

        Args:
            encoded: What `encode` returned.
            exit_every, rerun: As for `exits`.
            call: Options of the call.

        Returns:
            Exits, as from `exits`.
        """
        raise ValueError(f"{self.name}: has one answer only; early exit needs a model with several")

    def budget_exits(
        self, inputs: Tensor, max_experts: int | None = None, *, generator: RandomSource = None, **options: Any
    ) -> BudgetExits[Output]:
        """The answers with at most 0, 1, 2, … experts per routed layer, each computed from the start.

        Args:
            inputs: As for `forward`.
            max_experts: The largest budget. Default: all experts.
            generator: Source of random numbers; all answers use the same. Default: PyTorch's global generator.
            **options: Further options of `forward`.

        Returns:
            Exits, as from `exits`.
        """
        sizes = [layer.experts.num_layers * layer.experts.num_experts for layer in self.routed_layers()]
        limit = max(sizes) if max_experts is None else min(max_experts, max(sizes))
        replayed = ReplayedGenerator(generator)

        def answer(budget: int) -> Output:
            out: Output = self(inputs, max_experts=budget, generator=replayed.restart(), **options)
            return out

        return BudgetExits(answer, limit)

    def prefixes(self, inputs: Tensor, max_experts: int | None = None, **options: Any) -> Iterator[Output]:
        """The answers with at most 0, 1, 2, … experts per routed layer, until every sample's sequence has ended.

        Args:
            inputs: As for `forward`.
            max_experts: The last answer is the one with this budget. Default: no limit.
            **options: `mask`, `generator`, `select`, `rows` and `stop`, as for `forward`.

        Yields:
            Output with `logits` (B, Y) or (B, T, Y).
        """
        if not self.answers_along_the_way:
            raise ValueError(f"{self.name}: has one answer only; prefixes need a model that answers along the way")
        return self._prefixes(inputs, max_experts, **options)

    def _prefixes(self, inputs: Tensor, max_experts: int | None, **options: Any) -> Iterator[Output]:
        exits = self.budget_exits(inputs, max_experts, **options)
        yield exits.current.output
        while not bool(exits.current.ended.all()):
            exits.advance()
            yield exits.current.output

    @property
    def own_confidence(self) -> float | None:
        """The confidence threshold of a model that exits early without being asked to; else None."""
        return None

    def cost(self, inputs: Tensor, out: Output) -> dict[str, Cost]:
        """Count what each answer cost.

        Args:
            inputs: The inputs of a call.
            out: The output of this call.

        Returns:
            The Cost of the parts "input", "routing", "experts" and "head", by name.
        """
        raise NotImplementedError

    @property
    def name(self) -> str:
        """The model's name in the registry, else that of its class."""
        return self.card.model or type(self).__name__

    def routed_layers(self) -> list[RoutedLayer]:
        """All routed layers, from the input to the output."""
        return [module for module in self.modules() if isinstance(module, RoutedLayer)]

    def routing_parameters(self) -> list[Tensor]:
        """Parameters outside of routed layers that serve routing alone: they train with the routers' learning rate."""
        return []


def check_select(model: Model, select: Select | None) -> None:
    """Refuse a way to choose experts that a model does not support."""
    rule = "must be greedy: nothing is drawn here"
    require(model.samples_paths or select in (None, "greedy"), "select", repr(select), rule)


def gathered(logits: Tensor, layers: Sequence[LayerOutput], sample_loss_fn: SampleLossFn | None = None) -> Output:
    """A model's output from its logits (B, Y) or (B, T, Y) and the outputs of its routed layers."""
    losses = [out.loss for out in layers if out.loss is not None]
    if sample_loss_fn is not None and any(out.policy_loss_fn for out in layers):
        # What a token runs changes the answers to all tokens after it: its decision gets the loss of the whole text.
        row_losses = sample_loss_fn(logits.detach()).repeat_interleave(prod(logits.shape[1:-1]))
        losses += [out.policy_loss_fn(row_losses) for out in layers if out.policy_loss_fn]
    return Output(logits, tuple([out.route for out in layers]), torch.stack(losses).sum() if losses else None)


def num_parameters(module: nn.Module) -> int:
    """How many parameters a module has, those of experts in a store included."""
    stored = [each for each in module.modules() if isinstance(each, StoredExperts)]
    in_stores = sum(each.num_layers * each.num_experts * each.num_parameters for each in stored)
    return sum(parameter.numel() for parameter in module.parameters()) + in_stores


def linear_cost(linear: nn.Linear) -> Cost:
    """The cost of a linear layer for one vector."""
    return Cost(linear.weight.numel(), num_parameters(linear))
