"""Evaluation: how good a model is and what it costs; the same for every batch size and number of processes.

Axes: n samples of the split, B samples of a batch, T targets of a sample, L layers, N experts per layer.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from raytraced.cost import SampleCost, sample_cost
from raytraced.errors import DivergedError
from raytraced.models.output import Model, Output
from raytraced.sequence import Route
from raytraced.tasks.task import Batch, Data, Tally, Task
from raytraced.training.world import World

MACS = ("total", "input", "routing", "experts", "head")

SINGLE = {"routes", "max_experts", "confidence", "stop", "experts", "effort", "max_bytes"}
"""options that ask for one answer"""
Answers = list[tuple[Output, SampleCost | None]]
"""outputs for a batch with their costs or None: one, or those with at most 0, 1, … experts"""


class Diverged(DivergedError):  # noqa: N818 (a finding, not a mistake)
    """The loss or a gradient is not finite."""


def seeded(seed: int, like: Tensor) -> torch.Generator:
    """A generator on the device of a tensor."""
    return torch.Generator(like.device).manual_seed(seed)


def predict_batch(model: Model, batch: Batch, seed: int, full: bool = False, **options: Any) -> Answers:
    """Answer a batch for evaluation.

    Args:
        model: The model, in evaluation mode.
        batch: Inputs (B, …); targets are not used.
        seed: Of the draws of ``select="sample"``.
        full: Add the cost of each answer; without a budget or a threshold among the options, and where the model answers
            along the way, give the answers with 0, 1, … experts.
        options: Options of the model: select, max_experts, confidence, exit_every, stop, experts, effort.

    Returns:
        The model's outputs, the last one unrestricted, each with its cost or None.
    """
    inputs = batch.inputs
    options |= {"generator": seeded(seed, inputs), "rows": batch.rows, "mask": batch.mask}
    if full and model.answers_along_the_way and not SINGLE & set(options):
        answers = list(model.prefixes(inputs, **options))
    else:
        answers = [model(inputs, **options)]
    return [(out, sample_cost(model, inputs, out, batch.mask) if full else None) for out in answers]


def record_routes(predict: Callable[..., Answers], recorded: list[tuple[Tensor, Route]]) -> Callable[..., Answers]:
    """The same function; it adds the positions of a batch's samples and the route of their last answer to a list."""

    def recording(batch: Batch, *args: Any, **options: Any) -> Answers:
        answers = predict(batch, *args, **options)
        recorded.append((batch.rows, answers[-1][0].routes[0]))
        return answers

    return recording


def follow_routes(predict: Callable[..., Answers], route_of: Callable[[Tensor], Route]) -> Callable[..., Answers]:
    """The same function; samples follow the routes that `route_of` returns for their positions (B,)."""

    def following(batch: Batch, *args: Any, **options: Any) -> Answers:
        return predict(batch, *args, routes=route_of(batch.rows), **options)

    return following


@torch.no_grad()
def evaluate(
    task: Task,
    data: Data,
    split: str,
    predict: Callable[..., Answers],
    world: World,
    *,
    batch_size: int,
    seed: int = 0,
    full: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Evaluate a model on a split.

    The figures of each sample go into its row of a table, which is summed in one order at the end: neither the batch size
    nor the number of processes changes the result.

    Args:
        task: The task, which computes the figures.
        data: The data set.
        split: "train", "validation" or "test".
        predict: (batch, seed, full, **options) -> answers, as `predict_batch` with a model.
        world: The processes that evaluate together.
        batch_size: Samples at a time, over all processes.
        seed: Of the draws of ``select="sample"``.
        full: Add costs, and the figures with 0, 1, … experts.
        options: Options of the model: select, max_experts, confidence, exit_every.

    Returns:
        Names and figures, as summary.json holds them.
    """
    place = {"rank": world.rank, "world_size": world.size, "device": world.device}
    loader = task.loader(data, split, batch_size, {}, shuffle=False, **place)
    noted: list[tuple[Tensor, list[dict[str, Tensor]]]] = []  # per batch: rows, and columns per number of experts
    load = torch.zeros((), dtype=torch.float64, device=world.device)
    for number, batch in enumerate(loader.epoch(0)):
        batch = batch._replace(rows=batch.rows + number * loader.batch_size)
        answers = predict(batch, seed, full, **options)
        noted.append((batch.rows, [note(task, batch, out, cost) for out, cost in answers]))
        load = load + count_load(task, data, batch, answers[-1][0])
    (longest,) = world.largest([max(len(columns) for _, columns in noted)])
    names = list(noted[0][1][0])
    whole = torch.zeros(longest, len(names), len(getattr(data, split)), dtype=torch.float64, device=world.device)
    for rows, columns in noted:
        columns += columns[-1:] * (longest - len(columns))  # where all sequences have ended, the last answer stays
        whole[:, :, rows] = torch.stack([torch.stack(list(each.values())) for each in columns])
    tallies = [Tally(dict(zip(names, each, strict=True))) for each in world.sum(whole)]
    if len(tallies) > 2 and torch.equal(tallies[-1].columns["experts"], tallies[-2].columns["experts"]):
        tallies.pop()  # it only showed that every sequence has ended
    tallies[-1] = tallies[-1]._replace(load=world.sum(load))
    return summarise(task, data, split, tallies)


def note(task: Task, batch: Batch, out: Output, cost: SampleCost | None) -> dict[str, Tensor]:
    """The columns of a batch (B,) each: sums over the targets of each sample."""
    logits = out.logits.float()
    noted = {"experts": out.num_runs}
    noted["targets"] = torch.ones_like(batch.targets) if batch.mask is None else batch.mask
    if cost is not None:
        parts = (cost.macs, *cost[2:])
        noted |= {"parameters": cost.parameters, **dict(zip([f"macs_{name}" for name in MACS], parts, strict=True))}
    columns = {name: value.double().unsqueeze(-1).flatten(1).sum(1) for name, value in noted.items()}
    own = {"loss": task.sample_losses(logits, batch).double() * columns["targets"], **task.columns(logits, batch)}
    return columns | {name: value.double() for name, value in own.items()}


def count_load(task: Task, data: Data, batch: Batch, out: Output) -> Tensor:
    """How many targets of each group activated each expert (groups, L, N)."""
    active = torch.cat([route.active for route in out.routes], -2).double()
    load = active.new_zeros(task.num_groups(data), *active.shape[-2:])
    return load.index_add(0, task.groups(batch).flatten(), active.flatten(0, -3))


def summarise(task: Task, data: Data, split: str, tallies: list[Tally]) -> dict[str, Any]:
    """Compute means over the targets of a split, as summary.json holds them."""
    last = tallies[-1]
    assert last.load is not None
    num, is_finite_n = float(last.columns["targets"].sum()), last.columns["loss"].isfinite()
    if num_bad := int((~is_finite_n).sum()):
        raise Diverged(f"{num_bad} of {len(is_finite_n)} answers are not finite: the weights diverged, or are damaged")

    def mean(name: str, tally: Tally = last) -> float:
        return float(tally.columns[name].sum() / num)

    def at_budget(tally: Tally) -> dict[str, float]:
        figures = task.figures(data, split, [tally])
        rest = {"experts": mean("experts", tally), "macs": mean("macs_total", tally)}
        return {task.better: figures[task.better]} | rest | {"expert_macs": mean("macs_experts", tally)}

    is_full = "parameters" in last.columns
    return {
        "num_samples": len(is_finite_n),
        "loss": mean("loss"),
        "mean_experts": mean("experts"),
        # (L, N): share of the targets that activated each expert; the layers of all routed layers one after the other
        "expert_load": (last.load.sum(0) / num).tolist(),
        "used_parameters": mean("parameters") if is_full else None,
        "macs": {name: mean(f"macs_{name}") for name in MACS} if is_full else {},
        **task.figures(data, split, tallies),
        **({"budgets": [at_budget(tally) for tally in tallies]} if len(tallies) > 1 else {}),
    }
