"""An answer at every moment: the predictions after no expert, after the first, the second, …"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from raytraced.classifier import RaytracedClassifier
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
    hidden_BD = model.input_block(images)
    if generator is None and (select or ("greedy" if not model.training else model.layer.train_select)) == "sample":
        generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
    state = None if generator is None else generator.get_state()
    limit = model.layer.routing.num_nodes if max_experts is None else min(max_experts, model.layer.routing.num_nodes)
    for budget in range(limit + 1):
        if generator is not None and state is not None:
            generator.set_state(state)  # every prefix is a prefix of the same draws
        out = model.classify(hidden_BD, select=select, max_experts=budget, generator=generator)
        assert out.sequence is not None
        yield Step(budget, out.logits, out.sequence.num_active)
        if not bool((out.sequence.num_active == budget).any()):
            return
