"""Time several contenders in turns (A B C A B C …), so that other load on the machine slows all of them alike."""

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import torch


class Settings(NamedTuple):
    """How long to measure."""

    rounds: int  # samples of each contender
    sample_seconds: float  # a sample repeats a short call until it takes about this long
    seconds: float  # stop after this long, though not before `least_rounds`
    least_rounds: int
    latencies: int  # single calls of each contender where latency is measured
    train_steps: int  # of the briefly trained models


LONG = Settings(rounds=40, sample_seconds=0.05, seconds=90, least_rounds=7, latencies=3000, train_steps=422)
SHORT = Settings(rounds=5, sample_seconds=0.005, seconds=3, least_rounds=2, latencies=300, train_steps=422)


class Contender(NamedTuple):
    """A call to time, the number of threads it may use, and the mean number of experts per sample, if it runs any."""

    name: str
    run: Callable[[], object]
    threads: int = 1
    experts: float | None = None


class Timings(dict[str, list[float]]):
    """Seconds per call: contender → a value for each round."""

    def median(self, one: Contender) -> float:
        return statistics.median(self[one.name])

    def row(self, one: Contender, other: Contender, *, times: float = 1.0) -> dict[str, Any]:
        """The ratio of one contender's median to `times` the other's, with the quartiles of the ratios of single rounds."""
        by_round = [a / (b * times) for a, b in zip(self[one.name], self[other.name], strict=True)]
        medians = self.median(one), self.median(other) * times
        row = {"what": one.name, "against": other.name, "ratio": medians[0] / medians[1], "rounds": len(by_round)}
        quartiles = np.quantile(by_round, (0.25, 0.75)).tolist()
        row |= {"quartiles": quartiles, "median_ms": medians[0] * 1e3, "against_median_ms": medians[1] * 1e3}
        return row | {"threads": one.threads, "experts": one.experts, "against_experts": other.experts}


def interleave(
    contenders: list[Contender],
    settings: Settings,
    *,
    single_calls: bool = False,
    tick: Callable[[float], None] = lambda share: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Timings:
    """Time all contenders in turns; with `single_calls` a sample is one call, for latencies."""
    samples = Timings({one.name: [] for one in contenders})
    rounds = settings.latencies if single_calls else settings.rounds
    with ExitStack() as afterwards:
        afterwards.callback(torch.set_num_threads, torch.get_num_threads())
        if gc.isenabled():
            afterwards.callback(gc.enable)
            gc.disable()
        calls = {one.name: _warm_up(one, settings, single_calls, clock) for one in contenders}
        started = clock()
        for done in range(rounds):
            if not single_calls:
                gc.collect()
            for name, run, threads, _ in contenders:
                torch.set_num_threads(threads)
                if not single_calls:
                    run()  # not timed: refills caches and wakes threads after the contender before
                begin = clock()
                for _ in range(calls[name]):
                    run()
                samples[name].append((clock() - begin) / calls[name])
            spent = clock() - started
            if not single_calls or done % 100 == 0:
                tick(max((done + 1) / rounds, min(1.0, spent / settings.seconds)))
            if done + 1 >= settings.least_rounds and spent > settings.seconds:
                break
    return samples


def _warm_up(one: Contender, settings: Settings, single_calls: bool, clock: Callable[[], float]) -> int:
    """Return how many calls make a sample; the first call loads code and pages, the second is timed."""
    torch.set_num_threads(one.threads)
    one.run()
    begin = clock()
    one.run()
    took = clock() - begin
    return 1 if single_calls else min(1000, max(1, round(settings.sample_seconds / max(took, 1e-9))))
