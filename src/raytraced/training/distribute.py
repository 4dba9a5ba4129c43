"""One objective over many processes: a copy in each (DDP), or a shard in each (FSDP2)."""

from typing import Literal

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from raytraced.training.objective import Objective
from raytraced.training.world import World


def distribute(objective: Objective, world: World, strategy: Literal["ddp", "fsdp"]) -> nn.Module:
    """The module to call in training; parameters of the objective itself become shards with FSDP."""
    if world.size == 1:
        return objective
    if strategy == "ddp":
        return DistributedDataParallel(objective, device_ids=[world.device] if world.device.type == "cuda" else None)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    # One unit, gathered whole for each step: experts of their own would be gathered by those processes only
    # whose samples chose them, and the others would be waited for in vain.
    mesh = init_device_mesh(world.device.type, (world.size,))
    fully_shard(objective, mesh=mesh, reshard_after_forward=True)
    register_fsdp_forward_method(objective, "predict")
    return objective
