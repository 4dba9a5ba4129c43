"""The state of a run: its position, its metrics, the sums of this epoch; and the checkpoints that hold all of it.

A checkpoint is one safetensors file with a checksum: tensors (weights, optimizer state, sums) and one JSON text (the rest).
No pickle: reading one never runs code. Two are kept, so that a damaged one costs the steps since the one before.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from raytraced.io.saving import DamagedFileError, read_tensors, write_tensors
from raytraced.tasks.task import Task
from raytraced.training import optim
from raytraced.training.config import TrainConfig
from raytraced.training.evaluation import Diverged
from raytraced.training.objective import StepResult
from raytraced.training.run_folder import RunFolder
from raytraced.training.world import World, is_lost_process

CHECKPOINT_FORMAT = "raytraced-checkpoint-2"
NUM_KEPT = 2


@dataclass
class State:
    """What is neither weights nor optimizer state."""

    step: int = 0
    epoch: int = 0
    batch: int = 0  # done in this epoch
    seconds: float = 0.0  # spent in this epoch
    best: float | None = None  # of the task's figure on validation data
    best_epoch: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    sums: dict[str, Any] = field(
        default_factory=dict
    )  # over the steps of this epoch: tensors, or numbers where no device is involved

    def count(self, result: StepResult, norm: Tensor, leads: bool = True) -> None:
        """Add one step of this process, on the device; what is the same in all processes is counted by the leader."""
        shared = {"steps": 1, "norm": norm} if leads else {"steps": 0, "norm": 0}
        for name, value in (result.sums | shared).items():
            self.sums[name] = self.sums.get(name, 0.0) + (value.double() if isinstance(value, Tensor) else value)

    def is_best(self, value: float, higher: bool) -> bool:
        """Whether no epoch so far has a better value; `higher`: more is better."""
        return self.best is None or (value > self.best if higher else value < self.best)

    def start_next_epoch(self) -> None:
        """Move to the first step of the next epoch."""
        self.epoch, self.batch, self.seconds = self.epoch + 1, 0, 0.0
        self.sums = {}

    def means(self, task: Task) -> dict[str, float]:
        """The mean figures of this epoch so far, of this process."""
        return mean_figures(task, self.sums)

    def total(self, world: World) -> dict[str, Tensor]:
        """The sums over all processes."""
        place: dict[str, Any] = {"device": world.device, "dtype": torch.float64}
        return {name: world.sum(torch.as_tensor(value, **place).clone()) for name, value in self.sums.items()}


def mean_figures(task: Task, sums: dict[str, Any]) -> dict[str, float]:
    """Means over the targets counted so far."""
    known = {name: float(value) for name, value in sums.items()}
    num = max(1.0, known["targets"])
    return {"loss": known["loss"] / num, **task.means(known, num), "experts": known["experts"] / num}


def epoch_metrics(
    task: Task, state: State, sums: dict[str, Tensor], learning_rate: float, validation: dict[str, Any]
) -> dict[str, Any]:
    """One line of metrics.jsonl; identical runs differ in seconds and samples_per_second only."""
    means = mean_figures(task, sums)
    validation_figures = {name: validation[name] for name in ("loss", *task.formats)} | {
        "experts": validation["mean_experts"]
    }
    return {
        "epoch": state.epoch + 1,
        "step": state.step,
        "learning_rate": learning_rate,
        **{f"train_{name}": means[name] for name in validation_figures},
        "gradient_norm": float(sums["norm"] / sums["steps"]),
        **{f"validation_{name}": value for name, value in validation_figures.items()},
        "expert_load": validation["expert_load"],
        "seconds": state.seconds,
        "samples_per_second": float(sums["targets"]) / max(state.seconds, 1e-9),
    }


class Checkpoint(NamedTuple):
    """Tensors by name, and the rest of the state as plain JSON values; step is the number of steps done."""

    step: int
    tensors: Mapping[str, Tensor]
    state: dict[str, Any]


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write `folder/step-….safetensors` and drop all but the newest two."""
    folder.mkdir(exist_ok=True)
    path = folder / f"step-{checkpoint.step:010d}.safetensors"
    write_tensors(
        path, checkpoint.tensors, CHECKPOINT_FORMAT, "state", json.dumps(checkpoint.state | {"step": checkpoint.step})
    )
    for old in list_checkpoints(folder)[NUM_KEPT:]:
        old.unlink(missing_ok=True)
    return path


def load_checkpoint(path: Path) -> Checkpoint:
    """Read and verify one file; one that is cut short, altered or not a checkpoint raises a DamagedFileError."""
    tensors, text = read_tensors(path, CHECKPOINT_FORMAT, "state")
    state = json.loads(text)
    return Checkpoint(state.pop("step"), tensors, state)


def newest_checkpoint(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint (None if there is none yet), and what is wrong with each newer one.

    Raises:
        DamagedFileError: All checkpoints are damaged.
    """
    problems: list[str] = []
    for path in list_checkpoints(folder):
        try:
            return load_checkpoint(path), problems
        except DamagedFileError as error:
            problems.append(str(error))
    if problems:
        raise DamagedFileError(f"no whole checkpoint: {'; '.join(problems)}")
    return None, []


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoint files, newest first."""
    return sorted(folder.glob("step-*.safetensors"), reverse=True)


def make_checkpoint(
    config: TrainConfig,
    spec: dict[str, Any],
    fingerprint: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: State,
    world: World,
) -> Checkpoint:
    """All that a run needs to continue bit for bit; every process gives its part."""
    parts = {"model": optim.model_tensors(model), "optimizer": optim.optimizer_tensors(model, optimizer)}
    parts |= {"totals": state.total(world)}
    tensors = {f"{part}/{name}": tensor for part, own in parts.items() for name, tensor in own.items()}
    # With them, neither an edited config.yaml nor other data can change the run unnoticed.
    rest = {name: value for name, value in vars(state).items() if name not in ("step", "sums")}
    return Checkpoint(state.step, tensors, rest | {"config": asdict(config), "spec": spec, "fingerprint": fingerprint})


def restore_state(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> State:
    """Load the weights, the optimizer's state and the rest of the state from a checkpoint."""
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}, "totals": {}}
    for key, tensor in checkpoint.tensors.items():
        part, _, name = key.partition("/")
        parts[part][name] = tensor
    optim.load_model_tensors(model, parts["model"])
    optim.load_optimizer_tensors(model, optimizer, parts["optimizer"])
    # The sums were taken over all processes: one of them continues with them.
    sums = {name: tensor.to(world.device) * float(world.leads) for name, tensor in parts["totals"].items()}
    kept = {name: value for name, value in checkpoint.state.items() if name not in ("config", "spec", "fingerprint")}
    return State(step=checkpoint.step, sums=sums, **kept)


def check_same_data(
    task: Task, begun: dict[str, Any], spec: dict[str, Any], fingerprint: dict[str, Any], data: str
) -> list[str]:
    """Compare the data with what a run began with; refuses other classes, shapes or tokens.

    Args:
        task: The task, which knows what of its spec is measured from the data.
        begun: The state of the run's checkpoint.
        spec: The spec of the data that is there now.
        fingerprint: The fingerprint of the data that is there now.
        data: Its name or path, for messages.

    Returns:
        Warnings, one line each; none where the data is the same.
    """
    other = differing(begun.get("spec", {}), spec)
    if kinds := [name for name in other if name not in task.measured]:
        remedy = "give the path of that data with --data, or train anew"
        raise ValueError(f"data={data}: its {' and '.join(kinds)} differ from what the run began with; {remedy}")
    other += differing(begun.get("fingerprint", {}), fingerprint)
    if not other:
        return []
    changed = f"data={data}: is not what the run began with ({', '.join(other)} differ)"
    return [f"{changed}; training continues on the new data, and test data may hold what was trained on before"]


def differing(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The names whose values differ; what is new has no name to compare."""
    return [name for name, value in old.items() if json.dumps(value) != json.dumps(new.get(name))]


@contextmanager
def add_resume_hint(run: RunFolder) -> Iterator[None]:
    """Add to an error of a file (a full disk) or of a process that is gone how to resume the run, from which checkpoint."""

    def kept() -> str:
        found = list_checkpoints(run.last)
        return f"{found[0].name} is whole; " if found else ""

    try:
        yield
    except OSError as error:
        reason = f"{error.strerror}; {kept()}once that is fixed: raytraced resume {run.path}"
        raise OSError(error.errno, reason, error.filename) from error
    except RuntimeError as error:
        if not is_lost_process(error):
            raise
        # Without its cause: the frames of a traceback would keep the process group from being destroyed.
        lost = "another process of this run has ended, or cannot be reached"
        remedy = f"start all processes again: raytraced resume {run.path}"
        raise ConnectionError(f"{lost}; {kept()}{remedy}") from None


def diverged(run: RunFolder, state: State, inputs: Tensor, model: nn.Module, result: StepResult) -> Diverged:
    """Make the error of a step that is not finite: which step, which tensor first, and the last good checkpoint."""
    parameters = dict(model.named_parameters())
    gradients = {f"the gradient of {name}": one.grad for name, one in parameters.items() if one.grad is not None}
    suspects = {"the inputs": inputs, **parameters, "the logits": result.logits, "the loss": result.loss, **gradients}
    bad = (name for name, value in suspects.items() if not bool(optim.whole(value.detach()).isfinite().all()))
    kept = list_checkpoints(run.last)
    last = f"the last good checkpoint is {kept[0]}" if kept else "there is no checkpoint yet"
    return Diverged(
        f"step {state.step + 1} (epoch {state.epoch + 1}): loss {float(result.loss.detach()):.4g}, first not finite: "
        f"{next(bad, 'the norm of the gradient')}; {last}; a smaller --lr or --clip 1 usually helps"
    )
