"""Every operation that has a fast path: its plain definition, its implementations, and when each of them runs.

An operation is called like a function and runs the first implementation in its list that is able to take the arguments, and
has no better one after it for these (`explain` says which, and why). `use` forces one for a while, for all operations or for
one, and the environment variable RAYTRACED_KERNELS for a whole process:

    with operations.use("plain"): ...            PyTorch's own operators, the definition of everything else
    with operations.use(experts="sparse"): ...
    RAYTRACED_KERNELS=plain raytraced train

A further implementation, for a GPU say, is one new file beside this one and one line in a list below.

Axes: B batch, L layers, N experts per layer, D width, C channels, H × W pixels.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from raytraced.experts import Experts, Grid, MLPExperts, Stream, run_dense, run_sparse
from raytraced.kernels import (
    cpp_convolution,
    cpp_early_exit,
    cpp_experts,
    cpp_library,
    cpp_raytrace,
    cpp_sequence,
    grouped_experts,
    sharded_experts,
    stored_experts,
    stored_raytrace,
    triton_sequence,
)
from raytraced.kernels.cpp_early_exit import EarlyExitResult as EarlyExitResult
from raytraced.kernels.cpp_gradients import unstacked as unstacked
from raytraced.kernels.cpp_raytrace import KernelArgs as KernelArgs
from raytraced.kernels.operation import OPERATIONS as OPERATIONS
from raytraced.kernels.operation import Implementation, Operation, add_plugin, use
from raytraced.plugins import subscribe
from raytraced.replay import follow_sequence
from raytraced.routing import RoutingNetwork, entry_rates, input_logits
from raytraced.sequence import Route, any_seen, expert_weights, unroll
from raytraced.store.experts import StoredExperts


def plain_sequence(
    routing: RoutingNetwork, entry_BN: Tensor, *, followed: Route | None = None, **options: Any
) -> Route:
    """Algorithm 1 step by step, or along a recorded route."""
    if followed is None:
        return unroll(routing, entry_BN, **options)
    names = ("estimator", "temperature", "input_logits_BLNO")
    return follow_sequence(routing, entry_BN, followed, **{name: options[name] for name in names})


# sequence(routing, entry_BN, *, input_logits_BLNO, stop, estimator, temperature, num_steps, seed, rows_B) -> Route; with
# `followed`, a recorded route, its nodes are taken in place of a choice
sequence = Operation(
    "sequence",
    # one call, some twenty times faster: ordinary CPU tensors in single or double precision
    Implementation("cpp", cpp_sequence.run, unsupported_reason=cpp_sequence.unsupported_reason),
    # one launch forward, one backward: tensors on a GPU, where triton is installed
    Implementation("triton", triton_sequence.run, unsupported_reason=triton_sequence.unsupported_reason),
    # Algorithm 1 step by step: any device and precision
    Implementation("plain", plain_sequence, "plain"),
)

# MACs of a dense layer from which the sparse way, with its many small calls, is the faster one: measured on one
# core for widths 16 to 512, forward and backward, with a tenth and with three tenths of the experts active.
_SMALL_LAYER = 20_000_000


def _unreadable_mask_reason(active: Tensor) -> str | None:
    # Compiled or exported, one graph serves every path: it cannot depend on which rows an expert has.
    hidden = any_seen(active[:1].detach()) is None
    return (
        "the mask has no readable values (compiled, exported, vmap, meta): all experts run, masked" if hidden else None
    )


def _prefer_dense(
    experts: Grid, hidden_BD: Tensor, active_BLN: Tensor, weights_BLN: Tensor, stream: Stream, exits: bool = False
) -> str | None:
    if sharded_experts.unsupported_reason(experts) is None:
        return "experts are on several processes"
    if torch.compiler.is_compiling():  # a size that were compared would be the only one that an exported layer takes
        return _unreadable_mask_reason(active_BLN)
    # Modules are run one by one anyway: each on its own rows.
    if isinstance(experts, MLPExperts) and len(hidden_BD) * experts.num_experts * experts.num_weights < _SMALL_LAYER:
        return f"fewer than {_SMALL_LAYER:,} MACs per layer: running all experts takes fewer calls"
    return _unreadable_mask_reason(active_BLN)


# experts(experts, hidden_BD, active_BLN, weights_BLN, stream, exits=False) -> hidden_BD: a grid whose active experts are
# known; with exits, the vectors after 0, 1, … layers (L + 1, B, D). Routers that choose step by step run one of
# unstacked(experts, hidden_BD), made once for a call, after the other.
experts = Operation(
    "experts",
    # each MLP expert on its own rows in one call, at any size: ordinary CPU tensors of one precision
    Implementation("cpp", cpp_experts.run, unsupported_reason=cpp_experts.unsupported_reason),
    # the same from the memory that experts of a store were read into
    Implementation("stored", stored_experts.run, unsupported_reason=stored_experts.unsupported_reason),
    # the same in grouped products that ask nothing of the device: a GPU in bfloat16
    Implementation(
        "grouped",
        grouped_experts.run,
        unsupported_reason=grouped_experts.unsupported_reason,
        slower_reason=grouped_experts.slower_reason,
    ),
    # each expert on its own rows: large layers, and custom experts
    Implementation("sparse", run_sparse, "plain", slower_reason=_prefer_dense),
    # rows travel to experts on other processes: grids that training/expert_parallel.py shared out
    Implementation("sharded", sharded_experts.run, "plain", unsupported_reason=sharded_experts.unsupported_reason),
    # all experts on all rows, masked: small layers, and masks without readable values
    Implementation("dense", run_dense, "plain"),
)


def raytrace_in_steps(
    layer: KernelArgs, hidden_BD: Tensor, *, exits: bool = False, **options: Any
) -> tuple[Tensor, Route]:
    """The entry gate, the activation sequence of every row, the weights of its experts, and the experts."""
    weight_ND, bias_N, *input_maps = layer.maps
    entry_BN = entry_rates(hidden_BD, weight_ND, bias_N)
    input_logits_BLNO = input_logits(hidden_BD, *input_maps) if input_maps else None
    route = sequence(layer.routing, entry_BN, input_logits_BLNO=input_logits_BLNO, **options)
    assert route.rates is not None
    weights_BLN = expert_weights(layer.weighting, route.active, route.rates.nodes, layer.weight_scale)
    return experts(layer.grid, hidden_BD, route.active, weights_BLN, layer.stream, exits), route


# raytrace(args, hidden_BD, *, exits=False, … as sequence) -> (hidden_BD, Route); with exits, the vectors after
# 0, 1, … layers (L + 1, B, D)
raytrace = Operation(
    "raytrace",
    # all of it as one function to PyTorch: small experts in training, or up to 64 rows, where calls cost more than arithmetic
    Implementation(
        "cpp",
        cpp_raytrace.run,
        unsupported_reason=cpp_raytrace.unsupported_reason,
        slower_reason=cpp_raytrace.slower_reason,
    ),
    # the same for experts in a store, where those in memory would run in one call: rounded as there
    Implementation(
        "stored",
        stored_raytrace.run,
        unsupported_reason=stored_raytrace.unsupported_reason,
        slower_reason=cpp_raytrace.slower_reason,
    ),
    # the entry gate, `sequence`, the weighting, `experts`, each by its own choice
    Implementation("steps", raytrace_in_steps, "steps"),
)


def no_fused_early_exit(*args: Any, **options: Any) -> None:
    """Nothing: the caller takes the exits one after the other."""
    return


# early_exit(args, hidden_BD, head, thresholds, mask_B, *, stop, estimator, temperature, num_steps) -> EarlyExitResult or None:
# the first confident answer of each row, with exits before the first layer and after each; greedy sequences only
early_exit: Operation[Any, EarlyExitResult | None] = Operation(
    "early_exit",
    # all exits in one call: small experts without gradients, where the many calls of an exit cost more than its arithmetic
    Implementation(
        "cpp",
        cpp_early_exit.run,
        unsupported_reason=cpp_early_exit.unsupported_reason,
        slower_reason=cpp_early_exit.slower_reason,
    ),
    # the same for experts in a store, layer by layer: rounded as there
    Implementation(
        "stored",
        stored_raytrace.run_early_exit,
        unsupported_reason=stored_raytrace.early_exit_unsupported_reason,
        slower_reason=cpp_early_exit.slower_reason,
    ),
    Implementation("steps", no_fused_early_exit, "steps"),
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
    Implementation("cpp", cpp_convolution.run, unsupported_reason=cpp_convolution.unsupported_reason),
    Implementation("plain", convolve, "plain"),
)


def available() -> bool:
    """Whether the compiled kernels are there."""
    return cpp_library.cpu is not None


def why_not() -> str | None:
    """Why they are not, None if they are."""
    return cpp_library.reason


def instructions() -> str | None:
    """The processor's instructions that they use, "avx2" or "baseline"; None where there are none."""
    return None if cpp_library.instruction_set is None else cpp_library.instruction_set().decode()


def count_macs(run: Callable[[], object]) -> int:
    """The multiply-adds of all matrix products and convolutions in a call, on the plain path, where PyTorch sees them."""
    with use("plain"), FlopCounterMode(display=False) as counter, torch.no_grad():
        run()
    return counter.get_total_flops() // 2


def expert_macs(experts: Experts, dim: int) -> int:
    """The multiply-adds of one expert on one row (D,)."""
    if isinstance(experts, MLPExperts | StoredExperts):
        return experts.num_weights
    like = next(experts.parameters(), torch.empty(0))
    return count_macs(lambda: experts.run_expert(0, 0, like.new_zeros(1, dim)))


# Implementations of plugins come first in their operation's list. Last in this file: their modules import it.
subscribe("kernel", add_plugin)
