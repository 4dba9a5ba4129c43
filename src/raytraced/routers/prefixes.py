"""A raytraced layer after no expert, after the first, the second, …: every prefix of a sequence is a smaller network.

Axes: B batch, L layers, N experts per layer, D width, T steps of a sequence, n rows that have not left yet, m rows that a
new node changes.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from raytraced import kernels
from raytraced.experts import MLPExperts
from raytraced.layer import Exit, LayerOutput
from raytraced.rng import ReplayedGenerator
from raytraced.router import Call
from raytraced.routers.raytraced import RaytracedExperts
from raytraced.rows import flat_stop

FEW_ROWS = 64  # that one call of `raytrace` takes
CallWithBudget = Callable[[int, Tensor], Call]
"""a budget and the numbers of rows in the first batch (n,) -> the call for them"""


def prefixes(
    layer: RaytracedExperts, hidden: Tensor, max_experts: int | None, call: Call, mask: Tensor | None = None
) -> Iterator[LayerOutput]:
    """The layer's output with at most 0, 1, … experts, up to `max_experts`, until every vector's sequence has ended."""
    hidden_BD, call, put_back = layer.as_rows(hidden, call, mask)
    # Few rows take one call for a whole prefix; keeping a part of the one before would take several.
    exits = expert_exits(layer, hidden_BD, call, max_experts, rerun=len(hidden_BD) <= FEW_ROWS)
    limit = _num_prefixes(layer, max_experts)
    for budget in range(limit + 1):
        if budget:
            exits.advance()
        out = exits.current.output
        yield put_back(out._replace(route=out.route._replace(num_runs=None)))
        if not bool((out.route.num_active == budget).any()):
            return


def expert_exits(
    layer: RaytracedExperts, hidden_BD: Tensor, call: Call, max_experts: int | None = None, rerun: bool = False
) -> "RerunExits | ExtendedExits":
    """The layer's answers after no expert, after the first, the second, …; see `raytraced.early_exit.Exits`.

    Args:
        layer: The raytraced layer.
        hidden_BD: Its input (B, D).
        call: Options of the call; its budget is not used.
        max_experts: The last exit is after this many experts. Default: after all nodes.
        rerun: Whether to compute every prefix from the start, in one compiled call, even where the one before could be kept.
    """
    replayed = ReplayedGenerator(call.generator)  # the same draws for every budget: each is a prefix of one sequence
    index_B = torch.arange(len(hidden_BD), device=hidden_BD.device)
    call = call._replace(
        stop=flat_stop(call.stop, hidden_BD.shape[:1]), rows=index_B if call.rows is None else call.rows
    )

    def call_with_budget(budget: int, index_n: Tensor) -> Call:
        kept = call if len(index_n) == len(index_B) else call.keep(index_n)
        return kept._replace(max_experts=budget, generator=replayed.restart())

    kind = RerunExits if rerun or not _can_extend(layer, hidden_BD) else ExtendedExits
    return kind(layer, hidden_BD, index_B, _num_prefixes(layer, max_experts), call_with_budget)


def _num_prefixes(layer: RaytracedExperts, max_experts: int | None) -> int:
    num_nodes = layer.router.routing.num_nodes
    return num_nodes if max_experts is None else min(max_experts, num_nodes)


def _can_extend(layer: RaytracedExperts, hidden_BD: Tensor) -> bool:
    """Whether a prefix's results can be kept for the next: only the compiled kernel computes a row alike in any batch."""
    if torch.is_grad_enabled() or not layer.fuses or not isinstance(layer.experts, MLPExperts):
        return False
    weights_BLN = hidden_BD.new_empty(len(hidden_BD), layer.router.num_layers, layer.router.num_experts)
    return kernels.experts.explain(layer.experts, hidden_BD, weights_BLN, weights_BLN, layer.stream).name == "cpp"


class RerunExits:
    """Every prefix computed from the start."""

    def __init__(
        self,
        layer: RaytracedExperts,
        hidden_BD: Tensor,
        index_B: Tensor,
        num_prefixes: int,
        call_with_budget: CallWithBudget,
    ) -> None:
        self.layer, self.hidden_nD, self.index_n = layer, hidden_BD, index_B
        self.num_prefixes, self.call_with_budget = num_prefixes, call_with_budget
        self.budget, self.num_runs_n = 0, torch.zeros_like(index_B)
        self.current = self._run()

    def advance(self, rows: Tensor | None = None) -> None:
        """Go on with some of the current rows (numbers, default: all) to the next prefix."""
        if rows is not None:
            self.hidden_nD, self.index_n, self.num_runs_n = (
                self.hidden_nD[rows],
                self.index_n[rows],
                self.num_runs_n[rows],
            )
        self.budget += 1
        self.current = self._run()

    def _run(self) -> Exit[LayerOutput]:
        out = self.layer.run(self.hidden_nD, self.call_with_budget(self.budget, self.index_n))
        num_active_n = out.route.num_active
        self.num_runs_n = self.num_runs_n + num_active_n
        ended_n = (num_active_n < self.budget) | (self.budget == self.num_prefixes)
        return Exit(out._replace(route=out.route._replace(num_runs=self.num_runs_n)), ended_n)


class ExtendedExits:
    """Every prefix computed from the one before: a new node changes its own layer and those below it, no others."""

    def __init__(
        self,
        layer: RaytracedExperts,
        hidden_BD: Tensor,
        index_B: Tensor,
        num_prefixes: int,
        call_with_budget: CallWithBudget,
    ) -> None:
        num_layers, stream = layer.router.num_layers, layer.stream
        self.layer, self.index_n = layer, index_B
        self.num_prefixes, self.call_with_budget = num_prefixes, call_with_budget
        self.layers = layer.experts.unstacked()
        nodes_nT = layer.router.sequence(hidden_BD, call_with_budget(num_prefixes, index_B)).nodes
        assert nodes_nT is not None
        self.nodes_nT = nodes_nT
        # The input of the first layer, then what each layer passes on.
        self.states = [hidden_BD.contiguous(), *(stream.start(hidden_BD).answer.clone() for _ in range(num_layers))]
        self.budget, self.num_runs_n = 0, torch.zeros_like(index_B)
        self.current = self._run()

    def advance(self, rows: Tensor | None = None) -> None:
        """Go on with some of the current rows (numbers, default: all) to the next prefix."""
        if rows is not None:
            self.states = [state_nD[rows] for state_nD in self.states]
            self.index_n, self.num_runs_n, self.nodes_nT = (
                self.index_n[rows],
                self.num_runs_n[rows],
                self.nodes_nT[rows],
            )
        self.budget += 1
        self.current = self._run()

    def _run(self) -> Exit[LayerOutput]:
        router, stream = self.layer.router, self.layer.stream
        # The firing rates of a prefix are those of its own set: the sequence up to its last node gives them.
        route = router.sequence(self.states[0], self.call_with_budget(self.budget, self.index_n))
        weights_nLN = router.weigh(route)
        newest_n = self.nodes_nT[:, self.budget - 1] if self.budget else torch.full_like(self.index_n, -1)
        for l in range(router.num_layers):
            changed_m = ((newest_n >= 0) & (newest_n < (l + 1) * router.num_experts)).nonzero()[:, 0]
            if len(changed_m):
                active_m1N, weights_m1N = route.active[changed_m, l : l + 1], weights_nLN[changed_m, l : l + 1]
                self.states[l + 1][changed_m] = kernels.experts(
                    self.layers[l], self.states[l][changed_m], active_m1N, weights_m1N, stream.within_layer
                )
                self.num_runs_n = self.num_runs_n.index_add(0, changed_m, active_m1N.sum((1, 2)).long())
        answer_nD = stream.combine(self.states[1:]).clone()
        ended_n = (route.num_active < self.budget) | (self.budget == self.num_prefixes)
        return Exit(LayerOutput(answer_nD, route._replace(num_runs=self.num_runs_n)), ended_n)
