"""What a router is: it chooses experts for every hidden vector, for one step or for all. Subclass `Router` to add one.

Axes: B batch, S steps (layers, times the rounds of each), N experts per layer, D width.
"""

from inspect import signature
from numbers import Integral
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from raytraced.errors import require
from raytraced.rng import RandomSource, new_seed, uniform
from raytraced.rows import keep_route_rows
from raytraced.sequence import Route, Select, StopPerRow


class Cost(NamedTuple):
    """Multiply-adds and parameters that a part of a model used, per sample (B,) or the same for every sample."""

    macs: Tensor | int  # multiply-adds
    parameters: Tensor | int  # number of parameters


class Choice(NamedTuple):
    """What a router chose: for one step (B, N), or for all steps where it plans ahead (B, S, N)."""

    active: Tensor  # 0 or 1
    weights: Tensor  # factor of each expert's output, 0 where the expert does not run
    loss: Tensor | None = None  # the router's own loss, weighted
    route: Route | None = None  # of a plan: order of activation and firing rates, where the router has them
    decision: Any = None  # an argument of `Router.policy_loss`, which needs the losses that the choice led to


class Call(NamedTuple):
    """Options of one call of a layer: how experts are chosen, a budget, and the source of random numbers."""

    select: Select | None = None
    max_experts: int | None = None
    generator: RandomSource = None
    rows: Tensor | None = None  # (B,), the row numbers that draws depend on; None: 0 … B − 1
    exits: bool = False
    stop: StopPerRow | None = None  # in place of the layer's own rule; a tensor (B,) has a number per row
    route: Route | None = None  # a recorded route to follow, in place of a choice

    @property
    def is_default(self) -> bool:
        """Whether no option is set that only some routers support."""
        return self.select in (None, "greedy") and self.max_experts is None and self.stop is None

    def keep(self, rows: Tensor | slice) -> "Call":
        """The call for some of its rows."""
        rows_B = None if self.rows is None else self.rows[rows]
        stop = self.stop[rows] if isinstance(self.stop, Tensor) else self.stop
        route = None if self.route is None else keep_route_rows(self.route, rows)
        return self._replace(rows=rows_B, stop=stop, route=route)


class Draws:
    """Uniform numbers for the rows of one call. A seed is taken from the generator when the first number is asked for."""

    def __init__(self, call: Call, like_BD: Tensor) -> None:
        self.generator = call.generator
        self.rows_B = torch.arange(like_BD.shape[0], device=like_BD.device) if call.rows is None else call.rows
        self.seed: Tensor | None = None
        self.route = call.route

    def recall(self, step: int, chosen_BN: Tensor) -> Tensor:
        """What a router chose for a step (B, N), booleans; where a recorded route is followed, what it chose then."""
        return chosen_BN if self.route is None else self.route.active[:, step] != 0

    def uniform(self, step: int) -> Tensor:
        """One number for each row (B,): a pure function of the seed, the row and the step."""
        if self.seed is None:
            self.seed = new_seed(self.generator, self.rows_B.device)
        return uniform(self.seed, self.rows_B, step)

    def keep(self, rows: Tensor | slice) -> None:
        """Go on with some of the rows."""
        self.rows_B = self.rows_B[rows]
        self.route = None if self.route is None else keep_route_rows(self.route, rows)


class Fusable:
    """A class whose methods may be replaced by one compiled call that does the same.

    `fuses` says whether a class allows that. A subclass may change any method, so it is False there, and every step runs in
    Python, unless the subclass sets `fuses = True` itself.
    """

    fuses: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.fuses = vars(cls).get("fuses", False)


NO_OPTIONS = "select, max_experts and stop: this router supports none of them; use a raytraced layer"


class Router(nn.Module):
    """Base class of routers: chooses which experts run for a hidden vector, and with which weight.

    A router that depends on the layer's input alone overrides `plan` and chooses for all steps at once. Any other router
    overrides `route` and is asked step by step, with the hidden vectors that reach the step.

    Args:
        dim: Width of the hidden vectors.
        num_layers: Number of expert layers in the grid.
        num_experts: Number of experts per layer.
        num_outlets: Number of outputs of each gate; 0 for a router without linear gates. Default: `num_experts`.
        num_rounds: How often each layer's experts may run one after the other.
    """

    plans: ClassVar[bool] = False
    """whether the choices of all steps are computed from one vector, so that a decoder can make them before its first block"""
    learns: ClassVar[bool] = True
    """whether training moves what the router reads; False: a routing embedding stays as it was drawn"""

    def __init__(
        self, dim: int, num_layers: int, num_experts: int, *, num_outlets: int | None = None, num_rounds: int = 1
    ) -> None:
        super().__init__()
        for name, value in (("dim", dim), ("num_layers", num_layers), ("num_experts", num_experts)):
            is_count = isinstance(value, Integral) and not isinstance(value, bool)
            require(is_count, name, repr(value), "must be a whole number")
            require(value >= 1, name, value, "must be at least 1")
        require(num_rounds >= 1, "num_rounds", num_rounds, "must be at least 1")
        self.num_layers, self.num_experts, self.num_rounds = num_layers, num_experts, num_rounds
        outlets = num_experts if num_outlets is None else num_outlets
        self.gates = nn.ModuleList(nn.Linear(dim, outlets) for _ in range(num_layers * num_rounds) if outlets)

    @property
    def num_steps(self) -> int:
        """How many steps a hidden vector goes through."""
        return self.num_layers * self.num_rounds

    def reset_parameters(self) -> None:
        """Initialise what the router has besides its gates. Called once, after the experts were made."""

    def plan(self, hidden_BD: Tensor, call: Call) -> Choice | None:
        """Choose for all steps.

        Args:
            hidden_BD: The layer's input (B, D).
            call: The options of this call.

        Returns:
            A Choice of shape (B, S, N), or None if the router must be asked step by step.
        """
        if not call.is_default:
            raise ValueError(NO_OPTIONS)
        return None

    @property
    def may_plan(self) -> bool:
        """Whether the router has a `plan` of its own, so that the vectors of the first step may decide on all steps."""
        return type(self).plan is not Router.plan

    def alike(self, call: Call) -> bool:
        """Whether equal vectors get equal plans in one call, so that a plan can be made once and looked up.

        Args:
            call: Options of the call.

        Returns:
            Whether they do; False unless a router overrides this.
        """
        return False

    def route(self, step: int, hidden_BD: Tensor, draws: Draws) -> Choice:
        """Choose for one step.

        Args:
            step: Number of the step, 0 … S − 1.
            hidden_BD: The hidden vectors that reach the step (B, D).
            draws: Source of random numbers, reproducible per row.

        Returns:
            A Choice of shape (B, N).
        """
        raise NotImplementedError(f"{type(self).__name__}: needs `plan` or `route`")

    def policy_loss(self, decisions: list[Any], num_active_B: Tensor, losses_B: Tensor) -> Tensor:
        """The loss of the router's decisions.

        Args:
            decisions: `Choice.decision` of every step that has one.
            num_active_B: How many experts ran for each row (B,).
            losses_B: The loss of each row that the decisions led to (B,).

        Returns:
            The loss, a scalar; it is added to the loss of training.
        """
        raise NotImplementedError(f"{type(self).__name__}: makes decisions, so it needs `policy_loss`")

    def gate_logits(self, step: int, hidden_BD: Tensor) -> Tensor:
        """Evaluate the linear gate of a step.

        Args:
            step: Number of the step, 0 … S − 1.
            hidden_BD: The hidden vectors that reach the step (B, D).

        Returns:
            The logits (B, num_outlets), at least in float32.
        """
        logits_BN: Tensor = self.gates[step](hidden_BD)
        return logits_BN.to(torch.promote_types(logits_BN.dtype, torch.float32))

    def step_cost(self) -> Cost:
        """The cost of choosing for one step; the same for every step and choice."""
        if not len(self.gates):
            return Cost(0, 0)
        weight, *rest = self.gates[0].parameters()
        return Cost(weight.numel(), weight.numel() + sum(parameter.numel() for parameter in rest))

    def cost(self, route: Route, num_steps: Tensor | None = None) -> Cost:
        """The cost of choosing, for each sample.

        Args:
            route: The route of the layer.
            num_steps: Count the first so many steps only (B,). Default: all steps.

        Returns:
            Cost, per sample or the same for all.
        """
        steps = self.num_steps if num_steps is None else num_steps
        return Cost(*(part * steps for part in self.step_cost()))

    def extra_repr(self) -> str:
        """The keyword options that the router keeps under their names."""
        options = (name for name, each in signature(type(self)).parameters.items() if each.kind == each.KEYWORD_ONLY)
        return ", ".join(f"{name}={getattr(self, name)}" for name in options if hasattr(self, name))
