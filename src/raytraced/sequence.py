"""The activation sequence (the paper's Algorithm 1): which nodes a sample activates, in which order, and when it stops.

Axes: B batch, L layers, N experts a layer, M = L·N nodes, K = M + 1 candidates (the nodes, then the output node), T steps.
"""

from collections.abc import Callable
from numbers import Real
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from raytraced.draws import exponential, uniform
from raytraced.routing import Rates, RoutingNetwork
from raytraced.words import check_budget, require, require_one_of

Select = Literal["sample", "greedy"]
Stop = Literal["drawn", "dominant"] | float
Estimator = Literal["reinmax", "gumbel", "straight-through", "none"]

# Where a look at values waits for all that is queued, steps are not ended early: a fixed number of them can be captured whole.
FIXED_STEPS_ON = {"cuda"}

# A rate below this has the log-derivative of this: 1/P of a rate that underflows would drown every other gradient.
RATE_FLOOR = 1e-6


class Route(NamedTuple):
    """What one routed layer did: the set, the order, the count, and the firing rates under the final set.

    The leading shape is that of the hidden vectors, (B,) or (B, T). Layers that route without an order or without rates
    (the rivals) leave those out.
    """

    active: Tensor  # (B, L, N), exactly 0 or 1; its gradient goes back through every draw, if the estimator has one
    nodes: Tensor | None  # (B, T), node ℓ·N + i in order of activation, padded with -1
    num_active: Tensor  # (B,)
    rates: Rates | None
    num_runs: Tensor | None = None  # (B,), how often experts ran, where some ran again; else num_active


# How each estimator carries a gradient from a draw, one-hot over the candidates, back to the probabilities it came from.
# The noise (B, K) is the exponential race's, None for a draw without one.


def straight_through_gradient(
    grad_BK: Tensor, probs_BK: Tensor, draw_BK: Tensor, noise_BK: Tensor | None, temperature: float
) -> Tensor:
    """The draw taken for its probabilities: the identity."""
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
    """The same with a forward derivative, which torch.compile would not let pass."""

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
        _Draw.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs[:3])

    @staticmethod
    def jvp(ctx, tangent_BK, *others):  # type: ignore[no-untyped-def]
        """What the estimator's gradient says of a step along the tangent: it is linear, so units give all of its matrix."""
        probs_BK, draw_BK, noise_BK = ctx.saved_tensors
        units_K1K = torch.eye(probs_BK.shape[-1], dtype=probs_BK.dtype, device=probs_BK.device)[:, None]
        matrix_KBK = _gradient(units_K1K, probs_BK, draw_BK, noise_BK, ctx.estimator, ctx.temperature)
        return (matrix_KBK * tangent_BK).sum(-1).mT


def _gradient(
    grad_BK: Tensor, probs_BK: Tensor, draw_BK: Tensor, noise_BK: Tensor | None, estimator: str, temperature: float
) -> Tensor:
    # Masked, not log(P + eps): a non-candidate's P is 0, but its gradient through an inactive node above is not.
    others_BK = probs_BK <= 0
    gradient = GRADIENTS[estimator]
    return gradient(grad_BK.masked_fill(others_BK, 0), probs_BK, draw_BK, noise_BK, temperature).masked_fill(
        others_BK, 0
    )


def any_seen(values: Tensor) -> bool | None:
    """Whether any value is not zero; None where no value can be looked at: torch.compile, torch.export, vmap, meta tensors."""
    if torch.compiler.is_compiling():
        return None
    if torch.jit.is_tracing():
        raise NotImplementedError("torch.jit.trace: would keep its example's experts for every input; use torch.export")
    try:
        return bool(values.any())
    except RuntimeError:  # a meta tensor has no values, one of vmap has many
        return None


def _choose(probs_BK: Tensor, noise: Tensor | None) -> Tensor:
    """The candidate drawn (B,): the largest; where a uniform number (B,) falls; or the winner of a race of exponentials."""
    if noise is None:
        return probs_BK.argmax(-1)
    if noise.ndim == 1:
        reached_BK = probs_BK.double().cumsum(-1)
        return (reached_BK < noise[:, None] * reached_BK[:, -1:]).sum(-1)
    return (probs_BK / noise).argmax(-1)


def apply_stop(probs_BK: Tensor, stop: Stop) -> Tensor:
    """Who may be drawn: everyone; or, by the paper's footnote, the output node once its rate exceeds all, else the nodes.

    A number is what the output node's rate counts beside the others: everyone, but the output node less often or more.
    """
    if stop == "drawn":
        return probs_BK
    nodes_BM, output_B1 = probs_BK[:, :-1], probs_BK[:, -1:]
    if not isinstance(stop, str):
        return torch.cat((nodes_BM, stop * output_B1), -1)
    dominant_B1 = output_B1 > nodes_BM.amax(-1, keepdim=True)
    return torch.cat((nodes_BM * ~dominant_B1, output_B1 * dominant_B1), -1)


def unroll(
    routing: RoutingNetwork,
    entry_BN: Tensor,
    *,
    stop: Stop,
    estimator: Estimator,
    temperature: float,
    num_steps: int,
    seed: Tensor | None,
    rows_B: Tensor | None,
    sight_BLNO: Tensor | None = None,
) -> Route:
    """Algorithm 1 step by step in plain PyTorch, the definition of every faster version; greedy where seed is None.

    With the estimator "none" the draws are constants: a gradient goes through the rates under the final set alone.
    """
    B, L, N, M = entry_BN.shape[0], routing.num_layers, routing.num_experts, routing.num_nodes
    rows_B = torch.arange(B, device=entry_BN.device) if rows_B is None else rows_B
    candidates_K = torch.arange(M + 1, device=entry_BN.device)
    active_BM = entry_BN.new_zeros(B, M)
    nodes: list[Tensor] = []
    running_B = torch.ones(B, dtype=torch.bool, device=entry_BN.device)
    draw = _Draw if torch.compiler.is_compiling() else _DrawBothWays
    looks = entry_BN.device.type not in FIXED_STEPS_ON
    for step in range(num_steps):
        if looks and any_seen(running_B) is False:
            break
        rates = routing(entry_BN, active_BM.view(B, L, N), sight_BLNO)
        probs_BK = torch.cat((rates.nodes.flatten(1) * (1 - active_BM), rates.output[:, None]), -1)

        noise = None
        if seed is not None:
            gumbel = estimator == "gumbel"
            noise = exponential(seed, rows_B, step, M + 1).to(probs_BK) if gumbel else uniform(seed, rows_B, step)
        choice_B = _choose(apply_stop(probs_BK.detach(), stop), noise)
        draw_BK = (choice_B[:, None] == candidates_K).to(probs_BK) * running_B[:, None]
        race_BK = noise if estimator == "gumbel" else None
        if estimator == "none":
            drawn_BK = draw_BK
        else:  # the stop draw keeps its gradient: its hard part adds no node, its soft part still moves every rate
            drawn_BK = draw.apply(probs_BK, draw_BK, race_BK, estimator, temperature) * running_B[:, None]

        active_BM = active_BM + drawn_BK[:, :M]
        running_B = running_B & (choice_B < M)
        nodes.append(torch.where(running_B, choice_B, -1))
    nodes += [torch.full((B,), -1, device=entry_BN.device)] * (num_steps - len(nodes))
    nodes_BT = torch.stack(nodes, 1) if nodes else running_B.new_empty(B, 0, dtype=torch.int64)
    active_BLN = active_BM.view(B, L, N)
    rates = routing(entry_BN, active_BLN, sight_BLNO)
    if not num_steps and estimator != "none":  # a gradient all the same, of zero: DDP waits for every parameter's
        active_BLN = active_BLN + 0 * rates.output[:, None, None]
    return Route(active_BLN, nodes_BT, (nodes_BT >= 0).sum(-1), rates)


# How much an active expert's output counts. The mask A carries the draws' gradient in all of them.


def unit_weights(active_BLN: Tensor, rates_BLN: Tensor) -> Tensor:
    """The paper: active experts are summed as they are."""
    return active_BLN


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
    "rates-to-one": rates_to_one_weights,
    "rates": rates_weights,
}


def check_sequence_options(
    *, select: str, stop: str | float, estimator: str, temperature: float = 1.0, max_experts: int | None = None
) -> None:
    """Raise a ValueError that names the option, its value and the rule."""
    require_one_of("select", select, ("sample", "greedy"))
    if isinstance(stop, str):
        require_one_of("stop", stop, ("drawn", "dominant"))
    else:
        is_weight = isinstance(stop, Real) and not isinstance(stop, bool) and 0 < stop < float("inf")
        require(
            is_weight, "stop", repr(stop), "must be drawn, dominant, or what the output node's rate counts, above 0"
        )
    require_one_of("estimator", estimator, get_args(Estimator))
    require(
        0 < temperature < float("inf"),
        "temperature",
        temperature,
        "must be positive and finite; the paper has 10 to 50",
    )
    check_budget(max_experts)


# Where a sequence should have ended.

SHORTEST = 0.4  # of the target, for the easiest; the hardest takes as much more than it


def stop_losses(route: Route, easier: Tensor, target: float) -> Tensor:
    """What asks a sequence to end where it should: at `target` experts on the mean, a few for the easy, more for the hard.

    The easiest sample is to take SHORTEST of the target and the hardest 2 − SHORTEST of it. Where a sequence is longer the
    output node should have been drawn, and its rate under the final set is to rise; where it is shorter, to fall.
    """
    assert route.rates is not None
    over = route.num_active - target * (SHORTEST + 2 * (1 - SHORTEST) * easier)
    rate = route.rates.output.clamp(1e-6, 1 - 1e-6)
    return -torch.where(over > 0.5, rate, torch.where(over < -0.5, 1 - rate, 1.0)).log()
