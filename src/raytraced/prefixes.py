"""An answer at every moment: the predictions after no expert, after the first, the second, …

Axes: B batch, L layers, N experts a layer, M = L·N nodes, D width, Y classes, T steps, n rows that still run.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raytraced.classifier import Output, RaytracedClassifier
from raytraced.experts import MLPExperts
from raytraced.kernels import fused_classifier, fused_experts
from raytraced.layer import RaytracedExperts
from raytraced.sequence import Select


class Step(NamedTuple):
    """The answer once every sample has run at most `budget` experts."""

    budget: int
    logits: Tensor  # (B, Y)
    num_active: Tensor  # (B,): below `budget` where the sequence had already ended


def anytime(
    model: RaytracedClassifier,
    images: Tensor,
    *,
    select: Select | None = None,
    max_experts: int | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Step]:
    """Yield the model's answer with 0, 1, 2, … experts, until every sample's sequence has ended.

    Step k is what `model(images, max_experts=k)` returns.
    """
    if max_experts is not None and max_experts < 0:
        raise ValueError(f"max_experts={max_experts}: must be at least 0, or None for no budget")
    if not bool(images.isfinite().all()):
        bad = int((~images.isfinite()).sum())
        raise ValueError(f"images: {bad} of {images.numel()} values are not finite; mend or drop these images")
    if generator is None and (select or ("greedy" if not model.training else model.layer.train_select)) == "sample":
        generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
    limit = model.layer.routing.num_nodes if max_experts is None else min(max_experts, model.layer.routing.num_nodes)
    draws = _Draws(select, generator)
    # Few images through tiny experts take one call; to hold on to a part of that would take several.
    if fused_classifier.parts_of(model, images) is not None:
        yield from _again(limit, lambda budget: model(images, **draws.options(budget)))
        return
    hidden_BD = model.input_block(images)
    if _can_extend(model, hidden_BD):
        yield from _extended(model, hidden_BD, limit, draws)
        return
    yield from _again(limit, lambda budget: model.classify(hidden_BD, **draws.options(budget)))


class _Draws:
    """The same draws for every budget: each prefix is a prefix of the same sequence."""

    def __init__(self, select: Select | None, generator: torch.Generator | None) -> None:
        self.select, self.generator = select, generator
        self.state = None if generator is None else generator.get_state()

    def options(self, budget: int) -> dict[str, Any]:
        if self.generator is not None and self.state is not None:
            self.generator.set_state(self.state)
        return {"select": self.select, "max_experts": budget, "generator": self.generator}


def _again(limit: int, classify: Callable[[int], Output]) -> Iterator[Step]:
    """Every prefix from the start."""
    for budget in range(limit + 1):
        out = classify(budget)
        assert out.sequence is not None
        yield Step(budget, out.logits, out.sequence.num_active)
        if not bool((out.sequence.num_active == budget).any()):
            return


def _can_extend(model: RaytracedClassifier, hidden_BD: Tensor) -> bool:
    """Whether what a prefix computed can be kept: only in the kernel is a row's result the same whatever rows surround it."""
    layer = model.layer
    if torch.is_grad_enabled() or type(layer) is not RaytracedExperts or type(model) is not RaytracedClassifier:
        return False
    if layer._forward_hooks or layer._forward_pre_hooks:
        return False
    return layer.explain_execution(hidden_BD).way == "kernel"


def _extended(model: RaytracedClassifier, hidden_BD: Tensor, limit: int, draws: _Draws) -> Iterator[Step]:
    """Every prefix from the one before: a node changes the hidden vectors of its own layer and of those below, no others."""
    layer = model.layer
    L, N, residual = layer.routing.num_layers, layer.routing.num_experts, layer.stream == "residual"
    assert isinstance(layer.experts, MLPExperts)
    parameters = [
        ([weight[l : l + 1] for weight in layer.experts.weights], [bias[l : l + 1] for bias in layer.experts.biases])
        for l in range(L)
    ]
    entry_BN = layer.entry(hidden_BD)
    sequence = layer.sequence_from(entry_BN, **draws.options(limit))
    states = [
        hidden_BD.contiguous(),
        *(hidden_BD.clone() if residual else torch.zeros_like(hidden_BD) for _ in range(L)),
    ]
    for budget in range(limit + 1):
        if budget:
            # The firing rates of a prefix are those of its own set: found as for the whole, up to its last node.
            prefix = layer.sequence_from(entry_BN, **draws.options(budget)) if budget < limit else sequence
            weights_BLN = layer.weigh(prefix)
            node_B = sequence.nodes[:, budget - 1]
            for l in range(L):
                rows_n = ((node_B >= 0) & (node_B < (l + 1) * N)).nonzero()[:, 0]
                active_n1N, weights_n1N = prefix.active[rows_n, l : l + 1], weights_BLN[rows_n, l : l + 1]
                one_layer = "residual" if residual else "last"
                states[l + 1][rows_n] = fused_experts.run(
                    states[l][rows_n], active_n1N, weights_n1N, one_layer, *parameters[l]
                )
        out_BD = states[-1]
        if layer.stream == "skip-sum":
            out_BD = states[1]
            for state_BD in states[2:]:
                out_BD = out_BD + state_BD
        num_active_B = sequence.num_active.clamp_max(budget)
        yield Step(budget, model.head(out_BD), num_active_B)
        if not bool((num_active_B == budget).any()):
            return
