"""Checkpoints: all that a run needs to go on bit by bit, in one safetensors file that knows its own checksum.

A file holds tensors (weights, optimizer state) and one JSON text (position, metrics so far). No pickle: reading one
never runs code. Two are kept, so that a damaged newest one costs a little time and nothing else.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from raytraced.files import remove_leftovers
from raytraced.saving import DamagedFileError, read_tensors, write_tensors

FORMAT = "raytraced-checkpoint-2"
NUM_KEPT = 2


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by name, and the rest of the state as plain JSON values; step is the number of steps done."""

    step: int
    tensors: Mapping[str, Tensor]
    state: dict[str, Any]


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write `folder/step-….safetensors` and drop all but the newest two."""
    folder.mkdir(exist_ok=True)
    path = folder / f"step-{checkpoint.step:010d}.safetensors"
    write_tensors(path, checkpoint.tensors, FORMAT, "state", json.dumps(checkpoint.state | {"step": checkpoint.step}))
    for old in list_checkpoints(folder)[NUM_KEPT:]:
        old.unlink(missing_ok=True)
    return path


def load_checkpoint(path: Path) -> Checkpoint:
    """Read and verify one file; a cut, altered or foreign one raises a DamagedFileError that says so."""
    tensors, text = read_tensors(path, FORMAT, "state")
    state = json.loads(text)
    return Checkpoint(state.pop("step"), tensors, state)


def newest_checkpoint(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint (None if there is none yet) and what was wrong with each newer one.

    Raises:
        DamagedFileError: there are files, but not one is whole.
    """
    remove_leftovers(folder)
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
