"""Times of several contenders, taken in turns (A B C A B C …), so that what slows the machine slows all of them alike."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch


class Settings(NamedTuple):
    """How long to measure."""

    rounds: int  # samples of each contender
    sample_seconds: float  # a sample repeats a short call until it takes about this long
    seconds: float  # stop after this long, though not before `least_rounds`
    least_rounds: int
    latencies: int  # single calls of each contender where latency is asked for
    train_steps: int  # of the briefly trained models


FULL = Settings(rounds=40, sample_seconds=0.05, seconds=90, least_rounds=7, latencies=3000, train_steps=422)
QUICK = Settings(rounds=5, sample_seconds=0.005, seconds=3, least_rounds=2, latencies=300, train_steps=422)


class Contender(NamedTuple):
    """Something to time, and the number of threads it may use."""

    run: Callable[[], object]
    threads: int = 1


class Ratio(NamedTuple):
    """The ratio of two medians, with the quartiles of the ratios round by round."""

    value: float
    low: float
    high: float


class Timings:
    """Seconds of every call, by contender and round."""

    def __init__(self, samples: dict[str, list[float]], threads: dict[str, int]) -> None:
        self.samples, self.threads = samples, threads

    def median(self, name: str) -> float:
        return statistics.median(self.samples[name])

    def ratio(self, name: str, other: str) -> Ratio:
        """How long one takes against the other."""
        by_round = [a / b for a, b in zip(self.samples[name], self.samples[other], strict=True)]
        low, high = quartiles(by_round)
        return Ratio(self.median(name) / self.median(other), low, high)

    def fastest(self, names: list[str]) -> str:
        return min(names, key=self.median)

    def summary(self) -> dict[str, dict[str, Any]]:
        """Median and quartiles in milliseconds."""
        rows = {}
        for name, seconds in self.samples.items():
            low, high = quartiles(seconds)
            rows[name] = {
                "median_ms": round(self.median(name) * 1e3, 6),
                "quartiles_ms": [round(low * 1e3, 6), round(high * 1e3, 6)],
                "samples": len(seconds),
                "threads": self.threads[name],
            }
        return rows


def quartiles(values: list[float]) -> tuple[float, float]:
    """The first and the third quartile."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


@contextmanager
def quiet_process() -> Iterator[None]:
    """No collection of garbage, and the caller's number of threads back at the end."""
    threads, collecting = torch.get_num_threads(), gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if collecting:
            gc.enable()


def interleave(
    contenders: Mapping[str, Contender],
    settings: Settings,
    *,
    single_calls: bool = False,
    tick: Callable[[float], None] = lambda share: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Timings:
    """Time all contenders in turns; `single_calls` takes one call a sample, for latencies."""
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    rounds = settings.latencies if single_calls else settings.rounds
    with quiet_process():
        calls = {name: _warm_up(c, settings, single_calls, clock) for name, c in contenders.items()}
        started = clock()
        for done in range(rounds):
            if not single_calls:
                gc.collect()
            for name, contender in contenders.items():
                torch.set_num_threads(contender.threads)
                if not single_calls:
                    # not counted: each finds caches, memory and threads as it left them, not as the one before did
                    contender.run()
                begin = clock()
                for _ in range(calls[name]):
                    contender.run()
                samples[name].append((clock() - begin) / calls[name])
            spent = clock() - started
            if not single_calls or done % 100 == 0:
                tick(max((done + 1) / rounds, min(1.0, spent / settings.seconds)))
            if done + 1 >= settings.least_rounds and spent > settings.seconds:
                break
    return Timings(samples, {name: contender.threads for name, contender in contenders.items()})


def _warm_up(contender: Contender, settings: Settings, single_calls: bool, clock: Callable[[], float]) -> int:
    """How many calls make a sample; the first call loads code and pages, the second is looked at."""
    torch.set_num_threads(contender.threads)
    contender.run()
    begin = clock()
    contender.run()
    took = clock() - begin
    return 1 if single_calls else min(1000, max(1, round(settings.sample_seconds / max(took, 1e-9))))
