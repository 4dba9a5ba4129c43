"""What is minimised: cross-entropy, the model's own loss, the cost dial, and the loss on prefixes.

B samples of this process, C classes, L layers, N experts a layer.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from raytraced.training.config import TrainConfig

PREFIXES = (0, 1, 2, 3, 4)  # numbers of experts after which anytime_loss asks for an answer, one of them a step


class StepResult(NamedTuple):
    """The loss to call backward on, and sums over this process's samples for the metrics."""

    loss: Tensor
    loss_sum: Tensor
    num_correct: Tensor
    load: Tensor  # (L, N): how many samples activated each node
    logits: Tensor  # (B, C), to say where a NaN came from


class Objective(nn.Module):
    """A model and how it is judged; one module, so that a step is one forward pass for DDP and FSDP."""

    def __init__(self, model: nn.Module, config: TrainConfig, world_size: int = 1) -> None:
        super().__init__()
        if config.anytime_loss and not hasattr(model, "classify"):
            raise ValueError(
                f"anytime_loss={config.anytime_loss}: model {config.model!r} does not answer along a sequence; leave it at 0"
            )
        self.model: Any = model  # its parts too are called
        self.config = config
        self.world_size = world_size

    def forward(self, images: Tensor, labels_B: Tensor, rows_B: Tensor, seed: int, num_global: int) -> StepResult:
        """The loss of this process's share of a global batch with num_global samples."""
        config = self.config
        # the prefix starts from what the input block made for the whole sequence: on colour images that is most of the work
        start = self.model.input_block(images) if config.anytime_loss else None
        out = self.run_model(images, rows_B, seed) if start is None else self.run_classify(start, rows_B, seed)
        # sums over the global batch's size, times the number of processes, over which gradients are averaged:
        # the same as the mean in one process, with an uneven last batch too
        share = self.world_size / num_global
        loss_sum = cross_entropy(out.logits, labels_B, reduction="sum", label_smoothing=config.label_smoothing)
        answer_loss = loss_sum
        if start is not None:
            prefix_sum = self.prefix_loss(start, labels_B, rows_B, seed)
            answer_loss = (1 - config.anytime_loss) * loss_sum + config.anytime_loss * prefix_sum
        loss = answer_loss * share
        if out.loss is not None:
            loss = loss + out.loss * (len(labels_B) * share)
        label_loss = getattr(self.model, "label_loss", None)
        if label_loss is not None:  # a model that learns from more than its last answer: docs/models.md
            loss = loss + label_loss(out, labels_B) * (len(labels_B) * share)
        if config.expert_cost:
            if not out.active.requires_grad and len(labels_B):
                raise ValueError(
                    f"expert_cost={config.expert_cost}: model {config.model!r} cannot learn to use fewer experts"
                )
            loss = loss + config.expert_cost * share * out.active.sum()
        if self.world_size > 1:
            # an expert that no sample of this process chose still takes part, or the others would wait for its gradient
            loss = loss + 0 * sum(parameter.sum() for parameter in self.model.parameters())
        num_correct = (out.logits.detach().argmax(-1) == labels_B).sum()
        return StepResult(loss, loss_sum.detach(), num_correct, out.active.detach().sum(0), out.logits.detach())

    def predict(self, images: Tensor, rows_B: Tensor, seed: int, **options: Any) -> Any:
        """The model's output, for evaluation: with FSDP an entrance of its own, before which weights are gathered."""
        return self.run_model(images, rows_B, seed, **options)

    def run_model(self, images: Tensor, rows_B: Tensor, seed: int, **options: Any) -> Any:
        """The model's output; all draws follow from the seed and the samples' row numbers."""
        return self.model(images, generator=seeded(seed, images), rows=rows_B, **options)

    def run_classify(self, hidden_BD: Tensor, rows_B: Tensor, seed: int, **options: Any) -> Any:
        """As run_model, from what the input block made."""
        return self.model.classify(hidden_BD, generator=seeded(seed, hidden_BD), rows=rows_B, **options)

    def prefix_loss(self, hidden_BD: Tensor, labels_B: Tensor, rows_B: Tensor, seed: int) -> Tensor:
        """The summed cross-entropy of the answers after a few experts; the same seed gives prefixes of the same sequences.

        How many is drawn from PREFIXES for each step: an unbiased estimate of their mean, for one more pass.
        """
        num_experts = PREFIXES[step_seed(seed, 1) % len(PREFIXES)]
        out = self.run_classify(hidden_BD, rows_B, seed, max_experts=num_experts)
        return cross_entropy(out.logits, labels_B, reduction="sum")


def seeded(seed: int, like: Tensor) -> torch.Generator:
    """A generator where a tensor is."""
    return torch.Generator(like.device).manual_seed(seed)


def step_seed(seed: int, step: int) -> int:
    """A seed for one step's draws, a pure function of the run's seed and the step: nothing to save for a resume."""
    mixed = (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) % 2**64
    mixed = (
        (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
    ) % 2**64  # SplitMix64's finaliser: neighbours become strangers
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) % 2**64
    return (mixed ^ (mixed >> 31)) >> 1
