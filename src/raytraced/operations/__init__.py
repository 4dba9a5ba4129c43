"""Every operation that has a fast path: its plain definition, its implementations, and which is used when.

An operation is called like a function and runs the first implementation in its list that is able to take the arguments, and
has no better one after it for these (`explain` says which, and why). `use` forces one for a while, for all operations or for
one, and the environment variable RAYTRACED_OPERATIONS for a whole process:

    with operations.use("plain"): ...            PyTorch's own operators, the definition of everything else
    with operations.use(experts="sparse"): ...
    RAYTRACED_OPERATIONS=plain raytraced train

A further implementation, for a GPU say, is one new file beside this one and one line in a list below.

Axes: B batch, L layers, N experts a layer, D width, C channels, H × W pixels.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from raytraced.grid import Experts, Grid, MLPExperts, Stream, run_dense, run_sparse
from raytraced.operations import (
    cpp_convolution,
    cpp_experts,
    cpp_library,
    cpp_raytrace,
    cpp_sequence,
    cpp_sure,
    grouped_experts,
    sharded_experts,
    triton_sequence,
)
from raytraced.operations.cpp_gradients import unstacked as unstacked
from raytraced.operations.cpp_raytrace import Traced as Traced
from raytraced.operations.cpp_sure import Answered as Answered
from raytraced.operations.operation import OPERATIONS as OPERATIONS
from raytraced.operations.operation import Implementation, Operation, use
from raytraced.routing import entry_rates, sight_logits
from raytraced.sequence import WEIGHTINGS, Route, any_seen, unroll

# sequence(routing, entry_BN, *, sight_BLNO, stop, estimator, temperature, num_steps, seed, rows_B) -> Route
sequence = Operation(
    "sequence",
    # one call, some twenty times faster: ordinary CPU tensors in single or double precision
    Implementation("cpp", cpp_sequence.run, cannot=cpp_sequence.cannot),
    # one launch forward, one backward: tensors on a GPU, where triton is installed
    Implementation("triton", triton_sequence.run, cannot=triton_sequence.cannot),
    # Algorithm 1 step by step: any device and precision
    Implementation("plain", unroll, "plain"),
)

# Multiply-adds of a dense layer from which the sparse way, with its many small calls, is the faster one: measured on one
# core for widths 16 to 512, forward and backward, with a tenth and with three tenths of the experts active.
_SMALL_LAYER = 20_000_000


def _unseen(active: Tensor) -> str | None:
    # Compiled or exported, one graph serves every path: there an expert's rows cannot be told apart.
    hidden = any_seen(active[:1].detach()) is None
    return "who is active cannot be looked at (compiled, exported, vmap, meta): all run, masked" if hidden else None


def _prefer_dense(
    experts: Grid, hidden_BD: Tensor, active_BLN: Tensor, weights_BLN: Tensor, stream: Stream, looks: bool = False
) -> str | None:
    if sharded_experts.cannot(experts) is None:
        return "experts are on several processes"
    if torch.compiler.is_compiling():  # a size that were compared would be the only one that an exported layer takes
        return _unseen(active_BLN)
    # Modules are run one by one anyway: each on its own rows.
    if isinstance(experts, MLPExperts) and len(hidden_BD) * experts.num_experts * experts.num_weights < _SMALL_LAYER:
        return f"fewer than {_SMALL_LAYER:,} multiply-adds a layer: running all experts takes fewer calls"
    return _unseen(active_BLN)


# experts(experts, hidden_BD, active_BLN, weights_BLN, stream, looks=False) -> hidden_BD: a grid of which it is known who
# runs; with looks, what hidden_BD would be after 0, 1, … layers (L + 1, B, D). Routers that choose step by step run one of
# unstacked(experts, hidden_BD), made once for a call, after the other.
experts = Operation(
    "experts",
    # each MLP expert on its own rows in one call, at any size: ordinary CPU tensors of one precision
    Implementation("cpp", cpp_experts.run, cannot=cpp_experts.cannot),
    # the same in grouped products that ask nothing of the device: a GPU in bfloat16
    Implementation("grouped", grouped_experts.run, cannot=grouped_experts.cannot, unless=grouped_experts.unless),
    # each expert on its own rows: large layers, and experts of one's own
    Implementation("sparse", run_sparse, "plain", unless=_prefer_dense),
    # rows travel to experts on other processes: grids that training/expert_parallel.py shared out
    Implementation("sharded", sharded_experts.run, "plain", cannot=sharded_experts.cannot),
    # all experts on all rows, masked: small layers, and where it cannot be seen who is active
    Implementation("dense", run_dense, "plain"),
)


def raytrace_in_steps(layer: Traced, hidden_BD: Tensor, *, looks: bool = False, **options: Any) -> tuple[Tensor, Route]:
    """Let rays in, find every row's sequence, weigh its experts and run them."""
    weight_ND, bias_N, *seen = layer.maps
    entry_BN = entry_rates(hidden_BD, weight_ND, bias_N)
    sight_BLNO = sight_logits(hidden_BD, *seen) if seen else None
    route = sequence(layer.routing, entry_BN, sight_BLNO=sight_BLNO, **options)
    assert route.rates is not None
    weights_BLN = WEIGHTINGS[layer.weighting](route.active, route.rates.nodes)
    return experts(layer.grid, hidden_BD, route.active, weights_BLN, layer.stream, looks), route


# raytrace(layer, hidden_BD, *, looks=False, … as sequence) -> (hidden_BD, Route); with looks, what hidden_BD would be after
# 0, 1, … layers (L + 1, B, D)
raytrace = Operation(
    "raytrace",
    # all of it as one function to PyTorch: small experts in training, or up to 64 rows, where calls cost more than arithmetic
    Implementation(
        *("cpp", cpp_raytrace.run, "", cpp_raytrace.cannot, cpp_raytrace.unless),
        parts=("sequence", "experts"),
        declines=True,
    ),
    # the entry gate, `sequence`, the weighting, `experts`, each by its own choice
    Implementation("steps", raytrace_in_steps, "steps"),
)

# until_sure(layer, hidden_BD, head, sure, mask_B, in_looks, *, stop, estimator, temperature, num_steps)
# -> (logits_BY, Route, num_looks_B): the first sure answer of each row, looked at before the first layer and after each;
# `in_looks()` does the same as RoutedLayer.looks defines it
until_sure = Operation(
    "until_sure",
    # all of it in one call: small experts without gradients, where a look's many calls cost more than its arithmetic
    Implementation(
        *("cpp", cpp_sure.run, "", cpp_sure.cannot, cpp_sure.unless), parts=("sequence", "experts"), declines=True
    ),
    # layer by layer, each operation by its own choice
    Implementation("steps", lambda *args, **options: args[5](), "steps"),
)


def convolve(images: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """Stages of 3×3 convolution with a border of zeros, ReLU and the maximum of each 2×2."""
    for weight, bias in zip(weights, biases, strict=True):
        images = F.max_pool2d(F.relu(F.conv2d(images, weight, bias, padding=1)), 2)
    return images


# convolution(images, weights, biases) -> images: (B, C, H, W), one weight (K, C, 3, 3) and bias (K,) for each stage
convolution = Operation(
    "convolution",
    # all stages in one call: ordinary CPU tensors in single precision, not under torch.compile
    Implementation("cpp", cpp_convolution.run, cannot=cpp_convolution.cannot),
    Implementation("plain", convolve, "plain"),
)


def available() -> bool:
    """Whether the compiled operations are there."""
    return cpp_library.cpu is not None


def why_not() -> str | None:
    """Why they are not, None if they are."""
    return cpp_library.reason


def instructions() -> str | None:
    """The processor's instructions that they use, "avx2" or "baseline"; None where there are none."""
    return None if cpp_library.instruction_set is None else cpp_library.instruction_set().decode()


def count_multiply_adds(run: Callable[[], object]) -> int:
    """The multiply-adds of all matrix products and convolutions in a call, on the plain path, where PyTorch sees them."""
    with use("plain"), FlopCounterMode(display=False) as counter, torch.no_grad():
        run()
    return counter.get_total_flops() // 2


def expert_multiply_adds(experts: Experts, dim: int) -> int:
    """The multiply-adds of one expert on one row (D,)."""
    if isinstance(experts, MLPExperts):
        return experts.num_weights
    like = next(experts.parameters(), torch.empty(0))
    return count_multiply_adds(lambda: experts.run_expert(0, 0, like.new_zeros(1, dim)))
