"""The activation sequence on a GPU: one Triton kernel forward, one backward, only the draws kept between.

triton is an extra (`pip install '.[gpu]'` in a clone; PyTorch for CUDA brings it along), imported when a kernel first runs.
Axes: B batch, L layers, N experts per layer, O = N + 1 outlets, T steps; G programs of the backward pass.
"""

import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from raytraced.errors import install_extra
from raytraced.kernels import cpp_sequence
from raytraced.kernels.cpp_function import Inputs, Outputs
from raytraced.kernels.cpp_library import PRECISIONS, unreadable_reason
from raytraced.kernels.cpp_sequence import ActivationSequence, RouteTensors, SequenceOptions
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
    """Blocks whose gates of one layer (R, P, P) are 8 numbers per thread at most: more would spill (see docs/guides/gpu.md)."""
    Q, P = (1 << (size - 1).bit_length() for size in (num_layers, num_experts))
    R = min(16, max(1, 1024 // P**2))
    return Launch(num_layers, num_experts, Q, P, R, num_warps=max(2, R * P * P // 256))


class KernelTensors(NamedTuple):
    """What both kernels read; where there is none, another tensor that the kernel does not read."""

    entry: Tensor
    first: Tensor
    inner: Tensor
    input_logits: Tensor
    seed: Tensor
    rows: Tensor
    stops: Tensor

    @classmethod
    def of(cls, inputs: Inputs[SequenceOptions]) -> "KernelTensors":
        given = dict(zip(cpp_sequence.tensor_names(inputs.options), inputs.tensors, strict=True))
        given |= {name: t for name, t in zip(cpp_sequence.DATA, inputs.data, strict=True) if t is not None}
        return cls(*(given.get(name, given["entry"]) for name in cls._fields))


def _fixed(inputs: Inputs[SequenceOptions]) -> dict[str, Any]:
    _, seed, rows, _ = inputs.data
    return {
        "INPUT_CONDITIONED": inputs.options.input_conditioned,
        "DRAWN": seed is not None,
        "HAS_ROWS": rows is not None,
    }


def _by_sender(inner: Tensor) -> Tensor:
    """Gates (L − 2, N, O, K) as (L − 2, K, N, O): what one sender means to a whole layer lies together."""
    return inner.permute(0, 3, 1, 2).contiguous() if inner.ndim == 4 else inner


class TritonSequence(ActivationSequence):
    """The same function, with the same tensors, on a GPU."""

    name: ClassVar[str] = "triton_sequence"

    def forward(self, inputs: Inputs[SequenceOptions], keep: bool) -> Outputs:
        from raytraced.kernels.triton_kernels import sequence_forward

        outputs, options = self.empty(inputs), inputs.options
        route = RouteTensors(*outputs.answers, *outputs.others)
        route.nodes.fill_(-1)
        route.num_active.zero_()
        given = KernelTensors.of(inputs)
        (B, N), L = given.entry.shape, options.num_layers
        *sizes, num_warps = size = launch(L, N)
        if B:
            with _on(given.entry):
                sequence_forward[(-(-B // size.R),)](
                    *given._replace(inner=_by_sender(given.inner)),
                    *(*route, B, options.num_steps, *sizes),
                    **_fixed(inputs),
                    RACE=options.estimator == cpp_sequence.ESTIMATORS.index("gumbel"),
                    DOMINANT=options.dominant,
                    COUNTS=options.output_counts,
                    HAS_STOPS=inputs.data[0] is not None,
                    num_warps=num_warps,
                )
        return outputs

    def backward(
        self, inputs: Inputs[SequenceOptions], saved: Sequence[Tensor], grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        from raytraced.kernels.triton_kernels import sequence_backward

        options, (entry, first, inner, input_logits, seed, rows, _) = inputs.options, KernelTensors.of(inputs)
        (B, N), L = entry.shape, options.num_layers
        *sizes, num_warps = size = launch(L, N)
        G = num_programs(size, B, entry.element_size())
        grad_entry, grad_input_logits = torch.zeros_like(entry), torch.zeros_like(input_logits)
        grad_first = entry.new_zeros(G, *(first.shape if L > 1 else ()))
        grad_inner = entry.new_zeros(G, *(inner.shape if L > 2 else ()))
        splits = entry.new_empty(G * (L - 1) * size.R * size.P * (size.P + 1))
        if B:
            present = [grad is not None for grad in grads]
            given = [entry if grad is None else grad for grad in grads]
            # on the device, where a number would be single
            temperature = entry.new_full((), options.temperature, dtype=torch.float64)
            gradients = grad_entry, grad_first, grad_inner, grad_input_logits
            with _on(entry):
                sequence_backward[(G,)](
                    *(entry, first, _by_sender(inner), inner, input_logits, seed, rows, *saved, *given),
                    *(*gradients, splits, temperature, B, options.num_steps, *sizes),
                    **_fixed(inputs),
                    ESTIMATOR=options.estimator,
                    FLOOR=RATE_FLOOR,
                    **dict(zip(("HAS_ACTIVE", "HAS_RATES", "HAS_OUTPUT"), present, strict=True)),
                    num_warps=num_warps,
                )
        gates = [grad_first.sum(0), grad_inner.sum(0)][: min(max(L - 1, 0), 2)]
        return [grad_entry, *([grad_input_logits] if options.input_conditioned else []), *gates]


def num_programs(size: Launch, batch: int, item_bytes: int) -> int:
    """As many as there are blocks, unless their gradients of the gates took too much memory."""
    gates = size.N * (size.N + 1) * (1 + max(size.L - 2, 0) * size.N) * item_bytes
    return max(1, min(-(-batch // size.R), _GRADIENT_BYTES // gates, _MOST_PROGRAMS))


def _on(tensor: Tensor) -> Any:
    """Triton launches on the current device: make it the tensor's."""
    return torch.cuda.device_of(tensor)


call = TritonSequence()


def unsupported_reason(
    routing: RoutingNetwork, entry_BN: Tensor, *, input_logits_BLNO: Tensor | None = None, **options: object
) -> str | None:
    """Why the kernels cannot find these sequences, None if they can."""
    if cpp_sequence.is_custom(routing):
        return "a custom routing network"
    if options.get("followed") is not None:
        return "a recorded route"
    tensors = [t for t in (entry_BN, input_logits_BLNO, *routing.gates()) if t is not None]
    if not (all([tensor.is_cuda for tensor in tensors]) or os.environ.get("TRITON_INTERPRET") == "1"):
        return "a tensor is not on a GPU"
    if not _HAS_TRITON:
        return f"triton is not installed ({install_extra('gpu')})"
    L, N = routing.num_layers, routing.num_experts
    if N > MAX_EXPERTS or launch(L, N).Q * launch(L, N).P > MAX_NODES:
        return f"more than {MAX_EXPERTS} experts per layer, or {MAX_NODES} nodes"
    if entry_BN.dtype not in PRECISIONS:
        return "entry rates in half precision"
    return unreadable_reason(tensors)


def run(routing: RoutingNetwork, entry_BN: Tensor, **options: Any) -> Route:
    """What `raytraced.sequence.unroll` computes."""
    inputs = cpp_sequence.arrange(routing, entry_BN, **options)
    return RouteTensors(*call(inputs.options, inputs.data, *inputs.tensors)).as_route(options["estimator"])
