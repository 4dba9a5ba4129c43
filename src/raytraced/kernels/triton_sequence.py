"""The activation sequence on a GPU: one Triton kernel forward, one backward, only the draws kept between.

triton is an extra (`pip install raytraced[gpu]`; PyTorch for CUDA brings it along) and is imported when a kernel first runs.
Axes: B batch, L layers, N experts per layer, O = N + 1 outlets, T steps; G programs of the backward pass.
"""

import os
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raytraced.kernels import cpp_sequence
from raytraced.kernels.cpp_library import PRECISIONS, LibraryCall, why_unreadable
from raytraced.routing import RoutingNetwork
from raytraced.sequence import RATE_FLOOR, Route

_HAS_TRITON = find_spec("triton") is not None
MAX_EXPERTS, MAX_NODES = 64, 1024
# Each program of the backward pass has a gradient of the gates of its own: sums then have one order, whatever the timing.
_GRADIENT_BYTES = 2**29
_MOST_PROGRAMS = 1024


class Launch(NamedTuple):
    """The sizes that a kernel is compiled for."""

    L: int
    N: int
    Q: int  # the next powers of two
    P: int
    R: int  # rows of a block
    num_warps: int


def launch(num_layers: int, num_experts: int) -> Launch:
    """Blocks whose gates of one layer (R, P, P) are 8 numbers a thread at most: more would spill (see docs/guides/gpu.md)."""
    Q, P = (1 << (size - 1).bit_length() for size in (num_layers, num_experts))
    R = min(16, max(1, 1024 // P**2))
    return Launch(num_layers, num_experts, Q, P, R, num_warps=max(2, R * P * P // 256))


def _by_name(spec: Any, data: Any) -> dict[str, Tensor]:
    """The data of a call, as far as there are any: "stops", "seed" and "rows"."""
    return dict(zip(cpp_sequence.DATA[bool(spec[7])], data, strict=False))


def _fixed(spec: Any, data: Any) -> dict[str, Any]:
    names = _by_name(spec, data)
    return {"SEES": bool(spec[5]), "DRAWN": "seed" in names, "HAS_ROWS": "rows" in names}


def _given(spec: Any, data: Any, tensors: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """entry, first, inner, input_logits, seed, rows; where there is none, another tensor that the kernel does not read."""
    entry, sees, names = tensors[0], bool(spec[5]), _by_name(spec, data)
    input_logits, gates = tensors[1] if sees else entry, tensors[2 if sees else 1 :]
    first, inner = (gates[0] if gates else entry), (gates[1] if len(gates) > 1 else entry)
    return entry, first, inner, input_logits, names.get("seed", entry), names.get("rows", entry)


def _by_sender(inner: Tensor) -> Tensor:
    """Gates (L − 2, N, O, K) as (L − 2, K, N, O): what one sender means to a whole layer lies together."""
    return inner.permute(0, 3, 1, 2).contiguous() if inner.ndim == 4 else inner


def forward(spec, data, tensors, keep) -> list[Tensor]:  # type: ignore[no-untyped-def]
    """What each sample activates."""
    from raytraced.kernels.triton_kernels import sequence_forward

    route = cpp_sequence.empty(spec, data, tensors)
    nodes, num_active = route[3:]
    nodes.fill_(-1)
    num_active.zero_()
    entry, first, inner, input_logits, seed, rows = _given(spec, data, tensors)
    stops = _by_name(spec, data).get("stops", entry)
    (B, N), L = entry.shape, int(spec[0])
    *sizes, num_warps = size = launch(L, N)
    if B:
        options = _fixed(spec, data) | {"RACE": int(spec[2]) == cpp_sequence.ESTIMATORS.index("gumbel")}
        with _on(entry):
            sequence_forward[(-(-B // size.R),)](
                *(entry, first, _by_sender(inner), input_logits, seed, rows, stops, *route, B, int(spec[1]), *sizes),
                **options,
                DOMINANT=bool(spec[3]),
                COUNTS=float(spec[6]),
                HAS_STOPS=bool(spec[7]),
                num_warps=num_warps,
            )
    return route


def backward(spec, data, tensors, kept, grads) -> list[Tensor]:  # type: ignore[no-untyped-def]
    """Gradients of the entry and of the gates, back through every draw, or through the final set's rates alone."""
    from raytraced.kernels.triton_kernels import sequence_backward

    entry, first, inner, input_logits, seed, rows = _given(spec, data, tensors)
    (B, N), L = entry.shape, int(spec[0])
    *sizes, num_warps = size = launch(L, N)
    G = num_programs(size, B, entry.element_size())
    grad_entry, grad_input_logits = torch.zeros_like(entry), torch.zeros_like(input_logits)
    grad_first = entry.new_zeros(G, *(first.shape if L > 1 else ()))
    grad_inner = entry.new_zeros(G, *(inner.shape if L > 2 else ()))
    splits = entry.new_empty(G * (L - 1) * size.R * size.P * (size.P + 1))
    if B:
        present = [grad is not None for grad in grads[:3]]
        given = [entry if grad is None else grad for grad in grads[:3]]
        temperature = entry.new_full((), spec[4], dtype=torch.float64)  # on the device, where a number would be single
        with _on(entry):
            sequence_backward[(G,)](
                *(entry, first, _by_sender(inner), inner, input_logits, seed, rows, *kept, *given),
                *(grad_entry, grad_first, grad_inner, grad_input_logits, splits, temperature, B, int(spec[1]), *sizes),
                **_fixed(spec, data),
                ESTIMATOR=int(spec[2]),
                FLOOR=RATE_FLOOR,
                **dict(zip(("HAS_ACTIVE", "HAS_RATES", "HAS_OUTPUT"), present, strict=True)),
                num_warps=num_warps,
            )
    gates = [grad_first.sum(0), grad_inner.sum(0)][: min(max(L - 1, 0), 2)]
    return [grad_entry, *([grad_input_logits] if spec[5] else []), *gates]


def num_programs(size: Launch, batch: int, item_bytes: int) -> int:
    """As many as there are blocks, unless their gradients of the gates took too much memory."""
    gates = size.N * (size.N + 1) * (1 + max(size.L - 2, 0) * size.N) * item_bytes
    return max(1, min(-(-batch // size.R), _GRADIENT_BYTES // gates, _MOST_PROGRAMS))


def _on(tensor: Tensor) -> Any:
    """Triton launches on the current device: make it the tensor's."""
    return torch.cuda.device_of(tensor)


call = LibraryCall("triton_sequence", forward, backward, cpp_sequence.empty, num_answers=3, num_returned=5)


def unsupported_reason(
    routing: RoutingNetwork, entry_BN: Tensor, *, input_logits_BLNO: Tensor | None = None, **options: object
) -> str | None:
    """Why the kernels cannot find these sequences, None if they can."""
    if cpp_sequence.is_custom(routing):
        return "a custom routing network"
    tensors = [t for t in (entry_BN, input_logits_BLNO, *routing.gates()) if t is not None]
    if not (all([tensor.is_cuda for tensor in tensors]) or os.environ.get("TRITON_INTERPRET") == "1"):
        return "a tensor is not on a GPU"
    if not _HAS_TRITON:
        return "triton is not installed (pip install raytraced[gpu])"
    L, N = routing.num_layers, routing.num_experts
    if N > MAX_EXPERTS or launch(L, N).Q * launch(L, N).P > MAX_NODES:
        return f"more than {MAX_EXPERTS} experts per layer, or {MAX_NODES} nodes"
    if entry_BN.dtype not in PRECISIONS:
        return "entry rates in half precision"
    return why_unreadable(tensors)


def run(routing: RoutingNetwork, entry_BN: Tensor, **options: Any) -> Route:
    """What `raytraced.sequence.unroll` computes."""
    spec, data, tensors = cpp_sequence.arrange(routing, entry_BN, **options)
    return cpp_sequence.as_route(call(spec, data, *tensors), options["estimator"])
