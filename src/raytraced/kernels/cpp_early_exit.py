"""Early exit through a layer and the output layer in one library call: inference through small experts.

As separate operations an exit is some forty small operators, which take longer than running every row to its end.
Axes: B batch, L layers, N experts per layer, D width, Y classes, S steps of a sequence.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module

from raytraced.kernels import cpp_library as library
from raytraced.kernels import cpp_raytrace
from raytraced.kernels.cpp_library import Float, Int, Pointer, fields
from raytraced.kernels.cpp_raytrace import INT64, KernelArgs, RaytraceOptions
from raytraced.kernels.operation import forced_reason
from raytraced.sequence import Route


class EarlyExitResult(NamedTuple):
    """The answers with which rows leave."""

    logits: Tensor  # (B, Y)
    route: Route
    num_exits: Tensor  # (B,), how many exits each row took


@library.mirrors
class EarlyExitCall(ctypes.Structure):
    """struct EarlyExitCall of cpu/raytrace.h."""

    _fields_ = [
        *fields("batch threads classes", Int),
        *fields("hidden weight bias", Pointer),
        ("thresholds", ctypes.POINTER(Float)),
        *fields("mask stops logits active nodes num_active num_exits", Pointer),
    ]


_early_exit = library.bind(
    "raytraced_early_exit", ctypes.POINTER(cpp_raytrace.RaytraceLayer), ctypes.POINTER(EarlyExitCall)
)


def slower_reason(layer: KernelArgs, hidden_BD: Tensor, *_: Any, **options: Any) -> str | None:
    """Why separate exits are faster, None if they are not."""
    if torch.compiler.is_compiling():
        return cpp_raytrace.COMPILING
    return cpp_raytrace.too_large(layer.grid) or forced_reason("sequence", "experts")


def unsupported_reason(
    layer: KernelArgs,
    hidden_BD: Tensor,
    head: nn.Module,
    confidence: Sequence[float],
    mask_B: Tensor | None,
    **options: Any,
) -> str | None:
    """Why the library cannot take these exits, None if it can."""
    if torch.is_grad_enabled():
        return "gradients may be needed"
    if mask_B is not None and not mask_B.is_cpu:
        return "a mask that is not on the CPU"
    return unsupported_head(head, hidden_BD) or cpp_raytrace.unsupported_reason(layer, hidden_BD)


def unsupported_head(head: nn.Module, hidden_BD: Tensor) -> str | None:
    """Why the library cannot stand for an output layer, None if it can."""
    if not isinstance(head, nn.Linear) or not library.is_unchanged(head, nn.Linear, "forward", "__call__"):
        return "a custom output layer"
    if _has_hooks(head):
        return "an output layer with hooks"
    weight_YD, bias_Y = head.weight, head.bias
    if bias_Y is None or bias_Y.ndim != 1 or weight_YD.shape != (len(bias_Y), hidden_BD.shape[1]):
        return "an output layer without a bias, or of another width"
    if not (weight_YD.is_contiguous() and bias_Y.is_contiguous()):
        return "an output layer that is not contiguous"
    return library.unfit_reason((weight_YD, bias_Y), hidden_BD.dtype)


def _has_hooks(head: nn.Module) -> bool:
    """Whether a call of the module runs more than its forward method; PyTorch has no public name for this."""
    hooks = head._forward_pre_hooks, head._forward_hooks, module._global_forward_pre_hooks, module._global_forward_hooks
    return any(hooks)


def run(
    layer: KernelArgs,
    hidden_BD: Tensor,
    head: nn.Module,
    confidence: Sequence[float],
    mask_B: Tensor | None,
    **options: Any,
) -> EarlyExitResult:
    """The first confident answer of each row, or its last one; sequences are greedy."""
    assert isinstance(head, nn.Linear)
    asked = RaytraceOptions.of(hidden_BD, options)
    # held here, as long as the library reads them
    weight_YD, bias_Y, hidden_BD = head.weight, head.bias, hidden_BD.contiguous()
    stops_B = asked.stop if isinstance(asked.stop, Tensor) else None
    mask_B = None if mask_B is None else mask_B.contiguous()
    B, L, N = len(hidden_BD), layer.routing.num_layers, layer.routing.num_experts
    Y, real = len(bias_Y), hidden_BD.new_empty
    logits_BY, active_BLN, nodes_BS = real(B, Y), real(B, L, N), INT64.new_empty(B, asked.num_steps)
    num_active_B, num_exits_B = INT64.new_empty(B), INT64.new_empty(B)
    mask, stops = (None if one is None else one.data_ptr() for one in (mask_B, stops_B))
    thresholds = [*confidence, *[confidence[-1]] * L][: L + 1]
    given = (one.data_ptr() for one in (hidden_BD, weight_YD, bias_Y))
    made = (one.data_ptr() for one in (logits_BY, active_BLN, nodes_BS, num_active_B, num_exits_B))
    call = EarlyExitCall(B, torch.get_num_threads(), Y, *given, (Float * (L + 1))(*thresholds), mask, stops, *made)
    described = cpp_raytrace.describe_layer(layer, layer.parameters, asked)
    library.run(_early_exit, "raytraced experts", described, call)
    return EarlyExitResult(logits_BY, Route(active_BLN, nodes_BS, num_active_B, None), num_exits_B)
