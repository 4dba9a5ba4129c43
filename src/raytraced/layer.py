"""A routed layer: a router chooses experts for every hidden vector, a grid of experts runs them.

Axes: B batch (any leading shape, flattened), L layers, S steps (layers, times the rounds of each), N experts per layer,
D width, n rows that are still computed.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor, nn

from raytraced import kernels
from raytraced.errors import require, require_one_of
from raytraced.experts import Experts, Stream, StreamName, make_grid, run_stream
from raytraced.replay import check_followed
from raytraced.rng import RandomSource, check_generator
from raytraced.router import Call, Choice, Cost, Draws, Router
from raytraced.rows import flat, flat_mask, flat_route, flat_stop, shape_route, spread_route, unordered_route
from raytraced.sequence import Route, Select, StopPerRow

T = TypeVar("T")


class LayerOutput(NamedTuple):
    """What every routed layer returns."""

    hidden: Tensor  # (..., D), the updated vectors
    route: Route  # which experts ran, with the leading shape (...)
    loss: Tensor | None = None  # the router's own loss, weighted
    policy_loss_fn: Callable[[Tensor], Tensor] | None = None  # loss of each row (B,) -> loss of the router's decisions
    residual: Tensor | None = None  # (..., D), the input that a residual stream added the experts' outputs to
    exits: Tensor | None = None  # (S + 1, ..., D), the vectors after 0, 1, … steps, if they were asked for

    @property
    def update(self) -> Tensor:
        """What the experts add (..., D), without the layer's input: for a block used as `x + block(norm(x))`."""
        return self.hidden if self.residual is None else self.hidden - self.residual


class RoutedLayer(nn.Module):
    """A router, a grid of experts, and the stream that carries hidden vectors through the grid.

    Args:
        router: Chooses the experts of every vector.
        experts: The grid of experts.
        dim: Width of the input and output vectors.
        stream: How vectors pass from one layer of experts to the next: "residual", "skip-sum" or "last"; see
            `raytraced.experts.Stream`.
    """

    answers_along_the_way = False

    def __init__(self, router: Router, experts: Experts, dim: int, *, stream: StreamName = "residual") -> None:
        super().__init__()
        require_one_of("stream", stream, get_args(StreamName))
        self.dim, self.stream = dim, Stream(stream)
        self.router, self.experts = router, experts
        router.reset_parameters()

    def forward(
        self,
        hidden: Tensor,
        *,
        select: Select | None = None,
        max_experts: int | None = None,
        generator: RandomSource = None,
        rows: Tensor | None = None,
        mask: Tensor | None = None,
        exits: bool = False,
        stop: StopPerRow | None = None,
        route: Route | None = None,
    ) -> LayerOutput:
        """Choose experts for every vector and run them.

        Args:
            hidden: Input vectors (..., D).
            select: How raytraced layers choose the next node: "greedy" (the most probable) or "sample". Default: greedy in
                evaluation, the layer's `train_select` in training.
            max_experts: Raytraced layers run at most this many experts per vector. Default: no limit.
            generator: Source of random numbers. Default: PyTorch's global generator.
            rows: Row number of each vector (...). What a vector draws depends on the generator's seed and on this number
                alone. Default: 0, 1, 2, …
            mask: (...), bool. Vectors where it is False pass through unchanged: no routing, no load, no cost.
            exits: Whether to return the vectors before the first step and after each step too.
            stop: How much the output node's rate counts when raytraced layers choose the next node: a number, or a tensor
                (...) with a number per vector; smaller values run more experts. Default: the layer's own `stop`.
            route: A route that the layer returned for as many vectors: its experts run again, in place of a choice. Firing
                rates and weights are those of the present gates under this set, and so are their gradients.

        Returns:
            LayerOutput with `hidden` (..., D), `update` (..., D), `route` and, if asked for, `exits` (S + 1, ..., D).
        """
        call = Call(select, max_experts, generator, rows, exits, stop)
        if route is not None:
            for name, value in (("select", select), ("max_experts", max_experts), ("stop", stop)):
                require(value is None, name, value, "must be left out with route, which says what runs")
            steps, num = self.router.num_steps, self.router.num_experts
            call = call._replace(route=flat_route(route, hidden.shape[:-1], steps, num))
        if hidden.ndim == 2 and mask is None:  # Hot path at batch size 1: no reshaping.
            self.check(hidden)
            if generator is not None:
                check_generator(generator)
            if rows is not None:
                call = call._replace(rows=flat("rows", rows, hidden.shape[:1]))
            if stop is not None:
                call = call._replace(stop=flat_stop(stop, hidden.shape[:1]))
            return self.run(hidden, call)
        hidden_BD, call, put_back = self.as_rows(hidden, call, mask)
        return put_back(self.run(hidden_BD, call))

    def as_rows(
        self, hidden: Tensor, call: Call, mask: Tensor | None
    ) -> tuple[Tensor, Call, Callable[[LayerOutput], LayerOutput]]:
        """The vectors that the mask keeps as rows (B, D), the call for them, and a function that restores the shape."""
        self.check(hidden)
        check_generator(call.generator)
        shape, residual = hidden.shape[:-1], hidden if self.stream.adds_input else None
        hidden_BD, rows_B = hidden.reshape(-1, self.dim), flat("rows", call.rows, shape)
        call = call._replace(rows=rows_B, stop=flat_stop(call.stop, shape))
        kept_n: Tensor | None = None
        if mask is not None:
            kept_n = flat_mask(mask, shape).nonzero()[:, 0]
            call = call.keep(kept_n)
            call = call._replace(rows=kept_n) if rows_B is None else call

        def put_back(out: LayerOutput) -> LayerOutput:
            if kept_n is not None:
                out = _spread(out, kept_n, hidden_BD, self.stream)
            exits = None if out.exits is None else out.exits.view(len(out.exits), *hidden.shape)
            route = shape_route(out.route, shape)
            return out._replace(hidden=out.hidden.view(hidden.shape), route=route, residual=residual, exits=exits)

        return hidden_BD if kept_n is None else hidden_BD[kept_n], call, put_back

    def run(self, hidden_BD: Tensor, call: Call) -> LayerOutput:
        """Run rows through the grid: all steps at once where the router plans ahead, else step by step.

        Args:
            hidden_BD: The layer's input (B, D).
            call: Options of the call.

        Returns:
            LayerOutput of these rows.
        """
        plan = self.router.plan(hidden_BD, call)
        if plan is not None:
            check_followed(call.route, plan.active, type(self.router).__name__)
            answer = kernels.experts(self.experts, hidden_BD, plan.active, plan.weights, self.stream, call.exits)
            return self.output(hidden_BD, answer, plan.route or unordered_route(plan.active), plan.loss)
        steps = GridSteps(self, hidden_BD, call)
        answer = run_stream(self.stream, self.router.num_steps, hidden_BD, steps.update, call.exits)
        return self.output(hidden_BD, answer, *steps.result())

    def output(
        self,
        hidden_BD: Tensor,
        answer: Tensor,
        route: Route,
        loss: Tensor | None = None,
        policy_loss_fn: Callable[[Tensor], Tensor] | None = None,
    ) -> LayerOutput:
        """What the layer returns for its input (B, D).

        Args:
            hidden_BD: The layer's input (B, D).
            answer: What the grid gave: (B, D), or with exits the answers after 0, 1, … steps (S + 1, B, D).
            route: The route of every row.
            loss: The router's own loss, weighted.
            policy_loss_fn: Loss of each row (B,) -> loss of the router's decisions.
        """
        residual = hidden_BD if self.stream is Stream.RESIDUAL else None
        if answer.ndim == hidden_BD.ndim:
            return LayerOutput(answer, route, loss, policy_loss_fn, residual)
        return LayerOutput(answer[-1], route, loss, policy_loss_fn, residual, answer)

    def run_step(self, layer: Any, hidden_nD: Tensor, active_nN: Tensor, weights_nN: Tensor) -> Tensor:
        """Run one layer's active experts.

        Args:
            layer: One of `kernels.unstacked`.
            hidden_nD: The layer's input (n, D).
            active_nN: Not 0 where an expert runs (n, N).
            weights_nN: Factor of each expert's output (n, N).

        Returns:
            The weighted sum of the experts' outputs (n, D).
        """
        return run_step(layer, hidden_nD, active_nN, weights_nN)

    def exits(self, hidden_BD: Tensor, call: Call) -> "LayerExits":
        """The layer's answers after no step, after the first, the second, …, for rows that may leave on the way.

        Args:
            hidden_BD: The layer's input (B, D).
            call: Options of the call.

        Returns:
            LayerExits, whose `current` holds the newest answer and whose `advance` runs the next step.
        """
        self.check(hidden_BD)
        check_generator(call.generator)
        return LayerExits(self, hidden_BD, call._replace(stop=flat_stop(call.stop, hidden_BD.shape[:1])))

    def read_out(self, hidden: Tensor) -> Tensor:
        """Turn the vectors of the stream into those that whatever follows the layer gets; here they are the same.

        Args:
            hidden: Vectors of the stream (..., D).

        Returns:
            The layer's output vectors (..., D).
        """
        return hidden

    def cost(self, route: Route, num_steps: Tensor | None = None) -> dict[str, Cost]:
        """Count what each vector cost.

        Args:
            route: The route that the layer returned.
            num_steps: How many steps each vector was routed for (...). Default: all.

        Returns:
            Cost of "routing", and of the "experts" that ran.
        """
        active = route.active.detach()
        # An expert that runs in two rounds has its parameters once.
        used = active.unflatten(-2, (-1, self.router.num_rounds)).amax(-2).sum((-1, -2)).long()
        runs = active.sum((-1, -2)).long() if route.num_runs is None else route.num_runs
        experts = Cost(runs * kernels.expert_macs(self.experts, self.dim), used * self.experts.num_parameters)
        return {"routing": self.router.cost(route, num_steps), "experts": experts}

    def check(self, hidden: Tensor) -> None:
        """Refuse vectors of another width."""
        if hidden.ndim == 0 or hidden.shape[-1] != self.dim:
            raise ValueError(f"hidden has shape {tuple(hidden.shape)}: the last axis must be dim={self.dim}")

    def extra_repr(self) -> str:
        return f"stream={self.stream}"


def run_step(layer: Any, hidden_nD: Tensor, active_nN: Tensor, weights_nN: Tensor) -> Tensor:
    """The weighted sum of one layer's active experts (n, D)."""
    return kernels.experts(layer, hidden_nD, active_nN.unsqueeze(1), weights_nN.unsqueeze(1), Stream.LAST)


@torch.no_grad()
def set_buffers(module: nn.Module, values: list[Tensor]) -> None:
    """Give the buffers of a module these values."""
    for buffer, value in zip(module.buffers(), values, strict=True):
        buffer.copy_(value)


class GridSteps:
    """One pass of rows through the grid, step by step: the caller may run something else between two layers.

    Args:
        layer: The routed layer.
        like_BD: Vectors like those that will be given (B, D); only their number, type and device count.
        call: Options of the call.
        plan: What the router has chosen for all steps; None: it chooses at each step, from the vectors that reach it.
    """

    def __init__(self, layer: RoutedLayer, like_BD: Tensor, call: Call, plan: Choice | None = None) -> None:
        self.layer, self.plan, self.draws = layer, plan, Draws(call, like_BD)
        self.layers = kernels.unstacked(layer.experts, like_BD)
        self.choices: dict[int, Choice] = {}  # by step
        self.buffers: dict[int, list[Tensor]] | None = None  # of the router before each step, where steps may run again

    def update(self, step: int, hidden_BD: Tensor) -> Tensor:
        """The weighted sum of the experts of one step (B, D)."""
        router = self.layer.router
        if self.plan is None:
            choice = self.choose(step, hidden_BD)
        else:
            choice = Choice(self.plan.active[:, step], self.plan.weights[:, step])
        return self.layer.run_step(self.layers[step // router.num_rounds], hidden_BD, choice.active, choice.weights)

    def choose(self, step: int, hidden_BD: Tensor) -> Choice:
        """The router's choice for a step; one that is computed again, for its gradient, is the same and changes no buffer."""
        router = self.layer.router
        if self.buffers is None:
            self.choices[step] = router.route(step, hidden_BD, self.draws)
            return self.choices[step]
        present = [buffer.clone() for buffer in router.buffers()]
        if step not in self.choices:
            self.buffers[step] = present
            self.choices[step] = router.route(step, hidden_BD, self.draws)
            return self.choices[step]
        set_buffers(router, self.buffers[step])
        choice = router.route(step, hidden_BD, self.draws)
        set_buffers(router, present)
        return choice

    def update_layer(self, number: int, hidden_BD: Tensor) -> Tensor:
        """What a layer of the grid adds to its input (B, D); where it runs in several rounds, each adds to the next's input."""
        first, *rest = range(number * self.layer.router.num_rounds, (number + 1) * self.layer.router.num_rounds)
        total_BD = self.update(first, hidden_BD)
        for step in rest:
            total_BD = total_BD + self.update(step, hidden_BD + total_BD)
        return total_BD

    def result(self) -> tuple[Route, Tensor | None, Callable[[Tensor], Tensor] | None]:
        """After the last step: the route, the router's own loss, and the loss of its decisions."""
        name = type(self.layer.router).__name__
        if self.plan is not None:
            check_followed(self.draws.route, self.plan.active, name)
            return self.plan.route or unordered_route(self.plan.active), self.plan.loss, None
        choices = list(self.choices.values())
        route = unordered_route(torch.stack([choice.active for choice in choices], 1))
        check_followed(self.draws.route, route.active, name)
        losses = [choice.loss for choice in choices if choice.loss is not None]
        decisions = [choice.decision for choice in choices if choice.decision is not None]
        policy_loss_fn = partial(self.layer.router.policy_loss, decisions, route.num_active) if decisions else None
        return route, torch.stack(losses).sum() if losses else None, policy_loss_fn


class Exit(NamedTuple, Generic[T]):
    """An answer on the way, for the rows that are still computed."""

    output: T
    ended: Tensor  # (n,), True where every later exit would give the same answer


class LayerExits:
    """Answers of a routed layer after no step, after the first, the second, …; see `raytraced.early_exit.Exits`.

    Nothing is chosen or drawn before the first `advance`, and nothing runs for rows that have left.
    """

    def __init__(self, layer: RoutedLayer, hidden_BD: Tensor, call: Call) -> None:
        router, dtype = layer.router, torch.promote_types(hidden_BD.dtype, torch.float32)
        self.layer, self.call, self.step = layer, call, 0
        self.state = layer.stream.start(hidden_BD)
        self.active_nSN = hidden_BD.new_zeros(len(hidden_BD), router.num_steps, router.num_experts, dtype=dtype)
        self.draws = Draws(call, hidden_BD)
        self.plan: Choice | None = None
        self.current = self._exit(torch.zeros(len(hidden_BD), dtype=torch.bool, device=hidden_BD.device))

    def advance(self, rows: Tensor | None = None) -> None:
        """Run the next step for some of the current rows (numbers, default: all) and set `current` to its answer."""
        require(self.step < self.layer.router.num_steps, "exits", self.step, "there is no further step; see `ended`")
        self._keep(slice(None) if rows is None else rows)
        if self.step == 0:
            self._start()
        step, router, stream = self.step, self.layer.router, self.layer.stream
        if self.plan is None:
            choice = router.route(step, self.state.hidden, self.draws)
            active_nN, weights_nN = choice.active, choice.weights
        else:
            active_nN, weights_nN = self.plan.active[:, step], self.plan.weights[:, step]
        update_nD = run_step(self.layers[step // router.num_rounds], self.state.hidden, active_nN, weights_nN)
        self.state = stream.step(self.state, update_nD)
        self.active_nSN = self.active_nSN.clone()  # earlier answers keep theirs
        self.active_nSN[:, step] = active_nN.detach()
        self.step = step + 1
        ended_n = torch.full_like(update_nD[:, 0], self.step == router.num_steps, dtype=torch.bool)
        if self.plan is not None and stream.skips_empty_layers:
            ended_n = self.plan.active[:, self.step :].sum((1, 2)) == 0
        self.current = self._exit(ended_n)

    def _start(self) -> None:
        """Plan all steps for the rows that take the first one."""
        hidden_nD = self.state.hidden
        self.plan = self.layer.router.plan(hidden_nD, self.call._replace(rows=self.draws.rows_B))
        self.layers = kernels.unstacked(self.layer.experts, hidden_nD)

    def _keep(self, rows: Tensor | slice) -> None:
        hidden_nD, answer_nD = self.state
        self.state = self.state._replace(hidden=hidden_nD[rows], answer=answer_nD[rows])
        self.active_nSN = self.active_nSN[rows]
        self.draws.keep(rows)
        self.call = self.call.keep(rows)
        if self.plan is not None:
            active, weights, route = self.plan.active[rows], self.plan.weights[rows], self.plan.route
            nodes_nT = None if route is None or route.nodes is None else route.nodes[rows]
            route = None if route is None else route._replace(nodes=nodes_nT)
            self.plan = self.plan._replace(active=active, weights=weights, route=route)

    def _exit(self, ended_n: Tensor) -> Exit[LayerOutput]:
        nodes_nT = None if self.plan is None or self.plan.route is None else self.plan.route.nodes
        route = unordered_route(self.active_nSN)._replace(nodes=nodes_nT)
        return Exit(LayerOutput(self.layer.read_out(self.state.answer), route), ended_n)


def router_width(dim: int, routing_dim: int | None) -> int:
    """The width of the vectors that a layer's router reads: that of the layer's input, unless another is given."""
    is_width = type(routing_dim) is int and routing_dim >= 1
    rule = f"must be a whole number, at least 1, or None for dim={dim}"
    require(routing_dim is None or is_width, "routing_dim", repr(routing_dim), rule)
    return dim if routing_dim is None else routing_dim


def routed_layer(
    router: type[Router],
    dim: int,
    num_layers: int,
    num_experts: int,
    *,
    expert: Callable[[], nn.Module] | None = None,
    hidden: int | None = None,
    num_hidden: int = 2,
    stream: StreamName = "residual",
    routing_dim: int | None = None,
    **options: Any,
) -> RoutedLayer:
    """Build a routed layer from a router class and a grid of experts.

    Args:
        router: The class of the router, for instance `raytraced.routers.top_k.TopK` or your own subclass of `Router`.
        dim: Width of the input and output vectors.
        num_layers: Number of expert layers in the grid.
        num_experts: Number of experts per layer.
        expert: Factory of custom experts, called once per node; each maps (n, dim) to (n, dim). Default: MLPs.
        hidden: Inner width of the default MLP experts. Default: `dim`.
        num_hidden: Number of hidden layers of the default MLP experts.
        stream: How vectors pass from one layer to the next: "residual", "skip-sum" or "last".
        routing_dim: Width of the vectors that the router reads, where a model plans by others than the layer's input.
            Default: `dim`.
        **options: Keyword options of the router.

    Returns:
        The layer.
    """
    made = router(router_width(dim, routing_dim), num_layers, num_experts, **options)
    return RoutedLayer(made, make_grid(dim, num_layers, num_experts, expert, hidden, num_hidden), dim, stream=stream)


def _spread(out: LayerOutput, kept_n: Tensor, hidden_BD: Tensor, stream: Stream) -> LayerOutput:
    """The output for all rows, from the output for those that the mask kept; the others activated nothing."""
    passed_BD = stream.start(hidden_BD).answer
    route = spread_route(out.route, kept_n, len(hidden_BD))
    hidden_BD = passed_BD.index_copy(0, kept_n, out.hidden.to(passed_BD.dtype))
    exits = None
    if out.exits is not None:
        exits = passed_BD.expand(len(out.exits), *passed_BD.shape).index_copy(1, kept_n, out.exits.to(passed_BD.dtype))
    policy_loss_fn = None if out.policy_loss_fn is None else lambda losses_B: out.policy_loss_fn(losses_B[kept_n])  # type: ignore[misc]
    return out._replace(hidden=hidden_BD, route=route, policy_loss_fn=policy_loss_fn, exits=exits)
