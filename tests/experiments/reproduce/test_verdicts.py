"""Where a verdict turns: just inside and just outside of what the paper's sentence, or the sentence beside the number, says."""

import pytest

from experiments.reproduce.claims import FAILS, HOLDS, PARTLY, evaluate_claims, first_reach, settled
from experiments.reproduce.records import Results

DATA = ("mnist", "fashion-mnist", "cifar10")


def verdict(name, *records):
    return evaluate_claims(Results(records))[name].verdict


def with_figures(one, **test):
    one.test.update(test)
    return one


def test_harder_data_must_use_more_experts_not_as_many(record):
    """ "Harder datasets use more experts"."""
    for experts, expected in (((2, 2.01, 2.02), HOLDS), ((2, 2, 3), FAILS), ((2, 3, 3), FAILS)):
        runs = (record(data, experts=float(num)) for data, num in zip(DATA, experts, strict=True))
        assert verdict("harder data", *runs) == expected


@pytest.mark.parametrize(("third", "expected"), [(0.19, HOLDS), (0.21, FAILS)])
def test_easy_classes_need_a_correlation_below_a_fifth_which_chance_gives_ten_classes_easily(record, third, expected):
    """Accuracies orthogonal to the experts but for a share −c: then the correlation is −c, here −0.21 and −0.19."""
    share = 0.4 - third
    experts = [-1.0, 0.0, 1.0]
    # orthogonal to `experts` and to ones, of the same length √2
    other = [value / 3**0.5 for value in (1.0, -2.0, 1.0)]
    accuracies = [-share * a + (1 - share**2) ** 0.5 * b for a, b in zip(experts, other, strict=True)]
    one = with_figures(record(), experts_per_class=experts, accuracy_per_class=accuracies)
    claim = evaluate_claims(Results([one]))["easy classes"]
    assert claim.number == pytest.approx(-share)
    assert claim.verdict == expected


@pytest.mark.parametrize(("last", "expected"), [(0.8971, HOLDS), (0.8969, FAILS)])
def test_a_sequence_may_fall_by_three_tenths_of_a_point(record, last, expected):
    assert verdict("rising sequence", record(prefixes=[0.5, 0.9, last])) == expected


def test_a_sequence_that_ends_where_it_began_does_not_rise(record):
    """ "Predictions with increasing accuracy"."""
    assert verdict("rising sequence", record(prefixes=[0.9, 0.9, 0.9])) == FAILS
    assert verdict("rising sequence", record(prefixes=[0.9, 0.9, 0.901])) == HOLDS


def test_one_dead_expert_is_not_balanced_and_as_even_as_top_k_is(record):
    """ "A balanced use of experts without needing a load-balancing mechanism"; dead: fewer than one image in a thousand."""

    def balance_verdict(ours, theirs):
        pair = with_figures(record(), expert_load=ours), with_figures(record(label="top-k"), expert_load=theirs)
        return verdict("balanced use", *pair)

    even, uneven = [[0.5] * 8] * 4, [[0.5] * 7 + [0.4]] * 4
    assert balance_verdict(even, even) == HOLDS
    assert balance_verdict(uneven, even) == FAILS
    rare, poor = [[0.5] * 7 + [0.0011]], [[0.5] * 7 + [0.0009]]
    lopsided = [[0.9] + [0.01] * 7] * 4
    assert balance_verdict(rare + even[:3], lopsided) == HOLDS
    assert balance_verdict(poor + even[:3], lopsided) == FAILS


@pytest.mark.parametrize(("theirs", "ours", "expected"), [(19, 17, HOLDS), (21, 19, FAILS), (20, 20, FAILS)])
def test_a_tenth_fewer_epochs_is_what_the_abstract_says_at_least(record, theirs, ours, expected):
    """ "A reduction in training epochs of 10 % to 40 %": 2 of 19 epochs are 10.5 %, 2 of 21 are 9.5 %."""

    def curve(num):
        return [0.5] * (num - 1) + [0.9] * (22 - num)

    pair = record(label="top-k", curve=curve(theirs)), record(label="mre", curve=curve(ours))
    assert verdict("fewer epochs", *pair) == expected


@pytest.mark.parametrize(("accuracy", "epoch"), [(0.8951, 1), (0.8949, 2)])
def test_the_margin_is_half_a_point(record, accuracy, epoch):
    assert settled(record(curve=[accuracy, 0.9])) == epoch
    baseline, ours = record(label="top-k", curve=[0.5, 0.9]), record(label="mre", curve=[accuracy, 0.9])
    assert verdict("fewer epochs", baseline, ours) == (HOLDS if epoch == 1 else FAILS)
    assert first_reach(ours, accuracy) == 1


@pytest.mark.parametrize(("width", "expected"), [(0.0099, HOLDS), (0.0101, FAILS)])
@pytest.mark.parametrize("ends", [(10, 20), (20, 50), (10, 50)])
def test_temperatures_from_10_to_50_inclusive_stay_within_a_point(record, width, expected, ends):
    """ "Robust … in a range between 10 and 50"."""

    def runs(**more):
        taus = {ends[0]: 0.8, ends[1]: 0.8 + width} | more.pop("others", {})
        return [
            record(label=f"mre-paper-tau-{tau}", group="temperature", family="mre-paper", setting=tau, accuracy=value)
            for tau, value in taus.items()
        ]

    assert verdict("temperature", *runs()) == expected
    assert verdict("temperature", *runs(others={9: 0.2, 51: 0.2})) == expected  # outside of the claim


@pytest.mark.parametrize(("times", "expected"), [(5.1, HOLDS), (4.9, PARTLY), (2.1, PARTLY), (1.9, FAILS)])
def test_half_of_the_ten_times_higher_rate_holds_and_twice_is_a_part(record, times, expected):
    """ "Learning rates one order of magnitude larger"."""
    grid = (1e-4, 1e-3, times * 1e-3)
    runs = [
        record("mnist", f"{label}-lr-{lr:g}", group="search", family=label, setting=lr, lr=lr,
               validation=0.9 if lr == best else 0.8)
        for label, best in (("mre", grid[2]), ("top-k", grid[1]))
        for lr in grid
    ]  # fmt: skip
    claim = evaluate_claims(Results(runs))["learning rate"]
    assert claim.number == pytest.approx(times)
    assert claim.verdict == expected
