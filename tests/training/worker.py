"""What one of many processes does: `main("train", CONFIG, RUN, STOP_STEP)` or `main("measure", MODEL, DATA, FILE)`."""

import json
import os
import signal
from pathlib import Path

import torch
from torch import nn

from raytraced import RaytracedExperts, load
from raytraced.models.classifier import Classifier
from raytraced.tasks.images.task import ImageTask
from raytraced.tasks.task import Batch
from raytraced.training.callbacks import Reporter
from raytraced.training.config import TrainConfig, read_config
from raytraced.training.evaluation import evaluate
from raytraced.training.interrupt import Interrupted
from raytraced.training.loop import train
from raytraced.training.objective import Objective
from raytraced.training.optim import gradient_norm, whole
from raytraced.training.run_folder import RunFolder
from raytraced.training.world import join_world


class SignalAt(Reporter):
    """Sends this process SIGTERM after so many steps; 0 never does."""

    def __init__(self, step: int) -> None:
        self.left = step

    def on_step(self, state):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGTERM)


def train_some_steps(config_file: str, run: str, stop: str) -> None:
    """Go on with a run; only the leading process gets the signal, and all stop."""
    try:
        train(read_config(config_file), RunFolder(Path(run)), SignalAt(int(stop)))
    except Interrupted:
        return


def custom_model() -> Classifier:
    """Custom modules as experts, of which a batch of one image leaves most without a sample."""
    torch.manual_seed(0)

    def layer():
        return RaytracedExperts(4, 2, 3, expert=lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()))

    return Classifier(layer, 4, image_shape=(1, 2, 2), num_classes=3)


def gradients(world, strategy: str) -> dict[str, list[float]]:
    """The gradients of one global batch of 2 images: of three processes one gets none."""
    torch.manual_seed(1)
    images, labels = torch.randn(2, 1, 2, 2), torch.tensor([0, 1])
    first, last = (2 * rank // world.size for rank in (world.rank, world.rank + 1))
    model = custom_model()
    compute = world.distribute(Objective(model, TrainConfig(), ImageTask(), world.size), strategy)
    part = Batch(images[first:last], labels[first:last], torch.arange(first, last))
    compute(part, 5, world.total(part.num_targets)).loss.backward()
    gradient_norm(list(model.parameters()), None)
    return {name: whole(parameter.grad).flatten().tolist() for name, parameter in model.named_parameters()}


def figures(world, model_file: str, data_file: str) -> dict:
    """All figures of a model on some data: test images by sevens, some processes get less, or none of the last."""
    task, model = ImageTask(), load(model_file)
    predict = Objective(model, TrainConfig(), task, world.size).eval().predict
    data = task.load(data_file)
    return evaluate(task, data, "test", predict, world, batch_size=7, full=True)


def measure(model_file: str, data_file: str, file: str) -> None:
    with join_world("cpu") as world:
        found = {"figures": figures(world, model_file, data_file)}
        found |= {strategy: gradients(world, strategy) for strategy in ("ddp", "fsdp")}
        if world.leads:
            Path(file).write_text(json.dumps(found))


def main(what: str, *words: str) -> None:
    torch.set_num_threads(1)
    {"train": train_some_steps, "measure": measure}[what](*words)
