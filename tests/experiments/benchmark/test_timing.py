"""The clock is a counter here: no claim rests on how long anything takes."""

import gc

import pytest
import torch

from experiments.benchmark.timing import Contender, Settings, Timings, interleave

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

        return Contender(name, run, threads)


def names(calls):
    return "".join(name for name, _ in calls)


def test_contenders_take_turns():
    clock = Clock()
    interleave([clock.contender("A", 1), clock.contender("B", 2)], FAST, clock=clock)
    # two calls of each that do not count, then in turns, each after one that does not
    assert names(clock.calls) == "AABB" + "AABB" * 4


def test_samples_are_seconds_a_call_and_warm_up_does_not_count():
    clock = Clock()
    durations = iter([50.0, 50.0, 60.0, 1.0, 60.0, 2.0, 60.0, 4.0, 60.0, 8.0])

    def run():
        clock.now += next(durations)

    one = Contender("A", run)
    timings = interleave([one], FAST, clock=clock)
    assert timings == {"A": [1.0, 2.0, 4.0, 8.0]}
    assert timings.median(one) == 3.0


def test_a_short_call_is_repeated_until_a_sample_is_long_enough():
    clock = Clock()
    settings = FAST._replace(sample_seconds=1.0, rounds=3)
    timings = interleave([clock.contender("A", 0.25)], settings, clock=clock)
    assert len(clock.calls) == 2 + 3 * (1 + 4)
    assert timings["A"] == [0.25] * 3


def test_single_calls_are_not_repeated():
    clock = Clock()
    settings = FAST._replace(sample_seconds=1.0)
    timings = interleave([clock.contender("A", 0.25)], settings, single_calls=True, clock=clock)
    assert len(timings["A"]) == settings.latencies
    assert len(clock.calls) == 2 + settings.latencies


def test_it_stops_when_time_is_up_but_not_before_the_least_rounds():
    clock = Clock()
    settings = FAST._replace(rounds=100, seconds=10.0, least_rounds=2)
    assert len(interleave([clock.contender("A", 2)], settings, clock=clock)["A"]) == 3
    assert len(interleave([clock.contender("A", 50)], settings, clock=clock)["A"]) == 2


def test_each_contender_runs_with_its_threads_and_the_callers_come_back():
    clock = Clock()
    interleave([clock.contender("A", 1), clock.contender("B", 1, threads=2)], FAST, clock=clock)
    assert {threads for name, threads in clock.calls if name == "A"} == {1}
    assert {threads for name, threads in clock.calls if name == "B"} == {2}
    assert torch.get_num_threads() == 1


def test_an_interrupt_restores_threads_and_garbage_collection():
    def run():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interleave([Contender("A", run, threads=2)], FAST)
    assert torch.get_num_threads() == 1
    assert gc.isenabled()


A, B = Contender("A", list, 2, experts=3.0), Contender("B", list, 1, experts=8.0)


def test_a_ratio_is_that_of_medians_with_quartiles_round_by_round():
    row = Timings({"A": [2.0, 4.0, 6.0, 8.0, 90.0], "B": [1.0, 1.0, 2.0, 2.0, 3.0]}).row(A, B)
    assert row["ratio"] == 6.0 / 2.0
    assert row["quartiles"] == [3.0, 4.0]  # of 2, 4, 3, 4, 30
    assert (row["median_ms"], row["against_median_ms"], row["rounds"]) == (6000.0, 2000.0, 5)
    assert (row["what"], row["against"], row["threads"]) == ("A", "B", 2)
    assert (row["experts"], row["against_experts"]) == (3.0, 8.0)


def test_what_a_time_is_held_against_can_be_a_part_or_a_multiple():
    timings = Timings({"A": [6.0, 6.0, 9.0], "B": [2.0, 3.0, 3.0]})
    whole, half = timings.row(A, B), timings.row(A, B, times=0.5)
    assert half["ratio"] == 2 * whole["ratio"] == 4.0
    assert half["quartiles"] == [2 * value for value in whole["quartiles"]]
    assert half["against_median_ms"] == 1500.0


def test_quartiles_of_one_round_are_its_ratio():
    assert Timings({"A": [5.0], "B": [2.0]}).row(A, B)["quartiles"] == [2.5, 2.5]
