"""Training on rows of a table: epochs of AdamW with the loss of `raytraced.training`, early stopping.

Axes: B rows, n rows of a batch, K answers of a model, Y outputs.
"""

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raytraced.models.output import Model
from raytraced.training.objective import combine_losses, draw_budget, share_easier, step_seed

# Where many rows are equal, an epoch has as many steps as if they were not, up to this number of rows.
ROWS_WITH_REPEATS = 4096


@dataclass(kw_only=True)
class TableTrainer:
    """Trains a model on rows.

    Args:
        model: The model.
        inputs_fn: Row numbers (n,) -> the model's inputs (n, C, H, W).
        targets: Class numbers (B,), or numbers (B, Y).
        weights: Weight of each row in the loss (B,), with mean 1.
        losses_fn: Outputs (K, n, Y) and targets of n rows -> losses (K, n).
        repeats: Rows that each row stands for on average: equal rows are trained on together.
        batch_size: Rows per step.
        learning_rate: Learning rate of AdamW.
        weight_decay: Weight decay of AdamW.
        anytime_loss: Share of the loss on the answer of a budget.
        target_experts: Mean number of experts to steer towards; None: no such loss.
        seed: Of the order of the rows and of all draws.
        state: State of AdamW to continue with; None: a new one.
    """

    model: Model
    inputs_fn: Callable[[Tensor], Tensor]
    targets: Tensor
    weights: Tensor
    losses_fn: Callable[[Tensor, Tensor], Tensor]
    repeats: float
    batch_size: int
    learning_rate: float
    weight_decay: float
    anytime_loss: float
    target_experts: float | None
    seed: int
    state: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self.learning_rate, weight_decay=self.weight_decay, fused=True
        )
        if self.state is not None:
            self.optimizer.load_state_dict(self.state)
        self.generator = torch.Generator().manual_seed(self.seed)
        self.step, self.history = 0, list[float]()

    def train(self, rows_n: Tensor, validation_n: Tensor, epochs: int, patience: int) -> int:
        """Train with a learning rate that falls to 0; keep the weights of the smallest validation loss.

        Args:
            rows_n: Numbers of the rows to train on.
            validation_n: Numbers of the rows to measure after each epoch; may be none.
            epochs: Largest number of epochs.
            patience: Number of epochs without a smaller validation loss after which training stops.

        Returns:
            Number of epochs that were run; `history` has their validation losses.
        """
        num_steps = epochs * math.ceil(self.num_per_epoch(rows_n) / self.batch_size)
        best, best_epoch = None, 0
        for epoch in range(epochs):
            self.run_epoch(rows_n, num_steps)
            if len(validation_n):
                loss = self.mean_loss(validation_n)
                if not self.history or loss < min(self.history):
                    best, best_epoch = deepcopy(self.model.state_dict()), epoch
                self.history.append(loss)
                if epoch - best_epoch >= patience:
                    break
        if best is not None:
            self.model.load_state_dict(best)
        return epoch + 1

    def run_epoch(self, rows_n: Tensor, num_steps: int | None = None) -> None:
        """Pass over the rows; with `num_steps`, the learning rate falls to 0 along a half cosine of that length."""
        self.model.train()
        for batch_n in self.order(rows_n).split(self.batch_size):
            loss = self.loss(batch_n)
            self.optimizer.zero_grad()
            loss.backward()
            decay = 1.0 if num_steps is None else 0.5 * (1 + math.cos(math.pi * self.step / num_steps))
            self.optimizer.param_groups[0]["lr"] = self.learning_rate * decay
            self.optimizer.step()
            self.step += 1
        if not math.isfinite(float(loss.detach())):
            raise ValueError(f"learning_rate={self.learning_rate}: the loss is no longer finite; set a smaller one")

    def order(self, rows_n: Tensor) -> Tensor:
        """The rows of an epoch in a random order; several times where they stand for more rows."""
        num = self.num_per_epoch(rows_n)
        orders = [torch.randperm(len(rows_n), generator=self.generator) for _ in range(math.ceil(num / len(rows_n)))]
        return rows_n[torch.cat(orders)[:num]]

    def num_per_epoch(self, rows_n: Tensor) -> int:
        """Number of rows that pass in an epoch."""
        return max(len(rows_n), min(round(len(rows_n) * self.repeats), ROWS_WITH_REPEATS))

    def loss(self, batch_n: Tensor) -> Tensor:
        """The loss of a batch: the library's, with a weight for each row."""
        seed, targets = step_seed(self.seed, self.step), self.targets[batch_n]
        budgets = (draw_budget(seed),) if self.anytime_loss else ()
        out = self.model(self.inputs_fn(batch_n), budgets=budgets, generator=torch.Generator().manual_seed(seed))
        loss, _ = combine_losses(
            out,
            lambda answers: self.losses_fn(answers, targets),
            share=1 / len(batch_n),
            num_targets=len(batch_n),
            anytime_loss=self.anytime_loss,
            target_experts=self.target_experts,
            easier_fn=lambda losses_n: share_easier(losses_n, losses_n, len(losses_n)),
            weights=self.weights[batch_n],
        )
        return loss

    @torch.no_grad()
    def mean_loss(self, rows_n: Tensor) -> float:
        """The weighted mean loss of rows in evaluation."""
        self.model.eval()
        losses = [
            self.losses_fn(self.model(self.inputs_fn(part)).logits[None], self.targets[part])[0] * self.weights[part]
            for part in rows_n.split(4096)
        ]
        return float(torch.cat(losses).mean())


def split_rows(targets: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Numbers of the training rows and of the validation rows; no validation rows where there are too few.

    Args:
        targets: Class numbers (B,), of which both parts get a share, or numbers (B, Y).
        fraction: Share of the rows for validation.
        seed: Of the split.

    Returns:
        Row numbers (n,) each.
    """
    from sklearn.model_selection import train_test_split

    num = len(targets)
    num_validation = round(num * fraction)
    counts = None if targets.is_floating_point() else torch.unique(targets, return_counts=True)[1]
    least = 4 if counts is None else max(4, len(counts))
    if num_validation < least or num - num_validation < least:
        return torch.arange(num), torch.empty(0, dtype=torch.int64)
    # A class with one row cannot be in both parts.
    labels = None if counts is None or int(counts.min()) < 2 else targets.numpy()
    train_n, validation_n = train_test_split(
        torch.arange(num).numpy(), test_size=num_validation, random_state=seed, stratify=labels
    )
    return torch.from_numpy(train_n), torch.from_numpy(validation_n)
