"""What a run leaves behind: the summary, the pictures, and events for TensorBoard."""

import importlib.util
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from raytraced.cost import num_parameters
from raytraced.models.output import Model
from raytraced.training.config import TrainConfig
from raytraced.training.evaluation import Evaluation
from raytraced.training.run_folder import RunFolder
from raytraced.training.state import State


def summarise(
    config: TrainConfig, state: State, model: Model, validation: Evaluation, test: Evaluation, world_size: int
) -> dict[str, Any]:
    """The content of summary.json."""
    from raytraced import __version__

    return {
        "data": config.data,
        "model": config.model,
        "seed": config.seed,
        "epochs": state.epoch,
        "steps": state.step,
        "parameters": num_parameters(model),
        "weights": "last" if config.patience is None else "best",
        "best_epoch": state.best_epoch,
        "best_validation": state.best,
        "validation": validation.as_dict(),
        "test": test.as_dict(),
        "seconds": sum(epoch["seconds"] for epoch in state.history),
        "finished": time.strftime("%Y-%m-%d %H:%M:%S"),
        "processes": world_size,
        "threads": torch.get_num_threads(),
        "versions": {"raytraced": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def write_event(run: RunFolder, metrics: dict[str, Any]) -> None:
    """Tell TensorBoard, if that extra is installed, of all epochs up to this one: one file a run, resumed or not."""
    if importlib.util.find_spec("tensorboard") is None:
        return
    from torch.utils.tensorboard import SummaryWriter

    folder = run.path / "events"
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".events-", dir=run.path) as fresh:
        with SummaryWriter(fresh) as writer:
            for epoch in (one for one in run.read_metrics() if one["epoch"] <= metrics["epoch"]):
                for name, value in epoch.items():
                    if isinstance(value, float):
                        writer.add_scalar(name, value, epoch["epoch"])
        (written,) = Path(fresh).iterdir()
        written.replace(folder / "events.out.tfevents.run")
