"""One pass of tokens through the experts of a decoder, a layer of the grid per block; padding takes no part in it.

Axes: B batch, T tokens, n tokens without padding, D width.
"""

from collections.abc import Callable, Iterable

from torch import Tensor

from raytraced.layer import GridSteps, LayerOutput, RoutedLayer
from raytraced.models.paths import without_experts
from raytraced.router import Call, Choice
from raytraced.rows import flat_route, flat_stop, keep_route_rows, shape_route, spread_route

PolicyLossFn = Callable[[Tensor], Tensor]


class ExpertPass:
    """One pass of tokens through the experts of all blocks; padding takes no part in it.

    Args:
        layer: The grid of experts, a layer per block, and its router.
        call: Options of the call; `rows` (B, T).
        mask_BT: False where there is padding; None: no padding.
    """

    def __init__(self, layer: RoutedLayer, call: Call, mask_BT: Tensor | None) -> None:
        assert call.rows is not None
        self.layer, self.shape = layer, call.rows.shape
        self.kept_n = None if mask_BT is None else mask_BT.flatten().nonzero()[:, 0]
        stop = flat_stop(call.stop, self.shape)
        if self.kept_n is not None and isinstance(stop, Tensor):
            stop = stop[self.kept_n]
        self.call = call._replace(rows=self.flat(call.rows), stop=stop)
        if call.route is not None:
            steps, num = layer.router.num_steps, layer.router.num_experts
            route = flat_route(call.route, self.shape, steps, num)
            kept = slice(None) if self.kept_n is None else self.kept_n
            self.call = self.call._replace(route=keep_route_rows(route, kept))
        self.plan: Choice | None = None
        self.steps: GridSteps | None = None

    def flat(self, values: Tensor) -> Tensor:
        """The values (B, T, …) of tokens that are not padding (n, …)."""
        flat = values.flatten(0, 1)
        return flat if self.kept_n is None else flat[self.kept_n]

    def prepare(self, x_BTD: Tensor) -> bool:
        """Make ready for blocks that run twice; False for a first block whose vectors may decide on all blocks."""
        if self.steps is None and (self.plan is not None or not self.layer.router.may_plan):
            x_nD = self.flat(x_BTD)
            plan = self.plan or self.layer.router.plan(x_nD, self.call)  # refuses options that the router does not have
            self.steps = GridSteps(self.layer, x_nD, self.call, plan)
            self.steps.buffers = {}
        return self.steps is not None

    def update(self, block: int, hidden_BTD: Tensor) -> Tensor:
        """What the experts of a block add (B, T, D), given its normalised vectors."""
        hidden_nD = self.flat(hidden_BTD)
        if self.steps is None:
            # Where no path was planned before: a router may plan all blocks by what reaches the first one.
            plan = self.plan or self.layer.router.plan(hidden_nD, self.call)
            self.steps = GridSteps(self.layer, hidden_nD, self.call, plan)
        update_nD = self.steps.update_layer(block, hidden_nD)
        if self.kept_n is not None:
            none_BD = update_nD.new_zeros(self.shape.numel(), update_nD.shape[-1])
            update_nD = none_BD.index_copy(0, self.kept_n, update_nD)
        return update_nD.view(hidden_BTD.shape)

    def output(self, hidden_BTD: Tensor, missed: Iterable[int] = ()) -> LayerOutput:
        """After the last block: the route of every token, without experts that did not arrive, and the router's losses."""
        assert self.steps is not None
        if missed:
            assert self.steps.plan is not None  # only planned experts have a deadline
            self.steps.plan = without_experts(self.steps.plan, missed)
        (route, loss, policy_loss_fn), kept_n = self.steps.result(), self.kept_n
        if kept_n is not None:
            route = spread_route(route, kept_n, self.shape.numel())
        return LayerOutput(hidden_BTD, shape_route(route, self.shape), loss, on_rows(policy_loss_fn, kept_n))


def on_rows(policy_loss_fn: PolicyLossFn | None, kept_n: Tensor | None) -> PolicyLossFn | None:
    """The loss of decisions as a function of the losses of all rows, padding included."""
    if policy_loss_fn is None or kept_n is None:
        return policy_loss_fn
    return lambda losses_B: policy_loss_fn(losses_B[kept_n])
