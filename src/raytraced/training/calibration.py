"""Calibration on validation data: the confidence threshold at which a model may stop, and the table of budgets.

Axes: n samples, S exits (after no layer, after the first, …).
"""

from math import ceil, floor, isfinite, log10, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raytraced.cost import sample_cost
from raytraced.data.sources import say
from raytraced.early_exit import ExitEvery, ExitPolicy, answers
from raytraced.errors import DivergedError, require
from raytraced.models.output import Model, Output
from raytraced.routers.raytraced import RaytracedExperts
from raytraced.tasks.task import Batch, Data, Task
from raytraced.training.evaluation import note

# From 0.2 to almost 1, in steps that halve the distance to 1 every three.
CANDIDATES = [1 - 0.8 * 2 ** (-step / 3) for step in range(45)]
# Values of `stop` at which a model is measured, from few experts to many.
STOPS = tuple(16 * 2.0**-step for step in range(14))
QUANTILE = 1.96  # of the normal distribution: intervals hold 95 %
MOST_TIMES = 100  # as many samples as there are: beyond that no number is of use
COLUMNS = ("accuracy", "experts", "macs")


class ExitTable(NamedTuple):
    """What every sample would get at each exit, and without any."""

    confidence: Tensor  # (n, S)
    correct: Tensor  # (n, S)
    experts: Tensor  # (n, S), experts that ran, re-runs included
    macs: Tensor  # (n, S), the output layer of every exit included
    fixed_macs: Tensor  # (n, S), with the output layer of this exit alone
    whole: Tensor  # (n, 3): correct, experts and macs of the model's answer without early exit
    num_classes: int

    def stop(self, threshold: float) -> dict[str, float]:
        """Means over the samples where each stops at its first exit that reaches the threshold."""
        exit_n1 = first_confident_exit(self.confidence, threshold)[:, None]
        figures = (self.correct, self.experts, self.macs)
        means = (float(figure_nS.gather(1, exit_n1).mean()) for figure_nS in figures)
        return dict(zip(COLUMNS, means, strict=True))

    def exits(self) -> list[dict[str, float]]:
        """For each exit the means over the samples if all of them stop there."""
        means = [figure_nS.mean(0).tolist() for figure_nS in (self.correct, self.experts, self.fixed_macs)]
        return [dict(zip(COLUMNS, row, strict=True)) for row in zip(*means, strict=True)]

    def by_runs(self, threshold: float) -> dict[str, tuple[int, int]]:
        """For each number of experts that ran until the threshold was reached: samples, and correct ones."""
        exit_n1 = first_confident_exit(self.confidence, threshold)[:, None]
        runs_n, correct_n = (column.gather(1, exit_n1)[:, 0] for column in (self.experts, self.correct))
        return {
            f"{num:g}": (int((runs_n == num).sum()), int(correct_n[runs_n == num].sum()))
            for num in runs_n.unique().tolist()
        }

    def interval(self, threshold: float) -> tuple[float, float]:
        """A 95 % interval of the points of accuracy that early exit loses, from this sample of the data.

        Agresti and Min's interval for paired answers: half a sample is added to each of the four cases (right or wrong,
        with and without early exit), so that a small sample without any difference does not count as certain.
        """
        exit_n1 = first_confident_exit(self.confidence, threshold)[:, None]
        lost_n = self.whole[:, 0] - self.correct.gather(1, exit_n1)[:, 0]
        return points_lost(int((lost_n > 0).sum()), int((lost_n < 0).sum()), len(lost_n))

    def samples_for(self, threshold: float, within: float) -> int | None:
        """About how many samples with the same shares of lost and won answers keep the interval within so many points.

        None where even many times as many do not: the loss itself is (almost) as large.
        """
        exit_n1 = first_confident_exit(self.confidence, threshold)[:, None]
        lost_n = self.whole[:, 0] - self.correct.gather(1, exit_n1)[:, 0]
        counts = (float((lost_n > 0).sum()), float((lost_n < 0).sum()), float(len(lost_n)))
        factor = 1.0
        while points_lost(*(factor * count for count in counts))[1] > within:
            factor *= 1.02
            if factor > MOST_TIMES:
                return None
        digits = 10 ** max(0, floor(log10(factor * counts[2])) - 1)  # two digits: the shares are estimates
        return digits * ceil(factor * counts[2] / digits)

    @property
    def to_the_end(self) -> dict[str, float]:
        """Means over the samples without early exit."""
        return dict(zip(COLUMNS, self.whole.mean(0).tolist(), strict=True))


def points_lost(lost: float, won: float, num: float) -> tuple[float, float]:
    """Agresti and Min's 95 % interval, in points, where `lost` answers of `num` were right only without early exit, `won`
    only with it."""
    lost, won, num = lost + 0.5, won + 0.5, num + 2
    half = QUANTILE * sqrt(lost + won - (lost - won) ** 2 / num)
    return 100 * (lost - won - half) / num, 100 * (lost - won + half) / num


def first_confident_exit(confidence_nS: Tensor, threshold: float) -> Tensor:
    """The first exit of each sample whose confidence reaches the threshold, or the last exit (n,)."""
    enough_nS = confidence_nS >= threshold
    enough_nS[:, -1] = True
    return enough_nS.int().argmax(1)


@torch.no_grad()
def evaluate_exits(
    model: Model, task: Task, data: Data, split: str, exit_every: ExitEvery, batch_size: int = 1000
) -> ExitTable:
    """Run every sample of a split through all exits.

    Args:
        model: A model with exits.
        task: Its task, whose answers are classes.
        data: The data set.
        split: "train", "validation" or "test".
        exit_every: Where the exits are.
        batch_size: Samples at a time; changes memory and speed only.

    Returns:
        The figures of each sample at each exit.
    """
    device = next(model.parameters()).device
    loader = task.loader(data, split, batch_size, {}, shuffle=False, rank=0, world_size=1, device=device)
    parts: list[list[Tensor]] = []
    whole: list[Tensor] = []
    num_classes = 0
    for batch in loader.epoch(0):
        # No threshold: a probability that float32 rounds to 1 would otherwise end a sample early.
        outputs = list(answers(lambda: model.exits(batch.inputs, exit_every), ExitPolicy()))  # noqa: B023
        columns = [_figures(model, task, batch, out) for out in outputs]
        parts.append([torch.stack(column, 1) for column in zip(*columns, strict=True)])
        # A model with a built-in threshold always exits early: its last exit is the end.
        last = model(batch.inputs) if model.own_confidence is None else outputs[-1]
        _, correct_n, runs_n, macs_n, fixed_n = _figures(model, task, batch, last)
        whole.append(torch.stack((correct_n, runs_n, macs_n if model.own_confidence is None else fixed_n), 1))
        num_classes = last.logits.shape[-1]
    longest = max(part[0].shape[1] for part in parts)

    def lengthen(part_nS: Tensor) -> Tensor:  # a batch may have fewer exits than another
        return torch.cat((part_nS, part_nS[:, -1:].expand(-1, longest - part_nS.shape[1])), 1)

    confidence_nS, correct_nS, experts_nS, macs_nS, fixed_nS = (
        torch.cat(list(map(lengthen, column))) for column in zip(*parts, strict=True)
    )
    return ExitTable(confidence_nS, correct_nS, experts_nS, macs_nS, fixed_nS, torch.cat(whole), num_classes)


def _figures(model: Model, task: Task, batch: Batch, out: Output) -> list[Tensor]:
    """Confidence, correct, experts, macs, and macs with one output layer, of each sample (n,)."""
    if not bool(out.logits.isfinite().all()):
        raise DivergedError("the model's answers are not finite: the weights diverged, or are damaged")
    columns = task.columns(out.logits.float(), batch)
    require("confidence" in columns, "task", task.name, "its answers are not classes, so they have no confidence")
    cost = sample_cost(model, batch.inputs, out)
    num_exits = 1 if out.num_exits is None else out.num_exits
    fixed_macs = cost.macs - cost.head_macs + cost.head_macs / num_exits
    figures = (columns["correct"], out.num_runs, cost.macs, fixed_macs)
    return [columns["confidence"], *(figure.double() for figure in figures)]


def calibrate(table: ExitTable, within: float) -> float:
    """Choose the cheapest threshold that loses at most `within` points of accuracy against the answer without early exit.

    Args:
        table: The exits of validation data.
        within: Points of accuracy that may be lost on these samples.

    Returns:
        The threshold. It lies above chance, 1 / number of classes: below that, no expert would ever run.
    """
    require(within >= 0, "within", within, "must be at least 0 points")
    lowest = table.to_the_end["accuracy"] - within / 100 - 1e-9
    candidates = [threshold for threshold in (*CANDIDATES, 1.0) if threshold > 1 / table.num_classes]
    found = {threshold: table.stop(threshold) for threshold in candidates}
    fitting = {threshold: one for threshold, one in found.items() if one["accuracy"] >= lowest}
    return min(fitting or {1.0: found[1.0]}, key=lambda threshold: found[threshold]["macs"])


def calibration(model: Model, task: Task, data: Data, within: float, exit_every: ExitEvery) -> dict[str, Any]:
    """Calibrate a model on validation data, and measure the result on test data.

    With fewer than 100 / within validation samples a loss of `within` points cannot be measured. Then no sample may be lost,
    one line reports how many samples are needed, and the interval shows what can be promised. With enough samples for that,
    one line reports where the interval still reaches beyond `within`, and about how many samples would keep it within.

    Args:
        model: A model with exits.
        task: Its task.
        data: The data set.
        within: Points of accuracy that may be lost on validation data.
        exit_every: Where the exits are.

    Returns:
        What a card keeps: the threshold ("confidence"), "exit_every", "within"; for "validation" and "test" the means with
        early exit ("stopped") and without ("to_the_end"); and "interval", for both the 95 % interval of the points lost.
    """
    table = evaluate_exits(model, task, data, "validation", exit_every)
    threshold = calibrate(table, within)
    tables = {"validation": table, "test": evaluate_exits(model, task, data, "test", exit_every)}
    found: dict[str, Any] = {"confidence": threshold, "exit_every": exit_every, "within": within}
    for split, one in tables.items():
        found[split] = {"stopped": one.stop(threshold), "to_the_end": one.to_the_end}
    found["interval"] = {split: list(one.interval(threshold)) for split, one in tables.items()}
    num, needed, most = len(table.whole), ceil(100 / within - 1e-9) if within else 0, found["interval"]["validation"][1]
    name = f"validation {task.sample_name}"
    if num < needed:
        promise = f"none of them may be lost, which promises {most:.1f} points (95 %)"
        say(f"within={within:g}: needs at least {needed:,} {name}, there are {num:,}; {promise}")
    elif within and most > within:
        enough = table.samples_for(threshold, within)
        remedy = "choose a smaller --within to lose less" if enough is None else f"about {enough:,} would do"
        say(f"within={within:g}: the loss may be up to {most:.1f} points (95 %) by {num:,} {name}; {remedy}")
    return found


def has_exits(model: Model) -> bool:
    """Whether a model has answers on the way at which it can stop."""
    return type(model).exits_of is not Model.exits_of


def has_dial(model: Model) -> bool:
    """Whether `stop` changes how many experts a model runs."""
    layers = model.routed_layers()
    return bool(layers) and all(isinstance(layer, RaytracedExperts) for layer in layers)


@torch.no_grad()
def measure_dial(
    model: Model, task: Task, data: Data, split: str = "validation", batch_size: int = 256
) -> dict[str, Any]:
    """Measure a raytraced model at several values of `stop`, from few experts to many.

    Args:
        model: The model.
        task: Its task.
        data: The data set.
        split: "train", "validation" or "test".
        batch_size: Samples at a time; changes memory and speed only.

    Returns:
        What a card keeps: "split", and "rows" with `stop`, and the means of `experts`, `macs` and `loss` per target, in the
        order of the number of experts. A value of `stop` that runs no more experts than the one before it is left out.
    """
    rows: list[dict[str, float]] = []
    model.eval()
    most = sum(layer.experts.num_layers * layer.experts.num_experts for layer in model.routed_layers())
    for stop in STOPS:
        means = measure_means(model, task, data, split, batch_size, stop=stop)
        row = {"stop": stop} | {name: means[name] for name in ("experts", "macs", "loss")}
        if rows and row["experts"] < rows[-1]["experts"] * (1 + 1e-3):
            rows.pop()  # the larger value of two that run as many is of no use
        rows.append(row)
        if row["experts"] > 0.9 * most:
            break
    return {"split": split, "rows": rows}


@torch.no_grad()
def measure_means(
    model: Model, task: Task, data: Data, split: str, batch_size: int = 256, **options: Any
) -> dict[str, float]:
    """The means of experts, macs, loss, bytes (of text) and accuracy (of classes) over the targets of a split.

    `options` are those of a call of the model.
    """
    device = next(model.parameters()).device
    loader = task.loader(data, split, batch_size, {}, shuffle=False, rank=0, world_size=1, device=device)
    sums = dict.fromkeys(("experts", "macs_total", "loss", "bytes", "correct", "targets"), 0.0)
    for batch in loader.epoch(0):
        out = model(batch.inputs, rows=batch.rows, mask=batch.mask, **options)
        noted = note(task, batch, out, sample_cost(model, batch.inputs, out, batch.mask))
        for name in sums:  # only text has bytes, only classes can be correct
            sums[name] += float(noted[name].sum()) if name in noted else 0.0
    if not isfinite(sums["loss"]):
        raise DivergedError("the model's answers are not finite: the weights diverged, or are damaged")
    names = {"experts": "experts", "macs": "macs_total", "loss": "loss", "bytes": "bytes", "accuracy": "correct"}
    return {name: sums[column] / sums["targets"] for name, column in names.items()}
