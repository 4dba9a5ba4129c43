"""Raytraced experts: an entry gate, the routing network, the activation sequence and experts as one layer.

Axes: B batch, L layers, N experts a layer, O = N + 1 outlets of a gate, D width, T steps.
"""

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from raytraced import operations
from raytraced.draws import DrawsFrom, new_seed
from raytraced.grid import Stream, make_grid, run_dense
from raytraced.layer import Call, Choice, LayerOutput, RoutedLayer, Router, Work, flat, looked
from raytraced.routing import GateInit, RoutingNetwork, entry_rates, sight_logits
from raytraced.sequence import WEIGHTINGS, Estimator, Route, Select, Stop, check_sequence_options
from raytraced.words import require, require_one_of

Weighting = Literal["unit", "rates-to-one", "rates"]
MaskGradient = Literal["all", "active"]


def activation_sequence(
    routing: RoutingNetwork,
    entry: Tensor,
    *,
    select: Select = "sample",
    stop: Stop = "drawn",
    estimator: Estimator = "none",
    temperature: float = 20.0,
    max_experts: int | None = None,
    generator: DrawsFrom = None,
    rows: Tensor | None = None,
    sight: Tensor | None = None,
) -> Route:
    """Find every sample's activation sequence from its entry rates (B, N), before any expert runs.

    `sight` (B, L − 1, N, N + 1) is added to the logits of the gates.

    One seed is taken from `generator`; what a sample draws then depends on that seed and its row number alone
    (`rows`, default 0 … B − 1: pass the numbers of a larger batch to draw as its part).
    """
    check_sequence_options(
        select=select, stop=stop, estimator=estimator, temperature=temperature, max_experts=max_experts
    )
    return operations.sequence(
        routing,
        entry.to(torch.promote_types(entry.dtype, torch.float32)),
        sight_BLNO=sight,
        stop=stop,
        estimator=estimator,
        temperature=temperature,
        num_steps=routing.num_nodes if max_experts is None else min(max_experts, routing.num_nodes),
        seed=new_seed(generator, entry.device) if select == "sample" else None,
        rows_B=flat("rows", rows, entry.shape[:1]),
    )


class RaytracedRouter(Router):
    """The paper's router: rays that enter by a gate on the hidden vector, and the set of nodes that they light."""

    def __init__(
        self,
        dim: int,
        num_layers: int,
        num_experts: int,
        *,
        weighting: Weighting,
        estimator: Estimator,
        temperature: float,
        stop: Stop,
        train_select: Select,
        gate_init: GateInit,
        scale_init: bool,
        reach: float,
        sight_rank: int,
    ) -> None:
        super().__init__(dim, num_layers, num_experts, num_outlets=0)
        require_one_of("weighting", weighting, WEIGHTINGS)
        require_one_of("train_select", train_select, get_args(Select))
        check_sequence_options(select=train_select, stop=stop, estimator=estimator, temperature=temperature)
        if estimator == "none" and weighting == "unit":
            raise ValueError("estimator=none: only rates then teach the routing, and weighting=unit leaves them out")
        is_rank = isinstance(sight_rank, Integral) and sight_rank >= 0
        rule = "must be a whole number, at least 0; 0: gates see rates alone, as the paper's"
        require(is_rank, "sight_rank", repr(sight_rank), rule)
        self.weighting, self.estimator, self.temperature = weighting, estimator, temperature
        self.stop, self.train_select = stop, train_select
        self.routing = RoutingNetwork(num_layers, num_experts, gate_init=gate_init, scale_init=scale_init, reach=reach)
        # Parameters, not a module to call: one library call may read them along with all the rest.
        self.gate = nn.ParameterDict(dict(nn.Linear(dim, num_experts).named_parameters()))
        self.sight_in: nn.Parameter | None = None
        if sight_rank and num_layers > 1:
            self.sight_in = nn.Parameter(nn.Linear(dim, sight_rank, bias=False).weight)
            self.sight_out = nn.Parameter(torch.zeros(num_layers - 1, num_experts, num_experts + 1, sight_rank))

    def entry(self, hidden_BD: Tensor) -> Tensor:
        """The rates that enter the first layer (B, N), at least in float32."""
        return entry_rates(hidden_BD, self.gate["weight"], self.gate["bias"])

    def sight(self, hidden_BD: Tensor) -> Tensor | None:
        """What gates that see the layer's input add to their logits (B, L − 1, N, O); nothing at the start of training."""
        return None if self.sight_in is None else sight_logits(hidden_BD, self.sight_in, self.sight_out)

    def maps(self) -> tuple[Tensor, ...]:
        """What is made of the hidden vector: the entry gate's weight and bias, then the two maps of gates that see it."""
        gate, sight_in = self.gate, self.sight_in  # a module looks every name up for long, and one image waits for it
        entry = gate["weight"], gate["bias"]
        return entry if sight_in is None else (*entry, sight_in, self.sight_out)

    def how(self, call: Call) -> Select:
        """Greedy unless asked otherwise; in training as the layer was made."""
        return call.select or (self.train_select if self.training else "greedy")

    def options(self, call: Call) -> dict[str, Any]:
        """Those of a sequence, checked."""
        select, budget, num_nodes = self.how(call), call.max_experts, self.num_layers * self.num_experts
        if select not in ("greedy", "sample") or (budget is not None and (type(budget) is not int or budget < 0)):
            check_sequence_options(select=select, stop=self.stop, estimator=self.estimator, max_experts=budget)
        return {
            "stop": self.stop,
            "estimator": self.estimator,
            "temperature": self.temperature,
            "num_steps": num_nodes if budget is None else min(budget, num_nodes),
        }

    def sequence(self, hidden_BD: Tensor, call: Call) -> Route:
        """The activation sequences that hidden vectors lead to; no expert runs."""
        return activation_sequence(
            self.routing,
            self.entry(hidden_BD),
            sight=self.sight(hidden_BD),
            select=self.how(call),
            stop=self.stop,
            estimator=self.estimator,
            temperature=self.temperature,
            max_experts=call.max_experts,
            generator=call.generator,
            rows=call.rows,
        )

    def weigh(self, route: Route) -> Tensor:
        """How much each expert's output counts (B, L, N)."""
        assert route.rates is not None
        return WEIGHTINGS[self.weighting](route.active, route.rates.nodes)

    def plan(self, hidden_BD: Tensor, call: Call) -> Choice:
        """The whole path is a function of the layer's input: it is known before any expert runs."""
        route = self.sequence(hidden_BD, call)
        return Choice(route.active, self.weigh(route), route=route)

    def work(self, route: Route, num_steps: Tensor | None = None) -> Work:
        """The entry gate, and the gates that sequences evaluate, each step redoing no more than it changed.

        A new node evaluates its own gate, and those of the active nodes in all layers below it, whose inputs it has changed.
        Nodes beside it and above it keep theirs. Inactive nodes need none: their firing rate is a sum.
        """
        N, L, nodes = self.num_experts, self.num_layers, route.nodes
        if nodes is None:  # everyone was sure before the first step
            nodes = route.num_active.new_empty(*route.num_active.shape, 0)
        gate_L = torch.tensor(self.gate_sizes(), device=nodes.device)
        layers_L = torch.arange(L, device=nodes.device)
        drawn_BT1, layer_BT1 = (nodes >= 0)[..., None], (nodes // N)[..., None]
        joins_BTL = drawn_BT1 & (layers_L == layer_BT1)
        redone_BTL = torch.where(joins_BTL, 1, joins_BTL.cumsum(-2)) * (drawn_BT1 & (layers_L >= layer_BT1))
        work_B, count_BL = (redone_BTL * gate_L).sum((-1, -2)), joins_BTL.sum(-2)
        weight, bias, rank = self.gate["weight"].numel(), self.gate["bias"].numel(), 0
        if self.sight_in is not None:  # seen once, and told to the gates of active nodes
            rank, weight = len(self.sight_in), weight + self.sight_in.numel()
        seen_B = count_BL[..., :-1].sum(-1) * rank * (N + 1)
        work = Work(work_B + seen_B + weight, (count_BL * gate_L).sum(-1) + seen_B + weight + bias)
        # Known before any step runs: all of it, unless not even the first was asked for.
        return work if num_steps is None else Work(*(part * (num_steps > 0) for part in work))

    def gate_sizes(self) -> list[int]:
        """The multiply-adds of one node's gate, W·x with W (O, K), in each layer; also its parameters. The last has none."""
        N, L = self.num_experts, self.num_layers
        return [(N + 1) * (1 if layer == 0 else N) if layer < L - 1 else 0 for layer in range(L)]


class RaytracedExperts(RoutedLayer):
    """A grid of experts of which every input vector runs its own sequence; hidden (..., D) in and out.

    The defaults are our recipe; `RaytracedExperts(dim, num_layers, num_experts, **raytraced.PAPER)` is the paper's.
    """

    answers_along_the_way = True
    router: RaytracedRouter

    def __init__(
        self,
        dim: int,
        num_layers: int,
        num_experts: int,
        *,
        expert: Callable[[], nn.Module] | None = None,
        hidden: int | None = None,
        num_hidden: int = 2,
        stream: Stream = "residual",
        weighting: Weighting = "rates-to-one",
        mask_gradient: MaskGradient = "active",
        estimator: Estimator = "none",
        temperature: float = 20.0,
        stop: Stop = "drawn",
        train_select: Select = "greedy",
        gate_init: GateInit = "normal",
        scale_init: bool = True,
        reach: float = 5.0,
        sight_rank: int = 4,
    ) -> None:
        require_one_of("mask_gradient", mask_gradient, get_args(MaskGradient))
        router = RaytracedRouter(
            dim,
            num_layers,
            num_experts,
            weighting=weighting,
            estimator=estimator,
            temperature=temperature,
            stop=stop,
            train_select=train_select,
            gate_init=gate_init,
            scale_init=scale_init,
            reach=reach,
            sight_rank=sight_rank,
        )
        super().__init__(
            router, make_grid(dim, num_layers, num_experts, expert, hidden, num_hidden), dim, stream=stream
        )
        self.mask_gradient = mask_gradient

    def run(self, hidden_BD: Tensor, call: Call) -> LayerOutput:
        if torch.is_grad_enabled() and self.mask_gradient == "all":
            # A mask's gradient is what its expert would give: inactive experts run too.
            plan = self.router.plan(hidden_BD, call)
            assert plan.route is not None
            answer = run_dense(self.experts, hidden_BD, plan.active, plan.weights, self.stream, call.looks, True)
            return looked(answer, call, plan.route)
        router = self.router  # a module looks every name up for long, and one image waits for it
        options = router.options(call)
        seed = new_seed(call.generator, hidden_BD.device) if router.how(call) == "sample" else None
        answer, route = operations.raytrace(
            self.traced(router), hidden_BD, looks=call.looks, seed=seed, rows_B=call.rows, **options
        )
        return looked(answer, call, route)

    def until_sure(
        self,
        hidden_BD: Tensor,
        call: Call,
        head: nn.Module,
        sure: Sequence[float],
        mask_B: Tensor | None,
        in_looks: Callable[[], operations.Answered],
    ) -> operations.Answered:
        """What the output layer says of each row when it is sure first; `in_looks` asks it after one layer and the next."""
        router = self.router
        if router.how(call) == "sample":  # draws wait until it is known that someone goes on
            return in_looks()
        self.check(hidden_BD)
        options = router.options(call)
        return operations.until_sure(self.traced(router), hidden_BD, head, sure, mask_B, in_looks, **options)

    def traced(self, router: RaytracedRouter) -> operations.Traced:
        """What one call may run as a whole."""
        return operations.Traced(router.routing, self.experts, router.maps(), router.weighting, self.stream)

    def extra_repr(self) -> str:
        return f"stream={self.stream}, mask_gradient={self.mask_gradient}"
