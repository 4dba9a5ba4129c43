"""Bars are reached if, and only if, the numbers reach them; every choice is made on validation images."""

import pytest

from raytraced.reproduce.bars import judge_bars
from raytraced.reproduce.records import Results


def bar(number, *records):
    return judge_bars(Results(records))[number]


def test_what_was_not_run_is_not_measured():
    assert {one.reached for one in judge_bars(Results([])).values()} == {None}


@pytest.mark.parametrize(
    ("accuracy", "experts", "reached"), [(0.9691, 3.9, True), (0.9689, 3.9, False), (0.98, 4.1, False)]
)
def test_bar_1_asks_for_accuracy_and_few_experts(record, accuracy, experts, reached):
    assert bar("1", record(accuracy=accuracy, experts=experts, prefixes=[0.1])).reached is reached


def test_bar_1_takes_a_budget_of_four_and_not_of_five(record):
    def reached(prefixes):
        return bar("1", record(accuracy=0.98, experts=9.0, prefixes=prefixes)).reached

    assert reached([0.1, 0.9, 0.9, 0.9, 0.97, 0.98]) is True
    assert reached([0.1, 0.9, 0.9, 0.9, 0.96, 0.98]) is False


def test_bar_1_takes_the_setting_of_the_dial_that_validation_prefers_among_the_frugal(record):
    records = [
        record(label="mre", experts=9.0, validation=0.99, accuracy=0.99, prefixes=[0.1]),
        record(label="mre-cost-0.01", experts=3.0, validation=0.97, accuracy=0.96, prefixes=[0.1]),
        record(label="mre-cost-0.1", experts=2.0, validation=0.95, accuracy=0.98, prefixes=[0.1]),
    ]
    one = bar("1", *records)
    assert one.reached is False
    assert "mre-cost-0.01" in one.by_data["mnist"]


def test_bar_2_is_reached_by_the_same_accuracy_at_two_fifths_of_the_cost(record):
    rival = record(label="top-k", accuracy=0.9, experts=8.0)
    assert bar("2", rival, record(accuracy=0.9, experts=3.1, prefixes=[0.1])).reached is True
    assert bar("2", rival, record(accuracy=0.9, experts=3.3, prefixes=[0.1])).reached is False
    assert bar("2", rival, record(accuracy=0.89, experts=3.2, prefixes=[0.1])).reached is False


def test_bar_2_is_reached_by_two_standard_errors_at_equal_cost(record):
    rivals = [
        record(label="top-k", seed=seed, accuracy=0.9 + shift, experts=8.0) for seed, shift in enumerate((-0.01, 0.01))
    ]

    # deviation 0.0141 of each, standard error of the difference 0.0141: two of them are 0.0283
    def ours(mean):  # fmt: skip
        return [
            record(seed=seed, accuracy=mean + shift, experts=7.9, prefixes=[0.1])
            for seed, shift in enumerate((-0.01, 0.01))
        ]

    assert bar("2", *rivals, *ours(0.929)).reached is True
    assert bar("2", *rivals, *ours(0.927)).reached is False


def test_bar_2_counts_budgets_as_points_of_mre(record):
    rival = record(label="top-k", accuracy=0.9, experts=8.0)
    assert bar("2", rival, record(accuracy=0.91, experts=8.0, prefixes=[0.1, 0.5, 0.9])).reached is True


def test_bar_2_chooses_a_budget_on_validation_images_too(record):
    rival = record(label="top-k", accuracy=0.9, experts=8.0)
    lucky = record(accuracy=0.9, experts=8.0, prefixes=[0.1, 0.9, 0.7], validated_prefixes=[0.1, 0.8, 0.85])
    assert bar("2", rival, lucky).reached is False
    assert "mre with at most 2 experts: 70.00" in bar("2", rival, lucky).by_data["mnist"]


def test_bar_2_is_matched_to_one_standard_error_of_the_difference(record):
    def with_error(label, mean, experts, **figures):  # deviation 0.0141, standard error 0.01
        return [
            record(label=label, seed=seed, accuracy=mean + shift, experts=experts, **figures)
            for seed, shift in enumerate((-0.01, 0.01))
        ]

    rivals = with_error("top-k", 0.9, 8.0)
    assert bar("2", *rivals, *with_error("mre", 0.887, 3.0, prefixes=[0.1])).reached is True
    assert bar("2", *rivals, *with_error("mre", 0.885, 3.0, prefixes=[0.1])).reached is False


def test_bar_2_looks_among_the_points_that_are_cheap_enough(record):
    rival = record(label="top-k", accuracy=0.9, experts=8.0)
    dear, cheap = (
        record(label=label, accuracy=0.9, experts=experts, prefixes=[0.1])
        for label, experts in (("mre", 7.0), ("mre-cost-0.1", 2.0))
    )
    assert bar("2", rival, dear, cheap).reached is True
    assert bar("2", rival, dear).reached is False


def test_bar_2_does_not_choose_on_test_images(record):
    rival = record(label="top-k", accuracy=0.9, experts=8.0)
    lucky = record(label="mre", validation=0.8, accuracy=0.95, experts=1.0, prefixes=[0.1])
    assert bar("2", rival, lucky).reached is True  # beats it at equal cost
    chosen = record(label="mre-cost-0.1", validation=0.9, accuracy=0.7, experts=2.0, prefixes=[0.1])
    assert bar("2", rival, lucky, chosen).reached is False


def test_bar_2_on_the_union_asks_for_every_control_and_rival(record):
    def union(ours):
        others = [
            record("union", "dense-1", accuracy=0.7, experts=1.0),
            record("union", "top-k", accuracy=0.8, experts=8.0),
        ]
        return bar("2", *others, record("union", "mre", accuracy=ours, experts=4.0, prefixes=[0.1, 0.75]))

    assert union(0.81).reached is True
    assert union(0.79).reached is False
    assert "top-k: -1.00" in union(0.79).by_data["union"]


@pytest.mark.parametrize(
    ("curve", "seconds", "reached"), [([0.5] * 5 + [0.9] * 5, 1.0, True), ([0.5] * 6 + [0.9] * 4, 1.0, False), ([0.5] * 5 + [0.9] * 5, 9.0, False)]
)  # fmt: skip
def test_bar_3_asks_for_fewer_epochs_and_less_time(record, curve, seconds, reached):
    rival = record(label="top-k", curve=[0.5] * 9 + [0.9])
    ours = record(curve=curve)
    for epoch in ours.history:
        epoch["seconds"] = seconds
    assert bar("3", rival, ours).reached is reached


@pytest.mark.parametrize(
    ("prefixes", "reached"), [([0.5, 0.88, 0.9], True), ([0.5, 0.86, 0.9], False), ([0.5, 0.9, 0.898], True), ([0.5, 0.9, 0.896], False)]
)  # fmt: skip
def test_bar_4_asks_for_prefixes_that_do_not_fall_and_a_good_first_expert(record, prefixes, reached):
    assert bar("4", record(prefixes=prefixes)).reached is reached


def test_a_bar_is_reached_only_if_it_is_on_every_data_set(record):
    one = bar("1", record("mnist", accuracy=0.99), record("cifar10", accuracy=0.1))
    assert one.reached is False
    assert one.reached_by_data == {"mnist": True, "cifar10": False}
