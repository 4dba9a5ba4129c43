"""What can go wrong with a model, said in one line."""

import torch
from torch import Tensor, nn

from raytraced.tasks.task import Batch
from raytraced.training.checkpoint import list_checkpoints
from raytraced.training.evaluation import Diverged
from raytraced.training.objective import Objective, StepResult
from raytraced.training.optim import whole
from raytraced.training.run_folder import RunFolder
from raytraced.training.state import State


def rehearse(objective: Objective, batch: Batch) -> None:
    """Run a batch and forget it: what a model, or its compiler, refuses is refused before there is a run folder."""
    buffers = {name: buffer.clone() for name, buffer in objective.named_buffers()}
    try:
        objective(batch, 0, batch.num_targets)
    except RuntimeError as error:
        if not objective.config.compile:
            raise
        reason = str(error).partition("\n")[0]
        raise ValueError(f"compile=True: the model cannot be compiled here ({reason}); leave it out") from error
    for name, buffer in objective.named_buffers():
        buffer.copy_(buffers[name])


def diverged(run: RunFolder, state: State, inputs: Tensor, model: nn.Module, result: StepResult) -> Diverged:
    """Which step, which tensor first, and what is still whole."""
    parameters = dict(model.named_parameters())
    suspects: dict[str, Tensor | None] = {"the inputs": inputs, **parameters}
    suspects |= {"the logits": result.logits, "the loss": result.loss}
    suspects |= {f"the gradient of {name}": parameter.grad for name, parameter in parameters.items()}
    culprit = "the norm of the gradient"
    for name, value in suspects.items():
        if value is not None and not bool(torch.isfinite(whole(value.detach())).all()):
            culprit = name
            break
    kept = list_checkpoints(run.last)
    last = f"the last good checkpoint is {kept[0]}" if kept else "there is no checkpoint yet"
    return Diverged(
        f"step {state.step + 1} (epoch {state.epoch + 1}): loss {float(result.loss.detach()):.4g}, "
        f"first not finite: {culprit}; {last}; a smaller --lr or --clip 1 usually helps"
    )
