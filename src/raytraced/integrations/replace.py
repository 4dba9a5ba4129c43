"""Raytraced experts in other models: as a block that maps vectors to vectors, and in place of existing feed-forward blocks.

Axes: n rows, D width, L layers, N experts per layer.
"""

from collections.abc import Iterable
from copy import deepcopy
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from raytraced.errors import did_you_mean, require
from raytraced.layer import LayerOutput, RoutedLayer
from raytraced.routers.raytraced import RaytracedExperts

SPLIT = ("intermediate", "output.dense")  # where BERT and the models made after it have the two halves of a block


class HiddenOnly(nn.Module):
    """A routed layer that returns only its hidden vectors, for nn.Sequential and for custom blocks.

    Args:
        layer: The routed layer; it returns a LayerOutput.
        update: Whether to return only what the experts add, as an MLP block does inside `x + block(norm(x))`.

    Returns (from ``forward``, which takes vectors (..., D) and the layer's options):
        Vectors (..., D).
    """

    def __init__(self, layer: nn.Module, *, update: bool = False) -> None:
        super().__init__()
        self.layer, self.update = layer, update

    def forward(self, hidden: Tensor, **options: Any) -> Tensor:
        """Run the layer.

        Args:
            hidden: Vectors (..., D).
            **options: Options of the layer's call.

        Returns:
            Vectors (..., D).
        """
        out: LayerOutput = self.layer(hidden, **options)
        return out.update if self.update else out.hidden


class FeedForward(HiddenOnly):
    """Raytraced experts in place of a block in `x + block(norm(x))`.

    Args:
        layer: The routed layer.

    Attributes:
        active: The experts that the last call ran (..., L, N), 0 or 1; None before the first call.
    """

    active: Tensor | None = None

    def __init__(self, layer: RoutedLayer) -> None:
        super().__init__(layer, update=True)

    def forward(self, hidden: Tensor, **options: Any) -> Tensor:
        """Run the experts; vectors (..., D) -> what the experts add to them (..., D)."""
        out: LayerOutput = self.layer(hidden, **options)
        self.active = out.route.active.detach()
        return out.update


class Grown(nn.Module):
    """An expert whose output is zero at first: a block times a learned number that starts at 0.

    Args:
        block: The block; it maps vectors (n, D) to vectors (n, D).
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.gain = block, nn.Parameter(torch.zeros(()))

    def forward(self, hidden_nD: Tensor) -> Tensor:
        """Run the block and scale its output; (n, D) -> (n, D)."""
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
    """Replace feed-forward blocks of a model by raytraced experts, in the model itself.

    Args:
        model: The model to change.
        names: Names of blocks as `model.named_modules()` has them, or patterns such as "transformer.h.*.mlp". A pattern
            is compared part by part: `*` stands for one part between two dots, or for some letters of it. Where a block is
            split over two modules, as in BERT, name the first, "encoder.layer.*.intermediate": the linear map of the second,
            `output.dense`, belongs to the block, and the dropout and the norm after it stay.
        num_layers: Number of expert layers in each grid.
        num_experts: Number of experts per layer.
        upcycle: Whether experts start as copies of the block that they replace: those of the first layer as it is, those
            of later layers times a learned number that starts at 0. Each vector runs at least one expert of the first
            layer, and the weights of a layer sum to one, so the model's output does not change.
        options: Further options of `RaytracedExperts`.

    Returns:
        The new blocks by the names of those that they replace.
    """
    if upcycle:
        for option, kept in (("stream", "residual"), ("weighting", "rates-to-one"), ("weight_scale", 1.0)):
            rule = f"must be {kept} with upcycle: else equal experts do not add up to the block"
            require(options.setdefault(option, kept) == kept, option, options.get(option), rule)
        for option in ("expert", "hidden", "num_hidden"):
            require(
                option not in options, option, options.get(option), "leave it out with upcycle: experts are the block"
            )
    # All are built before the first is put in place: if one cannot be built, the model stays as it was.
    made: dict[int, FeedForward] = {}
    found = find_blocks(model, names)
    ends = {name: find_end(model, name) for name in found}
    for name, block in found.items():
        if id(block) not in made:  # a block that two parts share is replaced by one that they share
            whole = block if (end := ends[name]) is None else nn.Sequential(block, model.get_submodule(end))
            made[id(block)] = make_experts(name, whole, num_layers, num_experts, upcycle, options)
    for name, block in found.items():
        model.set_submodule(name, made[id(block)])
        if (end := ends[name]) is not None:
            model.set_submodule(end, nn.Identity())
    return {name: made[id(block)] for name, block in found.items()}


def find_blocks(model: nn.Module, names: str | Iterable[str]) -> dict[str, nn.Module]:
    """The parts of a model that names or patterns match, by name."""
    parts = {name: part for name, part in model.named_modules(remove_duplicate=False) if name}
    found: dict[str, nn.Module] = {}
    for pattern in [names] if isinstance(names, str) else names:
        matching = {name: part for name, part in parts.items() if matches(name, pattern)}
        if not matching:
            remedy = did_you_mean(pattern, parts, "model.named_modules() lists the names")
            raise ValueError(f"{pattern}: no part of {type(model).__name__} has this name; {remedy}")
        found |= matching
    require(bool(found), "names", "[]", "must name at least one block")
    for name in found:
        if inside := next((other for other in found if other.startswith(f"{name}.")), None):
            raise ValueError(f"{name}: {inside} inside it is named as well; name one of them only")
    return found


def find_end(model: nn.Module, name: str) -> str | None:
    """The name of the linear map that ends a block split over two modules, as in BERT; None for a block in one module."""
    parent, _, own = name.rpartition(".")
    end = f"{parent}.{SPLIT[1]}".lstrip(".")
    if own != SPLIT[0]:
        return None
    try:
        return end if isinstance(model.get_submodule(end), nn.Linear) else None
    except AttributeError:
        return None


def matches(name: str, pattern: str) -> bool:
    """Whether a dotted name matches a pattern part by part, so that `*` never stands for several parts."""
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def make_experts(
    name: str, block: nn.Module, num_layers: int, num_experts: int, upcycle: bool, options: dict[str, Any]
) -> FeedForward:
    """The layer that replaces a block, with its width, its precision and on its device."""
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
    """The width D for which a block maps vectors (n, D) to (n, D), each independently; a ValueError where there is none."""
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
            continue  # another width, or more arguments than vectors
        if isinstance(out_nD, Tensor) and out_nD.shape == rows_nD.shape:
            if torch.allclose(out_nD[:1], alone_1D, rtol=1e-3, atol=1e-5):
                return size
            rule = "an expert must map each vector independently; name an MLP block"
            raise ValueError(f"{name}: {kind} mixes several vectors; {rule}")
    raise ValueError(f"{name}: {kind} does not map vectors (n, D) alone to vectors (n, D); name an MLP block")
