"""Hidden vectors of any leading shape as rows: what is given per vector, and routes, become (B, …) and get their shape back."""

from collections.abc import Callable

import torch
from torch import Tensor

from raytraced.errors import require
from raytraced.routing import Rates
from raytraced.sequence import Route, StopPerRow, check_stop


def flat(name: str, values: Tensor | None, shape: torch.Size) -> Tensor | None:
    """One number for each hidden vector, as (B,)."""
    if values is None:
        return None
    if values.shape not in (shape, (shape.numel(),)):
        raise ValueError(f"{name} has shape {tuple(values.shape)}: must be {tuple(shape)}, one value for each vector")
    if values.is_floating_point():
        raise ValueError(f"{name} are {values.dtype}: must be whole numbers")
    return values if values.ndim == 1 else values.reshape(-1)


def flat_stop(stop: StopPerRow | None, shape: torch.Size) -> StopPerRow | None:
    """A rule for the output node, checked; a tensor with a number for each hidden vector as (B,)."""
    if stop is None:
        return None
    if isinstance(stop, Tensor) and stop.shape not in (shape, (shape.numel(),)):
        rule = f"must be {tuple(shape)}, one number for each vector, or a single number that is no tensor"
        raise ValueError(f"stop has shape {tuple(stop.shape)}: {rule}")
    check_stop(stop)
    return stop.detach().reshape(-1) if isinstance(stop, Tensor) else stop


def flat_mask(mask: Tensor, shape: torch.Size) -> Tensor:
    """A mask with one value for each hidden vector or sample, as (B,)."""
    require(mask.dtype == torch.bool, "mask", mask.dtype, "must be torch.bool, False where there is padding")
    flat_B = flat("mask", mask, shape)
    assert flat_B is not None
    return flat_B


def flat_route(route: Route, shape: torch.Size, num_steps: int, num_experts: int) -> Route:
    """A recorded route for rows (B,), from one with the leading shape of the vectors; refuses one of another shape."""
    expected = (*shape, num_steps, num_experts)
    if tuple(route.active.shape) != expected:
        rule = f"must be {expected}: one for each vector, of a grid of {num_steps} × {num_experts} experts"
        raise ValueError(f"route: its active set has shape {tuple(route.active.shape)}; {rule}")
    if route.nodes is not None and route.nodes.shape[:-1] != shape:
        raise ValueError(f"route: its nodes have shape {tuple(route.nodes.shape)}; must begin with {tuple(shape)}")
    nodes_BT = None if route.nodes is None else route.nodes.reshape(shape.numel(), -1)
    active_BSN = route.active.detach().reshape(-1, num_steps, num_experts)
    return Route(active_BSN, nodes_BT, active_BSN.sum((1, 2)).long(), None)


def keep_route_rows(route: Route, rows: Tensor | slice) -> Route:
    """A recorded route for some of its rows."""
    nodes_nT = None if route.nodes is None else route.nodes[rows]
    return Route(route.active[rows], nodes_nT, route.num_active[rows], None)


def unordered_route(active_BSN: Tensor) -> Route:
    """The route of a router that has no order of activation and no firing rates."""
    return Route(active_BSN, None, active_BSN.detach().sum((-1, -2)).long(), None)


def shape_route(route: Route, shape: torch.Size) -> Route:
    """Give every field (B, …) the leading shape of the hidden vectors."""
    if len(shape) == 1:
        return route
    return map_route(route, lambda field: field.unflatten(0, shape) if shape else field[0])


def spread_route(route: Route, kept_n: Tensor, num_rows: int) -> Route:
    """The route of all rows, from the route of those with the numbers `kept_n`; the others activated nothing."""

    def among_all(field: Tensor) -> Tensor:
        fill = -1 if field is route.nodes else 0
        return field.new_full((num_rows, *field.shape[1:]), fill).index_copy(0, kept_n, field)

    return map_route(route, among_all)


def map_route(route: Route, change: Callable[[Tensor], Tensor]) -> Route:
    """Apply a function to every tensor of a route."""
    active, nodes, num_active, rates, num_runs = route
    return Route(
        change(active),
        None if nodes is None else change(nodes),
        change(num_active),
        None if rates is None else Rates(change(rates.nodes), change(rates.output)),
        None if num_runs is None else change(num_runs),
    )
