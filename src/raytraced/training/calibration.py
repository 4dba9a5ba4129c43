"""How sure is sure enough: the probability at which a model may stop, found on validation data.

Axes: n samples, S looks (after no layer, after the first, …).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from raytraced.cost import sample_cost
from raytraced.models.output import LookAt, Model
from raytraced.models.sure import answers_until_sure
from raytraced.tasks.task import Data, Task
from raytraced.words import require

# From hardly sure to as good as certain, in steps that halve the doubt that is left every three.
CANDIDATES = [1 - 0.8 * 2 ** (-step / 3) for step in range(45)]


class Looked(NamedTuple):
    """What every sample would get if it stopped at each look (n, S)."""

    confidence: Tensor
    correct: Tensor
    experts: Tensor
    macs: Tensor  # the output layer of every look included
    fixed_macs: Tensor  # had nobody looked before

    def stop(self, sure: float) -> dict[str, float]:
        """What stopping at the first look that is sure enough gives, as means."""
        look_n1 = first_sure(self.confidence, sure)[:, None]
        columns = {"accuracy": self.correct, "experts": self.experts, "macs": self.macs}
        return {name: float(column_nS.gather(1, look_n1).mean()) for name, column_nS in columns.items()}

    def looks(self) -> list[dict[str, float]]:
        """What it gives that everyone stops at the first look, at the second, …, without one before."""
        columns = {"accuracy": self.correct, "experts": self.experts, "macs": self.fixed_macs}
        means = {name: column_nS.mean(0).tolist() for name, column_nS in columns.items()}
        return [dict(zip(means, row, strict=True)) for row in zip(*means.values(), strict=True)]

    def by_runs(self, sure: float) -> dict[str, tuple[int, int]]:
        """By the number of experts that ran until an answer was sure: images, and how many of them are right."""
        look_n1 = first_sure(self.confidence, sure)[:, None]
        runs_n, correct_n = (column.gather(1, look_n1)[:, 0] for column in (self.experts, self.correct))
        return {
            f"{num:g}": (int((runs_n == num).sum()), int(correct_n[runs_n == num].sum()))
            for num in runs_n.unique().tolist()
        }

    @property
    def to_the_end(self) -> dict[str, float]:
        """What running on gives, without a look on the way."""
        return self.looks()[-1]


def first_sure(confidence_nS: Tensor, sure: float) -> Tensor:
    """The first look of each sample that is sure enough, or its last (n,)."""
    enough_nS = confidence_nS >= sure
    enough_nS[:, -1] = True
    return enough_nS.int().argmax(1)


@torch.no_grad()
def look_at_all(model: Model, task: Task, data: Data, split: str, look: LookAt, batch_size: int = 1000) -> Looked:
    """Run every sample of a split to the end, and note what it had at each look."""
    device = next(model.parameters()).device
    loader = task.loader(data, split, batch_size, {}, shuffle=False, rank=0, world_size=1, device=device)
    parts: list[list[Tensor]] = []
    for batch in loader.epoch(0):
        columns: list[list[Tensor]] = []
        for out in answers_until_sure(model.looks(batch.inputs, look), 1.0):
            if not bool(out.logits.isfinite().all()):
                raise ValueError(f"{model.name}: its answers are not finite: the weights diverged, or are damaged")
            noted = task.columns(out.logits.float(), batch)
            require("confidence" in noted, "task", task.name, "its answers are not one of several, none can be sure")
            cost = sample_cost(model, batch.inputs, out)
            macs_n, heads_n = cost.multiply_adds, cost.head_multiply_adds
            fixed_n = macs_n - heads_n + heads_n / out.num_looks
            figures = (noted["correct"], out.num_runs, macs_n, fixed_n)
            columns.append([noted["confidence"], *(figure.double() for figure in figures)])
        parts.append([torch.stack(column, 1) for column in zip(*columns, strict=True)])
    longest = max(part[0].shape[1] for part in parts)

    def lengthen(part_nS: Tensor) -> Tensor:  # a batch may have come to its end before another
        return torch.cat((part_nS, part_nS[:, -1:].expand(-1, longest - part_nS.shape[1])), 1)

    return Looked(*(torch.cat(list(map(lengthen, column))) for column in zip(*parts, strict=True)))


def calibrate(seen: Looked, within: float) -> float:
    """The cheapest threshold that loses at most `within` points of accuracy against running to the end."""
    require(within >= 0, "within", within, "must be at least 0 points")
    lowest = seen.to_the_end["accuracy"] - within / 100 - 1e-9
    found = {sure: seen.stop(sure) for sure in (*CANDIDATES, 1.0)}
    fitting = {sure: one for sure, one in found.items() if one["accuracy"] >= lowest}
    return min(fitting or {1.0: found[1.0]}, key=lambda sure: found[sure]["macs"])


def calibration(model: Model, task: Task, data: Data, within: float, look: LookAt) -> dict[str, Any]:
    """What a card keeps: the threshold, where one looks, what was given up for it, and what it gave."""
    seen = look_at_all(model, task, data, "validation", look)
    sure = calibrate(seen, within)
    kept: dict[str, Any] = {"sure": sure, "look": look, "within": within}
    for split, one in (("validation", seen), ("test", look_at_all(model, task, data, "test", look))):
        kept[split] = {"stopped": one.stop(sure), "to_the_end": one.to_the_end}
    return kept
