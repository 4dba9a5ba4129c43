"""Where the rules of benchmarks/aims-readings.md turn: just inside and just outside."""

import pytest

from experiments.reproduce.reading_aims import (
    AHEAD,
    BEHIND,
    LEVEL,
    Difference,
    agrees,
    changes_little,
    compare_final_loss,
    compare_longer,
    difference,
    strongest,
)
from experiments.reproduce.records import Results, Spread
from experiments.reproduce.tables import final_loss_table, longer_table


@pytest.mark.parametrize(("accuracy", "expected"), [(96.59, True), (96.61, False), (96.01, True), (95.99, False)])
def test_three_tenths_of_a_point_agree_where_the_papers_deviation_is_small(accuracy, expected):
    assert agrees(accuracy, 7.5, (96.3, 0.1), 7.5) == expected


@pytest.mark.parametrize(("accuracy", "expected"), [(62.79, True), (62.81, False), (58.01, True), (57.99, False)])
def test_two_deviations_agree_where_they_are_more(accuracy, expected):
    assert agrees(accuracy, 11.4, (60.4, 1.2), 11.4) == expected


@pytest.mark.parametrize(("experts", "expected"), [(9.99, True), (10.01, False), (6.01, True), (5.99, False)])
def test_experts_agree_within_a_quarter(experts, expected):
    assert agrees(96.3, experts, (96.3, 0.1), 8.0) == expected


@pytest.mark.parametrize(
    ("mean", "verdict"), [(0.19, LEVEL), (0.21, AHEAD), (-0.19, LEVEL), (-0.21, BEHIND), (0.2, AHEAD), (-0.2, BEHIND)]
)
def test_level_is_below_two_standard_errors(mean, verdict):
    assert Difference(mean, 0.1).verdict == verdict


def test_without_any_error_equal_means_are_level():
    assert [Difference(mean, 0.0).verdict for mean in (0.0, 0.1, -0.1)] == [LEVEL, AHEAD, BEHIND]


def test_standard_errors_of_a_difference_add_as_squares_and_count_their_own_seeds():
    """0.3/√9 = 0.1 and 0.3/√4 = 0.15."""
    found = difference(Spread(1.0, 0.3, 9), Spread(0.5, 0.3, 4))
    assert found.mean == pytest.approx(0.5)
    assert found.error == pytest.approx((0.1**2 + 0.15**2) ** 0.5)


@pytest.mark.parametrize(
    ("gain", "experts", "expected"),
    [(0.19, 10.9, True), (0.21, 10.9, False), (-0.21, 10.9, False), (0.19, 11.1, False), (0.19, 9.1, True), (0.19, 8.9, False)],
)  # fmt: skip
def test_longer_training_changes_little_in_accuracy_and_in_experts(gain, experts, expected):
    assert changes_little(Difference(gain, 0.1), (10.0, experts)) == expected


def test_longer_training_is_read_from_the_records(record):
    short = [record("cifar10", "mre-paper", seed, accuracy=0.6 + 0.01 * seed, experts=9.0) for seed in range(2)]
    assert compare_longer(Results(short)) is None
    long = [
        record("cifar10", "mre-paper-60-epochs", seed, group="reading", accuracy=0.63 + 0.01 * seed, experts=9.5)
        for seed in range(2)
    ]
    found = compare_longer(Results([*short, *long]))
    assert found.accuracy == pytest.approx((3.0, 0.5 * 2**0.5))
    assert not found.little
    assert "does not hold" in longer_table(Results([*short, *long])).note


def test_the_strongest_may_need_as_much_and_no_more(record):
    results = Results([record(label="top-k", experts=4.0, accuracy=0.8), record(label="aux-free", experts=5.0)])
    cheap, dear = (results.point("mnist", label) for label in ("top-k", "aux-free"))
    assert strongest([cheap, dear], dear.macs) is dear
    assert strongest([cheap, dear], dear.macs - 1) is cheap
    assert strongest([cheap, dear], cheap.macs - 1) is None


def test_baselines_of_the_final_loss_are_not_ours_and_not_trained_with_exits(record):
    others = {"mre": 0.99, "mre-paper": 0.99, "top-k-exits": 0.99, "multi-exit": 0.99, "top-k": 0.8, "threshold": 0.85}
    runs = [
        record(label=label, seed=seed, accuracy=accuracy + 0.01 * seed, experts=2.0)
        for label, accuracy in (others | {"mre-final-loss": 0.82}).items()
        for seed in range(2)
    ]
    found = compare_final_loss(Results(runs), "mnist")
    assert found.best.records[0].label == "threshold"
    assert found.against(found.threshold).mean == pytest.approx(-3)
    assert found.against(found.threshold).verdict == BEHIND
    (row,) = final_loss_table(Results(runs)).rows
    above = ["-3.00 ± 0.71", BEHIND]
    assert row[4:] == ["threshold", "85.50 ± 0.50", "14,540", *above, above[0], "14,540", BEHIND, *above]
    assert compare_final_loss(Results(runs[:-2]), "mnist") is None


def test_a_row_with_fewer_seeds_says_how_many(record):
    runs = [
        record(label=label, seed=seed, experts=2.0) for label in ("mre-final-loss", "threshold") for seed in range(3)
    ]
    runs += [record(label="dense-4", seed=seed, accuracy=0.95, experts=1.0) for seed in range(2)]
    assert final_loss_table(Results(runs)).rows[0][4] == "dense-4 (2 seeds)"
