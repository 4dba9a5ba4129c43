"""Checkpoints: all that a run needs to go on bit by bit, in one safetensors file that knows its own checksum.

A file holds tensors (weights, optimizer state) and one JSON text (position, metrics so far). No pickle: reading one
never runs code. Two are kept, so that a damaged newest one costs a little time and nothing else.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as decode
from safetensors.torch import save as encode
from torch import Tensor

from raytraced.training.files import remove_leftovers, write_file

FORMAT = "raytraced-checkpoint-1"
NUM_KEPT = 2


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by name, and the rest of the state as plain JSON values; step is the number of steps done."""

    step: int
    tensors: Mapping[str, Tensor]
    state: dict[str, Any]


class DamagedCheckpointError(ValueError):
    """A file that is not, or no longer, a whole checkpoint; the text says which file and why."""


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write `folder/step-….safetensors` and drop all but the newest two."""
    folder.mkdir(exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in checkpoint.tensors.items()}
    state = json.dumps(checkpoint.state | {"step": checkpoint.step})
    metadata = {"format": FORMAT, "state": state, "sha256": checksum(tensors, state)}
    path = folder / f"step-{checkpoint.step:010d}.safetensors"
    write_file(path, encode(tensors, metadata))
    for old in list_checkpoints(folder)[NUM_KEPT:]:
        old.unlink(missing_ok=True)
    return path


def load_checkpoint(path: Path) -> Checkpoint:
    """Read and verify one file; a cut, altered or foreign one raises a DamagedCheckpointError that says so."""
    content = path.read_bytes()
    metadata = read_metadata(path, content)
    if metadata.get("format") != FORMAT or "state" not in metadata:
        found = metadata.get("format", "no format")
        raise DamagedCheckpointError(f"{path}: foreign: has {found}, not {FORMAT}")
    try:
        tensors = decode(content)
    except SafetensorError as error:
        raise DamagedCheckpointError(f"{path}: cut or altered: {error}") from error
    if checksum(tensors, metadata["state"]) != metadata.get("sha256"):
        raise DamagedCheckpointError(f"{path}: altered: its content does not match its checksum")
    state = json.loads(metadata["state"])
    return Checkpoint(state.pop("step"), tensors, state)


def newest_checkpoint(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint (None if there is none yet) and what was wrong with each newer one.

    Raises:
        DamagedCheckpointError: there are files, but not one is whole.
    """
    remove_leftovers(folder)
    problems: list[str] = []
    for path in list_checkpoints(folder):
        try:
            return load_checkpoint(path), problems
        except DamagedCheckpointError as error:
            problems.append(str(error))
    if problems:
        raise DamagedCheckpointError(f"no whole checkpoint: {'; '.join(problems)}")
    return None, []


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoint files, newest first."""
    return sorted(folder.glob("step-*.safetensors"), reverse=True)


def checksum(tensors: Mapping[str, Tensor], text: str) -> str:
    """SHA-256 over a text and every tensor's name, type, shape and bytes."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_metadata(path: Path, content: bytes) -> dict[str, str]:
    """The metadata in the header of a safetensors file: 8 bytes of length, then JSON."""
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or content[8:9] != b"{":
        raise DamagedCheckpointError(f"{path}: foreign: is not a safetensors file")
    if len(content) < 8 + length:
        raise DamagedCheckpointError(f"{path}: cut: ends inside its header, at byte {len(content)}")
    try:
        metadata = json.loads(content[8 : 8 + length]).get("__metadata__", {})
    except ValueError as error:
        raise DamagedCheckpointError(f"{path}: altered: its header cannot be read") from error
    return dict(metadata)
