"""Routes that were recorded, followed again: the same experts in the same order, with today's gates.

Axes: B batch, S steps of a layer, L layers, N experts per layer, M = L·N nodes, T steps of a sequence, K = M + 1 candidates.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from raytraced.routing import RoutingNetwork
from raytraced.sequence import Estimator, Route, _Draw, _DrawBothWays, any_seen


def check_followed(recorded: Route | None, active_BSN: Tensor, name: str) -> None:
    """Refuse that a router has chosen other experts than those of the route that it was given."""
    if recorded is None:
        return
    if any_seen((active_BSN.detach() != 0) != (recorded.active != 0)):
        rule = "a custom router replays one if it passes its choice through `draws.recall(step, chosen)`"
        raise ValueError(f"route: {name} did not follow it; {rule}")


def check_gradient(recorded: Route, estimator: Estimator) -> None:
    """Refuse a recorded route that does not say what the gradient of its draws depends on."""
    if estimator == "none" or not torch.is_grad_enabled():
        return
    if estimator == "gumbel":
        raise ValueError(
            "estimator=gumbel: a route has no random numbers, on which its gradient depends;"
            " replay under torch.no_grad()"
        )
    if recorded.nodes is None:
        raise ValueError(f"estimator={estimator}: a route without the order of its nodes has no draws to follow")


def ordered_nodes(recorded: Route) -> Tensor:
    """The active nodes of a recorded route (B, T) in order of activation, −1 after the last.

    Nodes that the order does not contain come last, by number; nodes of the order that are not active are left out.
    """
    active_BM = recorded.active.flatten(1) != 0
    (B, M), device = active_BM.shape, active_BM.device
    given_BT = active_BM.new_full((B, 0), -1, dtype=torch.int64) if recorded.nodes is None else recorded.nodes
    T = M if recorded.nodes is None else max(given_BT.shape[1], int(active_BM.sum(1).max()) if B else 0)
    place_BM = (given_BT.shape[1] + torch.arange(M, device=device)).repeat(B, 1)
    for step in reversed(range(given_BT.shape[1])):
        rows_n = ((given_BT[:, step] >= 0) & (given_BT[:, step] < M)).nonzero()[:, 0]
        place_BM[rows_n, given_BT[rows_n, step].long()] = step
    nodes_BM = place_BM.masked_fill(~active_BM, given_BT.shape[1] + M).argsort(1)
    nodes_BM = nodes_BM.masked_fill(torch.arange(M, device=device) >= active_BM.sum(1, keepdim=True), -1)
    return F.pad(nodes_BM, (0, max(0, T - M)), value=-1)[:, :T].contiguous()


def follow_sequence(
    routing: RoutingNetwork,
    entry_BN: Tensor,
    recorded: Route,
    *,
    estimator: Estimator,
    temperature: float,
    input_logits_BLNO: Tensor | None,
) -> Route:
    """The route of a recorded activation sequence under the present gates: firing rates, and the gradients of the draws.

    Args:
        routing: The routing network.
        entry_BN: Rates that enter the first layer (B, N).
        recorded: The active set (B, L, N) and, for an estimator that needs the draws, their order (B, T).
        estimator: As that of `raytraced.sequence.unroll`. With "none" only the final set counts.
        temperature: Of the estimator "gumbel", whose draws cannot be replayed with a gradient.
        input_logits_BLNO: Terms of input-conditioned gates (B, L − 1, N, O), or None.

    Returns:
        Route with the recorded set and order, and the rates under this set.
    """
    active_BLN = (recorded.active != 0).to(entry_BN.dtype)
    check_gradient(recorded, estimator)
    if estimator != "none" and torch.is_grad_enabled():
        assert recorded.nodes is not None
        active_BLN = _draw_along(routing, entry_BN, recorded.nodes, estimator, temperature, input_logits_BLNO)
    rates = routing(entry_BN, active_BLN, input_logits_BLNO)
    return Route(active_BLN, recorded.nodes, recorded.num_active, rates)


def _draw_along(
    routing: RoutingNetwork,
    entry_BN: Tensor,
    nodes_BT: Tensor,
    estimator: Estimator,
    temperature: float,
    input_logits_BLNO: Tensor | None,
) -> Tensor:
    """The active set (B, L, N) of given nodes, with the gradient of every draw: `unroll`, whose choices are given."""
    B, L, N, M = entry_BN.shape[0], routing.num_layers, routing.num_experts, routing.num_nodes
    candidates_K = torch.arange(M + 1, device=entry_BN.device)
    active_BM = entry_BN.new_zeros(B, M)
    running_B = torch.ones(B, dtype=torch.bool, device=entry_BN.device)
    draw = _Draw if torch.compiler.is_compiling() else _DrawBothWays
    for step in range(nodes_BT.shape[1]):
        if any_seen(running_B) is False:
            break
        rates = routing(entry_BN, active_BM.view(B, L, N), input_logits_BLNO)
        probs_BK = torch.cat((rates.nodes.flatten(1) * (1 - active_BM), rates.output[:, None]), -1)
        choice_B = torch.where(nodes_BT[:, step] < 0, M, nodes_BT[:, step])  # the first −1 is the output node's draw
        draw_BK = (choice_B[:, None] == candidates_K).to(probs_BK) * running_B[:, None]
        drawn_BK = draw.apply(probs_BK, draw_BK, None, estimator, temperature) * running_B[:, None]
        active_BM = active_BM + drawn_BK[:, :M]
        running_B = running_B & (choice_B < M)
    return active_BM.view(B, L, N)
