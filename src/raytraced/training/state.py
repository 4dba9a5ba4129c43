"""Where a run is: its position, its metrics, the sums of the running epoch; written to and read from checkpoints."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from raytraced.tasks.task import Task
from raytraced.training import optim
from raytraced.training.checkpoint import Checkpoint, list_checkpoints, save_checkpoint
from raytraced.training.config import TrainConfig
from raytraced.training.evaluation import Evaluation
from raytraced.training.objective import StepResult
from raytraced.training.run_folder import RunFolder
from raytraced.training.world import World

TIMING_FIELDS = ("seconds", "samples_per_second")
"""The fields of a metrics line that two identical runs need not share."""


@dataclass
class State:
    """All that is neither weights nor optimizer state nor sums."""

    step: int = 0
    epoch: int = 0
    batch: int = 0  # done in this epoch
    seconds: float = 0.0  # spent in this epoch
    best: float | None = None  # of the task's figure on validation data
    best_epoch: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)


class Totals:
    """Sums over the steps of an epoch, kept on the device: reading them at every step would make it wait."""

    def __init__(self, task: Task, world: World) -> None:
        self.task, self.world = task, world
        self.sums: dict[str, Any] = {}  # tensors, and numbers that need no device

    def add(self, result: StepResult, norm: Tensor) -> None:
        """Count one step of this process; what all know alike, the leader counts."""
        alike = {"steps": 1, "norm": norm} if self.world.leads else {"steps": 0, "norm": 0}
        for name, value in (result.sums | alike).items():
            self.sums[name] = self.sums.get(name, 0.0) + (value.double() if isinstance(value, Tensor) else value)

    def means(self, seconds: float) -> dict[str, float]:
        """The figures of a live display, from this process's own samples."""
        return mean_figures(self.task, self.sums, seconds / self.world.size)

    def reduced(self) -> dict[str, Tensor]:
        """The sums over all processes."""
        device = self.world.device
        tensors = {
            name: torch.as_tensor(value, dtype=torch.float64, device=device) for name, value in self.sums.items()
        }
        return {name: self.world.sum(tensor.clone()) for name, tensor in tensors.items()}

    def clear(self) -> None:
        """Begin a new epoch."""
        self.sums = {}


def mean_figures(task: Task, sums: dict[str, Any], seconds: float) -> dict[str, float]:
    """Means over the targets (the norm's over the steps) counted so far."""
    known = {name: float(value) for name, value in sums.items()}
    num = max(1.0, known["targets"])
    return {
        "loss": known["loss"] / num,
        **task.means(known, num),
        "experts": known["experts"] / num,
        "gradient_norm": known["norm"] / known["steps"],
        "samples_per_second": num / max(seconds, 1e-9),
    }


def epoch_metrics(
    task: Task, state: State, sums: dict[str, Tensor], learning_rate: float, validation: Evaluation
) -> dict[str, Any]:
    """One line of metrics.jsonl."""
    means = mean_figures(task, sums, state.seconds)
    judged = {name: validation[name] for name in task.formats}
    judged = {"loss": validation.loss, **judged, "experts": validation.mean_experts}
    return {
        "epoch": state.epoch + 1,
        "step": state.step,
        "learning_rate": learning_rate,
        **{f"train_{name}": means[name] for name in judged},
        "gradient_norm": means["gradient_norm"],
        **{f"validation_{name}": value for name, value in judged.items()},
        "expert_load": validation.expert_load,
        "seconds": state.seconds,
        "samples_per_second": means["samples_per_second"],
    }


def save_state(
    run: RunFolder,
    config: TrainConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    totals: Totals,
    world: World,
    state: State,
) -> None:
    """Write a checkpoint; every process gives its part, the leader writes."""
    tensors = {f"model/{name}": tensor for name, tensor in optim.model_tensors(model).items()}
    tensors |= {f"optimizer/{name}": tensor for name, tensor in optim.optimizer_tensors(model, optimizer).items()}
    tensors |= {f"totals/{name}": tensor for name, tensor in totals.reduced().items()}
    rest = asdict(state) | {"config": asdict(config)}  # so that an edited config.yaml cannot change the run in silence
    step = rest.pop("step")
    world.from_leader(lambda: write_checkpoint(run, Checkpoint(step, tensors, rest)))


def write_checkpoint(run: RunFolder, checkpoint: Checkpoint) -> None:
    """Write it; if that fails, say what is still whole and how to go on."""
    with tells_how_to_go_on(run):
        save_checkpoint(run.last, checkpoint)


@contextmanager
def tells_how_to_go_on(run: RunFolder) -> Iterator[None]:
    """A file that cannot be written, on a full disk say, is told with what is still whole and how to go on."""
    try:
        yield
    except OSError as error:
        kept = list_checkpoints(run.last)
        still = f"{kept[0].name} is whole; " if kept else ""
        reason = f"{error.strerror}; {still}once that is mended: raytraced resume {run.path}"
        raise OSError(error.errno, reason, error.filename) from error


def restore_state(
    checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer, totals: Totals, world: World
) -> State:
    """Put everything back as it was when the checkpoint was written."""
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}, "totals": {}}
    for key, tensor in checkpoint.tensors.items():
        part, _, name = key.partition("/")
        parts[part][name] = tensor
    optim.load_model_tensors(model, parts["model"])
    optim.load_optimizer_tensors(model, optimizer, parts["optimizer"])
    # the sums were taken over all processes: one of them goes on with them
    share = 1.0 if world.leads else 0.0
    totals.sums = {name: tensor.to(world.device) * share for name, tensor in parts["totals"].items()}
    kept = {name: value for name, value in checkpoint.state.items() if name != "config"}
    return State(step=checkpoint.step, **kept)
