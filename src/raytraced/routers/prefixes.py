"""A raytraced layer after no expert, after the first, the second, …: every prefix of a sequence is a smaller network.

Axes: B batch, L layers, N experts a layer, D width, n rows that a new node changes.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from raytraced import operations
from raytraced.draws import fixed_draws
from raytraced.grid import Experts, MLPExperts
from raytraced.layer import Call, LayerOutput
from raytraced.routers.raytraced import RaytracedExperts

FEW_ROWS = 64  # that one call of `raytrace` takes


def prefixes(
    layer: RaytracedExperts, hidden: Tensor, most: int | None, call: Call, mask: Tensor | None = None
) -> Iterator[LayerOutput]:
    """What the layer gives with at most 0, 1, … experts, up to `most`, until every vector's sequence has ended."""
    hidden_BD, call, put_back = layer.as_rows(hidden, call, mask)
    num_nodes = layer.router.routing.num_nodes
    limit = num_nodes if most is None else min(most, num_nodes)
    draws = fixed_draws(call.generator)  # the same for every budget: each prefix is a prefix of the same sequence

    def with_budget(budget: int) -> Call:
        return call._replace(max_experts=budget, generator=draws())

    outputs = _extended if _can_extend(layer, hidden_BD) else _again
    for budget, out in enumerate(outputs(layer, hidden_BD, limit, with_budget)):
        yield put_back(out)
        if not bool((out.route.num_active == budget).any()):
            return


def _again(
    layer: RaytracedExperts, hidden_BD: Tensor, limit: int, with_budget: Callable[[int], Call]
) -> Iterator[LayerOutput]:
    """Every prefix from the start."""
    for budget in range(limit + 1):
        yield layer.run(hidden_BD, with_budget(budget))


def _can_extend(layer: RaytracedExperts, hidden_BD: Tensor) -> bool:
    """Whether what a prefix computed can be kept: in the library alone a row's result is the same whatever rows surround it.

    Few rows take one call for all of it; to hold on to a part of that would take several.
    """
    if torch.is_grad_enabled() or type(layer) is not RaytracedExperts or not isinstance(layer.experts, MLPExperts):
        return False
    if len(hidden_BD) <= FEW_ROWS:
        return False
    weights_BLN = hidden_BD.new_empty(len(hidden_BD), layer.router.num_layers, layer.router.num_experts)
    return operations.experts.explain(layer.experts, hidden_BD, weights_BLN, weights_BLN, layer.stream).name == "cpp"


def _extended(
    layer: RaytracedExperts, hidden_BD: Tensor, limit: int, with_budget: Callable[[int], Call]
) -> Iterator[LayerOutput]:
    """Every prefix from the one before: a node changes the hidden vectors of its own layer and of those below, no others."""
    router, residual = layer.router, layer.stream == "residual"
    L, N = router.num_layers, router.num_experts
    layers = [_layer_of(layer.experts, l) for l in range(L)]
    entry_BN = router.entry(hidden_BD)
    whole = router.sequence(entry_BN, with_budget(limit))
    assert whole.nodes is not None
    fresh = [hidden_BD.clone() if residual else torch.zeros_like(hidden_BD) for _ in range(L)]
    states = [hidden_BD.contiguous(), *fresh]
    for budget in range(limit + 1):
        # The firing rates of a prefix are those of its own set: found as for the whole, up to its last node.
        route = whole if budget == limit else router.sequence(entry_BN, with_budget(budget))
        weights_BLN = router.weigh(route)
        node_B = whole.nodes[:, budget - 1] if budget else whole.num_active.new_full((len(hidden_BD),), -1)
        for l in range(L):
            rows_n = ((node_B >= 0) & (node_B < (l + 1) * N)).nonzero()[:, 0]
            if len(rows_n):
                active_n1N, weights_n1N = route.active[rows_n, l : l + 1], weights_BLN[rows_n, l : l + 1]
                stream = "residual" if residual else "last"
                states[l + 1][rows_n] = operations.experts(
                    layers[l], states[l][rows_n], active_n1N, weights_n1N, stream
                )
        out_BD = states[-1]
        if layer.stream == "skip-sum":
            out_BD = states[1]
            for state_BD in states[2:]:
                out_BD = out_BD + state_BD
        yield LayerOutput(out_BD.clone(), route)


def _layer_of(experts: Experts, layer: int) -> MLPExperts:
    """One layer as a grid of its own, on the same memory."""
    assert isinstance(experts, MLPExperts)
    dim, *hidden, _ = experts.widths
    with torch.device("meta"):
        part = MLPExperts(1, experts.num_experts, dim, hidden[0], len(hidden))
    for own, whole in ((part.weights, experts.weights), (part.biases, experts.biases)):
        for index, parameter in enumerate(whole):
            own[index] = nn.Parameter(parameter[layer : layer + 1].detach(), requires_grad=False)
    return part
