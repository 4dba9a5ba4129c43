"""Reading a decoder's experts from a store while it runs: ahead of the blocks that need them, and within a deadline.

Axes: L blocks, N experts per block, S longest path.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from torch import Tensor, nn

from raytraced.errors import require
from raytraced.models.paths import Paths
from raytraced.router import Choice
from raytraced.store.budget import ByteBudget, TimeLimit
from raytraced.store.experts import StoredExperts
from raytraced.store.pool import ReadPlan

if TYPE_CHECKING:
    from raytraced.models.gpt import GPT


def byte_budgets(model: "GPT", max_bytes: int, num_texts: int) -> list[ByteBudget]:
    """A deadline in bytes for each of some texts; refuses a model that reads nothing, or plans nothing."""
    grid = planned_store(model, "max_bytes", max_bytes)
    return [ByteBudget(max_bytes, grid.pool.file, grid.pool.num_slots) for _ in range(num_texts)]


def time_limit(model: "GPT", max_ms: float) -> TimeLimit:
    """A deadline for a pass that begins now; refuses a model that reads nothing, or plans nothing."""
    planned_store(model, "max_ms", max_ms)
    return TimeLimit(max_ms)


def planned_store(model: "GPT", option: str, value: object) -> StoredExperts:
    """The experts in a store whose paths are known beforehand; refuses an option for which there must be such."""
    grid = model.layer.experts
    rule = "is for models loaded from a store whose paths depend on tokens alone; leave it out"
    require(isinstance(grid, StoredExperts) and model.path_follows_token, option, value, rule)
    assert isinstance(grid, StoredExperts)
    return grid


@contextmanager
def read_planned(grid: nn.Module, plan: Choice | None, limit: TimeLimit | None) -> Iterator[None]:
    """While the blocks run inside, read the planned experts of a store ahead of the blocks that need them."""
    if plan is None or not isinstance(grid, StoredExperts):
        yield
        return
    nodes = None if plan.route is None else plan.route.nodes
    order = None if limit is None else reading_order(grid, plan.active, nodes)
    with grid.within(limit), grid.reading(plan.active, order):
        yield


def read_ahead(grid: nn.Module, paths: Paths | None, by_rank: bool = False) -> ReadPlan | None:
    """Begin to read the experts of tokens that were just drawn; None where experts are in memory, or paths unknown.

    They are read in the order of blocks, or `by_rank` where some may not arrive in time.
    """
    if paths is None or not isinstance(grid, StoredExperts):
        return None
    return grid.pool.expect(reading_order(grid, paths.active, paths.nodes if by_rank else None))


def following(grid: nn.Module, plan: ReadPlan | None) -> AbstractContextManager[None]:
    """While the blocks run inside, they use what a plan has read; the plan is closed at the end."""
    return grid.following(plan) if isinstance(grid, StoredExperts) else nullcontext()


def reading_order(grid: StoredExperts, active: Tensor, nodes: Tensor | None) -> list[int]:
    """In which order the experts of tokens are read if some may not arrive in time: by rank, numbered as in the pool.

    Where they do not all fit into memory, or have no order of activation, they are read in the order of blocks.

    Args:
        grid: The experts.
        active: (..., L, N), not 0 where an expert runs.
        nodes: (..., S), their order of activation, padded with −1.
    """
    order = grid.order(active)
    if nodes is None or len(order) > grid.pool.num_slots:
        return order
    by_rank = nodes.reshape(-1, nodes.shape[-1]).T.flatten().tolist()
    return list(dict.fromkeys([grid.first + node for node in by_rank if node >= 0]))
