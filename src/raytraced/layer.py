"""The raytraced layer: gate, routing network, activation sequence and experts as one module in place of an MLP block.

Axes: B batch (any leading shape, flattened), L layers, N experts a layer, D width.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from raytraced.experts import (
    Choice,
    Execution,
    MLPExperts,
    ModuleExperts,
    Stream,
    choose_execution,
    run_stack,
)
from raytraced.routing import Rates, RoutingNetwork
from raytraced.sequence import (
    RATE_FLOOR,
    Estimator,
    Select,
    Sequence,
    Stop,
    activation_sequence,
    check_options,
)

Weighting = Literal["unit", "through", "rates", "rates-to-one"]
MaskGradient = Literal["all", "active"]


class LayerOutput(NamedTuple):
    """What every routed layer returns: hidden vectors, which experts ran, and what is particular to the layer."""

    hidden: Tensor  # (..., D)
    active: Tensor  # (..., L, N), 0 or 1
    sequence: Sequence | None = None  # of raytraced layers
    loss: Tensor | None = None  # the layer's own loss, weighted: balance, policy gradient


# How much an active expert's output counts. The mask A carries the draws' gradient in all of them.


def unit_weights(active_BLN: Tensor, rates_BLN: Tensor) -> Tensor:
    """The paper: active experts are summed as they are."""
    return active_BLN


def through_weights(active_BLN: Tensor, rates_BLN: Tensor) -> Tensor:
    """f / f.detach(): the value is exactly 1, but the firing rates get a gradient."""
    fixed_BLN = rates_BLN.detach()
    return active_BLN * (1 + (rates_BLN - fixed_BLN) / fixed_BLN.clamp_min(RATE_FLOOR))


def rates_to_one_weights(active_BLN: Tensor, rates_BLN: Tensor) -> Tensor:
    """Firing rates, normalised to sum to one over the active experts of a layer."""
    total_BL1 = (active_BLN * rates_BLN).sum(-1, keepdim=True)
    # In an empty layer an expert's weight would be 1, were it the first: that is the gradient its mask gets.
    share_BLN = torch.where(total_BL1 > 0, rates_BLN / total_BL1.clamp_min(RATE_FLOOR), 1.0)
    return active_BLN * share_BLN


def rates_weights(active_BLN: Tensor, rates_BLN: Tensor) -> Tensor:
    """Firing rates, normalised to sum to the number of active experts of a layer."""
    count_BL1 = active_BLN.detach().sum(-1, keepdim=True).clamp_min(1)
    return rates_to_one_weights(active_BLN, rates_BLN) * count_BL1


WEIGHTINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "unit": unit_weights,
    "through": through_weights,
    "rates": rates_weights,
    "rates-to-one": rates_to_one_weights,
}


class RaytracedExperts(nn.Module):
    """A grid of experts of which every input vector runs its own sequence; hidden (..., D) in and out."""

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
        weighting: Weighting = "through",
        mask_gradient: MaskGradient = "active",
        estimator: Estimator = "reinmax",
        temperature: float = 20.0,
        stop: Stop = "drawn",
        train_select: Select = "sample",
        scale_init: bool = True,
        reach: float = 0.0,
        execution: Execution = "auto",
    ) -> None:
        super().__init__()
        if dim < 1:
            raise ValueError(f"dim={dim}: must be at least 1")
        for name, value, allowed in (
            ("stream", stream, get_args(Stream)),
            ("weighting", weighting, tuple(WEIGHTINGS)),
            ("mask_gradient", mask_gradient, get_args(MaskGradient)),
            ("train_select", train_select, get_args(Select)),
            ("execution", execution, get_args(Execution)),
        ):
            if value not in allowed:
                raise ValueError(f"{name}={value!r}: must be one of {', '.join(allowed)}")
        if execution == "sparse" and mask_gradient == "all":
            raise ValueError("execution='sparse' with mask_gradient='all': inactive experts must run; use 'active'")
        if expert is not None and (hidden is not None or num_hidden != 2):
            raise ValueError(f"hidden={hidden}, num_hidden={num_hidden}: are for the default MLP, not with `expert`")
        check_options(select=train_select, stop=stop, estimator=estimator, temperature=temperature)
        self.execution = execution
        self.dim, self.stream, self.weighting, self.mask_gradient = dim, stream, weighting, mask_gradient
        self.estimator, self.temperature, self.stop, self.train_select = estimator, temperature, stop, train_select
        self.routing = RoutingNetwork(num_layers, num_experts, scale_init=scale_init, reach=reach)
        self.gate = nn.Linear(dim, num_experts)
        self.experts = (
            MLPExperts(num_layers, num_experts, dim, hidden, num_hidden)
            if expert is None
            else ModuleExperts(num_layers, num_experts, expert)
        )

    def forward(
        self,
        hidden: Tensor,
        *,
        select: Select | None = None,
        max_experts: int | None = None,
        generator: torch.Generator | None = None,
        rows: Tensor | None = None,
    ) -> LayerOutput:
        """Draw each vector's activation sequence from the vector alone, then run the experts on it.

        `select` defaults to `train_select` in training and to "greedy" in evaluation.
        """
        self._check(hidden)
        hidden_BD = hidden.reshape(-1, self.dim)
        sequence = self.sequence(hidden_BD, select=select, max_experts=max_experts, generator=generator, rows=rows)
        hidden_BD = self.run_experts(hidden_BD, sequence.active, self.weigh(sequence))
        sequence = _with_leading_shape(sequence, hidden.shape[:-1])
        return LayerOutput(hidden_BD.view(hidden.shape), sequence.active, sequence)

    def sequence(
        self,
        hidden_BD: Tensor,
        *,
        select: Select | None = None,
        max_experts: int | None = None,
        generator: torch.Generator | None = None,
        rows: Tensor | None = None,
    ) -> Sequence:
        """The activation sequence of each vector; no expert runs."""
        return self.sequence_from(
            self.entry(hidden_BD), select=select, max_experts=max_experts, generator=generator, rows=rows
        )

    def entry(self, hidden_BD: Tensor) -> Tensor:
        """The rates that enter the first layer (B, N), at least in float32."""
        logits_BN = self.gate(hidden_BD)
        return logits_BN.softmax(-1, dtype=torch.promote_types(logits_BN.dtype, torch.float32))

    def sequence_from(
        self,
        entry_BN: Tensor,
        *,
        select: Select | None = None,
        max_experts: int | None = None,
        generator: torch.Generator | None = None,
        rows: Tensor | None = None,
    ) -> Sequence:
        """The activation sequence that these entry rates lead to."""
        return activation_sequence(
            self.routing,
            entry_BN,
            select=select or (self.train_select if self.training else "greedy"),
            stop=self.stop,
            estimator=self.estimator,
            temperature=self.temperature,
            max_experts=max_experts,
            generator=generator,
            rows=rows,
        )

    def weigh(self, sequence: Sequence) -> Tensor:
        """How much each expert's output counts (B, L, N)."""
        return WEIGHTINGS[self.weighting](sequence.active, sequence.rates.nodes)

    def run_experts(self, hidden_BD: Tensor, active_BLN: Tensor, weights_BLN: Tensor) -> Tensor:
        """Run the active experts, each weighted; all of them where inactive ones need a gradient for their mask."""
        return run_stack(
            self.experts,
            hidden_BD,
            active_BLN,
            weights_BLN,
            self.stream,
            execution=self.execution,
            needs_inactive=self._needs_inactive,
        )

    @property
    def _needs_inactive(self) -> bool:
        return self.mask_gradient == "all" and torch.is_grad_enabled()

    def explain_execution(self, hidden: Tensor) -> Choice:
        """How the experts would be run on these vectors, dense or sparse, and why."""
        hidden_BD = hidden.reshape(-1, self.dim)
        weights_BLN = hidden_BD.new_empty(len(hidden_BD), self.routing.num_layers, self.routing.num_experts)
        return choose_execution(
            self.experts, hidden_BD, weights_BLN, self.execution, needs_inactive=self._needs_inactive
        )

    def _check(self, hidden: Tensor) -> None:
        if hidden.ndim == 0 or hidden.shape[-1] != self.dim:
            raise ValueError(f"hidden has shape {tuple(hidden.shape)}: the last axis must be dim={self.dim}")
        expected = self.gate.weight.dtype
        if hidden.dtype != expected and not torch.is_autocast_enabled(hidden.device.type):
            raise ValueError(
                f"hidden is {hidden.dtype}: must be {expected} as the parameters; convert one, or use autocast"
            )

    def extra_repr(self) -> str:
        return (
            f"stream={self.stream}, weighting={self.weighting}, mask_gradient={self.mask_gradient}, "
            f"estimator={self.estimator}, stop={self.stop}, train_select={self.train_select}"
        )


def _with_leading_shape(sequence: Sequence, shape: torch.Size) -> Sequence:
    """Give every field (B, …) the leading shape that the hidden vectors came in."""
    if len(shape) == 1:
        return sequence
    active, nodes, num_active, rates = sequence
    return Sequence(
        active.unflatten(0, shape) if shape else active[0],
        nodes.unflatten(0, shape) if shape else nodes[0],
        num_active.view(shape),
        Rates(rates.nodes.unflatten(0, shape) if shape else rates.nodes[0], rates.output.view(shape)),
    )


class HiddenOnly(nn.Module):
    """The one-line adapter for nn.Sequential: a routed layer that returns only its hidden vectors."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer(hidden).hidden
