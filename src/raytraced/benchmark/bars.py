"""The table of bars: letter -> what it says and the function that measures it."""

from collections.abc import Callable
from typing import NamedTuple

from raytraced.benchmark import expert_bars, model_bars, sequence_bars
from raytraced.benchmark.outcome import Outcome
from raytraced.benchmark.workloads import Bench


class Bar(NamedTuple):
    """A letter's measurement."""

    title: str
    measure: Callable[[Bench], Outcome]


BARS = {
    "a": Bar("fused sequence against the plain path, times faster", sequence_bars.against_plain),
    "b": Bar("share of the sequence in a training step", sequence_bars.share_of_step),
    "c": Bar("training step against our top-2", model_bars.training_step),
    "d": Bar("inference at batch 1,000 against top-2 and MLP(36)", model_bars.inference_batch),
    "e": Bar("latency at batch 1 against MLP(36)", model_bars.latency),
    "f": Bar("costly experts, inference ÷ (dense × active share)", expert_bars.sparse_inference),
    "g": Bar("our top-2 against other libraries'", expert_bars.against_peers),
    "h": Bar("peak memory of a step against the plain path", model_bars.peak_memory),
    "i": Bar("2 threads against 1, times faster", model_bars.threads),
    "j": Bar("growth with the grid, fitted exponents", sequence_bars.growth),
    "k": Bar("time of a step ÷ limit of the core, width 512", expert_bars.distance_to_limit),
    "l": Bar("costly experts, step ÷ (dense × active share)", expert_bars.sparse_training),
}
