"""Raytraced experts in other models: as a block of plain vectors, and in place of the feed-forward blocks that are there.

Axes: n rows, D width, L layers, N experts a layer.
"""

from collections.abc import Iterable
from copy import deepcopy
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from raytraced.layer import LayerOutput, RoutedLayer
from raytraced.routers.raytraced import RaytracedExperts
from raytraced.words import did_you_mean, require


class HiddenOnly(nn.Module):
    """For nn.Sequential and for blocks of one's own: a routed layer that returns only its hidden vectors.

    With `update=True` it returns what the experts add, alone, as an MLP block does inside `x + block(norm(x))`.
    """

    def __init__(self, layer: nn.Module, *, update: bool = False) -> None:
        super().__init__()
        self.layer, self.update = layer, update

    def forward(self, hidden: Tensor, **options: Any) -> Tensor:
        out: LayerOutput = self.layer(hidden, **options)
        return out.update if self.update else out.hidden


class FeedForward(HiddenOnly):
    """Raytraced experts where a block stood in `x + block(norm(x))`; keeps which of them the last call ran."""

    active: Tensor | None = None  # (..., L, N)

    def __init__(self, layer: RoutedLayer) -> None:
        super().__init__(layer, update=True)

    def forward(self, hidden: Tensor, **options: Any) -> Tensor:
        """Vectors (..., D) -> what the experts add to them (..., D)."""
        out: LayerOutput = self.layer(hidden, **options)
        self.active = out.route.active.detach()
        return out.update


class Grown(nn.Module):
    """An expert that starts by adding nothing: a block times a number that is learned, 0 at first."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.gain = block, nn.Parameter(torch.zeros(()))

    def forward(self, hidden_nD: Tensor) -> Tensor:
        out_nD: Tensor = self.gain * self.block(hidden_nD)
        return out_nD


def replace_feed_forward(
    model: nn.Module,
    names: str | Iterable[str],
    *,
    num_layers: int,
    num_experts: int,
    upcycle: bool = False,
    **options: Any,
) -> dict[str, FeedForward]:
    """Put raytraced experts in place of blocks, in the model itself, and return them by name; options are the layer's.

    `names` are those of `model.named_modules()` or patterns such as "transformer.h.*.mlp". With `upcycle` every expert
    starts from the block that it replaces: those of the first layer as it is, later ones times a number that grows from 0.
    Each vector runs at least one expert of the first layer and their weights sum to one: what the model says stays the same.
    """
    if upcycle:
        for option, kept in (("stream", "residual"), ("weighting", "rates-to-one")):
            rule = f"must be {kept} with upcycle: else equal experts do not add up to the block"
            require(options.get(option, kept) == kept, option, options.get(option), rule)
        for option in ("expert", "hidden", "num_hidden"):
            require(
                option not in options, option, options.get(option), "leave it out with upcycle: experts are the block"
            )
    # all of them before the first is put in place: where one does not fit, the model stays as it was
    made: dict[int, FeedForward] = {}
    found = find_blocks(model, names)
    for name, block in found.items():
        if id(block) not in made:  # a block that stands in two places still does
            made[id(block)] = make_experts(name, block, num_layers, num_experts, upcycle, options)
    for name, block in found.items():
        model.set_submodule(name, made[id(block)])
    return {name: made[id(block)] for name, block in found.items()}


def find_blocks(model: nn.Module, names: str | Iterable[str]) -> dict[str, nn.Module]:
    """The parts of a model that names or patterns stand for."""
    parts = {name: part for name, part in model.named_modules(remove_duplicate=False) if name}
    found: dict[str, nn.Module] = {}
    for pattern in [names] if isinstance(names, str) else names:
        matching = {name: part for name, part in parts.items() if fnmatchcase(name, pattern)}
        if not matching:
            remedy = did_you_mean(pattern, parts, "model.named_modules() tells the names")
            raise ValueError(f"{pattern}: no part of {type(model).__name__} has this name; {remedy}")
        found |= matching
    require(bool(found), "names", "[]", "must name at least one block")
    for name in found:
        if inside := next((other for other in found if other.startswith(f"{name}.")), None):
            raise ValueError(f"{name}: also {inside} inside it is named; name one of them, e.g. by a narrower pattern")
    return found


def make_experts(
    name: str, block: nn.Module, num_layers: int, num_experts: int, upcycle: bool, options: dict[str, Any]
) -> FeedForward:
    """The layer that takes a block's place, of its width, its precision and on its device."""
    dim, like = find_width(name, block), next(block.parameters())
    if upcycle:
        first = [deepcopy(block) for _ in range(num_experts)]
        rest = [Grown(deepcopy(block)) for _ in range((num_layers - 1) * num_experts)]
        options = options | {"expert": iter([*first, *rest]).__next__}
    elif "expert" not in options:
        widest = max(size for weight in block.parameters() if weight.ndim == 2 for size in weight.shape)
        options = {"hidden": widest, "num_hidden": 1} | options
    layer = RaytracedExperts(dim, num_layers, num_experts, **options)
    return FeedForward(layer.to(like.device, like.dtype)).train(block.training)


def find_width(name: str, block: nn.Module) -> int:
    """The one size for which a block maps vectors (n, D) to (n, D), each on its own; else a line that says what it is not."""
    if any(isinstance(part, RoutedLayer) for part in block.modules()):
        raise ValueError(f"{name}: holds routed experts already")
    probe, kind = deepcopy(block).eval(), type(block).__name__
    sizes = {size for weight in probe.parameters() if weight.ndim == 2 for size in weight.shape}
    like = next(probe.parameters(), torch.empty(0))
    for size in sorted(sizes):
        rows_nD = torch.linspace(-1, 1, 3 * size, device=like.device, dtype=like.dtype).view(3, size)
        try:
            with torch.no_grad():
                out_nD, alone_1D = probe(rows_nD), probe(rows_nD[:1])
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
            continue  # not of this width, or asks for more than vectors
        if isinstance(out_nD, Tensor) and out_nD.shape == rows_nD.shape:
            if torch.allclose(out_nD[:1], alone_1D, rtol=1e-3, atol=1e-5):
                return size
            raise ValueError(f"{name}: {kind} looks at many vectors at once; an expert sees one, so name an MLP block")
    raise ValueError(
        f"{name}: {kind} does not turn vectors into vectors of their width, all by itself; name an MLP block"
    )
