"""A whole raytraced classifier in one library call, for batches so small that PyTorch's calls would cost the most.

Axes: B batch, L layers, N experts a layer, M = L·N nodes, J linear layers of an expert, I inputs, D width, Y classes, T steps.
"""

import struct
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from raytraced.experts import MLPExperts
from raytraced.kernels import library
from raytraced.kernels.fused_experts import STREAMS
from raytraced.kernels.fused_sequence import ESTIMATORS, STOPS
from raytraced.layer import RaytracedExperts
from raytraced.routing import Rates, RoutingNetwork
from raytraced.sequence import RATE_FLOOR, Sequence

MOST_ROWS = 64  # beyond, the calls of the separate parts matter little, and they use all threads
_MOST_WEIGHTS = 2**14  # of one expert: larger ones are not what takes the time in the calls
_MOST_LINEARS = 16
_WEIGHTINGS = {"unit": 0, "through": 0, "rates": 1, "rates-to-one": 2}  # the numbers of cpu/classifier.cpp

if library.cpu is not None:
    _classify = library.bind("raytraced_classifier")


class Answer(NamedTuple):
    """What the call computes."""

    logits: Tensor  # (B, Y)
    hidden: Tensor  # (B, D)
    sequence: Sequence


class _Parts:
    """The parts of one model, looked up once; `fresh` says whether they still are its parts."""

    def __init__(self, model: nn.Module) -> None:
        self.entries = [
            (table, name, value)
            for module in model.modules()
            for table in (module._modules, module._parameters)
            for name, value in table.items()
        ]
        below = [module for module in model.modules() if module is not model]
        self.listeners = [
            hooks
            for m in below
            for hooks in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)
        ]
        self.parameters = list(model.parameters())
        self.fits = self._find(model)

    def _find(self, model: nn.Module) -> bool:
        block, layer, head = (model._modules[name] for name in ("input_block", "layer", "head"))
        if type(block) is not nn.Sequential or [type(m) for m in block] != [nn.Flatten, nn.Linear]:
            return False
        if type(layer) is not RaytracedExperts or type(head) is not nn.Linear:
            return False
        flatten, linear = block
        gate, routing, experts = layer.gate, layer.routing, layer.experts
        if type(gate) is not nn.Linear or type(routing) is not RoutingNetwork or type(experts) is not MLPExperts:
            return False
        if (flatten.start_dim, flatten.end_dim) != (1, -1) or len(experts.weights) > _MOST_LINEARS:
            return False
        if linear.bias is None or gate.bias is None or head.bias is None or experts.num_weights > _MOST_WEIGHTS:
            return False
        assert isinstance(linear, nn.Linear)
        self.layer, self.num_inputs = layer, linear.in_features
        self.L, self.N, self.D, self.Y = routing.num_layers, routing.num_experts, layer.dim, head.out_features
        self.linears: tuple[Tensor, ...] = (linear.weight, linear.bias, gate.weight, gate.bias, head.weight, head.bias)
        self.gates = (routing.gate_first, routing.gate_inner)
        self.experts = (*experts.weights, *experts.biases)
        self.widths, J = experts.widths, len(experts.weights)
        # struct ClassifierArgs of cpu/classifier.cpp, in which SequenceArgs and ExpertsArgs with its tail
        self.args = struct.Struct(f"3q8Q 8q2d16Q 9q11Q {J + 1}q{5 * J}Q")
        self.nothing = [0] * (3 * J)
        return True

    def fresh(self) -> bool:
        return all(table.get(name) is value for table, name, value in self.entries)


_parts: "WeakKeyDictionary[nn.Module, _Parts]" = WeakKeyDictionary()


def parts_of(model: nn.Module, images: Tensor) -> _Parts | None:
    """What `run` needs, or None where the model has other parts, or something that only separate calls can do is asked."""
    if library.cpu is None or torch.is_grad_enabled() or images.ndim < 2 or not 1 <= images.shape[0] <= MOST_ROWS:
        return None
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or torch.is_autocast_enabled("cpu"):
        return None
    parts = _parts.get(model)
    if parts is None or not parts.fresh():
        parts = _parts[model] = _Parts(model)
    if not parts.fits or any(parts.listeners) or nn_module._has_any_global_hook() or parts.layer.execution == "dense":
        return None
    dtype = images.dtype
    if dtype not in (torch.float32, torch.float64) or images.numel() != images.shape[0] * parts.num_inputs:
        return None
    if type(images) is not Tensor or not images.is_cpu:
        return None
    return parts if all(p.dtype == dtype and p.is_cpu and p.is_contiguous() for p in parts.parameters) else None


def run(parts: _Parts, images: Tensor, seed: Tensor | None, rows: Tensor | None, max_experts: int | None) -> Answer:
    """Images (B, …) -> answer; greedy where there is no seed."""
    layer, L, N = parts.layer, parts.L, parts.N
    M, B, images = L * N, images.shape[0], images.contiguous()
    T = M if max_experts is None else min(max_experts, M)
    like = images.new_empty
    logits, hidden, active, rates, output = like(B, parts.Y), like(B, parts.D), like(B, L, N), like(B, L, N), like(B)
    nodes, num_active = torch.empty((B, T), dtype=torch.int64), torch.empty(B, dtype=torch.int64)
    rows = None if rows is None else rows.contiguous()
    is_double, threads = images.dtype == torch.float64, 1
    linears, experts = [p.data_ptr() for p in parts.linears], [p.data_ptr() for p in parts.experts]
    first, inner = parts.gates
    # fmt: off
    args = parts.args.pack(
        parts.num_inputs, parts.Y, _WEIGHTINGS[layer.weighting], images.data_ptr(), *linears, logits.data_ptr(),
        B, L, N, T, is_double, ESTIMATORS.index(layer.estimator), STOPS.index(layer.stop), threads,
        layer.temperature, RATE_FLOOR,
        0 if first is None else first.data_ptr(), 0 if inner is None else inner.data_ptr(), 0,
        0 if seed is None else seed.data_ptr(), 0 if rows is None else rows.data_ptr(), active.data_ptr(),
        nodes.data_ptr(), num_active.data_ptr(), rates.data_ptr(), output.data_ptr(), 0, 0, 0, 0, 0, 0,
        B, L, N, len(parts.widths) - 1, is_double, STREAMS.index(layer.stream), threads, B, 1,
        0, 0, 0, 0, 0, hidden.data_ptr(), 0, 0, 0, 0, 0,
        *parts.widths, *experts, *parts.nothing,
    )
    # fmt: on
    if _classify(args):
        raise MemoryError(f"a classifier on {B} images: no memory for the kernel's scratch")
    return Answer(logits, hidden, Sequence(active, nodes, num_active, Rates(rates, output)))
