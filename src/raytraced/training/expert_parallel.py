"""Experts shared out over processes beside data parallelism: a mesh of (data, experts), every process with rows of its own.

    mesh = make_mesh("cuda", num_processes=8, expert_processes=4)
    model = parallelise(model, mesh, "fsdp")       # under torchrun, before the optimizer is made

Expert e of a layer of N is on the processes of column e · expert_processes // N. Gradients of experts are reduced over "data"
alone, all others over every process; they are means over all processes, as DDP's.
"""

from typing import Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from raytraced.grid import MLPExperts
from raytraced.layer import RoutedLayer
from raytraced.operations.sharded_experts import ShardedExperts
from raytraced.words import require


def make_mesh(device: str, num_processes: int, expert_processes: int) -> DeviceMesh:
    """Processes as (data, experts): neighbours, which are on one host, share the experts."""
    rule = f"must divide the {num_processes} processes"
    require(expert_processes > 0 and num_processes % expert_processes == 0, "expert_processes", expert_processes, rule)
    shape = (num_processes // expert_processes, expert_processes)
    return init_device_mesh(device, shape, mesh_dim_names=("data", "experts"))


def shard_experts(model: nn.Module, mesh: DeviceMesh) -> list[ShardedExperts]:
    """Put the experts of every routed layer on the processes of a mesh (…, experts), in place."""
    sharded = []
    for module in model.modules():
        if isinstance(module, RoutedLayer) and isinstance(module.experts, MLPExperts):
            module.experts = ShardedExperts(module.experts, mesh["experts"])  # type: ignore[assignment]
            sharded.append(module.experts)
    if not sharded:
        raise ValueError(f"{type(model).__name__}: has no routed layer with MLP experts to share out")
    return sharded  # type: ignore[return-value]


def parallelise(model: nn.Module, mesh: DeviceMesh, strategy: Literal["ddp", "fsdp"] = "ddp") -> nn.Module:
    """The module to call in training: experts shared out, the rest a copy in each process (DDP) or a shard (FSDP2)."""
    sharded = shard_experts(model, mesh)
    if strategy == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for experts in sharded:
            fully_shard(experts, mesh=mesh["data"])
        fully_shard(model, mesh=init_device_mesh(mesh.device_type, (mesh.size(),)))
        return model

    model.to(mesh.device_type)  # as FSDP moves what it shards; experts are there already, each process with its own
    data = mesh["data"].get_group()

    def reduce(parameter: Tensor) -> None:
        assert parameter.grad is not None
        local = parameter.grad.to_local()  # type: ignore[attr-defined]
        dist.all_reduce(local, group=data)
        local /= data.size()

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    own = [parameter for experts in sharded for parameter in experts.parameters()]
    for parameter in own:
        parameter.register_post_accumulate_grad_hook(reduce)
    # a private name: DDP has no other for parameters that are reduced elsewhere
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [names[id(each)] for each in own])
    return DistributedDataParallel(model)
