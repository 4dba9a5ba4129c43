"""Raytraced experts: an entry gate, the routing network, the activation sequence and experts as one layer.

Axes: B batch, L layers, N experts per layer, O = N + 1 outlets of a gate, D width, T steps.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from raytraced import kernels
from raytraced.early_exit import ExitPolicy
from raytraced.errors import check_budget
from raytraced.experts import Stream, make_grid, run_dense
from raytraced.layer import LayerOutput, RoutedLayer, router_width
from raytraced.replay import check_gradient
from raytraced.rng import RandomSource, log_uniform, new_seed
from raytraced.router import Call, Choice, Cost, Fusable, Router
from raytraced.routers.raytraced_config import RaytracedConfig
from raytraced.routing import RoutingNetwork, entry_rates, input_logits
from raytraced.rows import flat, flat_stop
from raytraced.sequence import Estimator, Route, Select, StopPerRow, check_sequence_options, expert_weights


def activation_sequence(
    routing: RoutingNetwork,
    entry: Tensor,
    *,
    select: Select = "sample",
    stop: StopPerRow = "drawn",
    estimator: Estimator = "none",
    temperature: float = 20.0,
    max_experts: int | None = None,
    generator: RandomSource = None,
    rows: Tensor | None = None,
    input_logits: Tensor | None = None,
) -> Route:
    """Find the activation sequence of every sample, before any expert runs.

    Args:
        routing: The routing network.
        entry: The rates that enter the first layer (B, N); each row sums to one.
        select: "sample" draws the next node by its firing rate, "greedy" takes the node with the largest one.
        stop: When a sequence ends: "drawn", when the output node is chosen like any other; "dominant", when its rate exceeds
            all others (the paper's footnote); or a number by which the output node's rate is multiplied before the choice:
            smaller values run more experts. A tensor (B,) has a number per sample.
        estimator: How gradients pass through a draw: "reinmax", "gumbel" (the paper's), "straight-through", or "none".
        temperature: Of the "gumbel" estimator.
        max_experts: A sequence has at most this many experts. Default: no limit.
        generator: Source of random numbers; one seed is taken from it. Default: PyTorch's global generator.
        rows: Row number of each sample (B,). Its draws depend on the seed and this number alone. Default: 0 … B − 1.
        input_logits: (B, L − 1, N, N + 1), added to the logits of the gates.

    Returns:
        Route with `active` (B, L, N), `nodes` (B, T), `num_active` (B,) and `rates` under the final set.
    """
    check_sequence_options(
        select=select, stop=stop, estimator=estimator, temperature=temperature, max_experts=max_experts
    )
    return kernels.sequence(
        routing,
        entry.to(torch.promote_types(entry.dtype, torch.float32)),
        input_logits_BLNO=input_logits,
        stop=flat_stop(stop, entry.shape[:1]),
        estimator=estimator,
        temperature=temperature,
        num_steps=routing.num_nodes if max_experts is None else min(max_experts, routing.num_nodes),
        seed=new_seed(generator, entry.device) if select == "sample" else None,
        rows_B=flat("rows", rows, entry.shape[:1]),
    )


def _member(module: nn.Module, name: str) -> Any:
    """getattr(module, name). Hot path at batch size 1: nn.Module's look-up of a parameter or a part takes 1 µs."""
    found: Any = module._parameters.get(name)
    if found is None:
        found = module._modules.get(name)
    return getattr(module, name) if found is None else found


class RaytracedRouter(Fusable, Router):
    """The paper's router: an entry gate on the hidden vector, the routing network, and the activation sequence.

    Args:
        dim: Width of the hidden vectors.
        num_layers: Number of expert layers in the grid.
        num_experts: Number of experts per layer.
        config: Options; see `RaytracedConfig`.
    """

    fuses = True
    plans = True

    def __init__(self, dim: int, num_layers: int, num_experts: int, config: RaytracedConfig) -> None:
        super().__init__(dim, num_layers, num_experts, num_outlets=0)
        config = self.config = config.for_grid(num_layers, num_experts)
        self.routing = RoutingNetwork(
            num_layers,
            num_experts,
            gate_init=config.gate_init,
            scale_init=config.scale_init,
            output_logit_offset=config.output_logit_offset,
        )
        # Parameters, not a module to call: one compiled call may read them along with all the rest.
        self.gate = nn.ParameterDict(dict(nn.Linear(dim, num_experts).named_parameters()))
        if config.entry_scale != 1:
            with torch.no_grad():
                for parameter in self.gate.values():
                    parameter *= config.entry_scale
        # The names of these two are those of stored tensors.
        self.sight_in: nn.Parameter | None = None
        if config.input_rank and num_layers > 1:
            self.sight_in = nn.Parameter(nn.Linear(dim, config.input_rank, bias=False).weight)
            self.sight_out = nn.Parameter(torch.zeros(num_layers - 1, num_experts, num_experts + 1, config.input_rank))
            if config.input_init_std:
                nn.init.normal_(self.sight_out, std=config.input_init_std)

    def entry(self, hidden_BD: Tensor) -> Tensor:
        """The rates that enter the first layer (B, N), at least in float32."""
        return entry_rates(hidden_BD, self.gate["weight"], self.gate["bias"])

    def input_logits(self, hidden_BD: Tensor) -> Tensor | None:
        """What input-conditioned gates add to their logits (B, L − 1, N, O); a fresh map has deviation `input_init_std`."""
        return None if self.sight_in is None else input_logits(hidden_BD, self.sight_in, self.sight_out)

    def input_maps(self) -> tuple[Tensor, ...]:
        """The linear maps of the hidden vector: the entry gate's weight and bias, then the two of input-conditioned gates."""
        gate, sight_in = _member(self, "gate"), _member(self, "sight_in")
        entry = _member(gate, "weight"), _member(gate, "bias")
        return entry if sight_in is None else (*entry, sight_in, _member(self, "sight_out"))

    def resolve_select(self, call: Call) -> Select:
        """How nodes are chosen: as the call asks, else greedily in evaluation and by `train_select` in training."""
        return call.select or (self.config.train_select if self.training else "greedy")

    def draws_stop(self, call: Call) -> bool:
        """Whether each row's rule for the output node is drawn from `stop_range`: in training, where the call has none."""
        return self.training and call.stop is None and self.config.stop_range is not None

    def resolve_stop(self, call: Call, hidden_BD: Tensor) -> StopPerRow:
        """The rule for the output node: the call's, one drawn for each row from `stop_range` in training, or the layer's.

        What is drawn depends on the seed and the row number alone; the seed is taken from the call's generator.
        """
        if not self.draws_stop(call):
            return self.config.stop if call.stop is None else call.stop
        assert self.config.stop_range is not None
        seed = new_seed(call.generator, hidden_BD.device)
        rows_B = torch.arange(len(hidden_BD), device=hidden_BD.device) if call.rows is None else call.rows
        return log_uniform(seed, rows_B, *self.config.stop_range)

    def sequence_options(self, call: Call, hidden_BD: Tensor) -> dict[str, Any]:
        """The options of the activation sequence for one call, checked."""
        config, select, budget = self.config, self.resolve_select(call), call.max_experts
        if select not in ("greedy", "sample") or (budget is not None and (type(budget) is not int or budget < 0)):
            check_sequence_options(select=select, stop=config.stop, estimator=config.estimator, max_experts=budget)
        num_nodes = self.num_layers * self.num_experts
        return {
            "stop": self.resolve_stop(call, hidden_BD),
            "estimator": config.estimator,
            "temperature": config.temperature,
            "num_steps": num_nodes if budget is None else min(budget, num_nodes),
        }

    def replay_options(self, route: Route) -> dict[str, Any]:
        """The options of the activation sequence where a recorded route is followed."""
        check_gradient(route, self.config.estimator)
        given = {"stop": "drawn", "num_steps": self.routing.num_nodes, "seed": None, "rows_B": None, "followed": route}
        return given | {"estimator": self.config.estimator, "temperature": self.config.temperature}

    def sequence(self, hidden_BD: Tensor, call: Call) -> Route:
        """The activation sequences of hidden vectors (B, D); no expert runs."""
        if call.route is not None:
            entry_BN, input_logits_BLNO = self.entry(hidden_BD), self.input_logits(hidden_BD)
            options = self.replay_options(call.route)
            return kernels.sequence(self.routing, entry_BN, input_logits_BLNO=input_logits_BLNO, **options)
        return activation_sequence(
            self.routing,
            self.entry(hidden_BD),
            input_logits=self.input_logits(hidden_BD),
            select=self.resolve_select(call),
            stop=self.resolve_stop(call, hidden_BD),
            estimator=self.config.estimator,
            temperature=self.config.temperature,
            max_experts=call.max_experts,
            generator=call.generator,
            rows=call.rows,
        )

    def weigh(self, route: Route) -> Tensor:
        """The factor of each expert's output (B, L, N)."""
        assert route.rates is not None
        return expert_weights(self.config.weighting, route.active, route.rates.nodes, self.config.weight_scale)

    def plan(self, hidden_BD: Tensor, call: Call) -> Choice:
        """The path through all layers: it depends on the layer's input alone, so it is known before any expert runs."""
        route = self.sequence(hidden_BD, call)
        return Choice(route.active, self.weigh(route), route=route)

    def alike(self, call: Call) -> bool:
        check_budget(call.max_experts)  # before a plan is looked up, where True and 1.0 would find that of 1
        differs = isinstance(call.stop, Tensor) or self.draws_stop(call)  # by row, not by vector
        return self.resolve_select(call) == "greedy" and not differs and call.route is None

    def cost(self, route: Route, num_steps: Tensor | None = None) -> Cost:
        """The cost of the entry gate and of the gates that each step of a sequence evaluates anew.

        A new node evaluates its own gate, and those of the active nodes in all layers below it, whose inputs it has changed.
        Nodes beside it and above it keep theirs. Inactive nodes need none: their firing rate is a sum.
        """
        N, L, nodes = self.num_experts, self.num_layers, route.nodes
        if nodes is None:  # every sample left before the first step
            nodes = route.num_active.new_empty(*route.num_active.shape, 0)
        gate_L = torch.tensor(self.gate_sizes(), device=nodes.device)
        layers_L = torch.arange(L, device=nodes.device)
        drawn_BT1, layer_BT1 = (nodes >= 0)[..., None], (nodes // N)[..., None]
        joins_BTL = drawn_BT1 & (layers_L == layer_BT1)
        redone_BTL = torch.where(joins_BTL, 1, joins_BTL.cumsum(-2)) * (drawn_BT1 & (layers_L >= layer_BT1))
        work_B, count_BL = (redone_BTL * gate_L).sum((-1, -2)), joins_BTL.sum(-2)
        weight, bias, rank = self.gate["weight"].numel(), self.gate["bias"].numel(), 0
        if self.sight_in is not None:  # computed once, then added to the logits of active nodes' gates
            rank, weight = len(self.sight_in), weight + self.sight_in.numel()
        from_input_B = count_BL[..., :-1].sum(-1) * rank * (N + 1)
        cost = Cost(work_B + from_input_B + weight, (count_BL * gate_L).sum(-1) + from_input_B + weight + bias)
        # Known before any step runs: all of it, unless not even the first was asked for.
        return cost if num_steps is None else Cost(*(part * (num_steps > 0) for part in cost))

    def gate_sizes(self) -> list[int]:
        """The multiply-adds of one node's gate, W·x with W (O, K), in each layer; also its parameters. The last has none."""
        N, L = self.num_experts, self.num_layers
        return [(N + 1) * (1 if layer == 0 else N) if layer < L - 1 else 0 for layer in range(L)]


class RaytracedExperts(Fusable, RoutedLayer):
    """A grid of experts through which every input vector takes its own path.

    Args:
        dim: Width of the input and output vectors.
        num_layers: Number of expert layers in the grid.
        num_experts: Number of experts per layer.
        expert: Factory of custom experts, called once per node; each maps (n, dim) to (n, dim). Default: MLPs.
        hidden: Inner width of the default MLP experts. Default: `dim`.
        num_hidden: Number of hidden layers of the default MLP experts.
        routing_dim: Width of the vectors that the router reads, where a model plans by others than the layer's input.
            Default: `dim`.
        config: All further options, as a `RaytracedConfig`; or give them one by one as keyword arguments:
        stream: How vectors pass from one layer to the next: "residual", "skip-sum" or "last".
        weighting: Factor of an expert's output: "unit" (1), "rates-to-one" or "rates" (firing rates that sum to one, or to
            the number of active experts, in every layer), or "relative" (the rate over the largest active rate of the
            layer, a constant to the gradient: a weight does not change when experts of smaller rates join). "auto":
            "relative" in grids of one or two layers or of one or two experts per layer, else "rates-to-one".
        weight_scale: A constant by which all these factors are multiplied.
        mask_gradient: Which experts get a gradient for their place in the mask: "active" or "all" (all experts then run).
        estimator: How gradients pass through a draw: "none", "reinmax", "gumbel" or "straight-through".
        temperature: Of the "gumbel" estimator.
        stop: When a sequence ends: "drawn", "dominant", or how much the output node's firing rate counts when the next node
            is chosen; smaller values run more experts.
        stop_range: In training, where a call gives no `stop`, one is drawn log-uniformly from this range, (low, high), for
            each vector: one model for many budgets. Default: none, `stop` holds in training too.
        train_select: How nodes are chosen in training: "greedy" or "sample".
        gate_init: Initial distribution of the gates' weights: "normal" or "uniform".
        scale_init: Whether to scale the initial gates by √(num_experts + 1), as the paper does.
        output_logit_offset: How much lower the initial weights towards the output node are; larger values start with longer
            sequences.
        input_rank: Rank of the map by which gates also depend on the layer's input; 0: on firing rates alone.
        entry_scale: Factor of the initial entry gate's logits; larger values start with sharper entry rates.
        input_init_std: Standard deviation of the initial map from rank `input_rank` to the gates' logits; 0: zeros.

    The defaults are our recipe; `RaytracedExperts(dim, num_layers, num_experts, **raytraced.PAPER)` is the paper's.

    Returns (from `forward`):
        LayerOutput with `hidden` (..., dim), `update` (..., dim) and `route`: `active` (..., L, N), `nodes` (..., T) in order
        of activation, padded with −1, `num_active` (...), and `rates` with `nodes` (..., L, N) and `output` (...).
    """

    answers_along_the_way = True
    fuses = True
    config_type = RaytracedConfig
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
        config: RaytracedConfig | None = None,
        routing_dim: int | None = None,
        **options: Any,
    ) -> None:
        if config is None:
            config = RaytracedConfig(**options)
        elif options:
            raise ValueError(f"{', '.join(options)}: give either config or single options, not both")
        router = RaytracedRouter(router_width(dim, routing_dim), num_layers, num_experts, config)
        grid = make_grid(dim, num_layers, num_experts, expert, hidden, num_hidden)
        super().__init__(router, grid, dim, stream=config.stream)
        # A model on the meta device is about to get trained weights, or is only measured.
        if not router.gate["weight"].is_meta and (reason := untrainable_reason(router)):
            shape = f"num_layers={num_layers}, num_experts={num_experts}"
            warnings.warn(f"RaytracedExperts({dim}, {shape}): its gates never learn to route: {reason}", stacklevel=2)

    def run(self, hidden_BD: Tensor, call: Call) -> LayerOutput:
        router: RaytracedRouter = _member(self, "router")
        if torch.is_grad_enabled() and router.config.mask_gradient == "all":
            return self._run_all(hidden_BD, call)
        if not (self.fuses and router.fuses):
            return super().run(hidden_BD, call)
        if call.route is not None:
            options = router.replay_options(call.route)
        else:
            options = router.sequence_options(call, hidden_BD)
            options["seed"] = (
                new_seed(call.generator, hidden_BD.device) if router.resolve_select(call) == "sample" else None
            )
            options["rows_B"] = call.rows
        answer, route = kernels.raytrace(self.kernel_args(router), hidden_BD, exits=call.exits, **options)
        return self.output(hidden_BD, answer, route)

    def _run_all(self, hidden_BD: Tensor, call: Call) -> LayerOutput:
        """Run every expert on every row: the gradient of an inactive expert's mask is what the expert would give."""
        plan = self.router.plan(hidden_BD, call)
        assert plan.route is not None
        answer = run_dense(self.experts, hidden_BD, plan.active, plan.weights, self.stream, call.exits, True)
        return self.output(hidden_BD, answer, plan.route)

    def run_step(self, layer: Any, hidden_nD: Tensor, active_nN: Tensor, weights_nN: Tensor) -> Tensor:
        if torch.is_grad_enabled() and self.router.config.mask_gradient == "all":
            active_n1N, weights_n1N = active_nN.unsqueeze(1), weights_nN.unsqueeze(1)
            return run_dense(layer, hidden_nD, active_n1N, weights_n1N, Stream.LAST, needs_inactive=True)
        return super().run_step(layer, hidden_nD, active_nN, weights_nN)

    def fused_early_exit(
        self, hidden_BD: Tensor, call: Call, head: nn.Module, policy: ExitPolicy, mask_B: Tensor | None
    ) -> kernels.EarlyExitResult | None:
        """Early exit through this layer and an output layer in one compiled call; None where there is none for it.

        Args:
            hidden_BD: The layer's input (B, D).
            call: Options of the call.
            head: The output layer, which turns hidden vectors into logits.
            policy: When a row leaves.
            mask_B: (B,), rows that are False take the first answer. None: all rows are True.
        """
        router = self.router
        supported = policy.exit_every == "layer" and policy.deadline is None and policy.confidence is not None
        if not (supported and self.fuses and router.fuses and router.resolve_select(call) == "greedy"):
            return None
        if router.draws_stop(
            call
        ):  # a seed taken here would be taken once more by the exits, where there is no fused call
            return None
        self.check(hidden_BD)
        thresholds = [policy.threshold(number) for number in range(router.num_layers + 1)]
        options = router.sequence_options(call, hidden_BD)
        return kernels.early_exit(self.kernel_args(router), hidden_BD, head, thresholds, mask_B, **options)

    def kernel_args(self, router: RaytracedRouter) -> kernels.KernelArgs:
        """The parts of the layer that one compiled call reads."""
        config = router.config
        return kernels.KernelArgs(
            _member(router, "routing"),
            _member(self, "experts"),
            router.input_maps(),
            config.weighting,
            self.stream,
            config.weight_scale,
        )

    def extra_repr(self) -> str:
        return f"stream={self.stream}, mask_gradient={self.router.config.mask_gradient}"


def untrainable_reason(router: RaytracedRouter) -> str | None:
    """Why the experts' outputs give no gate a gradient, and the remedy; None where gates learn, or where there is no choice.

    Weights that are normalised per layer give a lone expert the weight 1, whatever its firing rate is.
    """
    num_layers, num_experts = router.num_layers, router.num_experts
    if router.config.weighting not in ("rates-to-one", "rates") or num_layers * num_experts == 1:
        return None
    if num_experts == 1:
        remedy = "set num_experts to 2 or more, or weighting='relative'"
        return f"the only expert of a layer has weight 1 whatever its rate is; {remedy}"
    # The first expert's rate is the largest. With one layer the output node then has all of it, so a greedy sequence ends.
    stop = router.config.stop if router.config.stop_range is None else router.config.stop_range[0]
    ends_at_once = stop in ("drawn", "dominant") or float(stop) >= 1
    if (
        num_layers == 1
        and router.config.train_select == "greedy"
        and router.config.estimator == "none"
        and ends_at_once
    ):
        remedy = "set num_layers to 2 or more, weighting='relative', or stop below 1 (0.3, for example)"
        return f"each vector runs exactly one expert, with weight 1 whatever its rate is; {remedy}"
    return None
