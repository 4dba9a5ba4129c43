"""What can be wrong with data or with numbers, said in one line."""

import torch
from torch import Tensor, nn

from raytraced.data import Dataset
from raytraced.training.checkpoint import list_checkpoints
from raytraced.training.objective import StepResult
from raytraced.training.optim import whole
from raytraced.training.run_folder import RunFolder
from raytraced.training.state import State


def check_classes(dataset: Dataset) -> None:
    """Refuse a data set in which a class has no training image: its accuracy would be a riddle."""
    counts = torch.bincount(dataset.train.labels, minlength=dataset.num_classes)
    for name, count in zip(dataset.class_names, counts.tolist(), strict=True):
        if count == 0:
            raise ValueError(f"{dataset.name}: class {name!r} has no training image; add some or leave the class out")


def describe_divergence(run: RunFolder, state: State, images: Tensor, model: nn.Module, result: StepResult) -> str:
    """Which step, which tensor first, and what is still whole."""
    parameters = dict(model.named_parameters())
    suspects: dict[str, Tensor | None] = {"the images": images, **parameters}
    suspects |= {"the logits": result.logits, "the loss": result.loss}
    suspects |= {f"the gradient of {name}": parameter.grad for name, parameter in parameters.items()}
    culprit = "the norm of the gradient"
    for name, value in suspects.items():
        if value is not None and not bool(torch.isfinite(whole(value.detach())).all()):
            culprit = name
            break
    kept = list_checkpoints(run.last)
    last = f"the last good checkpoint is {kept[0]}" if kept else "there is no checkpoint yet"
    return (
        f"step {state.step + 1} (epoch {state.epoch + 1}): loss {float(result.loss.detach()):.4g}, "
        f"first not finite: {culprit}; {last}; a smaller --lr or --clip 1 usually helps"
    )
