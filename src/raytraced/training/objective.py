"""The training objective: the task's loss, the model's auxiliary loss, the loss of early answers, the loss that ends sequences.

Axes: B samples of this process, L layers, N experts per layer.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F

from raytraced.errors import require
from raytraced.models.gpt import GPT
from raytraced.models.output import Model, Output
from raytraced.sequence import stop_losses
from raytraced.tasks.task import Batch, Task
from raytraced.training.calibration import has_exits
from raytraced.training.config import TrainConfig
from raytraced.training.evaluation import Answers, predict_batch, seeded

STOP_WEIGHT = 0.03  # weight of the loss that ends sequences: docs/lab/recipe.md
PREFIXES = (0, 1, 2, 3, 4)  # budgets of anytime_loss, of which each step takes one


class StepResult(NamedTuple):
    """The loss of a step, and sums over the targets of this process for the metrics."""

    loss: Tensor
    sums: dict[str, Tensor | float]  # "loss", "targets", "experts", and those of the task
    logits: Tensor  # to find the origin of a NaN


class Objective(nn.Module):
    """A model and its loss as one module, so that a step is one forward pass for DDP and FSDP.

    Args:
        model: The model.
        config: The options of the run.
        task: The task, which computes the losses of targets.
        world_size: Number of processes.
    """

    def __init__(self, model: Model, config: TrainConfig, task: Task, world_size: int = 1) -> None:
        super().__init__()
        rule = f"model {config.model!r} has no exits; leave it at 0"
        require(not config.exit_loss or has_exits(model), "exit_loss", config.exit_loss, rule)
        rule = "is for paths with an order, those of one token; set the model option path_tokens to 1, or leave it out"
        has_order = not isinstance(model, GPT) or model.path_tokens == 1 or not model.answers_along_the_way
        require(config.target_experts is None or has_order, "target_experts", config.target_experts, rule)
        rule = f"model {config.model!r} does not answer along a sequence; leave it at 0"
        require(not config.anytime_loss or model.answers_along_the_way, "anytime_loss", config.anytime_loss, rule)
        self.model, self.config, self.task, self.world_size = model, config, task, world_size

    def forward(self, batch: Batch, seed: int, num_global: Tensor | int) -> StepResult:
        """Compute the loss of this process's part of a global batch.

        Args:
            batch: Inputs (B, …) and targets (B,) or (B, T).
            seed: Of the draws of this step.
            num_global: Number of targets of the global batch.

        Returns:
            The loss to call backward on, and sums for the metrics.
        """
        config, task = self.config, self.task
        out = self.model(
            batch.inputs,
            budgets=self.budgets(seed),
            exits=bool(config.exit_loss),
            sample_loss_fn=lambda logits: task.sample_losses(logits, batch),
            generator=seeded(seed, batch.inputs),
            rows=batch.rows,
            mask=batch.mask,
        )
        # Gradients are averaged over processes: with this factor, sums become the mean over the global batch, also where
        # the processes have different numbers of targets.
        share = self.world_size / num_global
        if config.target_experts is not None:
            rule = f"model {config.model!r} has no activation sequence; leave target_experts out"
            require(all(one.rates for one in out.routes), "target_experts", config.target_experts, rule)
        loss, sums = combine_losses(
            out,
            lambda answers: task.exit_target_losses(answers, batch, config.label_smoothing),
            share=share,
            num_targets=batch.num_targets,
            exit_loss=config.exit_loss,
            anytime_loss=config.anytime_loss,
            target_experts=config.target_experts,
            easier_fn=lambda losses: self.easier(losses, batch.mask, num_global),
            weights=batch.mask,
        )
        if self.world_size > 1:
            # Experts that no sample of this process chose take part, too: the others would wait for their gradients.
            loss = loss + 0 * sum(parameter.sum() for parameter in self.model.parameters())
        logits = out.logits.detach()
        counted = {"loss": sums[-1].detach(), "targets": batch.num_targets, "experts": out.num_experts.sum()}
        return StepResult(loss, counted | task.sums(logits, batch), logits)

    def easier(self, losses: Tensor, mask: Tensor | None, num_global: Tensor | int) -> Tensor:
        """For each target the share of the global batch, 0 … 1, that is easier, which means that it has a smaller loss."""
        own = losses.flatten() if mask is None else losses[mask]
        all_losses = own
        if self.world_size > 1:  # the same as in one process: parts that are smaller are padded with infinity
            sizes = [own.new_zeros(1) for _ in range(self.world_size)]
            distributed.all_gather(sizes, own.new_full((1,), len(own)))
            longest = int(max(size.item() for size in sizes))
            parts = [own.new_empty(longest) for _ in range(self.world_size)]
            distributed.all_gather(parts, F.pad(own, (0, longest - len(own)), value=float("inf")))
            all_losses = torch.cat(parts)
        return share_easier(losses, all_losses, int(num_global))

    def predict(self, batch: Batch, seed: int, full: bool = False, **options: Any) -> Answers:
        """Answer a batch, for evaluation: FSDP gathers the weights before it calls this method."""
        return predict_batch(self.model, batch, seed, full, **options)

    def rehearse(self, batch: Batch) -> None:
        """Run a batch without keeping the result: errors of the model or its compiler come before there is a run folder."""
        buffers = {name: buffer.clone() for name, buffer in self.named_buffers()}
        try:
            self(batch, 0, batch.num_targets)
        except RuntimeError as error:
            if not self.config.compile:
                raise
            reason = str(error).partition("\n")[0]
            raise ValueError(f"compile=True: the model cannot be compiled here ({reason}); leave it out") from error
        for name, buffer in self.named_buffers():
            buffer.copy_(buffers[name])

    def budgets(self, seed: int) -> tuple[int, ...]:
        """The budget of this step's additional answer; none without anytime_loss."""
        return (draw_budget(seed),) if self.config.anytime_loss else ()


def combine_losses(
    out: Output,
    losses_fn: Callable[[Tensor], Tensor],
    *,
    share: Tensor | float,
    num_targets: Tensor | int,
    exit_loss: float = 0.0,
    anytime_loss: float = 0.0,
    target_experts: float | None = None,
    easier_fn: Callable[[Tensor], Tensor] | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The loss of a training step from a model's output.

    Args:
        out: The model's output, with `exits` if there is an `exit_loss` and one of `answers` if there is an `anytime_loss`.
        losses_fn: K answers (K, B, …) -> the loss of each target, (K, B) or (K, B, T).
        share: Factor that turns a sum over targets into the mean over the global batch.
        num_targets: Number of targets of this batch.
        exit_loss: Share of the loss that is measured at the exits before the last one.
        anytime_loss: Share of the rest that is measured on the answer of a budget.
        target_experts: Mean number of experts to steer towards; None: no such loss.
        easier_fn: With `target_experts`: losses (B,) or (B, T) -> the share of targets that are easier, like them.
        weights: Factor of each target's losses, like targets; None: 1.

    Returns:
        The loss, and the sum of the targets' losses for each exit (K,), the last answer's at the end.
    """
    # One weight per exit, or for the last answer alone.
    answers = out.logits[None] if out.exits is None else out.exits
    earlier = len(answers) - 1
    last = 1 - exit_loss * bool(earlier)
    factors = [exit_loss / max(1, earlier)] * earlier + [last * (1 - anytime_loss * len(out.answers))]

    def weighted(losses: Tensor) -> Tensor:
        return losses if weights is None else losses * weights

    losses = losses_fn(answers)
    sums = weighted(losses).flatten(1).sum(1)
    loss = sums @ sums.new_tensor(factors) * share
    for early in out.answers:
        loss = loss + weighted(losses_fn(early.logits[None])).sum() * (last * anytime_loss * share)
    if out.loss is not None:
        loss = loss + out.loss * (num_targets * share)
    if target_experts is not None:
        assert easier_fn is not None
        easier = easier_fn(losses[-1].detach())
        stops = [weighted(stop_losses(route, easier, target_experts)).sum() for route in out.routes]
        loss = loss + STOP_WEIGHT * share * sum(stops)
    return loss, sums


def share_easier(losses: Tensor, all_losses: Tensor, num: int) -> Tensor:
    """For each loss the share, 0 … 1, of `all_losses` (num,) that are smaller; like `losses`."""
    return torch.searchsorted(all_losses.sort().values, losses.contiguous()) / max(1, num - 1)


def draw_budget(seed: int) -> int:
    """The budget of a step's additional answer, drawn from PREFIXES.

    The loss of that answer is an unbiased estimate of the mean over all PREFIXES, at the cost of one.
    """
    return PREFIXES[step_seed(seed, 1) % len(PREFIXES)]


def step_seed(seed: int, step: int) -> int:
    """The seed of one step's draws, a pure function of the run's seed and the step: a checkpoint need not hold it."""
    mixed = (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) % 2**64
    # SplitMix64 finaliser: decorrelates neighbouring seeds.
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) % 2**64
    return (mixed ^ (mixed >> 31)) >> 1
