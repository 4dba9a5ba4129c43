"""The processes that train together: one, or those that torchrun started, on one host or several."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from raytraced.errors import require
from raytraced.store.experts import StoredExperts

Value = TypeVar("Value")
LAST_TURN = 0.25  # seconds that other threads get before the process group is destroyed


@dataclass(frozen=True)
class World:
    """The processes of a run, from the side of one of them.

    Args:
        rank: Number of this process.
        size: Number of processes.
        device: Where this process computes.
    """

    rank: int
    size: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes files and prints."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def total(self, number: Tensor | int) -> Tensor | int:
        """The sum of a number over all processes."""
        return number if self.size == 1 else self.sum(torch.as_tensor(number, device=self.device))

    def largest(self, values: list[int]) -> list[int]:
        """The largest of each value over all processes, so that all take the same decision."""
        if self.size == 1:
            return values
        tensor = torch.tensor(values, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return [int(value) for value in tensor.tolist()]

    def from_leader(self, compute: Callable[[], Value]) -> Value:
        """Give all processes what the leading one computes, or raise its error: only its files need to exist."""
        if self.size == 1:
            return compute()
        box: list[Any] = [None]
        if self.leads:
            try:
                box = [compute()]
            except (ValueError, OSError) as error:
                box = [error]
        dist.broadcast_object_list(box, src=0)
        if isinstance(box[0], Exception):
            raise box[0]
        return box[0]

    def distribute(self, objective: nn.Module, strategy: Literal["ddp", "fsdp"]) -> nn.Module:
        """The module to call in training: a copy per process (DDP), or the objective itself, sharded in place (FSDP)."""
        if self.size == 1:
            return objective
        if strategy == "ddp":
            return DistributedDataParallel(objective, device_ids=[self.device] if self.device.type == "cuda" else None)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        # One unit, gathered whole for each step. Experts as units would be gathered only by processes whose samples chose
        # them, and these would wait for the others for ever.
        mesh = init_device_mesh(self.device.type, (self.size,))
        fully_shard(objective, mesh=mesh, reshard_after_forward=True)
        register_fsdp_forward_method(objective, "predict")
        return objective


def is_lost_process(error: RuntimeError) -> bool:
    """Whether an error means that another process is gone; PyTorch's backends have no class of errors in common."""
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)


@contextmanager
def join_world(device: str) -> Iterator[World]:
    """Join the processes that torchrun started (it sets RANK, WORLD_SIZE, …), or train alone.

    Args:
        device: cpu, cuda, cuda:1, …, or auto.

    Yields:
        The processes of the run.
    """
    size, own = int(os.environ.get("WORLD_SIZE", "1")), choose_device(device)
    if size == 1:
        yield World(0, 1, own)
        return
    if own.type == "cuda":
        torch.cuda.set_device(own)
    try:
        dist.init_process_group("nccl" if own.type == "cuda" else "gloo")
    except dist.DistError as error:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        reason = str(error).partition("\n")[0]
        raise ConnectionError(f"WORLD_SIZE={size}: cannot reach the other processes at {place} ({reason})") from None
    try:
        yield World(dist.get_rank(), size, own)
    finally:
        # DDP keeps a reference to the group, so Gloo's threads outlive it. A thread that drops the tensor of the last
        # collective after the interpreter is gone aborts the process: give the threads time to end.
        time.sleep(LAST_TURN)
        dist.destroy_process_group()


def choose_device(name: str, model: nn.Module | None = None) -> torch.device:
    """Find a device by its name.

    Args:
        name: cpu, cuda, cuda:1, …; "auto" takes a GPU if there is one. "auto" and "cuda" give each process of a host
            another GPU.
        model: The model that will run there; experts in a store are computed on the CPU.

    Returns:
        The device; refuses one that is not available.
    """
    has_cuda = torch.cuda.is_available()
    is_stored = model is not None and any(isinstance(module, StoredExperts) for module in model.modules())
    if name == "auto":
        name = "cuda" if has_cuda and not is_stored else "cpu"
    require(not is_stored or name == "cpu", "device", name, "must be cpu for a model whose experts are in a store")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device={name}: must be auto, cpu, cuda or another device that torch knows") from None
    require(device.type != "cuda" or has_cuda, "device", name, "no GPU is available; use cpu")
    require(device.type != "meta", "device", name, "cannot compute; use cpu or cuda")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return device
