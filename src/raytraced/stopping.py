"""An answer at every moment: the predictions after no expert, after the first, the second, …"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from raytraced.layer import flat_mask
from raytraced.models.output import Model
from raytraced.models.sure import Sure, answers_until_sure
from raytraced.sequence import Select
from raytraced.words import check_budget


class Step(NamedTuple):
    """The answer once every sample has run at most `budget` experts."""

    budget: int
    logits: Tensor  # (B, Y) or (B, T, Y)
    num_active: Tensor  # (B,) or (B, T): below `budget` where the sequence had already ended


def anytime(
    model: Model,
    inputs: Tensor,
    *,
    select: Select | None = None,
    max_experts: int | None = None,
    generator: torch.Generator | None = None,
    rows: Tensor | None = None,
    mask: Tensor | None = None,
    sure: Sure | None = None,
) -> Iterator[Step]:
    """Yield the model's answer with 0, 1, 2, … experts, until every sample's sequence has ended.

    Step k is what `model(inputs, max_experts=k)` returns. With `sure` a sample whose largest probability has reached it keeps
    that answer, nothing more runs for it, and the steps end when all have: `model(inputs, sure=sure, look="expert")`.
    """
    check_budget(max_experts)
    if inputs.is_floating_point() and not bool(inputs.isfinite().all()):
        bad = int((~inputs.isfinite()).sum())
        raise ValueError(f"inputs: {bad} of {inputs.numel()} values are not finite; mend or drop these samples")
    if sure is None:
        outputs = model.prefixes(inputs, max_experts, select=select, generator=generator, rows=rows, mask=mask)
    else:
        looks = model.looks(inputs, "expert", max_experts=max_experts, select=select, generator=generator, rows=rows)
        outputs = answers_until_sure(looks, sure, None if mask is None else flat_mask(mask, inputs.shape[:1]))
    for budget, out in enumerate(outputs):
        yield Step(budget, out.logits, out.num_experts)
