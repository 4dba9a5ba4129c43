"""What torchrun starts in the tests of many processes: `worker.py train CONFIG RUN STOP_STEP` or `worker.py experts FILE`."""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

from raytraced.classifier import RaytracedClassifier, input_block
from raytraced.layer import RaytracedExperts
from raytraced.training.config import TrainConfig, read_config
from raytraced.training.distribute import distribute
from raytraced.training.interrupt import Interrupted
from raytraced.training.loop import train
from raytraced.training.objective import Objective
from raytraced.training.optim import gradient_norm, whole
from raytraced.training.progress import Silent
from raytraced.training.run_folder import RunFolder
from raytraced.training.world import join_world


class SignalAt(Silent):
    """Sends this process SIGTERM after so many steps; 0 never does."""

    def __init__(self, step: int) -> None:
        self.left = step

    def step(self, epoch, batch, figures):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGTERM)


def train_some_steps(config_file: str, run: str, stop: str) -> None:
    """Go on with a run; only the leading process gets the signal, and all stop."""
    try:
        train(read_config(config_file), RunFolder(Path(run)), SignalAt(int(stop)))
    except Interrupted:
        return


def custom_model() -> RaytracedClassifier:
    """Experts as modules of one's own, of which a batch of one image leaves most without a sample."""
    torch.manual_seed(0)
    layer = RaytracedExperts(4, 2, 3, expert=lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    return RaytracedClassifier(input_block((1, 2, 2), 4), layer, 3)


def gradients(world, strategy: str) -> dict[str, list[float]]:
    """The gradients of one global batch of 3 images, of which a process may get none."""
    torch.manual_seed(1)
    images, labels = torch.randn(3, 1, 2, 2), torch.tensor([0, 1, 2])
    first, last = (3 * rank // world.size for rank in (world.rank, world.rank + 1))
    model = custom_model()
    compute = distribute(Objective(model, TrainConfig(), world.size), world, strategy)
    compute(images[first:last], labels[first:last], torch.arange(first, last), 5, 3).loss.backward()
    gradient_norm(list(model.parameters()), None)
    return {name: whole(parameter.grad).flatten().tolist() for name, parameter in model.named_parameters()}


def write_gradients(file: str) -> None:
    with join_world("cpu") as world:
        found = {strategy: gradients(world, strategy) for strategy in ("ddp", "fsdp")}
        if world.leads:
            Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"train": train_some_steps, "experts": write_gradients}[sys.argv[1]](*sys.argv[2:])
