"""The activation sequence (the paper's Algorithm 1): which nodes a sample activates, in which order, and when it stops.

Axes: B batch, L layers, N experts per layer, M = L·N nodes, K = M + 1 candidates (the nodes, then the output node),
O = N + 1 outlets of a gate, T steps.
"""

from collections.abc import Callable
from numbers import Real
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from raytraced.errors import check_budget, require, require_one_of
from raytraced.rng import exponential, uniform
from raytraced.routing import Rates, RoutingNetwork

Select = Literal["sample", "greedy"]
Stop = Literal["drawn", "dominant"] | float
StopPerRow = Stop | Tensor
"""a rule for the output node, the same for all rows or a number for each (B,)"""
Estimator = Literal["reinmax", "gumbel", "straight-through", "none"]

# On these devices reading a value waits for all queued work: the number of steps is fixed, so that they can be captured.
FIXED_STEPS_ON = {"cuda"}

# Lower bound of P in the derivative 1/P of log P: a rate that underflows would otherwise dominate every gradient.
RATE_FLOOR = 1e-6


class Route(NamedTuple):
    """The routing result of one layer: the active set, its order, its size, and the firing rates under the final set.

    The leading shape is that of the hidden vectors, (B,) or (B, T). Baselines, which route without an order and without
    firing rates, leave `nodes` and `rates` None.
    """

    active: Tensor  # (B, L, N), exactly 0 or 1; its gradient passes through every draw, if the estimator has one
    nodes: Tensor | None  # (B, T), nodes ℓ·N + i in order of activation, padded with -1
    num_active: Tensor  # (B,), number of active experts
    rates: Rates | None  # under the final active set
    num_runs: Tensor | None = None  # (B,), number of expert runs if experts ran more than once; else num_active


# Estimators: each maps the gradient of a draw, one-hot over the candidates, to a gradient of the probabilities (B, K).
# The noise (B, K) is that of the exponential race, None for a draw without one.


def straight_through_gradient(
    grad_BK: Tensor, probs_BK: Tensor, draw_BK: Tensor, noise_BK: Tensor | None, temperature: float
) -> Tensor:
    """Straight-through (Bengio et al. 2013): the identity."""
    return grad_BK


def reinmax_gradient(
    grad_BK: Tensor, probs_BK: Tensor, draw_BK: Tensor, noise_BK: Tensor | None, temperature: float
) -> Tensor:
    """ReinMax (Liu et al. 2023), 2·J(p₁)ᵀg − ½·J(p₀)ᵀg with p₀ = P and p₁ = (draw + p₀) / 2, on the logits log P."""
    middle_BK = (draw_BK + probs_BK) / 2
    centred0_BK = grad_BK - (probs_BK * grad_BK).sum(-1, keepdim=True)
    centred1_BK = grad_BK - (middle_BK * grad_BK).sum(-1, keepdim=True)
    return (1 + draw_BK / probs_BK.clamp_min(RATE_FLOOR)) * centred1_BK - centred0_BK / 2


def gumbel_gradient(
    grad_BK: Tensor, probs_BK: Tensor, draw_BK: Tensor, noise_BK: Tensor | None, temperature: float
) -> Tensor:
    """Gumbel-softmax straight-through (Jang et al. 2017), the paper's: softmax of (log P + Gumbel noise) / temperature."""
    logits_BK = probs_BK.log() if noise_BK is None else probs_BK.log() - noise_BK.log()
    soft_BK = (logits_BK / temperature).softmax(-1)
    centred_BK = grad_BK - (soft_BK * grad_BK).sum(-1, keepdim=True)
    return soft_BK * centred_BK / (temperature * probs_BK.clamp_min(RATE_FLOOR))


GRADIENTS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]] = {
    "straight-through": straight_through_gradient,
    "reinmax": reinmax_gradient,
    "gumbel": gumbel_gradient,
}


class _Draw(torch.autograd.Function):
    """An exact one-hot draw with an estimator's gradient; hard − soft + soft would be 0/1 only up to rounding."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        probs_BK: Tensor, draw_BK: Tensor, noise_BK: Tensor | None, estimator: str, temperature: float
    ) -> Tensor:
        return draw_BK.clone()

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
        probs_BK, draw_BK, noise_BK, ctx.estimator, ctx.temperature = inputs
        ctx.save_for_backward(probs_BK, draw_BK, noise_BK)

    @staticmethod
    def backward(ctx, grad_BK):  # type: ignore[no-untyped-def]
        probs_BK, draw_BK, noise_BK = ctx.saved_tensors
        grad_probs_BK = _gradient(grad_BK, probs_BK, draw_BK, noise_BK, ctx.estimator, ctx.temperature)
        return grad_probs_BK, None, None, None, None


class _DrawBothWays(_Draw):
    """`_Draw` with a forward-mode derivative, which torch.compile does not accept."""

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
        _Draw.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs[:3])

    @staticmethod
    def jvp(ctx, tangent_BK, *others):  # type: ignore[no-untyped-def]
        """The Jacobian times the tangent. The estimator is linear in the gradient, so unit vectors give its whole matrix."""
        probs_BK, draw_BK, noise_BK = ctx.saved_tensors
        units_K1K = torch.eye(probs_BK.shape[-1], dtype=probs_BK.dtype, device=probs_BK.device)[:, None]
        matrix_KBK = _gradient(units_K1K, probs_BK, draw_BK, noise_BK, ctx.estimator, ctx.temperature)
        return (matrix_KBK * tangent_BK).sum(-1).mT


def _gradient(
    grad_BK: Tensor, probs_BK: Tensor, draw_BK: Tensor, noise_BK: Tensor | None, estimator: str, temperature: float
) -> Tensor:
    # Masked, not log(P + eps): P of a non-candidate is 0, but its gradient through an inactive upstream node is not.
    others_BK = probs_BK <= 0
    gradient = GRADIENTS[estimator]
    return gradient(grad_BK.masked_fill(others_BK, 0), probs_BK, draw_BK, noise_BK, temperature).masked_fill(
        others_BK, 0
    )


def any_seen(values: Tensor) -> bool | None:
    """Whether any value is not zero; None where values cannot be read: torch.compile, torch.export, vmap, meta tensors."""
    if torch.compiler.is_compiling():
        return None
    if torch.jit.is_tracing():
        raise NotImplementedError("torch.jit.trace: would keep its example's experts for every input; use torch.export")
    try:
        return bool(values.any())
    except RuntimeError:  # a meta tensor has no values, a tensor in vmap has many
        return None


def _choose(probs_BK: Tensor, noise: Tensor | None) -> Tensor:
    """The candidate chosen (B,), by the noise: None takes the largest, a uniform number (B,) inverts the distribution, and
    exponential numbers (B, K) decide a race.
    """
    if noise is None:
        return probs_BK.argmax(-1)
    if noise.ndim == 1:
        reached_BK = probs_BK.double().cumsum(-1)
        return (reached_BK < noise[:, None] * reached_BK[:, -1:]).sum(-1)
    return (probs_BK / noise).argmax(-1)


def apply_stop(probs_BK: Tensor, stop: StopPerRow) -> Tensor:
    """Apply the rule for the output node to the probabilities of the candidates.

    Args:
        probs_BK: Probabilities of the candidates (B, K), the output node last.
        stop: "drawn" changes nothing: the sequence ends when the output node is drawn. "dominant" is the paper's
            footnote: only the output node once its rate exceeds all others, only the nodes before that. A number
            multiplies the rate of the output node: smaller values run more experts. A tensor (B,) has a number per row.

    Returns:
        Values (B, K) in proportion to the probability of each candidate to be chosen; they need not sum to 1.
    """
    nodes_BM, output_B1 = probs_BK[:, :-1], probs_BK[:, -1:]
    if isinstance(stop, Tensor):
        return torch.cat((nodes_BM, stop.to(output_B1)[:, None] * output_B1), -1)
    if stop == "drawn":
        return probs_BK
    if not isinstance(stop, str):
        return torch.cat((nodes_BM, stop * output_B1), -1)
    dominant_B1 = output_B1 > nodes_BM.amax(-1, keepdim=True)
    return torch.cat((nodes_BM * ~dominant_B1, output_B1 * dominant_B1), -1)


def unroll(
    routing: RoutingNetwork,
    entry_BN: Tensor,
    *,
    stop: StopPerRow,
    estimator: Estimator,
    temperature: float,
    num_steps: int,
    seed: Tensor | None,
    rows_B: Tensor | None,
    input_logits_BLNO: Tensor | None = None,
) -> Route:
    """Algorithm 1 step by step in plain PyTorch, the definition of every faster version; greedy where seed is None.

    A sequence ends where nothing can be drawn, as it does when the output node is drawn: where the rates of all candidates
    are 0, or their sum is NaN or infinite. Entry rates that are NaN or all zero therefore activate no expert.

    With the estimator "none" the draws are constants: a gradient goes through the rates under the final set alone.

    Args:
        routing: The routing network.
        entry_BN: Rates that enter the first layer (B, N).
        stop: Rule for the output node, see `apply_stop`; a tensor (B,) has a number per row.
        estimator: Gradient of the draws: "reinmax", "gumbel" (the paper's), "straight-through" or "none".
        temperature: Temperature of the estimator "gumbel".
        num_steps: Largest number of steps, and of active nodes.
        seed: Seed of the draws, a scalar of int64; None chooses the candidate with the largest rate.
        rows_B: Row numbers of the draws (B,); None for 0 … B − 1.
        input_logits_BLNO: Terms that input-conditioned gates add to their logits (B, L − 1, N, O), or None.

    Returns:
        Route with ``active`` (B, L, N), ``nodes`` (B, num_steps), ``num_active`` (B,) and the rates of the final set.
    """
    B, L, N, M = entry_BN.shape[0], routing.num_layers, routing.num_experts, routing.num_nodes
    rows_B = torch.arange(B, device=entry_BN.device) if rows_B is None else rows_B
    candidates_K = torch.arange(M + 1, device=entry_BN.device)
    active_BM = entry_BN.new_zeros(B, M)
    nodes: list[Tensor] = []
    running_B = torch.ones(B, dtype=torch.bool, device=entry_BN.device)
    draw = _Draw if torch.compiler.is_compiling() else _DrawBothWays
    exits = entry_BN.device.type not in FIXED_STEPS_ON
    for step in range(num_steps):
        if exits and any_seen(running_B) is False:
            break
        rates = routing(entry_BN, active_BM.view(B, L, N), input_logits_BLNO)
        probs_BK = torch.cat((rates.nodes.flatten(1) * (1 - active_BM), rates.output[:, None]), -1)

        noise = None
        if seed is not None:
            gumbel = estimator == "gumbel"
            noise = exponential(seed, rows_B, step, M + 1).to(probs_BK) if gumbel else uniform(seed, rows_B, step)
        candidates_BK = apply_stop(probs_BK.detach(), stop)
        total_B = candidates_BK.sum(-1)
        running_B = running_B & (total_B > 0) & (total_B < float("inf"))
        choice_B = _choose(candidates_BK, noise)
        draw_BK = (choice_B[:, None] == candidates_K).to(probs_BK) * running_B[:, None]
        race_BK = noise if estimator == "gumbel" else None
        if estimator == "none":
            drawn_BK = draw_BK
        else:  # the draw of the output node keeps its gradient: it activates no node, but depends on every rate
            drawn_BK = draw.apply(probs_BK, draw_BK, race_BK, estimator, temperature) * running_B[:, None]

        active_BM = active_BM + drawn_BK[:, :M]
        running_B = running_B & (choice_B < M)
        nodes.append(torch.where(running_B, choice_B, -1))
    nodes += [torch.full((B,), -1, device=entry_BN.device)] * (num_steps - len(nodes))
    nodes_BT = torch.stack(nodes, 1) if nodes else running_B.new_empty(B, 0, dtype=torch.int64)
    active_BLN = active_BM.view(B, L, N)
    rates = routing(entry_BN, active_BLN, input_logits_BLNO)
    if not num_steps and estimator != "none":  # a gradient of zeros: DDP waits for the gradient of every parameter
        active_BLN = active_BLN + 0 * rates.output[:, None, None]
    return Route(active_BLN, nodes_BT, (nodes_BT >= 0).sum(-1), rates)


# Weightings: the weight of each active expert's output, from the active set and the rates (B, L, N). All of them multiply
# by the active set, which carries the gradient of the draws.


def unit_weights(active_BLN: Tensor, rates_BLN: Tensor) -> Tensor:
    """The paper's weighting: every active expert has weight 1."""
    return active_BLN


def rates_to_one_weights(active_BLN: Tensor, rates_BLN: Tensor) -> Tensor:
    """Firing rates, normalised to sum to 1 over the active experts of each layer."""
    total_BL1 = (active_BLN * rates_BLN).sum(-1, keepdim=True)
    # The first active expert of a layer has weight 1: in an empty layer this is the gradient of the mask.
    share_BLN = torch.where(total_BL1 > 0, rates_BLN / total_BL1.clamp_min(RATE_FLOOR), 1.0)
    return active_BLN * share_BLN


def rates_weights(active_BLN: Tensor, rates_BLN: Tensor) -> Tensor:
    """Firing rates, normalised to sum to the number of active experts of each layer."""
    count_BL1 = active_BLN.detach().sum(-1, keepdim=True).clamp_min(1)
    return rates_to_one_weights(active_BLN, rates_BLN) * count_BL1


def relative_weights(active_BLN: Tensor, rates_BLN: Tensor) -> Tensor:
    """Firing rates over the largest active rate of each layer, which is a constant to the gradient.

    A weight does not change when experts of smaller rates join, and the gate of a layer's only expert, whose weight is 1,
    gets a gradient.
    """
    largest_BL1 = (active_BLN * rates_BLN).detach().amax(-1, keepdim=True)
    # As above: a first active expert would have weight 1.
    share_BLN = torch.where(largest_BL1 > 0, rates_BLN / largest_BL1.clamp_min(RATE_FLOOR), 1.0)
    return active_BLN * share_BLN


WEIGHTINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "unit": unit_weights,
    "rates-to-one": rates_to_one_weights,
    "rates": rates_weights,
    "relative": relative_weights,
}


def expert_weights(weighting: str, active_BLN: Tensor, rates_BLN: Tensor, scale: float = 1.0) -> Tensor:
    """The factor of each expert's output (B, L, N): a weighting of the active set and the firing rates, times a constant."""
    weights_BLN = WEIGHTINGS[weighting](active_BLN, rates_BLN)
    return weights_BLN if scale == 1 else weights_BLN * scale


STOP_RULE = "must be drawn, dominant, or a number above 0 that multiplies the output node's rate"
LARGEST_STOP = torch.finfo(torch.float32).max  # beyond it the product with a rate of 0 would be NaN


def check_stop(stop: Any) -> None:
    """Refuse a rule for the output node that is no word of `Stop`, no number above 0 in float32's range, no tensor of such."""
    if isinstance(stop, Tensor):
        require(stop.dtype is not torch.bool and not stop.is_complex(), "stop", stop.dtype, "must hold real numbers")
        # Values on a GPU are not read: that would wait for all queued work.
        if stop.device.type not in FIXED_STEPS_ON and any_seen(bad := ~((stop > 0) & stop.float().isfinite())):
            value = float(stop[bad].flatten()[0])
            raise ValueError(
                f"stop={value:g} in a tensor: must be above 0 and finite in float32; smaller values run more experts"
            )
    elif isinstance(stop, str):
        require_one_of("stop", stop, ("drawn", "dominant"))
    else:
        value = stop  # of any type: the types of numbers know no order of Real
        is_weight = isinstance(stop, Real) and not isinstance(stop, bool) and 0 < value < float("inf")
        require(is_weight, "stop", repr(stop), STOP_RULE)
        rule = f"must be at most {LARGEST_STOP:.3g}, float32's largest number; smaller values run more experts"
        require(value <= LARGEST_STOP, "stop", repr(stop), rule)


def check_sequence_options(
    *,
    select: str,
    stop: str | float | Tensor,
    estimator: str,
    temperature: float = 1.0,
    max_experts: int | None = None,
) -> None:
    """Raise a ValueError for an invalid option, with its name, its value and the rule."""
    require_one_of("select", select, ("sample", "greedy"))
    check_stop(stop)
    require_one_of("estimator", estimator, get_args(Estimator))
    is_number = isinstance(temperature, Real) and not isinstance(temperature, bool)
    fits = is_number and 0 < temperature < float("inf")
    require(fits, "temperature", repr(temperature), "must be positive and finite; the paper has 10 to 50")
    check_budget(max_experts)


# A loss on the length of sequences.

SHORTEST = 0.4  # length for the easiest sample, in parts of the target; the hardest gets 2 − SHORTEST


def stop_losses(route: Route, easier: Tensor, target: float) -> Tensor:
    """A loss that moves the mean number of active experts towards a target, with fewer for easy and more for hard samples.

    A sample's own target grows linearly from SHORTEST·target for the easiest to (2 − SHORTEST)·target for the hardest. A
    sequence longer than that raises the rate of the output node under the final set, a shorter one lowers it.

    Args:
        route: The routing result, with rates (B,).
        easier: Share of samples that are easier than each sample (B,), from 0 to 1.
        target: Mean number of active experts to reach.

    Returns:
        The loss of each sample (B,); 0 within half an expert of its target.
    """
    assert route.rates is not None
    over = route.num_active - target * (SHORTEST + 2 * (1 - SHORTEST) * easier)
    rate = route.rates.output.clamp(1e-6, 1 - 1e-6)
    return -torch.where(over > 0.5, rate, torch.where(over < -0.5, 1 - rate, 1.0)).log()
