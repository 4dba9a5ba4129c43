"""Layer by layer until each row is sure, with the output layer, in one library call: inference through small experts.

One by one, a look is some forty small operators, which take longer than running every row to its end.
Axes: B batch, L layers, N experts a layer, D width, Y classes, S steps of a sequence.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module

from raytraced.operations import cpp_library as library
from raytraced.operations import cpp_raytrace
from raytraced.operations.cpp_library import Float, Int, Pointer, fields
from raytraced.operations.cpp_raytrace import INT64, Traced
from raytraced.sequence import Route

Answered = tuple[Tensor, Route, Tensor]
"""logits (B, Y), who ran, and how many answers were looked at (B,)"""


class SureCall(ctypes.Structure):
    """struct SureCall of cpu/raytrace.h."""

    _fields_ = [
        *fields("batch threads classes", Int),
        *fields("hidden weight bias", Pointer),
        ("thresholds", ctypes.POINTER(Float)),
        *fields("mask logits active nodes num_active num_looks", Pointer),
    ]


_until_sure = library.bind("raytraced_until_sure", ctypes.POINTER(cpp_raytrace.RaytraceArgs), ctypes.POINTER(SureCall))


def unless(layer: Traced, hidden_BD: Tensor, *_: Any, **options: Any) -> str | None:
    """Why the layers one by one are better."""
    return cpp_raytrace.COMPILING if torch.compiler.is_compiling() else cpp_raytrace.too_large(layer.grid)


def cannot(
    layer: Traced, hidden_BD: Tensor, head: nn.Module, sure: Sequence[float], mask_B: Tensor | None, *_: Any, **__: Any
) -> str | None:
    """Why it is not possible."""
    found = _read(head, hidden_BD, mask_B)
    return found if isinstance(found, str) else cpp_raytrace.cannot(layer, hidden_BD)


def _read(head: nn.Module, hidden_BD: Tensor, mask_B: Tensor | None) -> tuple[Tensor, Tensor] | str:
    """The weight (Y, D) and bias (Y,) of an output layer, or why the library cannot stand for it."""
    if torch.is_grad_enabled():
        return "gradients may be wanted"
    if type(head) is not nn.Linear or _is_watched(head):
        return "an output layer of one's own, or one that somebody hooked into"
    weight_YD, bias_Y = head.weight, head.bias
    if bias_Y is None or bias_Y.ndim != 1 or weight_YD.shape != (len(bias_Y), hidden_BD.shape[1]):
        return "an output layer without a bias, or of another width"
    if not (weight_YD.is_contiguous() and bias_Y.is_contiguous()):
        return "an output layer that is not contiguous"
    if mask_B is not None and not mask_B.is_cpu:
        return "a mask that is not on the CPU"
    return library.why_unfit((weight_YD, bias_Y), hidden_BD.dtype) or (weight_YD, bias_Y)


def _is_watched(head: nn.Module) -> bool:
    """Whether a call of the module would do more than its class says; PyTorch tells of hooks by these names alone."""
    hooks = head._forward_pre_hooks, head._forward_hooks, module._global_forward_pre_hooks, module._global_forward_hooks
    return any(hooks) or "forward" in vars(head)


def run(
    layer: Traced,
    hidden_BD: Tensor,
    head: nn.Module,
    sure: Sequence[float],
    mask_B: Tensor | None,
    in_looks: Callable[[], Answered],
    **options: Any,
) -> Answered:
    """The first answer of each row that is sure enough, or the last there is; sequences are greedy."""
    found = _read(head, hidden_BD, mask_B)
    if isinstance(found, str):
        return NotImplemented
    told = cpp_raytrace.tell(layer, hidden_BD, options)
    if told is None:
        return NotImplemented
    # held here, as long as the library reads them
    (weight_YD, bias_Y), hidden_BD = found, hidden_BD.contiguous()
    mask_B = None if mask_B is None else mask_B.contiguous()
    B, L, N = len(hidden_BD), layer.routing.num_layers, layer.routing.num_experts
    Y, S, real = len(bias_Y), options["num_steps"], hidden_BD.new_empty
    logits_BY, active_BLN = real(B, Y), real(B, L, N)
    nodes_BS, num_active_B, looks_B = INT64.new_empty(B, S), INT64.new_empty(B), INT64.new_empty(B)
    mask = None if mask_B is None else mask_B.data_ptr()
    thresholds = [*sure, *[sure[-1]] * L][: L + 1]
    given = (one.data_ptr() for one in (hidden_BD, weight_YD, bias_Y))
    made = (one.data_ptr() for one in (logits_BY, active_BLN, nodes_BS, num_active_B, looks_B))
    call = SureCall(B, torch.get_num_threads(), Y, *given, (Float * (L + 1))(*thresholds), mask, *made)
    library.run(_until_sure, "raytraced experts", told.args, call)
    return logits_BY, Route(active_BLN, nodes_BS, num_active_B, None), looks_B
