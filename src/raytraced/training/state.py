"""Where a run is: its position, its metrics, the sums of the running epoch; and the checkpoints that hold all of it.

A checkpoint is one safetensors file that knows its own checksum: tensors (weights, optimizer state, sums) and one JSON
text (the rest). No pickle: reading one never runs code. Two are kept, so that a damaged newest one costs a little time
and nothing else.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from raytraced.saving import DamagedFileError, read_tensors, write_tensors
from raytraced.tasks.task import Task
from raytraced.training import optim
from raytraced.training.config import TrainConfig
from raytraced.training.evaluation import Diverged
from raytraced.training.objective import StepResult
from raytraced.training.run_folder import RunFolder
from raytraced.training.world import World

CHECKPOINT_FORMAT = "raytraced-checkpoint-2"
NUM_KEPT = 2


@dataclass
class State:
    """All that is neither weights nor optimizer state."""

    step: int = 0
    epoch: int = 0
    batch: int = 0  # done in this epoch
    seconds: float = 0.0  # spent in this epoch
    best: float | None = None  # of the task's figure on validation data
    best_epoch: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    sums: dict[str, Any] = field(default_factory=dict)  # over this epoch's steps; what needs no device is no tensor

    def count(self, result: StepResult, norm: Tensor, leads: bool = True) -> None:
        """Add one step of this process, on the device: reading would make it wait. What all know alike, the leader counts."""
        alike = {"steps": 1, "norm": norm} if leads else {"steps": 0, "norm": 0}
        for name, value in (result.sums | alike).items():
            self.sums[name] = self.sums.get(name, 0.0) + (value.double() if isinstance(value, Tensor) else value)

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
    """One line of metrics.jsonl; two identical runs share all of it but seconds and samples_per_second."""
    means = mean_figures(task, sums)
    judged = {name: validation[name] for name in ("loss", *task.formats)} | {"experts": validation["mean_experts"]}
    return {
        "epoch": state.epoch + 1,
        "step": state.step,
        "learning_rate": learning_rate,
        **{f"train_{name}": means[name] for name in judged},
        "gradient_norm": float(sums["norm"] / sums["steps"]),
        **{f"validation_{name}": value for name, value in judged.items()},
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
    """Read and verify one file; a cut, altered or foreign one raises a DamagedFileError that says so."""
    tensors, text = read_tensors(path, CHECKPOINT_FORMAT, "state")
    state = json.loads(text)
    return Checkpoint(state.pop("step"), tensors, state)


def newest_checkpoint(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint (None if there is none yet) and what was wrong with each newer one.

    Raises:
        DamagedFileError: there are files, but not one is whole.
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
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: State,
    world: World,
) -> Checkpoint:
    """All that a run needs to go on bit by bit; every process gives its part."""
    parts = {"model": optim.model_tensors(model), "optimizer": optim.optimizer_tensors(model, optimizer)}
    parts |= {"totals": state.total(world)}
    tensors = {f"{part}/{name}": tensor for part, own in parts.items() for name, tensor in own.items()}
    # so that neither an edited config.yaml nor other data can change the run in silence
    rest = {name: value for name, value in vars(state).items() if name not in ("step", "sums")}
    return Checkpoint(state.step, tensors, rest | {"config": asdict(config), "spec": spec})


def restore_state(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> State:
    """Put everything back as it was when the checkpoint was written."""
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}, "totals": {}}
    for key, tensor in checkpoint.tensors.items():
        part, _, name = key.partition("/")
        parts[part][name] = tensor
    optim.load_model_tensors(model, parts["model"])
    optim.load_optimizer_tensors(model, optimizer, parts["optimizer"])
    # the sums were taken over all processes: one of them goes on with them
    sums = {name: tensor.to(world.device) * float(world.leads) for name, tensor in parts["totals"].items()}
    kept = {name: value for name, value in checkpoint.state.items() if name not in ("config", "spec")}
    return State(step=checkpoint.step, sums=sums, **kept)


def check_same_data(task: Task, begun: dict[str, Any], now: dict[str, Any], data: str) -> list[str]:
    """Refuse to go on with other classes, shapes or tokens than a run began with; tells what else is not the same."""
    other = [name for name, value in begun.items() if json.dumps(value) != json.dumps(now.get(name))]
    if kinds := [name for name in other if name not in task.measured]:
        remedy = "say with --data where that data lies, or train anew"
        raise ValueError(f"data={data}: has another {' and '.join(kinds)} than the run began with; {remedy}")
    told = f"data={data}: is not what the run began with ({', '.join(other)} differ); it goes on with what is there now"
    return [told] if other else []


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


def diverged(run: RunFolder, state: State, inputs: Tensor, model: nn.Module, result: StepResult) -> Diverged:
    """Which step, which tensor first, and what is still whole."""
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
