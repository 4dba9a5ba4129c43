"""What a run leaves behind once it is over: the summary and the pictures."""

import importlib.util
import platform
import time
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from raytraced.classifier import RaytracedClassifier
from raytraced.data import Split
from raytraced.saving import load_with_card
from raytraced.training.config import TrainConfig
from raytraced.training.evaluation import Evaluation
from raytraced.training.run_folder import RunFolder
from raytraced.training.state import State


def draw_pictures(run: RunFolder, state: State, split: Split) -> None:
    """The curves of training, and how a raytraced model went through a few images."""
    from raytraced.analysis.curves import draw_curves
    from raytraced.analysis.pictures import draw_sequences

    model, card = load_with_card(run.model)
    if state.history:
        draw_curves({run.path.name: state.history}, run.path / "curves.png")
    if isinstance(model, RaytracedClassifier):
        draw_sequences(model, split, card, run.path / "sequences.png")


def write_outcome(
    run: RunFolder, config: TrainConfig, state: State, validation: Evaluation, test: Evaluation, world_size: int
) -> None:
    """Write summary.json, whose presence says that the run is over."""
    model, _ = load_with_card(run.model)
    run.write_summary(summarise(config, state, model, validation, test, world_size))


def summarise(
    config: TrainConfig, state: State, model: nn.Module, validation: Evaluation, test: Evaluation, world_size: int
) -> dict[str, Any]:
    """The content of summary.json."""
    from raytraced import __version__

    return {
        "data": config.data,
        "model": config.model,
        "seed": config.seed,
        "epochs": state.epoch,
        "steps": state.step,
        "parameters": count_parameters(model),
        "weights": "last" if config.patience is None else "best",
        "best_epoch": state.best_epoch,
        "best_validation_accuracy": state.best_accuracy,
        "validation": asdict(validation),
        "test": asdict(test),
        "seconds": sum(epoch["seconds"] for epoch in state.history),
        "finished": time.strftime("%Y-%m-%d %H:%M:%S"),
        "processes": world_size,
        "threads": torch.get_num_threads(),
        "versions": {"raytraced": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def count_parameters(model: nn.Module) -> int:
    """Trainable numbers."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def write_event(run: RunFolder, metrics: dict[str, Any]) -> None:
    """Add an epoch to the TensorBoard events, if that extra is installed."""
    if importlib.util.find_spec("tensorboard") is None:
        return
    from torch.utils.tensorboard import SummaryWriter

    # purge_step hides what a run that was killed had already told about this epoch
    with SummaryWriter(str(run.path / "events"), purge_step=metrics["epoch"]) as writer:
        for name, value in metrics.items():
            if isinstance(value, float):
                writer.add_scalar(name, value, metrics["epoch"])
