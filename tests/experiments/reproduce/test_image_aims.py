"""The rules of benchmarks/aims-images.md on hand-made records: where each verdict turns."""

import pytest

from experiments.reproduce import image_aims
from experiments.reproduce.image_aims import (
    dial_level,
    early_exit,
    is_default,
    one_checkpoint,
    to_the_end,
    verdicts,
)
from experiments.reproduce.records import Results, spread

SEEDS = range(5)


@pytest.fixture
def complete(monkeypatch):
    """Every rule has the records that it needs."""
    monkeypatch.setattr(image_aims, "is_missing", lambda results, labels, data: False)


BASE = 13_004.0  # MACs of a made-up record without experts


def macs(experts):
    return BASE + 768 * experts


@pytest.fixture
def baselines(record):
    """Two dense models on MNIST: 90 % with 1 expert, 94 % with 5."""
    return [
        record("mnist", f"dense-{num}", seed, family="dense", accuracy=accuracy + seed / 10_000, experts=num)
        for num, accuracy in ((1, 0.90), (5, 0.94))
        for seed in SEEDS
    ]


def ours(record, at_three: float, end: float = 0.92):
    """Our checkpoints, with an accuracy at a mean of three experts, and the line of the baselines elsewhere."""
    rows = [
        {"setting": stop, "experts": num, "macs": macs(num), "accuracy": accuracy}
        for stop, num, accuracy in ((8.0, 1, 0.90), (1.0, 3, at_three), (0.1, 5, 0.94), (0.01, 9, 0.94))
    ]
    return [
        record("mnist", "mre-budgets", seed, accuracy=end + seed / 10_000, experts=3.0, dial=rows) for seed in SEEDS
    ]


@pytest.mark.parametrize(("end", "holds"), [(0.90, True), (0.88, False), (0.95, True)])
def test_the_end_is_compared_with_the_best_baseline_of_at_most_its_cost(record, baselines, end, holds):
    (row,) = to_the_end(Results([*baselines, *ours(record, 0.92, end)]))
    assert (row.data, row.holds) == ("mnist", holds)
    assert "dense-1" in row.found  # five experts cost more than three


def test_a_dial_is_read_linearly_between_two_settings(record):
    level = dial_level(ours(record, 0.92), 2)
    assert level.bits == pytest.approx(100 - 91)
    assert level.macs == pytest.approx(macs(2))


def test_a_dial_that_does_not_reach_counts_with_its_nearest_setting(record):
    assert dial_level(ours(record, 0.92), 20).bits == pytest.approx(6)


@pytest.mark.parametrize(("at_three", "holds"), [(0.92, True), (0.9165, True), (0.9155, False)])
def test_one_checkpoint_is_at_most_a_fifth_of_a_point_below_the_line(record, baselines, at_three, holds):
    """The line has 91 % at 2 experts and 93 % at 4; the dial's points there are halfway to its point at 3."""
    (row,) = one_checkpoint(Results([*baselines, *ours(record, at_three)]))
    assert row.holds == holds, row.found


def stopped(record, label, accuracy, data="mnist", family=None):
    """Models with exits: two points of the line of their thresholds; ours cost 1,000 more, halfway to the next point."""
    more = 1_000 if label.startswith("mre") else 0
    points = [
        {"within": within, "macs": 14_000.0 + 2_000 * at + more, "accuracy": accuracy + 0.02 * at, "experts": 1.0}
        for at, within in enumerate((0.1, 0.0))
    ]
    return [
        record(
            data,
            label,
            seed,
            family=family or label,
            early_exit={"points": [one | {"accuracy": one["accuracy"] + seed / 10_000} for one in points], "exits": []},
        )
        for seed in SEEDS
    ]


@pytest.mark.parametrize(("gain", "holds"), [(0.0101, True), (0.02, True), (0.009, False)])
def test_early_exit_is_compared_on_the_line_of_each_baseline(record, gain, holds):
    found = [*stopped(record, "mre-budgets-exits", 0.9 + gain), *stopped(record, "dense-8-exits", 0.9)]
    found += stopped(record, "threshold-exits", 0.8)
    (row,) = early_exit(Results(found))
    assert row.holds == holds, row.found
    assert "dense-8-exits" in row.found


def test_seeds_of_two_models_are_not_paired(record):
    """Ours and the baseline differ by as much in every seed, but the seeds themselves differ."""
    found = [*stopped(record, "mre-budgets-exits", 0.9), *stopped(record, "dense-8-exits", 0.9)]
    results = Results(found)
    ahead = image_aims.points_ahead(results.of("mnist", "mre-budgets-exits"), results.of("mnist", "dense-8-exits"))
    seeds = spread(seed / 100 for seed in SEEDS)  # in percent
    assert ahead.mean == pytest.approx(-1.0)  # 1,000 multiply-adds more, halfway between two points 2 points apart
    assert ahead.error == pytest.approx(2**0.5 * seeds.error)


def test_a_model_is_compared_with_the_line_at_its_cost(record, baselines):
    (one,) = {round(image_aims.error_level(point).macs) for point in [make_point(record, 0.92)]}
    assert one == round(macs(3))
    for accuracy, above in ((0.92, 0.0), (0.93, 1.0), (0.91, -1.0)):
        points = [Results(baselines).point("mnist", f"dense-{num}") for num in (1, 5)]
        assert image_aims.above_line(make_point(record, accuracy), points).mean == pytest.approx(above, abs=0.02)


def make_point(record, accuracy):
    """A model with three experts."""
    found = [record("mnist", "mre-final-loss", seed, accuracy=accuracy + seed / 10_000, experts=3.0) for seed in SEEDS]
    return Results(found).point("mnist", "mre-final-loss")


def test_both_recipes_are_compared_at_equal_cost(record):
    """The first has 94 % with 5 experts, and 90 % with at most 3; the second 92 % with 3, and 93 % with 5 by its dial."""

    def rows(*settings):
        return [{"experts": num, "macs": macs(num), "accuracy": accuracy} for num, accuracy in settings]

    budgets = rows((1, 0.88), (3, 0.90), (5, 0.94))
    found = [record("mnist", "mre-final-loss", seed, accuracy=0.94, experts=5.0, budgets=budgets) for seed in SEEDS]
    dial = rows((1, 0.91), (5, 0.93))
    found += [record("mnist", "mre-budgets", seed, accuracy=0.92, experts=3.0, dial=dial) for seed in SEEDS]
    found += [*stopped(record, "mre", 0.9), *stopped(record, "mre-budgets-exits", 0.95)]
    one = image_aims.equal_cost(Results(found), "mnist")
    assert one.to_the_end.mean == pytest.approx(-1.0)
    assert one.few_experts.mean == pytest.approx(2.0)
    assert one.early_exit.mean == pytest.approx(5.0)


def test_early_exit_is_not_decided_before_eight_blocks_with_exits_are_there(record):
    assert early_exit(Results(stopped(record, "mre-budgets-exits", 0.9))) == []


@pytest.mark.usefixtures("complete")
def test_the_third_rule_needs_two_sets_on_which_ours_is_ahead_of_eight_blocks(record, baselines):
    def found_with(names):
        found = [*baselines, *ours(record, 0.92)]
        for data in names:
            found += stopped(record, "mre-budgets-exits", 0.93, data) + stopped(record, "dense-8-exits", 0.9, data)
            found += stopped(record, "mre", 0.9, data)
        return [row[1] for row in verdicts(Results(found))]

    assert found_with(["mnist"])[2] == "fails"
    assert found_with(["mnist", "cifar10"])[2] == "holds"


def test_a_rule_is_decided_when_all_seeds_of_all_models_that_it_names_are_there_on_all_sets(record):
    assert image_aims.compared_data() == ["mnist", "fashion-mnist", "cifar10", "union"]
    found = []
    for data in image_aims.compared_data():
        found += [one for label in image_aims.needed(3, data) for one in stopped(record, label, 0.9, data)]
    assert [row[1] for row in verdicts(Results(found))][2] == "fails"  # nowhere ahead of eight blocks
    for number in (0, 7, len(found) - 1):
        few = [one for place, one in enumerate(found) if place != number]
        assert [row[1] for row in verdicts(Results(few))][2] == "not decided yet"


def test_a_set_without_baselines_has_no_line(record):
    assert one_checkpoint(Results(ours(record, 0.92))) == []


def test_rules_without_records_do_not_hold():
    assert [row[1] for row in verdicts(Results([]))] == ["not decided yet"] * 4


def test_the_second_recipe_becomes_the_default_only_if_it_is_nowhere_behind_the_first(record):
    def recipes(new, new_exits):
        found = [record("mnist", "mre-final-loss", seed, accuracy=0.9 + seed / 10_000) for seed in SEEDS]
        found += [record("mnist", "mre-budgets", seed, accuracy=new + seed / 10_000) for seed in SEEDS]
        found += stopped(record, "mre", 0.9) + stopped(record, "mre-budgets-exits", new_exits)
        return is_default(Results(found))

    assert recipes(0.90, 0.90).holds
    assert not recipes(0.89, 0.90).holds
    assert not recipes(0.90, 0.89).holds
    assert recipes(0.91, 0.91).holds
