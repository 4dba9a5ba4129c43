"""Fast versions of the sequence, the experts and the convolutions for the CPU; each is checked against the plain one."""

import torch
from torch import Tensor

from raytraced.kernels import library
from raytraced.routing import Rates, RoutingNetwork
from raytraced.sequence import Estimator, Sequence, Stop

if library.cpu is not None:
    from raytraced.kernels.autograd import fused as _fused
    from raytraced.kernels.fused_sequence import ESTIMATORS as _ESTIMATORS
    from raytraced.kernels.fused_sequence import STOPS as _STOPS
    from raytraced.kernels.fused_sequence import Options as _Options


def available() -> bool:
    """Whether the compiled kernels are there and not turned off."""
    return library.cpu is not None


def why_not() -> str | None:
    """Why they are not available, None if they are."""
    return library.reason


def can_run_sequence(routing: RoutingNetwork, entry_BN: Tensor) -> bool:
    """Whether `sequence` can stand in for the plain path: ordinary CPU tensors in single or double precision."""
    if library.cpu is None or not entry_BN.is_cpu or entry_BN.dtype not in (torch.float32, torch.float64):
        return False
    if torch.compiler.is_compiling():
        return True
    # A tensor inside torch.func's transforms, or of another class, has no memory of its own to point to.
    if type(entry_BN) is not Tensor or torch._C._are_functorch_transforms_active():
        return False
    return all(gate is None or gate.is_cpu for gate in (routing.gate_first, routing.gate_inner))


def sequence(
    routing: RoutingNetwork,
    entry_BN: Tensor,
    *,
    stop: Stop,
    estimator: Estimator,
    temperature: float,
    num_steps: int,
    seed: Tensor | None,
    rows_B: Tensor | None,
) -> Sequence:
    """What `raytraced.sequence.unroll` computes, in one call; rows_B None stands for 0 … B − 1."""
    if entry_BN.ndim != 2 or entry_BN.shape[1] != routing.num_experts:
        raise ValueError(
            f"entry has shape {tuple(entry_BN.shape)}: must be (batch, {routing.num_experts}), "
            "one rate for each expert of the first layer"
        )
    first: Tensor | None = routing.gate_first
    inner: Tensor | None = routing.gate_inner
    if first is not None and first.dtype != entry_BN.dtype:
        first, inner = first.to(entry_BN.dtype), None if inner is None else inner.to(entry_BN.dtype)
    result = _fused(
        entry_BN,
        first,
        inner,
        seed,
        rows_B,
        _Options(
            routing.num_layers,
            num_steps,
            _ESTIMATORS.index(estimator),
            _STOPS.index(stop),
            float(temperature),
        ),
    )
    return Sequence(result.active, result.nodes, result.num_active, Rates(result.rates, result.output))
