"""The learning-rate search."""

from dataclasses import replace

import pytest

from raytraced.reproduce.plan import FULL
from raytraced.reproduce.records import Results, write_record
from raytraced.reproduce.search import best_rates, every_search, find_rates

SCALE = replace(FULL, grid=(1e-3, 2e-3, 5e-3))


def searches(record, accuracies, data="mnist", label="top-k"):
    return [
        record(data, f"{label}-lr-{lr:g}", 100, group="search", lr=lr, validation=accuracy or 0.0, accuracy=0.99, error=None if accuracy else "not finite")
        for lr, accuracy in accuracies.items()
    ]  # fmt: skip


def test_the_best_on_validation_wins_whatever_the_test_images_say(record):
    found = best_rates(Results(searches(record, {1e-3: 0.8, 2e-3: 0.9, 5e-3: 0.7})), SCALE)
    assert found["mnist"]["top-k"] == 2e-3


def test_of_equals_the_smaller_wins_and_a_diverged_run_loses(record):
    assert best_rates(Results(searches(record, {1e-3: 0.8, 2e-3: 0.8, 5e-3: None})), SCALE)["mnist"]["top-k"] == 1e-3


def test_rates_within_a_tenth_of_a_point_are_equal(record):
    near, far = {1e-3: 0.8, 2e-3: 0.9, 5e-3: 0.9009}, {1e-3: 0.8, 2e-3: 0.9, 5e-3: 0.9011}
    at_the_edge = {1e-3: 0.8, 2e-3: 0.9705, 5e-3: 0.9715}  # 6 of 6,000 images
    rates = [
        best_rates(Results(searches(record, found)), SCALE)["mnist"]["top-k"] for found in (near, far, at_the_edge)
    ]
    assert rates == [2e-3, 5e-3, 2e-3]


def test_the_union_has_a_grid_of_its_own(record):
    scale = replace(SCALE, union_grid=(1e-3, 5e-3))
    runs = searches(record, {1e-3: 0.8, 5e-3: 0.7}, data="union")
    assert best_rates(Results(runs), scale)["union"]["top-k"] == 1e-3
    assert best_rates(Results(runs), replace(scale, union_grid=(1e-3, 2e-3, 5e-3))) == {}


def test_an_incomplete_search_finds_nothing(record):
    assert best_rates(Results(searches(record, {1e-3: 0.8, 5e-3: 0.7})), SCALE) == {}


def test_a_search_that_always_diverges_is_an_error(record):
    with pytest.raises(ValueError, match="top-k on mnist: diverged at every learning rate"):
        best_rates(Results(searches(record, dict.fromkeys(SCALE.grid))), SCALE)


def test_rates_come_from_the_records_of_searches_with_this_very_recipe(tmp_path, record):
    runs = [run for run in every_search(SCALE) if run.key.startswith("search-mnist-top-k-lr-")]
    assert {run.config.lr for run in runs} == set(SCALE.grid)
    for run in runs:
        accuracy = 0.9 if run.config.lr == 2e-3 else 0.8
        write_record(tmp_path / f"{run.key}.json", record("mnist", run.label, 100, group="search", lr=run.config.lr, digest=run.digest, validation=accuracy))  # fmt: skip
    assert find_rates(SCALE, tmp_path) == {"mnist": {"top-k": 2e-3}}
    longer = replace(SCALE, search_epochs=SCALE.search_epochs | {"mnist": 9})
    assert find_rates(longer, tmp_path) == {}
