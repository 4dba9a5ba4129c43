"""Expert parallelism beside data parallelism: a mesh of (data, experts) processes, each with its part of the batch.

    mesh = make_mesh("cuda", num_processes=8, expert_processes=4)
    model = parallelise(model, mesh, "fsdp")       # under torchrun, before the optimizer is made

Expert e of a layer of N is on the processes of column e · expert_processes // N. Gradients of experts are reduced over "data"
alone, all other gradients over every process; they are means over all processes, as in DDP.
"""

from typing import Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from raytraced.errors import require
from raytraced.experts import MLPExperts
from raytraced.kernels.sharded_experts import ShardedExperts
from raytraced.layer import RoutedLayer


def make_mesh(device: str, num_processes: int, expert_processes: int) -> DeviceMesh:
    """Make a mesh of (data, experts) processes; neighbours, which are on one host, share the experts.

    Args:
        device: "cpu" or "cuda".
        num_processes: Number of all processes.
        expert_processes: Number of processes over which the experts are divided; must divide num_processes.

    Returns:
        The mesh with the dimensions "data" and "experts".
    """
    rule = f"must divide the {num_processes} processes"
    require(expert_processes > 0 and num_processes % expert_processes == 0, "expert_processes", expert_processes, rule)
    shape = (num_processes // expert_processes, expert_processes)
    return init_device_mesh(device, shape, mesh_dim_names=("data", "experts"))


def shard_experts(model: nn.Module, mesh: DeviceMesh) -> list[ShardedExperts]:
    """Divide the experts of every routed layer over the processes of a mesh, in place.

    Args:
        model: A model with routed layers.
        mesh: A mesh with a dimension "experts".

    Returns:
        The sharded experts of each routed layer.
    """
    sharded = []
    for module in model.modules():
        if isinstance(module, RoutedLayer) and isinstance(module.experts, MLPExperts):
            module.experts = ShardedExperts(module.experts, mesh["experts"])  # type: ignore[assignment]
            sharded.append(module.experts)
    if not sharded:
        raise ValueError(f"{type(model).__name__}: has no routed layer with MLP experts to divide")
    return sharded  # type: ignore[return-value]


def parallelise(model: nn.Module, mesh: DeviceMesh, strategy: Literal["ddp", "fsdp"] = "ddp") -> nn.Module:
    """Divide the experts over processes, and copy (DDP) or shard (FSDP2) the rest.

    Args:
        model: A model with routed layers; it is changed in place.
        mesh: What `make_mesh` returns.
        strategy: "ddp" or "fsdp", for everything but the experts.

    Returns:
        The module to call in training.
    """
    sharded = shard_experts(model, mesh)
    if strategy == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for experts in sharded:
            fully_shard(experts, mesh=mesh["data"])
        fully_shard(model, mesh=init_device_mesh(mesh.device_type, (mesh.size(),)))
        return model

    model.to(mesh.device_type)  # FSDP does so with what it shards; the experts are there already
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
    # A private name: DDP has no public one to leave out parameters that are reduced elsewhere.
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [names[id(each)] for each in own])
    return DistributedDataParallel(model)
