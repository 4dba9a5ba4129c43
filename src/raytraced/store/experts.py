"""A grid of experts that are in a store: the same grid as `raytraced.experts.MLPExperts`, without weights of its own.

Axes: B batch, L layers, N experts per layer, D width, n rows of one expert, P numbers of one expert.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raytraced.experts import MLPExperts
from raytraced.store.budget import TimeLimit
from raytraced.store.pool import ExpertPool, ReadPlan


def expert_numbers(experts: MLPExperts, layer: int, expert: int) -> Tensor:
    """The weight and the bias of each linear layer of one expert, one after the other (P,)."""
    parameters = zip(experts.weights, experts.biases, strict=True)
    return torch.cat([each[layer, expert].detach().reshape(-1).cpu() for pair in parameters for each in pair])


class StoredExperts(nn.Module):
    """A grid of MLP experts that are read from a store when they are needed. They have no gradients.

    Args:
        pool: The memory that experts are read into; several grids of a model share one.
        first: The number of this grid's first expert in the pool.
        like: The grid that it stands for; its parameters may be without memory.
    """

    def __init__(self, pool: ExpertPool, first: int, like: MLPExperts) -> None:
        super().__init__()
        self.pool, self.first, self.widths = pool, first, like.widths
        self.num_layers, self.num_experts = like.num_layers, like.num_experts
        self.num_weights, self.num_parameters = like.num_weights, like.num_parameters
        self.dtype = pool.file.dtype
        self._call = threading.local()

    def unstacked(self, unbind: Any = None) -> list["StoredLayer"]:
        """The same experts layer by layer."""
        return [StoredLayer(self, layer) for layer in range(self.num_layers)]

    def order(self, active: Tensor) -> list[int]:
        """The experts that some rows need.

        Args:
            active: (..., L, N), not 0 where an expert runs.

        Returns:
            Their numbers in the pool, in the order of layers.
        """
        needed_LN = active.detach().reshape(-1, self.num_layers, self.num_experts).ne(0).any(0)
        return [self.first + node for node in needed_LN.flatten().nonzero()[:, 0].tolist()]

    def expect(self, active: Tensor) -> ReadPlan:
        """Begin to read the experts that some rows need, in the order of layers.

        Args:
            active: (..., L, N), not 0 where an expert runs.

        Returns:
            The plan, to be closed when the rows were computed.
        """
        return self.pool.expect(self.order(active))

    @contextmanager
    def reading(self, active: Tensor, order: list[int] | None = None) -> Iterator[None]:
        """Read the experts of some rows ahead of the layers that this thread runs inside the block.

        Args:
            active: (..., L, N), not 0 where an expert runs.
            order: Numbers in the pool, in the order in which to read. Default: the order of layers.

        Returns:
            A context manager.
        """
        order = self.order(active) if order is None else order
        if self.plan is not None and self.plan.covers(order):  # they are on their way
            yield
            return
        with self.following(self.pool.expect(order)):
            yield

    @contextmanager
    def following(self, plan: ReadPlan | None) -> Iterator[None]:
        """Follow a plan while this thread runs layers inside the block, and close it at the end.

        Args:
            plan: What `expect` returned; None: no plan.

        Returns:
            A context manager.
        """
        if plan is None:
            yield
            return
        before = self.plan
        self._call.plan = plan
        try:
            yield
        finally:
            self._call.plan = before
            plan.close()

    @property
    def plan(self) -> ReadPlan | None:
        """The plan of the block that this thread is in."""
        return getattr(self._call, "plan", None)

    @contextmanager
    def within(self, limit: TimeLimit | None) -> Iterator[None]:
        """Leave out what does not arrive in time while this thread runs layers inside the block.

        Args:
            limit: When to stop waiting; None: wait for all.

        Returns:
            A context manager.
        """
        before = self.limit
        self._call.limit = limit
        try:
            yield
        finally:
            self._call.limit = before

    @property
    def limit(self) -> TimeLimit | None:
        """The deadline of the block that this thread is in."""
        return getattr(self._call, "limit", None)

    def acquire(self, experts: list[int], plan: ReadPlan | None) -> list[int]:
        """Wait for the first of some experts, numbered as in the pool; none of them when the time is over."""
        limit = self.limit
        if limit is None:
            return self.pool.acquire(experts, plan)
        # What was left out once stays out: a pass has one path.
        experts = [expert for expert in experts if expert - self.first not in limit.missed]
        ready = self.pool.acquire(experts, plan, limit.until) if experts else []
        if not ready:
            limit.missed.update(expert - self.first for expert in experts)
        return ready

    def run_layer(self, layer: int, hidden_BD: Tensor) -> Tensor:
        """Run all experts of a layer on all rows.

        Args:
            layer: Number of the layer, from 0.
            hidden_BD: Input vectors (B, D).

        Returns:
            The output of each expert (B, N, D).
        """
        return torch.stack([self.run_expert(layer, expert, hidden_BD) for expert in range(self.num_experts)], 1)

    def run_expert(self, layer: int, expert: int, hidden_nD: Tensor) -> Tensor:
        """Run one expert on its rows.

        Args:
            layer: Number of the layer, from 0.
            expert: Number of the expert in its layer, from 0.
            hidden_nD: Input vectors (n, D).

        Returns:
            Output vectors (n, D); zeros if the expert does not arrive in time.
        """
        self.check(hidden_nD)
        number = self.first + layer * self.num_experts + expert
        ready = self.acquire([number], self.plan)
        try:
            return self.run_from(self.pool.slot(number), hidden_nD) if ready else torch.zeros_like(hidden_nD)
        finally:
            self.pool.release(ready)

    def run_from(self, slot: memoryview, hidden_nD: Tensor) -> Tensor:
        """The expert that is in a slot, on its rows (n, D)."""
        numbers_P, begin = torch.frombuffer(slot, dtype=self.dtype).to(hidden_nD.dtype), 0
        for index, (K, O) in enumerate(pairwise(self.widths)):
            weight_OK, bias_O = numbers_P[begin : begin + O * K].view(O, K), numbers_P[begin + O * K :][:O]
            hidden_nD = F.linear(F.relu(hidden_nD) if index else hidden_nD, weight_OK, bias_O)
            begin += O * K + O
        return hidden_nD

    def check(self, hidden: Tensor) -> None:
        """Refuse vectors that experts in a store cannot be computed with."""
        if hidden.requires_grad and torch.is_grad_enabled():
            raise ValueError("experts in a store have no gradients: load the model's run without memory= to train it")
        if hidden.device.type != "cpu":
            raise ValueError(f"experts in a store are computed on the CPU, not on {hidden.device}: use device=cpu")

    def places(self) -> list[int]:
        """Where in a slot each weight, then each bias begins, in numbers."""
        weights, biases, begin = [], [], 0
        for K, O in pairwise(self.widths):
            weights.append(begin)
            biases.append(begin + O * K)
            begin += O * K + O
        return weights + biases

    def __deepcopy__(self, memo: dict[int, Any]) -> "StoredExperts":
        return self  # it has no state but the pool, which copies of a model share

    def extra_repr(self) -> str:
        words = f"{self.num_layers} layers of {self.num_experts}, widths {'-'.join(map(str, self.widths))}"
        return f"{words}, in a store, at most {self.pool.num_slots} in memory"


class StoredLayer:
    """One layer of experts in a store as a grid of its own."""

    num_layers = 1

    def __init__(self, experts: StoredExperts, layer: int) -> None:
        self.experts, self.layer = experts, layer
        self.num_experts, self.first = experts.num_experts, experts.first + layer * experts.num_experts

    def unstacked(self) -> list["StoredLayer"]:
        return [self]

    def idle_parameters(self, ran: Any) -> list[Tensor]:
        return []

    def run_layer(self, layer: int, hidden_BD: Tensor) -> Tensor:
        return self.experts.run_layer(self.layer, hidden_BD)

    def run_expert(self, layer: int, expert: int, hidden_nD: Tensor) -> Tensor:
        return self.experts.run_expert(self.layer, expert, hidden_nD)

    def arrivals(self, needed: Sequence[int]) -> Iterator[list[int]]:
        """Some experts of the layer, group by group as they come into memory, where each group stays while it is used."""
        pool, plan = self.experts.pool, self.experts.plan
        waiting = [self.first + expert for expert in needed]
        own = pool.expect(waiting) if plan is None or not plan.covers(waiting) else None
        try:
            while waiting and (ready := self.experts.acquire(waiting, own or plan)):
                try:
                    yield [expert - self.first for expert in ready]
                finally:
                    pool.release(ready)
                arrived = set(ready)
                waiting = [expert for expert in waiting if expert not in arrived]
        finally:
            if own is not None:
                own.close()

    def slot(self, expert: int) -> memoryview:
        """The memory of an expert that has arrived."""
        return self.experts.pool.slot(self.first + expert)
