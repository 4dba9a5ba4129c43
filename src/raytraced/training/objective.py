"""What is minimised: the task's loss, the model's own loss, the loss on earlier answers, and on when a sequence ends.

B samples of this process, L layers, N experts a layer.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F

from raytraced.cost import sample_cost
from raytraced.models.output import Model
from raytraced.sequence import stop_losses
from raytraced.tasks.task import Batch, Task
from raytraced.training.config import TrainConfig
from raytraced.training.evaluation import Answers
from raytraced.words import require

STOP_WEIGHT = 0.03  # of the loss that ends sequences: docs/recipe.md
PREFIXES = (0, 1, 2, 3, 4)  # numbers of experts after which anytime_loss asks for an answer, one of them a step


class StepResult(NamedTuple):
    """The loss to call backward on, and sums over this process's targets for the metrics."""

    loss: Tensor
    sums: dict[str, Tensor | float]  # "loss", "targets", "experts", and the task's own
    logits: Tensor  # to say where a NaN came from


class Objective(nn.Module):
    """A model and how it is judged; one module, so that a step is one forward pass for DDP and FSDP."""

    def __init__(self, model: Model, config: TrainConfig, task: Task, world_size: int = 1) -> None:
        super().__init__()
        rule = f"model {config.model!r} does not answer along a sequence; leave it at 0"
        require(not config.anytime_loss or model.answers_along_the_way, "anytime_loss", config.anytime_loss, rule)
        self.model, self.config, self.task, self.world_size = model, config, task, world_size

    def forward(self, batch: Batch, seed: int, num_global: Tensor | int) -> StepResult:
        """The loss of this process's share of a global batch with num_global targets."""
        config, task = self.config, self.task
        out = self.model(
            batch.inputs,
            budgets=self.budgets(seed),
            looks=bool(config.look_loss),
            judge=lambda logits: task.losses(logits, batch),
            generator=seeded(seed, batch.inputs),
            rows=batch.rows,
            mask=batch.mask,
        )
        # sums over the global batch's size, times the number of processes, over which gradients are averaged:
        # the same as the mean in one process, with an uneven last batch too
        share = self.world_size / num_global
        # an answer after each layer, or the last alone: what each counts
        answers = out.logits[None] if out.looks is None else out.looks
        earlier = len(answers) - 1
        last = 1 - config.look_loss * bool(earlier)
        weights = [config.look_loss / max(1, earlier)] * earlier + [last * (1 - config.anytime_loss * len(out.answers))]
        losses = task.each_of(answers, batch, config.label_smoothing)
        sums = losses.flatten(1).sum(1)
        loss = sums @ sums.new_tensor(weights) * share
        for early in out.answers:
            loss = loss + task.loss(early.logits, batch, config.label_smoothing) * (last * config.anytime_loss * share)
        if out.loss is not None:
            loss = loss + out.loss * (batch.num_targets * share)
        if config.target_experts is not None:
            rule = f"model {config.model!r} has no sequence that could end elsewhere; leave it out"
            require(all(one.rates for one in out.routes), "target_experts", config.target_experts, rule)
            easier = self.easier(losses[-1].detach(), batch.mask, num_global)
            stops = (stop_losses(route, easier, config.target_experts) for route in out.routes)
            loss = loss + STOP_WEIGHT * share * sum(
                (one if batch.mask is None else one * batch.mask).sum() for one in stops
            )
        if self.world_size > 1:
            # an expert that no sample of this process chose still takes part, or the others would wait for its gradient
            loss = loss + 0 * sum(parameter.sum() for parameter in self.model.parameters())
        logits = out.logits.detach()
        counted = {"loss": sums[-1].detach(), "targets": batch.num_targets, "experts": out.num_experts.sum()}
        return StepResult(loss, counted | task.sums(logits, batch), logits)

    def easier(self, losses: Tensor, mask: Tensor | None, num_global: Tensor | int) -> Tensor:
        """For each target the share of the global batch, 0 … 1, that is easier: has a smaller loss."""
        own = losses.flatten() if mask is None else losses[mask]
        everyone = own
        if self.world_size > 1:  # as if in one process; shares may differ in size, infinity is easier than nobody
            sizes = [own.new_zeros(1) for _ in range(self.world_size)]
            distributed.all_gather(sizes, own.new_full((1,), len(own)))
            longest = int(max(size.item() for size in sizes))
            parts = [own.new_empty(longest) for _ in range(self.world_size)]
            distributed.all_gather(parts, F.pad(own, (0, longest - len(own)), value=float("inf")))
            everyone = torch.cat(parts)
        number = torch.searchsorted(everyone.sort().values, losses.contiguous())
        return number / max(1, int(num_global) - 1)

    def predict(self, batch: Batch, seed: int, full: bool = False, **options: Any) -> Answers:
        """The model's answer, for evaluation; `full`: with costs, and with 0, 1, … experts where it answers along the way.

        With FSDP this is an entrance of its own, before which weights are gathered.
        """
        model, inputs = self.model, batch.inputs
        options |= {"generator": seeded(seed, inputs), "rows": batch.rows, "mask": batch.mask}
        if full and model.answers_along_the_way and not {"max_experts", "sure"} & set(options):
            answers = list(model.prefixes(inputs, **options))
        else:
            answers = [model(inputs, **options)]
        return [(out, sample_cost(model, inputs, out, batch.mask) if full else None) for out in answers]

    def rehearse(self, batch: Batch) -> None:
        """Run a batch and forget it: what a model, or its compiler, refuses is refused before there is a run folder."""
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
        """The number of experts after which this step asks for an answer too, drawn from PREFIXES.

        An unbiased estimate of the mean loss of all those prefixes, for one more pass.
        """
        return (PREFIXES[step_seed(seed, 1) % len(PREFIXES)],) if self.config.anytime_loss else ()


def seeded(seed: int, like: Tensor) -> torch.Generator:
    """A generator where a tensor is."""
    return torch.Generator(like.device).manual_seed(seed)


def step_seed(seed: int, step: int) -> int:
    """A seed for one step's draws, a pure function of the run's seed and the step: nothing to save for a resume."""
    mixed = (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) % 2**64
    # SplitMix64's finaliser: neighbours become strangers
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) % 2**64
    return (mixed ^ (mixed >> 31)) >> 1
