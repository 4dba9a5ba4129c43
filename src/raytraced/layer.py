"""A routed layer: a router decides who runs, a grid of experts runs; hidden vectors in and out.

Axes: B batch (any leading shape, flattened), L layers, S steps (layers, times the rounds of each), N experts a layer, D width.
"""

from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial
from inspect import signature
from numbers import Integral
from typing import Any, Generic, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor, nn

from raytraced import operations
from raytraced.draws import DrawsFrom, check_generator, new_seed, uniform
from raytraced.grid import Experts, Stream, make_grid, run_stream
from raytraced.routing import Rates
from raytraced.sequence import Route, Select
from raytraced.words import require, require_one_of


class Work(NamedTuple):
    """Multiply-adds and parameters that some part of a model took for each sample, or for any."""

    multiply_adds: Tensor | int
    parameters: Tensor | int


class Choice(NamedTuple):
    """What a router decided, for one step (B, N), or for all of them where it can plan ahead (B, S, N)."""

    active: Tensor  # 0 or 1
    weights: Tensor  # how much an expert's output counts, 0 where it does not run
    loss: Tensor | None = None  # the router's own, weighted
    route: Route | None = None  # of a plan, if there is more to tell than who is active
    decision: Any = None  # what `Router.policy_loss` judges once the losses are known


class LayerOutput(NamedTuple):
    """What every routed layer returns."""

    hidden: Tensor  # (..., D), the updated vectors
    route: Route
    loss: Tensor | None = None  # the router's own, weighted
    judge: Callable[[Tensor], Tensor] | None = None  # the loss of each row (B,) -> a loss for what was decided
    given: Tensor | None = None  # what a residual stream started from
    looks: Tensor | None = None  # (S + 1, ..., D), the vectors as they would be after 0, 1, … steps, if asked for

    @property
    def update(self) -> Tensor:
        """What the experts add, alone: for a block that stands in `x + block(norm(x))`."""
        return self.hidden if self.given is None else self.hidden - self.given


class Call(NamedTuple):
    """What one call of a layer asks for besides its rows: how to choose, a budget, and where draws come from."""

    select: Select | None = None
    max_experts: int | None = None
    generator: DrawsFrom = None
    rows: Tensor | None = None  # (B,), None for 0 … B − 1
    looks: bool = False

    @property
    def is_default(self) -> bool:
        """Whether nothing is asked that only some routers can do."""
        return self.select in (None, "greedy") and self.max_experts is None


T = TypeVar("T")
U = TypeVar("U")


class Look(NamedTuple, Generic[T]):
    """What there is so far, of the rows that still go on."""

    out: T
    ended: Tensor  # (n,), True where it would stay the same however long one went on


# Sent, after each look, the rows (n,) of it that go on, None for all.
Looks = Generator[Look[T], Tensor | None, None]


def mapped(looks: Looks[T], change: Callable[[T], U]) -> Looks[U]:
    """The same looks at what is made of each."""
    with suppress(StopIteration):
        found = next(looks)
        while True:
            kept_n = yield Look(change(found.out), found.ended)
            found = looks.send(kept_n)


class Draws:
    """Uniform numbers for the rows of one call; a seed is taken from the generator only if a number is asked for."""

    def __init__(self, call: Call, like_BD: Tensor) -> None:
        self.generator = call.generator
        self.rows_B = torch.arange(like_BD.shape[0], device=like_BD.device) if call.rows is None else call.rows
        self.seed: Tensor | None = None

    def uniform(self, step: int) -> Tensor:
        """(B,), a pure function of the seed, the row and the step."""
        if self.seed is None:
            self.seed = new_seed(self.generator, self.rows_B.device)
        return uniform(self.seed, self.rows_B, step)


class Router(nn.Module):
    """Turns hidden vectors into who runs, with which weight, and says what it cost to decide.

    A router that needs to see only the layer's input gives the `plan` of all steps; any other is asked step by step.
    """

    def __init__(
        self, dim: int, num_layers: int, num_experts: int, *, num_outlets: int | None = None, num_rounds: int = 1
    ) -> None:
        super().__init__()
        for name, value in (("dim", dim), ("num_layers", num_layers), ("num_experts", num_experts)):
            require(isinstance(value, Integral), name, repr(value), "must be a whole number")
            require(value >= 1, name, value, "must be at least 1")
        require(num_rounds >= 1, "num_rounds", num_rounds, "must be at least 1")
        self.num_layers, self.num_experts, self.num_rounds = num_layers, num_experts, num_rounds
        outlets = num_experts if num_outlets is None else num_outlets
        self.gates = nn.ModuleList(nn.Linear(dim, outlets) for _ in range(num_layers * num_rounds) if outlets)

    def reset_parameters(self) -> None:
        """Draw what a router has besides its gates; called once, when the experts exist."""

    def plan(self, hidden_BD: Tensor, call: Call) -> Choice | None:
        """Who runs in all steps, or None where that must be asked step by step."""
        if not call.is_default:
            raise ValueError("select and max_experts: are for layers that answer along the way, this one does not")
        return None

    def route(self, step: int, hidden_BD: Tensor, draws: Draws) -> Choice:
        """Who runs at a step, and with which weight."""
        raise NotImplementedError(f"{type(self).__name__}: needs `plan` or `route`")

    def policy_loss(self, decisions: list[Any], experts_B: Tensor, losses_B: Tensor) -> Tensor:
        """The loss of decisions, given how many experts they ran and the loss of each row that they led to."""
        raise NotImplementedError(f"{type(self).__name__}: makes decisions, so it needs `policy_loss`")

    def gate_logits(self, step: int, hidden_BD: Tensor) -> Tensor:
        """What the gate of a step says (B, outlets), at least in float32."""
        logits_BN: Tensor = self.gates[step](hidden_BD)
        return logits_BN.to(torch.promote_types(logits_BN.dtype, torch.float32))

    def step_work(self) -> Work:
        """What it takes to decide one step; the same for all, whatever is chosen."""
        if not len(self.gates):
            return Work(0, 0)
        weight, *rest = self.gates[0].parameters()
        return Work(weight.numel(), weight.numel() + sum(parameter.numel() for parameter in rest))

    def work(self, route: Route, num_steps: Tensor | None = None) -> Work:
        """What it took to decide for each sample: all steps, or the first `num_steps` (B,)."""
        steps = self.num_layers * self.num_rounds if num_steps is None else num_steps
        return Work(*(part * steps for part in self.step_work()))

    def extra_repr(self) -> str:
        """Its options, as far as it keeps them under their names."""
        options = (name for name, each in signature(type(self)).parameters.items() if each.kind == each.KEYWORD_ONLY)
        return ", ".join(f"{name}={getattr(self, name)}" for name in options if hasattr(self, name))


class RoutedLayer(nn.Module):
    """A router, a grid of experts and the stream that carries hidden vectors (..., D) through it."""

    answers_along_the_way = False

    def __init__(self, router: Router, experts: Experts, dim: int, *, stream: Stream = "residual") -> None:
        super().__init__()
        require_one_of("stream", stream, get_args(Stream))
        self.dim, self.stream = dim, stream
        self.router, self.experts = router, experts
        router.reset_parameters()

    def forward(
        self,
        hidden: Tensor,
        *,
        select: Select | None = None,
        max_experts: int | None = None,
        generator: DrawsFrom = None,
        rows: Tensor | None = None,
        mask: Tensor | None = None,
        looks: bool = False,
    ) -> LayerOutput:
        """Decide who runs and run it; vectors whose mask (...) is False pass by: no routing, no load, no cost.

        What a vector draws follows from the generator's seed and its number in `rows` (...) alone (default: 0, 1, 2, …).
        `select` is how raytraced layers choose: "sample" or "greedy"; they run at most `max_experts` experts a vector.
        `looks` asks for the vectors before the first step and after each.
        """
        call = Call(select, max_experts, generator, rows, looks)
        if hidden.ndim == 2 and mask is None:  # nothing to put in place: one image waits for every call
            self.check(hidden)
            check_generator(generator)
            if rows is not None:
                call = call._replace(rows=flat("rows", rows, hidden.shape[:1]))
            out, route, loss, judge, _, seen = self.run(hidden, call)
            return LayerOutput(out, route, loss, judge, hidden if self.stream == "residual" else None, seen)
        hidden_BD, call, put_back = self.as_rows(hidden, call, mask)
        return put_back(self.run(hidden_BD, call))

    def as_rows(
        self, hidden: Tensor, call: Call, mask: Tensor | None
    ) -> tuple[Tensor, Call, Callable[[LayerOutput], LayerOutput]]:
        """The vectors that a mask leaves, as rows (B, D), the call for them, and how to put what came of them in place."""
        self.check(hidden)
        check_generator(call.generator)
        shape, given = hidden.shape[:-1], hidden if self.stream == "residual" else None
        hidden_BD, rows_B = hidden.reshape(-1, self.dim), flat("rows", call.rows, shape)
        if mask is None:
            kept_n = None
        else:
            kept_n = flat_mask(mask, shape).nonzero()[:, 0]
            rows_B = kept_n if rows_B is None else rows_B[kept_n]

        def put_back(out: LayerOutput) -> LayerOutput:
            if kept_n is not None:
                out = _spread(out, kept_n, hidden_BD, self.stream)
            seen = None if out.looks is None else out.looks.view(len(out.looks), *hidden.shape)
            route = _shaped(out.route, shape)
            return out._replace(hidden=out.hidden.view(hidden.shape), route=route, given=given, looks=seen)

        return hidden_BD if kept_n is None else hidden_BD[kept_n], call._replace(rows=rows_B), put_back

    def run(self, hidden_BD: Tensor, call: Call) -> LayerOutput:
        """Rows (B, D) through the grid: all at once where the router has a plan, else layer by layer."""
        plan = self.router.plan(hidden_BD, call)
        if plan is not None:
            answer = operations.experts(self.experts, hidden_BD, plan.active, plan.weights, self.stream, call.looks)
            return looked(answer, call, plan.route or _unordered(plan.active), plan.loss)
        draws, choices, layers = Draws(call, hidden_BD), [], operations.unstacked(self.experts, hidden_BD)

        def update(step: int, stream_BD: Tensor) -> Tensor:
            choice = self.router.route(step, stream_BD, draws)
            choices.append(choice)
            layer = layers[step // self.router.num_rounds]
            return operations.experts(layer, stream_BD, choice.active.unsqueeze(1), choice.weights.unsqueeze(1), "last")

        num_steps = self.router.num_layers * self.router.num_rounds
        answer = run_stream(self.stream, num_steps, hidden_BD, update, call.looks)
        route = _unordered(torch.stack([choice.active for choice in choices], 1))
        losses = [choice.loss for choice in choices if choice.loss is not None]
        decisions = [choice.decision for choice in choices if choice.decision is not None]
        judge = partial(self.router.policy_loss, decisions, route.num_active) if decisions else None
        return looked(answer, call, route, torch.stack(losses).sum() if losses else None, judge)

    def looks(self, hidden_BD: Tensor, call: Call) -> Looks[LayerOutput]:
        """The vectors after no step, after the first, the second, …, of rows that go on; nothing runs for the others."""
        self.check(hidden_BD)
        check_generator(call.generator)
        router, residual = self.router, self.stream == "residual"
        rows_n = torch.arange(len(hidden_BD), device=hidden_BD.device) if call.rows is None else call.rows
        answer_nD = hidden_BD if residual else torch.zeros_like(hidden_BD)
        dtype = torch.promote_types(hidden_BD.dtype, torch.float32)
        num_steps = router.num_layers * router.num_rounds
        active_nSN = hidden_BD.new_zeros(len(hidden_BD), num_steps, router.num_experts, dtype=dtype)
        going_n = torch.zeros(len(hidden_BD), dtype=torch.bool, device=hidden_BD.device)
        kept_n = yield Look(LayerOutput(self.see(answer_nD), _unordered(active_nSN)), going_n)
        some = slice(None) if kept_n is None else kept_n
        hidden_nD, answer_nD, active_nSN, rows_n = (t[some] for t in (hidden_BD, answer_nD, active_nSN, rows_n))
        call = call._replace(rows=rows_n)
        plan, draws = router.plan(hidden_nD, call), Draws(call, hidden_nD)
        layers = operations.unstacked(self.experts, hidden_nD)
        nodes_nT = None if plan is None or plan.route is None else plan.route.nodes
        for step in range(num_steps):
            if plan is None:
                choice = router.route(step, hidden_nD, draws)
                chosen_nN, weights_nN = choice.active, choice.weights
            else:
                chosen_nN, weights_nN = plan.active[:, step], plan.weights[:, step]
            layer = layers[step // router.num_rounds]
            update_nD = operations.experts(layer, hidden_nD, chosen_nN.unsqueeze(1), weights_nN.unsqueeze(1), "last")
            hidden_nD = hidden_nD + update_nD if residual else update_nD
            answer_nD = answer_nD + update_nD if self.stream == "skip-sum" else hidden_nD
            active_nSN = active_nSN.clone()
            active_nSN[:, step] = chosen_nN.detach()
            out = LayerOutput(self.see(answer_nD), _unordered(active_nSN)._replace(nodes=nodes_nT))
            ended_n = torch.full_like(answer_nD[:, 0], step == num_steps - 1, dtype=torch.bool)
            if plan is not None and self.stream != "last":  # empty layers change nothing
                ended_n = plan.active[:, step + 1 :].sum((1, 2)) == 0
            kept_n = yield Look(out, ended_n)
            some = slice(None) if kept_n is None else kept_n
            hidden_nD, answer_nD, active_nSN = hidden_nD[some], answer_nD[some], active_nSN[some]
            draws.rows_B, nodes_nT = draws.rows_B[some], None if nodes_nT is None else nodes_nT[some]
            if plan is not None:
                plan = plan._replace(active=plan.active[some], weights=plan.weights[some])

    def see(self, hidden: Tensor) -> Tensor:
        """The stream as those after the layer see it."""
        return hidden

    def work(self, route: Route, num_steps: Tensor | None = None) -> dict[str, Work]:
        """What deciding, for `num_steps` steps or for all, and running took, for each vector."""
        active = route.active.detach()
        # An expert that runs in two rounds has its parameters once.
        used = active.unflatten(-2, (-1, self.router.num_rounds)).amax(-2).sum((-1, -2)).long()
        runs = active.sum((-1, -2)).long() if route.num_runs is None else route.num_runs
        experts = Work(
            runs * operations.expert_multiply_adds(self.experts, self.dim), used * self.experts.num_parameters
        )
        return {"routing": self.router.work(route, num_steps), "experts": experts}

    def check(self, hidden: Tensor) -> None:
        """Refuse vectors of another width."""
        if hidden.ndim == 0 or hidden.shape[-1] != self.dim:
            raise ValueError(f"hidden has shape {tuple(hidden.shape)}: the last axis must be dim={self.dim}")

    def extra_repr(self) -> str:
        return f"stream={self.stream}"


def routed_layer(
    router: type[Router],
    dim: int,
    num_layers: int,
    num_experts: int,
    *,
    expert: Callable[[], nn.Module] | None = None,
    hidden: int | None = None,
    num_hidden: int = 2,
    stream: Stream = "residual",
    **options: Any,
) -> RoutedLayer:
    """A layer of a router, made with its own options, and a grid of experts."""
    made = router(dim, num_layers, num_experts, **options)
    return RoutedLayer(made, make_grid(dim, num_layers, num_experts, expert, hidden, num_hidden), dim, stream=stream)


def flat(name: str, values: Tensor | None, shape: torch.Size) -> Tensor | None:
    """One number for each hidden vector, as (B,)."""
    if values is None:
        return None
    if values.shape not in (shape, (shape.numel(),)):
        raise ValueError(f"{name} has shape {tuple(values.shape)}: must be {tuple(shape)}, one value for each vector")
    if values.is_floating_point():
        raise ValueError(f"{name} are {values.dtype}: must be whole numbers")
    return values if values.ndim == 1 else values.reshape(-1)


def flat_mask(mask: Tensor, shape: torch.Size) -> Tensor:
    """What is no padding, for each hidden vector or sample, as (B,)."""
    require(mask.dtype == torch.bool, "mask", mask.dtype, "must be torch.bool, False where there is padding")
    flat_B = flat("mask", mask, shape)
    assert flat_B is not None
    return flat_B


def looked(answer: Tensor, call: Call, route: Route, loss: Tensor | None = None, judge: Any = None) -> LayerOutput:
    """What experts gave, (S + 1, B, D) after 0, 1, … steps if that was asked for, as a layer's output."""
    hidden_BD = answer[-1] if call.looks else answer
    return LayerOutput(hidden_BD, route, loss, judge, looks=answer if call.looks else None)


def _unordered(active_BSN: Tensor) -> Route:
    return Route(active_BSN, None, active_BSN.detach().sum((-1, -2)).long(), None)


def _shaped(route: Route, shape: torch.Size) -> Route:
    """Give every field (B, …) the leading shape that the hidden vectors came in."""
    if len(shape) == 1:
        return route
    return _map(route, lambda field: field.unflatten(0, shape) if shape else field[0])


def _spread(out: LayerOutput, kept_n: Tensor, hidden_BD: Tensor, stream: Stream) -> LayerOutput:
    """What was found for some rows put among all of them; the others activated nothing."""
    passed_BD = hidden_BD if stream == "residual" else torch.zeros_like(hidden_BD)

    def among_all(field: Tensor) -> Tensor:
        fill = -1 if field is out.route.nodes else 0
        return field.new_full((len(hidden_BD), *field.shape[1:]), fill).index_copy(0, kept_n, field)

    hidden_BD = passed_BD.index_copy(0, kept_n, out.hidden.to(passed_BD.dtype))
    seen = None
    if out.looks is not None:
        seen = passed_BD.expand(len(out.looks), *passed_BD.shape).index_copy(1, kept_n, out.looks.to(passed_BD.dtype))
    judge = None if out.judge is None else lambda losses_B: out.judge(losses_B[kept_n])  # type: ignore[misc]
    return out._replace(hidden=hidden_BD, route=_map(out.route, among_all), judge=judge, looks=seen)


def _map(route: Route, change: Callable[[Tensor], Tensor]) -> Route:
    """The same change to every tensor of a route."""
    active, nodes, num_active, rates, num_runs = route
    return Route(
        change(active),
        None if nodes is None else change(nodes),
        change(num_active),
        None if rates is None else Rates(change(rates.nodes), change(rates.output)),
        None if num_runs is None else change(num_runs),
    )
