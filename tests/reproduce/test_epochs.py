"""How soon an accuracy is reached."""

import pytest

from raytraced.reproduce.epochs import Reached, best_rival, first_reach, race, settled
from raytraced.reproduce.records import Results


def test_first_reach_is_the_first_epoch_at_or_above(record):
    one = record(curve=[0.5, 0.8, 0.7, 0.9])
    assert first_reach(one, 0.8) == 2
    assert first_reach(one, 0.81) == 4
    assert first_reach(one, 0.91) is None


def test_a_run_has_settled_within_half_a_point_of_its_best(record):
    assert settled(record(curve=[0.5, 0.894, 0.896, 0.9])) == 3


def test_the_race_is_to_the_rivals_final_accuracy_less_half_a_point(record):
    results = Results([
        record(label="top-k", seed=0, curve=[0.5, 0.8, 0.895, 0.9]),
        record(label="top-k", seed=1, curve=[0.5, 0.895, 0.9, 0.9]),
        record(label="mre", seed=0, curve=[0.895, 0.9, 0.9, 0.9]),
        record(label="mre", seed=1, curve=[0.6, 0.895, 0.9, 0.9]),
    ])  # fmt: skip
    one = race(results, "mnist", "top-k")
    assert one.target == pytest.approx(0.895)
    assert one.rival_reached == Reached(2.5, 5.0)
    assert one.ours == Reached(1.5, 3.0)
    assert one.saved == pytest.approx(0.4)


def test_seconds_are_at_the_pace_of_the_fastest_epoch(record):
    slow, quick = record(label="top-k", seed=0, curve=[0.5, 0.9]), record(label="top-k", seed=1, curve=[0.5, 0.9])
    quick.history[0]["seconds"] = 0.5  # the others shared their core
    one = race(Results([slow, quick, record(label="mre", curve=[0.5, 0.9])]), "mnist", "top-k")
    assert one.rival_reached == Reached(2.0, 1.0)
    assert one.ours == Reached(2.0, 4.0)


def test_a_seed_that_never_arrives_is_not_averaged_away(record):
    results = Results([
        record(label="top-k", curve=[0.8, 0.9]),
        record(label="mre", seed=0, curve=[0.95, 0.95]),
        record(label="mre", seed=1, curve=[0.5, 0.6]),
    ])  # fmt: skip
    assert race(results, "mnist", "top-k").ours is None
    assert "MRE never" in race(results, "mnist", "top-k").tell()
    assert race(results, "mnist", "absent") is None


def test_the_best_rival_is_chosen_on_validation_and_is_none_of_ours_nor_a_control(record):
    results = Results([
        record(label="mre", validation=0.99), record(label="mre-cost-0.1", validation=0.99),
        record(label="mre-paper", validation=0.99), record(label="dense-4", validation=0.99),
        record(label="top-k", validation=0.8, accuracy=0.99), record(label="threshold", validation=0.9, accuracy=0.1),
    ])  # fmt: skip
    assert best_rival(results, "mnist") == "threshold"
    assert best_rival(results, "mnist", among=("top-k",)) == "top-k"
    assert best_rival(results, "cifar10") is None
