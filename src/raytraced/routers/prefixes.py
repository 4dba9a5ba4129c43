"""A raytraced layer after no expert, after the first, the second, …: every prefix of a sequence is a smaller network.

Axes: B batch, L layers, N experts a layer, D width, n rows that a new node changes.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from raytraced import operations
from raytraced.draws import SameDraws
from raytraced.grid import MLPExperts
from raytraced.layer import Call, LayerOutput, Look, Looks
from raytraced.routers.raytraced import RaytracedExperts

FEW_ROWS = 64  # that one call of `raytrace` takes
WithBudget = Callable[[int, Tensor], Call]


def prefixes(
    layer: RaytracedExperts, hidden: Tensor, most: int | None, call: Call, mask: Tensor | None = None
) -> Iterator[LayerOutput]:
    """What the layer gives with at most 0, 1, … experts, up to `most`, until every vector's sequence has ended."""
    hidden_BD, call, put_back = layer.as_rows(hidden, call, mask)
    # Few rows take one call for all of a prefix; to hold on to a part of that would take several.
    looks = expert_looks(layer, hidden_BD, call, most, again=len(hidden_BD) <= FEW_ROWS)
    for budget, (out, _) in enumerate(looks):
        yield put_back(out._replace(route=out.route._replace(num_runs=None)))
        if not bool((out.route.num_active == budget).any()):
            return


def expert_looks(
    layer: RaytracedExperts, hidden_BD: Tensor, call: Call, most: int | None = None, again: bool = False
) -> Looks[LayerOutput]:
    """The vectors after no expert, after the first, the second, …, of rows that go on; nothing runs for the others."""
    num_nodes = layer.router.routing.num_nodes
    limit = num_nodes if most is None else min(most, num_nodes)
    draws = SameDraws(call.generator)  # the same for every budget: each prefix is a prefix of the same sequence
    rows_n = torch.arange(len(hidden_BD), device=hidden_BD.device) if call.rows is None else call.rows

    def with_budget(budget: int, rows_n: Tensor) -> Call:
        return call._replace(max_experts=budget, generator=draws.again(), rows=rows_n)

    outputs = _again if again or not _can_extend(layer, hidden_BD) else _extended
    return outputs(layer, hidden_BD, rows_n, limit, with_budget)


def _again(
    layer: RaytracedExperts, hidden_nD: Tensor, rows_n: Tensor, limit: int, with_budget: WithBudget
) -> Looks[LayerOutput]:
    """Every prefix from the start."""
    runs_n = torch.zeros_like(rows_n)
    for budget in range(limit + 1):
        out = layer.run(hidden_nD, with_budget(budget, rows_n))
        runs_n = runs_n + out.route.num_active
        ended_n = (out.route.num_active < budget) | (budget == limit)
        kept_n = yield Look(out._replace(route=out.route._replace(num_runs=runs_n)), ended_n)
        if kept_n is not None:
            hidden_nD, rows_n, runs_n = hidden_nD[kept_n], rows_n[kept_n], runs_n[kept_n]


def _can_extend(layer: RaytracedExperts, hidden_BD: Tensor) -> bool:
    """Whether what a prefix computed can be kept: in the library alone a row's result is the same whatever rows surround it."""
    if torch.is_grad_enabled() or type(layer) is not RaytracedExperts or not isinstance(layer.experts, MLPExperts):
        return False
    weights_BLN = hidden_BD.new_empty(len(hidden_BD), layer.router.num_layers, layer.router.num_experts)
    return operations.experts.explain(layer.experts, hidden_BD, weights_BLN, weights_BLN, layer.stream).name == "cpp"


def _extended(
    layer: RaytracedExperts, hidden_nD: Tensor, rows_n: Tensor, limit: int, with_budget: WithBudget
) -> Looks[LayerOutput]:
    """Every prefix from the one before: a node changes the hidden vectors of its own layer and of those below, no others."""
    router, residual = layer.router, layer.stream == "residual"
    L, N = router.num_layers, router.num_experts
    layers = layer.experts.unstacked()
    nodes_nT = router.sequence(hidden_nD, with_budget(limit, rows_n)).nodes
    assert nodes_nT is not None
    fresh = [hidden_nD.clone() if residual else torch.zeros_like(hidden_nD) for _ in range(L)]
    states, runs_n = [hidden_nD.contiguous(), *fresh], torch.zeros_like(rows_n)
    for budget in range(limit + 1):
        # The firing rates of a prefix are those of its own set: found as for the whole, up to its last node.
        route = router.sequence(states[0], with_budget(budget, rows_n))
        weights_nLN = router.weigh(route)
        node_n = nodes_nT[:, budget - 1] if budget else torch.full_like(rows_n, -1)
        for l in range(L):
            some_m = ((node_n >= 0) & (node_n < (l + 1) * N)).nonzero()[:, 0]
            if len(some_m):
                active_m1N, weights_m1N = route.active[some_m, l : l + 1], weights_nLN[some_m, l : l + 1]
                stream = "residual" if residual else "last"
                states[l + 1][some_m] = operations.experts(
                    layers[l], states[l][some_m], active_m1N, weights_m1N, stream
                )
                runs_n = runs_n.index_add(0, some_m, active_m1N.sum((1, 2)).long())
        out_nD = states[-1]
        if layer.stream == "skip-sum":
            out_nD = states[1]
            for state_nD in states[2:]:
                out_nD = out_nD + state_nD
        ended_n = (route.num_active < budget) | (budget == limit)
        kept_n = yield Look(LayerOutput(out_nD.clone(), route._replace(num_runs=runs_n)), ended_n)
        if kept_n is not None:
            states, rows_n, runs_n = [state_nD[kept_n] for state_nD in states], rows_n[kept_n], runs_n[kept_n]
            nodes_nT = nodes_nT[kept_n]
