"""Layer by layer until each row is sure, with the output layer, in one library call: inference through small experts.

One by one, a look is some forty small operators, which take longer than running every row to its end.
Axes: B batch, L layers, N experts a layer, D width, Y classes, S steps of a sequence.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from raytraced.operations import cpp_library as library
from raytraced.operations import cpp_raytrace
from raytraced.operations.cpp_library import Float, Int, Pointer, fields
from raytraced.operations.cpp_raytrace import Traced
from raytraced.sequence import Route

Answered = tuple[Tensor, Route, Tensor]
"""logits (B, Y), who ran, and how many answers were looked at (B,)"""


class Call(ctypes.Structure):
    """struct SureCall of cpu/raytrace.h."""

    _fields_ = [
        *fields("batch threads classes", Int),
        *fields("hidden weight bias", Pointer),
        ("thresholds", ctypes.POINTER(Float)),
        *fields("mask logits active nodes num_active num_looks", Pointer),
    ]


_whole = torch.empty(0, dtype=torch.int64, device="cpu")  # to make others of: a dtype that is named takes longer
_until_sure = library.bind("raytraced_until_sure", ctypes.POINTER(cpp_raytrace.Args), ctypes.POINTER(Call))


def unless(layer: Traced, hidden_BD: Tensor, *_: Any, **options: Any) -> str | None:
    """Why the layers one by one are better."""
    return cpp_raytrace.too_large(layer.grid)


def cannot(layer: Traced, hidden_BD: Tensor, head: nn.Module, *_: Any, **options: Any) -> str | None:
    """Why it is not possible."""
    if torch.is_grad_enabled():
        return "gradients may be wanted"
    return _unfit(head, hidden_BD) or cpp_raytrace.cannot(layer, hidden_BD)


def _unfit(head: nn.Module, hidden_BD: Tensor) -> str | None:
    if type(head) is not nn.Linear or head.bias is None:
        return "an output layer of one's own"
    if not (head.weight.is_contiguous() and head.bias.is_contiguous()):
        return "an output layer that is not contiguous"
    return library.why_unfit((head.weight, head.bias), hidden_BD.dtype)


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
    if torch.is_grad_enabled() or _unfit(head, hidden_BD) is not None:
        return NotImplemented
    told = cpp_raytrace.tell(layer, hidden_BD, options)
    if told is None:
        return NotImplemented
    assert isinstance(head, nn.Linear)
    hidden_BD = hidden_BD.contiguous()
    B, L, N = len(hidden_BD), layer.routing.num_layers, layer.routing.num_experts
    Y, S, real = head.out_features, options["num_steps"], hidden_BD.new_empty
    logits_BY, active_BLN = real(B, Y), real(B, L, N)
    nodes_BS, num_active_B, looks_B = _whole.new_empty(B, S), _whole.new_empty(B), _whole.new_empty(B)
    mask = None if mask_B is None else mask_B.contiguous().data_ptr()
    thresholds = [*sure, *[sure[-1]] * L][: L + 1]
    given = (one.data_ptr() for one in (hidden_BD, head.weight, head.bias))
    found = (one.data_ptr() for one in (logits_BY, active_BLN, nodes_BS, num_active_B, looks_B))
    call = Call(B, torch.get_num_threads(), Y, *given, (Float * (L + 1))(*thresholds), mask, *found)
    library.run(_until_sure, "raytraced experts", told.args, call)
    return logits_BY, Route(active_BLN, nodes_BS, num_active_B, None), looks_B
