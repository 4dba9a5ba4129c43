"""A raytraced layer whose experts are in a store, rounded as the one call (or early exit) for experts in memory rounds it.

The library finds the paths, and answers at an exit, with the arithmetic of that call; between them, experts run as they arrive.
Axes: B batch, n rows that have not left yet, L layers, N experts per layer, D width, Y classes, S steps of a sequence.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from raytraced.experts import Stream
from raytraced.kernels import cpp_library as library
from raytraced.kernels import cpp_raytrace, stored_experts
from raytraced.kernels.cpp_early_exit import EarlyExitCall, EarlyExitResult, unsupported_head
from raytraced.kernels.cpp_library import Float, Int, Pointer
from raytraced.kernels.cpp_raytrace import INT64, KernelArgs, RaytraceLayer, RaytraceOptions
from raytraced.kernels.cpp_sequence import RouteTensors
from raytraced.sequence import Route
from raytraced.store.experts import StoredExperts

# A library that was built before these functions were written lacks them.
_is_built = hasattr(library.cpu, "raytraced_raytrace_paths")
_call = ctypes.POINTER(cpp_raytrace.RaytraceLayer), ctypes.POINTER(cpp_raytrace.RaytraceCall), Pointer
_find_paths = library.bind("raytraced_raytrace_paths", *_call) if _is_built else None
_exit = ctypes.POINTER(cpp_raytrace.RaytraceLayer), ctypes.POINTER(EarlyExitCall), Int, Pointer
_answer = library.bind("raytraced_early_exit_answers", *_exit) if _is_built else None
_NAME = "raytraced experts"


def unsupported_reason(layer: KernelArgs, hidden_BD: Tensor, *, exits: bool = False, **options: Any) -> str | None:
    """Why the library cannot find the paths of this layer for experts in a store, None if it can."""
    if not isinstance(layer.grid, StoredExperts):
        return "experts are not in a store"
    if not len(hidden_BD):
        return "no rows"
    if library.cpu is not None and not _is_built:
        return "the compiled kernels are older than this file: build them again"
    return stored_experts.unsupported_reason(
        layer.grid, hidden_BD, hidden_BD, hidden_BD, layer.stream
    ) or cpp_raytrace.unsupported_parts(layer, hidden_BD, exits)


def run(layer: KernelArgs, hidden_BD: Tensor, *, exits: bool = False, **options: Any) -> tuple[Tensor, Route]:
    """What `cpp_raytrace.run` computes."""
    asked, hidden_BD = RaytraceOptions.of(hidden_BD, options), hidden_BD.contiguous()
    route, weights_BLN = find_paths(layer, asked, hidden_BD)
    answer = stored_experts.run(layer.grid, hidden_BD, route.active, weights_BLN, layer.stream, exits)
    return answer, asked.as_route(route)


def find_paths(layer: KernelArgs, options: RaytraceOptions, hidden_BD: Tensor) -> tuple[RouteTensors, Tensor]:
    """The route of each row, and the weights of its experts in the sum (B, L, N)."""
    B, L, N = len(hidden_BD), layer.routing.num_layers, layer.routing.num_experts
    route = RouteTensors.empty(B, L, N, options.num_steps, hidden_BD.new_empty, INT64.new_empty)
    weights_BLN = hidden_BD.new_empty(B, L, N)
    described = cpp_raytrace.describe_layer(layer, layer.parameters, options)
    call = cpp_raytrace.make_call(options, hidden_BD, route, None, None)
    call.threads = torch.get_num_threads()
    library.run(_find_paths, _NAME, described, call, weights_BLN.data_ptr())
    return route, weights_BLN


def early_exit_unsupported_reason(
    layer: KernelArgs,
    hidden_BD: Tensor,
    head: nn.Module,
    confidence: Sequence[float],
    mask_B: Tensor | None,
    **options: Any,
) -> str | None:
    """Why the library cannot take these exits for experts in a store, None if it can."""
    if torch.is_grad_enabled():
        return "gradients may be needed"
    return unsupported_reason(layer, hidden_BD) or unsupported_head(head, hidden_BD)


def run_early_exit(
    layer: KernelArgs,
    hidden_BD: Tensor,
    head: nn.Module,
    confidence: Sequence[float],
    mask_B: Tensor | None,
    **options: Any,
) -> EarlyExitResult:
    """What `cpp_early_exit.run` computes; an expert is read when the first row that needs it reaches its layer."""
    assert isinstance(head, nn.Linear)
    assert isinstance(layer.grid, StoredExperts)
    asked, stream, hidden_BD = RaytraceOptions.of(hidden_BD, options), layer.stream, hidden_BD.contiguous()
    B, L, N = len(hidden_BD), layer.routing.num_layers, layer.routing.num_experts
    described = cpp_raytrace.describe_layer(layer, layer.parameters, asked)
    thresholds = [*confidence, *[confidence[-1]] * L][: L + 1]

    start_BD = stream.start(hidden_BD).answer
    logits_BY, is_confident_B = answer(described, start_BD, head, thresholds, 0)
    stays_B = torch.ones_like(is_confident_B) if mask_B is None else mask_B
    active_BLN, num_exits_B = hidden_BD.new_zeros(B, L, N), stays_B.long()
    nodes_BS = INT64.new_full((B, asked.num_steps), -1)
    rows_n = (stays_B & ~is_confident_B).nonzero()[:, 0]
    if not len(rows_n):
        return _as_result(logits_BY, active_BLN, nodes_BS, num_exits_B)

    stop = asked.stop[rows_n] if isinstance(asked.stop, Tensor) else asked.stop
    hidden_nD, answer_nD = hidden_BD[rows_n], start_BD[rows_n]
    route, weights_nLN = find_paths(layer, asked._replace(stop=stop), hidden_nD)
    active_nLN, nodes_BS[rows_n] = route.active, route.nodes
    for number, experts in enumerate(layer.grid.unstacked()):
        active_nN = active_nLN[:, number]
        within = stream.within_layer
        hidden_nD = stored_experts.run_layer(experts, hidden_nD, active_nN, weights_nLN[:, number], within)
        answer_nD = answer_nD + hidden_nD if stream is Stream.SKIP_SUM else hidden_nD
        active_BLN[rows_n, number] = active_nN
        num_exits_B[rows_n] += 1
        logits_BY[rows_n], leaves_n = answer(described, answer_nD, head, thresholds, number + 1)
        if stream.skips_empty_layers:
            leaves_n = leaves_n | (active_nLN[:, number + 1 :].sum((1, 2)) == 0)
        kept_n = (~leaves_n).nonzero()[:, 0]
        if not len(kept_n):
            break
        rows_n, hidden_nD, answer_nD = rows_n[kept_n], hidden_nD[kept_n], answer_nD[kept_n]
        active_nLN, weights_nLN = active_nLN[kept_n], weights_nLN[kept_n]
    return _as_result(logits_BY, active_BLN, nodes_BS, num_exits_B)


def answer(
    described: RaytraceLayer, vectors_nD: Tensor, head: nn.Linear, thresholds: Sequence[float], number: int
) -> tuple[Tensor, Tensor]:
    """The logits (n, Y) at an exit, and which rows are confident enough (n,)."""
    n, Y, vectors_nD = len(vectors_nD), len(head.bias), vectors_nD.contiguous()
    logits_nY = vectors_nD.new_empty(n, Y)
    is_confident_n = torch.empty(n, dtype=torch.bool)
    call = EarlyExitCall(n, 1, Y, vectors_nD.data_ptr(), head.weight.data_ptr(), head.bias.data_ptr())
    call.thresholds, call.logits = (Float * len(thresholds))(*thresholds), logits_nY.data_ptr()
    library.run(_answer, _NAME, described, call, number, is_confident_n.data_ptr())
    return logits_nY, is_confident_n


def _as_result(logits_BY: Tensor, active_BLN: Tensor, nodes_BS: Tensor, num_exits_B: Tensor) -> EarlyExitResult:
    num_active_B = active_BLN.count_nonzero((1, 2))
    return EarlyExitResult(logits_BY, Route(active_BLN, nodes_BS, num_active_B, None), num_exits_B)
