"""The processes that train together: one by itself, or those that torchrun started, on one host or several."""

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

from raytraced.words import require

Value = TypeVar("Value")
LAST_TURN = 0.25  # seconds


@dataclass(frozen=True)
class World:
    """This process's number (rank), how many there are, and the device that this one computes on."""

    rank: int
    size: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """Whether this is the one process that writes files and prints."""
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
        """The largest of each value over all processes, so that they decide alike."""
        if self.size == 1:
            return values
        tensor = torch.tensor(values, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return [int(value) for value in tensor.tolist()]

    def from_leader(self, compute: Callable[[], Value]) -> Value:
        """What the leading process computes, or the error it meets, for all: only its files need to exist."""
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
        """The module to call in training: a copy in each process, or a shard, which the objective itself becomes."""
        if self.size == 1:
            return objective
        if strategy == "ddp":
            return DistributedDataParallel(objective, device_ids=[self.device] if self.device.type == "cuda" else None)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        # One unit, gathered whole for each step: experts of their own would be gathered by those processes only
        # whose samples chose them, and the others would be waited for in vain.
        mesh = init_device_mesh(self.device.type, (self.size,))
        fully_shard(objective, mesh=mesh, reshard_after_forward=True)
        register_fsdp_forward_method(objective, "predict")
        return objective


@contextmanager
def join_world(device: str) -> Iterator[World]:
    """Take part in what torchrun started (it sets RANK, WORLD_SIZE, …), or be a world of one."""
    size, own = int(os.environ.get("WORLD_SIZE", "1")), choose_device(device)
    if size == 1:
        yield World(0, 1, own)
        return
    if own.type == "cuda":
        torch.cuda.set_device(own)
    dist.init_process_group("nccl" if own.type == "cuda" else "gloo")
    try:
        yield World(dist.get_rank(), size, own)
    finally:
        # Gloo's threads outlive the group where DDP was used (it keeps a reference), and one that has yet to drop the
        # tensor of the last collective aborts the process if the interpreter is gone by then: give them their turn.
        time.sleep(LAST_TURN)
        dist.destroy_process_group()


def choose_device(name: str) -> torch.device:
    """The device a name stands for; "auto" and "cuda" give each process of a host its own GPU."""
    has_cuda = torch.cuda.is_available()
    if name == "auto":
        name = "cuda" if has_cuda else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device={name}: must be auto, cpu, cuda or another device that torch knows") from None
    require(device.type != "cuda" or has_cuda, "device", name, "no GPU is available; use cpu")
    require(device.type != "meta", "device", name, "computes nothing; use cpu or cuda")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return device
