"""The workload on a GPU: the sequence's kernels and grouped experts against plain PyTorch there, and against one core.

Axes: B batch, L layers, N experts a layer, D width.
"""

from collections.abc import Callable
from typing import Any

import torch

from raytraced.benchmark.layer_workloads import COSTLY, LayerStep, SequenceRun, compare_sequences, raytraced_layer
from raytraced.benchmark.model_workloads import Bench, forced, seeded
from raytraced.benchmark.results import Outcome
from raytraced.benchmark.timing import Contender
from raytraced.layer import HiddenOnly
from raytraced.routing import RoutingNetwork
from raytraced.sequence import Select

GPU_GRIDS, GPU_BATCH = ((4, 8), (8, 16)), 4096


def gpu(bench: Bench, device: str = "cuda") -> Outcome:
    """The sequence for some grids, and a layer of costly experts in bfloat16."""
    pairs, equal = [], []
    ways: tuple[tuple[Select, str], ...] = (("greedy", "greedy"), ("sample", "drawn"))
    for L, N in GPU_GRIDS:
        here = RoutingNetwork(L, N), torch.randn(GPU_BATCH, N, generator=seeded()).softmax(-1)
        there = RoutingNetwork(L, N).to(device), here[1].to(device)
        there[0].load_state_dict(here[0].state_dict())
        for select, way in ways:
            fast = waiting(SequenceRun(*there, select).contender(f"sequence, {way}, {L}×{N}"), device)
            core = SequenceRun(*here, select).contender(f"sequence, {way}, {L}×{N}, one core")
            pairs += [(fast, forced(fast, "plain", "sequence")), (fast, core)]
        equal.append(compare_sequences(*there))
    layer = raytraced_layer(COSTLY).to(device, torch.bfloat16)
    run = LayerStep(HiddenOnly(layer), COSTLY.dim, num=GPU_BATCH)
    step = waiting(Contender(f"experts {COSTLY}, bfloat16", run), device)
    grouped, sparse, dense = (forced(step, word, "experts") for word in ("grouped", "sparse", "dense"))
    pairs += [(grouped, sparse), (grouped, dense)]
    conditions = {what: all(found[what] for found in equal) for what in equal[0]}
    return Outcome(bench.compare(pairs).rows, conditions)


def waiting(one: Contender, device: str) -> Contender:
    """The same until the device has finished: a call alone only puts work into its queue."""
    wait: Callable[[], Any] = torch.cuda.synchronize if device == "cuda" else lambda: None

    def run() -> None:
        one.run()
        wait()

    return one._replace(run=run)
