"""An answer at every moment: the predictions after no expert, after the first, the second, …"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raytraced import early_exit
from raytraced.early_exit import Confidence, ExitPolicy
from raytraced.errors import check_budget
from raytraced.models.output import Model
from raytraced.rows import flat_mask
from raytraced.sequence import Select, StopPerRow


class Step(NamedTuple):
    """The answer once every sample has run at most `budget` experts."""

    budget: int  # the most experts that a sample has run
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
    confidence: Confidence | None = None,
    stop: StopPerRow | None = None,
) -> Iterator[Step]:
    """Yield the model's answer with 0, 1, 2, … experts, until every sample's sequence has ended.

    Args:
        model: A model that answers along the way: `mre`, `gpt-mre` and their like, or multi-exit.
        inputs: Images (B, channels, height, width) or tokens (B, T).
        select: "greedy" or "sample". Default: greedy in evaluation.
        max_experts: The last answer is the one with this budget. Default: no limit.
        generator: Source of random numbers. Default: PyTorch's global generator.
        rows: Row number of each sample (B,), on which its draws depend. Default: 0 … B − 1.
        mask: (B,) or (B, T), bool; False where there is padding.
        confidence: A sample whose largest class probability reaches this threshold keeps its answer, nothing more runs for
            it, and the steps end when all samples have: as `model(inputs, confidence=…, exit_every="expert")`.
        stop: How much the output node's rate counts, in place of the layers' own `stop`; a number, or one per sample (B,).

    Yields:
        Step with `budget`, `logits` and `num_active`. Without `confidence`, step k is `model(inputs, max_experts=k)`.
    """
    check_budget(max_experts)
    if inputs.is_floating_point() and not bool(inputs.isfinite().all()):
        bad = int((~inputs.isfinite()).sum())
        raise ValueError(f"inputs: {bad} of {inputs.numel()} values are not finite; fix or drop these samples")
    draws: dict[str, Any] = {"select": select, "generator": generator, "rows": rows, "stop": stop}
    if confidence is None:
        outputs = model.prefixes(inputs, max_experts, mask=mask, **draws)
    else:
        policy = ExitPolicy(confidence, max_experts, exit_every="expert")
        mask_B = None if mask is None else flat_mask(mask, inputs.shape[:1])
        outputs = early_exit.answers(
            lambda: model.exits(inputs, "expert", max_experts=max_experts, **draws), policy, mask_B
        )
    for budget, out in enumerate(outputs):
        yield Step(budget, out.logits, out.num_experts)
