"""Parameter groups, optimizer and learning rate; the optimizer's state as named tensors."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from raytraced.models.output import Model
from raytraced.training.config import TrainConfig


def build_optimizer(model: Model, config: TrainConfig) -> torch.optim.Optimizer:
    """Build the optimizer; each group of parameters has one learning rate, routing and experts may have different ones."""
    rates = {"routing": config.lr_routing or config.lr, "experts": config.lr_experts or config.lr}
    parts, by_rate = routed_parameters(model), dict[float, list[nn.Parameter]]()
    for parameter in filter(lambda one: one.requires_grad, model.parameters()):
        by_rate.setdefault(rates.get(parts.get(parameter, ""), config.lr), []).append(parameter)
    groups = [{"params": parameters, "full_lr": rate, "lr": rate} for rate, parameters in by_rate.items()]
    # Fused: 5 times as fast for many small tensors; not available for shards of FSDP.
    fused = not any(is_sharded(parameter) for parameter in model.parameters())
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, momentum=0.9, weight_decay=config.weight_decay, fused=fused)
    kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    return kind(groups, weight_decay=config.weight_decay, fused=fused)


def routed_parameters(model: Model) -> dict[Tensor, str]:
    """The parameters of routed layers with what they belong to: "routing" or "experts"."""
    parts: dict[Tensor, str] = {
        parameter: group
        for layer in model.routed_layers()
        for part, group in (("router", "routing"), ("experts", "experts"))
        for parameter in layer.get_submodule(part).parameters()
    }
    return parts | dict.fromkeys(model.routing_parameters(), "routing")


def learning_rate_factor(config: TrainConfig, step: int, steps_per_epoch: int) -> float:
    """The factor of the learning rate at a step (0 is the first), a pure function: a checkpoint need not hold it."""
    num_warmup = round(config.warmup * steps_per_epoch)
    if step < num_warmup:
        return (step + 1) / (num_warmup + 1)
    if config.schedule == "constant":
        return 1.0
    num_left = max(1, config.epochs * steps_per_epoch - num_warmup)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - num_warmup) / num_left)))


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set the learning rate of every group to its full rate times a factor."""
    for group in optimizer.param_groups:
        group["lr"] = group["full_lr"] * factor


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a shard of FSDP; asked by attribute, since importing its class takes a second."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """A tensor, gathered from all processes if it is sharded; all processes must call this together."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def like(tensor: Tensor, model: Any) -> Tensor:
    """A whole tensor, placed and sharded like another one."""
    if not is_sharded(model) or tensor.ndim == 0:
        return tensor.clone()
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(model.device), model.device_mesh, model.placements)


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, unsharded."""
    return {name: whole(tensor.detach()) for name, tensor in model.state_dict().items()}


def load_model_tensors(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Load unsharded tensors into a model."""
    own = model.state_dict()
    model.load_state_dict({name: like(tensor, own[name]) for name, tensor in tensors.items()})


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as "parameter name:entry", unsharded."""
    return {
        f"{name}:{entry}": whole(value)
        for name, parameter in model.named_parameters()
        for entry, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def load_optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Load the optimizer's state from unsharded tensors."""
    parameters = dict(model.named_parameters())
    for key, tensor in tensors.items():
        name, _, entry = key.rpartition(":")
        # The step counter stays a scalar that is not sharded, on the parameter's device as fused optimizers need it.
        value = like(tensor, parameters[name]).to(parameters[name].device)
        optimizer.state[parameters[name]][entry] = value


def take_step(
    optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], loss: Tensor, clip: float | None = None
) -> Tensor | None:
    """Take a step against the gradient of a loss; returns its norm, or None where it is not finite and no step is taken."""
    for parameter in parameters:
        parameter.grad = None  # as zero_grad does, 20 times as fast
    loss.backward()
    norm = gradient_norm(parameters, clip)
    if not bool(torch.isfinite(norm)):  # weights stay finite, and so do checkpoints
        return None
    optimizer.step()
    return norm


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The norm of all tensors together."""
    if tensors[0].device.type == "cpu":  # grouping the calls would take as long as the calls
        return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(tensor) for tensor in tensors]))
    return torch.nn.utils.get_total_norm(tensors)


def gradient_norm(params: Sequence[nn.Parameter], largest: float | None) -> Tensor:
    """The norm of all gradients together; scales the gradients down to the largest allowed norm if there is one."""
    for parameter in params:
        if parameter.grad is None:  # an expert that no sample chose: the same as zero, with one process or many
            parameter.grad = torch.zeros_like(parameter)
    norm = whole(total_norm([p.grad for p in params if p.grad is not None]))
    if largest is not None:
        torch.nn.utils.clip_grads_with_norm_(params, largest, norm)
    return norm
