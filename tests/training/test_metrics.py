"""The figures of training, against a loop over the batches by hand."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from raytraced import load
from raytraced.tasks.images.task import ImageTask
from training.runs import metrics


def test_epochs_figures_are_means_over_its_samples_and_steps(train_with):
    """The weights hardly move, so that the model before training gives the figures of every epoch."""
    run, before = train_with(epochs=2, lr=1e-9), load(train_with(name="before", epochs=0).path)
    data = ImageTask().load(run.config.data)
    for epoch, line in enumerate(metrics(run)):
        norms, losses, correct, experts = [], [], [], []
        for batch in ImageTask().loader(data, "train", 16, {}).epoch(epoch):
            out = before.train()(batch.inputs)
            before.zero_grad()
            cross_entropy(out.logits, batch.targets).backward()
            norms.append(torch.stack([parameter.grad.norm() for parameter in before.parameters()]).norm())
            losses += cross_entropy(out.logits, batch.targets, reduction="none").tolist()
            correct += (out.logits.argmax(-1) == batch.targets).tolist()
            experts += out.num_experts.tolist()
        assert len(norms) == 6
        assert line["train_loss"] == pytest.approx(sum(losses) / 87, rel=1e-5)
        assert line["train_accuracy"] == pytest.approx(sum(correct) / 87)
        assert line["train_experts"] == pytest.approx(sum(experts) / 87)
        assert line["gradient_norm"] == pytest.approx(sum(norms).item() / 6, rel=1e-4)
        assert (line["epoch"], line["step"]) == (epoch + 1, 6 * (epoch + 1))


def test_learning_rate_in_the_metrics_is_that_of_the_last_step(train_with):
    first, second = metrics(train_with(epochs=2, lr=0.1, schedule="cosine"))
    half_a_step = torch.pi / 12
    assert first["learning_rate"] == pytest.approx(0.05 * (1 + torch.tensor(5 * half_a_step).cos().item()))
    assert second["learning_rate"] == pytest.approx(0.05 * (1 + torch.tensor(11 * half_a_step).cos().item()), abs=1e-9)
