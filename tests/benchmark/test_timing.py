"""The clock is a counter here: no claim rests on how long anything takes."""

import gc

import pytest
import torch

from raytraced.benchmark.timing import Contender, Settings, Timings, interleave, quartiles

FAST = Settings(rounds=4, sample_seconds=0.0, seconds=1e9, least_rounds=2, latencies=6, train_steps=1)


class Clock:
    """Time passes only when a contender says so."""

    def __init__(self):
        self.now = 0.0
        self.calls = []

    def __call__(self):
        return self.now

    def contender(self, name, seconds, threads=1):
        def run():
            self.calls.append((name, torch.get_num_threads()))
            self.now += seconds

        return Contender(run, threads)


def names(calls):
    return "".join(name for name, _ in calls)


def test_contenders_take_turns():
    clock = Clock()
    interleave({"A": clock.contender("A", 1), "B": clock.contender("B", 2)}, FAST, clock=clock)
    assert (
        names(clock.calls) == "AABB" + "AABB" * 4
    )  # two calls of each that do not count, then in turns, each after one that does not


def test_samples_are_seconds_a_call_and_warm_up_does_not_count():
    clock = Clock()
    durations = iter([50.0, 50.0, 60.0, 1.0, 60.0, 2.0, 60.0, 4.0, 60.0, 8.0])

    def run():
        clock.now += next(durations)

    timings = interleave({"A": Contender(run)}, FAST, clock=clock)
    assert timings.samples == {"A": [1.0, 2.0, 4.0, 8.0]}
    assert timings.median("A") == 3.0


def test_a_short_call_is_repeated_until_a_sample_is_long_enough():
    clock = Clock()
    settings = FAST._replace(sample_seconds=1.0, rounds=3)
    timings = interleave({"A": clock.contender("A", 0.25)}, settings, clock=clock)
    assert len(clock.calls) == 2 + 3 * (1 + 4)
    assert timings.samples["A"] == [0.25] * 3


def test_single_calls_are_not_repeated():
    clock = Clock()
    settings = FAST._replace(sample_seconds=1.0)
    timings = interleave({"A": clock.contender("A", 0.25)}, settings, single_calls=True, clock=clock)
    assert len(timings.samples["A"]) == settings.latencies
    assert len(clock.calls) == 2 + settings.latencies


def test_it_stops_when_time_is_up_but_not_before_the_least_rounds():
    clock = Clock()
    settings = FAST._replace(rounds=100, seconds=10.0, least_rounds=2)
    assert len(interleave({"A": clock.contender("A", 2)}, settings, clock=clock).samples["A"]) == 3
    assert len(interleave({"A": clock.contender("A", 50)}, settings, clock=clock).samples["A"]) == 2


def test_each_contender_runs_with_its_threads_and_the_callers_come_back():
    clock = Clock()
    interleave({"A": clock.contender("A", 1), "B": clock.contender("B", 1, threads=2)}, FAST, clock=clock)
    assert {threads for name, threads in clock.calls if name == "A"} == {1}
    assert {threads for name, threads in clock.calls if name == "B"} == {2}
    assert torch.get_num_threads() == 1


def test_an_interrupt_restores_threads_and_garbage_collection():
    def run():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interleave({"A": Contender(run, threads=2)}, FAST)
    assert torch.get_num_threads() == 1
    assert gc.isenabled()


def test_ratio_is_that_of_medians_with_quartiles_round_by_round():
    timings = Timings({"A": [2.0, 4.0, 6.0, 8.0, 90.0], "B": [1.0, 1.0, 2.0, 2.0, 3.0]}, {"A": 1, "B": 1})
    ratio = timings.ratio("A", "B")
    assert ratio.value == 6.0 / 2.0
    assert (ratio.low, ratio.high) == (3.0, 4.0)  # of 2, 4, 3, 4, 30
    assert timings.fastest(["A", "B"]) == "B"


def test_quartiles_of_one_value_are_that_value():
    assert quartiles([5.0]) == (5.0, 5.0)
