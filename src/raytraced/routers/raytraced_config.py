"""The options of a raytraced layer, and which of their values are allowed."""

from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, Literal, get_args

from raytraced.errors import require, require_one_of
from raytraced.experts import StreamName
from raytraced.routing import GateInit, check_gate_options
from raytraced.sequence import LARGEST_STOP, Estimator, Select, Stop, check_sequence_options

Weighting = Literal["auto", "unit", "rates-to-one", "rates", "relative"]
MaskGradient = Literal["all", "active"]


@dataclass(frozen=True)
class RaytracedConfig:
    """Options of a raytraced layer. The defaults are our recipe; `RaytracedConfig(**raytraced.PAPER)` is the paper's."""

    stream: StreamName = "residual"
    """how vectors pass from one layer to the next: "residual", "skip-sum" or "last"; see `raytraced.experts.Stream`"""
    weighting: Weighting = "auto"
    """factor of an expert's output: 1 ("unit"); its firing rate, scaled so that the rates of a layer's active experts sum to
    one ("rates-to-one") or to their number ("rates"), or over the largest of them ("relative"); "auto": "relative" in
    grids of one or two layers, or of one or two experts per layer, where other gates get no gradient, else "rates-to-one" """
    weight_scale: float = 1.0
    """a constant by which all these factors are multiplied"""
    mask_gradient: MaskGradient = "active"
    """which experts get a gradient for their place in the mask: the "active" ones, or "all" (then all experts run)"""
    estimator: Estimator = "none"
    """how gradients pass through a draw: "reinmax", "gumbel", "straight-through", or "none" (only through the weights)"""
    temperature: float = 20.0
    """of the "gumbel" estimator"""
    stop: Stop = "drawn"
    """when a sequence ends; a number multiplies the output node's rate in the choice: smaller values run more experts"""
    stop_range: tuple[float, float] | None = None
    """in training, where a call gives no `stop`, one is drawn log-uniformly from this range for each vector"""
    train_select: Select = "greedy"
    """how nodes are chosen in training: "greedy" or "sample"; evaluation is greedy"""
    gate_init: GateInit = "normal"
    """initial distribution of the gates' weights: "normal" or "uniform" """
    scale_init: bool = True
    """whether to scale the initial gates by √(N + 1), as the paper does"""
    output_logit_offset: float = 5.0
    """how much lower the initial weights towards the output node are: larger values start with longer sequences"""
    input_rank: int = 4
    """rank of the map by which gates also depend on the layer's input; 0: on firing rates alone, as in the paper"""
    entry_scale: float = 1.0
    """factor of the initial entry gate's logits: larger values start with sharper entry rates"""
    input_init_std: float = 0.0
    """standard deviation of the initial map from the rank `input_rank` to the gates' logits; 0: zeros"""

    def __post_init__(self) -> None:
        require_one_of("weighting", self.weighting, get_args(Weighting))
        require_one_of("mask_gradient", self.mask_gradient, get_args(MaskGradient))
        require_one_of("train_select", self.train_select, get_args(Select))
        check_sequence_options(
            select=self.train_select, stop=self.stop, estimator=self.estimator, temperature=self.temperature
        )
        if self.estimator == "none" and self.weighting == "unit":
            raise ValueError(
                "estimator=none: the routing learns from the weights of the experts alone, and weighting=unit has none"
            )
        is_rank = isinstance(self.input_rank, Integral) and self.input_rank >= 0
        rule = "must be a whole number, at least 0; 0: gates depend on firing rates alone, as in the paper"
        require(is_rank, "input_rank", repr(self.input_rank), rule)
        for name in ("weight_scale", "entry_scale"):
            value = getattr(self, name)
            require(_is_number(value) and value > 0, name, repr(value), "must be a number above 0")
        check_gate_options(self.gate_init, self.scale_init, self.output_logit_offset)
        std = self.input_init_std
        require(_is_number(std) and std >= 0, "input_init_std", repr(std), "must be a number, at least 0; 0: zeros")
        if self.stop_range is not None:
            object.__setattr__(self, "stop_range", check_stop_range(self.stop_range))

    def for_grid(self, num_layers: int, num_experts: int) -> "RaytracedConfig":
        """The same options for one grid, with "auto" replaced by the weighting that it stands for there.

        Args:
            num_layers: Number of expert layers in the grid.
            num_experts: Number of experts per layer.

        Returns:
            The options; `weighting` is not "auto".
        """
        if self.weighting != "auto":
            return self
        # By rates that sum to one a layer's only active expert has weight 1, whatever the gates above it do. The last layer
        # rarely has another: in a grid of one layer the entry gate would never learn, in one of two layers no other gate.
        # With two experts per layer, deeper grids too may start without a lower layer that runs both (a third of all seeds).
        is_small = num_layers <= 2 or num_experts <= 2
        return replace(self, weighting="relative" if is_small else "rates-to-one")


def _is_number(value: Any) -> bool:
    number = value  # of any type: the types of numbers know no order of Real
    return isinstance(value, Real) and not isinstance(value, bool) and bool(abs(number) < float("inf"))


def check_stop_range(stop_range: Any) -> tuple[float, float]:
    """The ends of a range of stops; refuses what is no range of numbers above 0."""
    rule = "must be two numbers above 0, the smaller one first, for example (0.03, 0.15)"
    require(isinstance(stop_range, list | tuple) and len(stop_range) == 2, "stop_range", repr(stop_range), rule)
    low, high = stop_range
    fits = _is_number(low) and _is_number(high) and 0 < low <= high
    require(fits, "stop_range", repr(stop_range), rule)
    require(
        high <= LARGEST_STOP, "stop_range", repr(stop_range), f"must be at most {LARGEST_STOP:.3g}, float32's largest"
    )
    return low, high
