"""The learning-rate search."""

from dataclasses import replace

import pytest

from raytraced.reproduce.plan import FULL
from raytraced.reproduce.records import Results
from raytraced.reproduce.search import add_found, read_rates, write_rates

SCALE = replace(FULL, grid=(1e-3, 2e-3, 5e-3))


def searches(record, accuracies, data="mnist", label="top-k"):
    return [
        record(data, f"{label}-lr-{lr:g}", 100, group="search", lr=lr, validation=accuracy or 0.0, accuracy=0.99, error=None if accuracy else "not finite")
        for lr, accuracy in accuracies.items()
    ]  # fmt: skip


def test_the_best_on_validation_wins_whatever_the_test_images_say(record):
    found = add_found({}, Results(searches(record, {1e-3: 0.8, 2e-3: 0.9, 5e-3: 0.7})), SCALE)
    assert found["mnist"]["top-k"]["lr"] == 2e-3
    assert found["mnist"]["top-k"]["validation"] == {"0.001": 0.8, "0.002": 0.9, "0.005": 0.7}


def test_of_equals_the_smaller_wins_and_a_diverged_run_loses(record):
    assert (
        add_found({}, Results(searches(record, {1e-3: 0.8, 2e-3: 0.8, 5e-3: None})), SCALE)["mnist"]["top-k"]["lr"]
        == 1e-3
    )


def test_rates_within_a_tenth_of_a_point_are_equal(record):
    near, far = {1e-3: 0.8, 2e-3: 0.9, 5e-3: 0.9009}, {1e-3: 0.8, 2e-3: 0.9, 5e-3: 0.9011}
    at_the_edge = {
        1e-3: 0.8,
        2e-3: 0.9705,
        5e-3: 0.9715,
    }  # 6 of 6,000 images
    rates = [
        add_found({}, Results(searches(record, found)), SCALE)["mnist"]["top-k"]["lr"]
        for found in (near, far, at_the_edge)
    ]
    assert rates == [2e-3, 5e-3, 2e-3]


def test_the_union_has_a_grid_of_its_own(record):
    scale = replace(SCALE, union_grid=(1e-3, 5e-3))
    runs = searches(record, {1e-3: 0.8, 5e-3: 0.7}, data="union")
    assert add_found({}, Results(runs), scale)["union"]["top-k"]["lr"] == 1e-3
    assert add_found({}, Results(runs), replace(scale, union_grid=(1e-3, 2e-3, 5e-3))) == {}


def test_an_incomplete_search_finds_nothing(record):
    assert add_found({}, Results(searches(record, {1e-3: 0.8, 5e-3: 0.7})), SCALE) == {}


def test_a_search_that_always_diverges_is_an_error(record):
    with pytest.raises(ValueError, match="top-k on mnist: diverged at every learning rate"):
        add_found({}, Results(searches(record, dict.fromkeys(SCALE.grid))), SCALE)


def test_what_was_found_is_kept(tmp_path, record):
    earlier = {"cifar10": {"mre": {"lr": 5e-3}}}
    found = add_found(earlier, Results(searches(record, {1e-3: 0.8, 2e-3: 0.9, 5e-3: 0.7})), SCALE)
    write_rates(tmp_path / "lr.json", found)
    assert read_rates(tmp_path / "lr.json") == found
    assert found["cifar10"] == earlier["cifar10"]
    assert read_rates(tmp_path / "absent.json") == {}
