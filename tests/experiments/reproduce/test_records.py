"""Records, their files and their means; the learning-rate search."""

import json
import statistics
from dataclasses import replace

import pytest

from experiments.reproduce.plan import FULL
from experiments.reproduce.records import Results, Store, read_line, read_searches, shorten, spread, write_line
from raytraced.training.config import TrainConfig


def test_a_record_survives_its_line(record):
    one = record(accuracy=0.875, family="mre", setting=0.25, config=TrainConfig(data="mnist", lr=1 / 3, model_options={"dim": 8}))  # fmt: skip
    line = write_line(one)
    assert line.endswith("}\n")
    assert line.count("\n") == 1
    assert read_line(line) == one


def test_what_is_private_to_a_machine_is_not_in_a_line(record):
    one = record(config=TrainConfig(data="mnist", data_root="/secret", runs_dir="/secret", name="secret", threads=7))
    assert "secret" not in write_line(one)
    assert "threads" not in write_line(one)


def test_records_are_kept_a_file_a_data_set_sorted_by_key_and_replaced_by_name(tmp_path, record):
    store = Store(tmp_path / "records")
    for one in (record(seed=1), record(seed=0), record("cifar10"), record(seed=1, accuracy=0.5)):
        store.put(one)
    assert sorted(path.name for path in (tmp_path / "records").glob("*.jsonl")) == ["cifar10.jsonl", "mnist.jsonl"]
    found = Store(tmp_path / "records").records
    assert list(found) == ["main-cifar10-mre-s0", "main-mnist-mre-s0", "main-mnist-mre-s1"]
    assert found["main-mnist-mre-s1"].accuracy == 0.5


@pytest.mark.parametrize("line", ["", "{", "[]", "{}", '{"config": {"unheard": 1}, "group": "main", "label": "mre"}'])
def test_a_line_that_is_not_a_record_is_refused_by_file_and_number(tmp_path, record, line):
    (tmp_path / "mnist.jsonl").write_text(write_line(record()) + line + "\n")
    with pytest.raises(ValueError, match=r"mnist\.jsonl, line 2: is not a record of this version .* remove the file"):
        Store(tmp_path)


def test_a_record_counts_for_its_very_configuration_only(tmp_path, record):
    store, one = Store(tmp_path), record()
    store.put(one)
    assert store.find(one) == one
    assert store.find(replace(one, config=replace(one.config, lr=1.0))) is None
    assert store.find(replace(one, label="absent")) is None


def test_spread_is_the_mean_and_the_sample_deviation():
    values = [0.1, 0.4, 0.35, 0.9]
    assert spread(values) == pytest.approx((statistics.mean(values), statistics.stdev(values), 4))
    assert spread([0.5]) == (0.5, 0.0, 1)
    assert spread([]).num == 0


def test_numbers_are_shortened_everywhere():
    given = {"a": [0.123456789, {"b": 1e-12 / 3}], "c": 7}
    assert json.dumps(shorten(given)) == '{"a": [0.123457, {"b": 3.33333e-13}], "c": 7}'


def test_results_tell_groups_data_and_labels_apart_and_leave_diverged_runs_out(record):
    results = Results([
        record("mnist", "mre", 1), record("mnist", "mre", 0), record("mnist", "mre", 0, group="equal-lr"),
        record("cifar10", "mre", 0), record("mnist", "top-k", 0), record("mnist", "top-k", 1, error="not finite"),
        record("union", "mre", 0),
    ])  # fmt: skip
    assert [one.seed for one in results.of("mnist", "mre")] == [0, 1]
    assert len(results.of("mnist", "top-k")) == 1
    assert results.data() == ["mnist", "cifar10", "union"]
    assert results.data(wide=False) == ["mnist", "cifar10"]
    assert results.labels("mnist") == ["mre", "top-k"]


GRID = (1e-3, 2e-3, 5e-3)
SCALE = replace(FULL, data=FULL.data | {"mnist": replace(FULL.data["mnist"], grid=GRID)})


@pytest.fixture
def search(record):
    def search(accuracies, data="mnist"):
        return Results(
            record(data, f"top-k-lr-{lr:g}", 100, group="search", family="top-k", setting=lr, lr=lr, accuracy=0.99,
                   validation=accuracy or 0.0, error=None if accuracy else "not finite")
            for lr, accuracy in accuracies.items()
        )  # fmt: skip

    return search


@pytest.fixture
def find(search):
    return lambda accuracies, data="mnist": read_searches(search(accuracies, data), SCALE)[0]


def test_the_best_rate_on_validation_wins_whatever_the_test_images_say(find):
    assert find({1e-3: 0.8, 2e-3: 0.9, 5e-3: 0.7}) == {"mnist": {"top-k": 2e-3}}


def test_of_equal_rates_the_smaller_wins_and_a_diverged_run_loses(find):
    assert find({5e-4: 0.7, 1e-3: 0.8, 2e-3: 0.8, 5e-3: None}) == {"mnist": {"top-k": 1e-3}}


@pytest.mark.parametrize(
    ("better", "worse", "taken"),
    [(0.9009, 0.9, 2e-3), (0.9011, 0.9, 5e-3), (0.9715, 0.9705, 2e-3)],  # the last: 6 of 6,000 images
)
def test_rates_within_a_tenth_of_a_point_are_equal(find, better, worse, taken):
    assert find({1e-3: 0.8, 2e-3: worse, 5e-3: better, 1e-2: 0.7})["mnist"]["top-k"] == taken


def test_a_data_set_may_have_a_grid_of_its_own(find):
    assert find({1e-3: 0.6, 2e-3: 0.8, 5e-3: 0.7}, "union") == {"union": {"top-k": 2e-3}}
    assert find({1e-3: 0.6, 2e-3: 0.8, 5e-3: 0.7}, "fashion-mnist") == {}  # five rates are tried there


def test_an_incomplete_search_finds_nothing(find):
    assert find({1e-3: 0.8, 5e-3: 0.7}) == {}


def test_a_search_that_always_diverges_is_an_error(find):
    with pytest.raises(ValueError, match="top-k on mnist: diverged at every learning rate"):
        find(dict.fromkeys(GRID))


@pytest.mark.parametrize(
    ("accuracies", "tried"),
    [
        ({}, None),
        ({1e-3: 0.9}, (1e-3, 2e-3, 5e-3)),  # not all of the grid yet
        ({1e-3: 0.7, 2e-3: 0.9, 5e-3: 0.8}, (1e-3, 2e-3, 5e-3)),
        ({1e-3: 0.7, 2e-3: 0.8, 5e-3: 0.9}, (1e-3, 2e-3, 5e-3, 1e-2)),
        ({1e-3: 0.7, 2e-3: 0.8, 5e-3: 0.9, 1e-2: 0.95}, (1e-3, 2e-3, 5e-3, 1e-2, 2e-2)),
        ({1e-3: 0.7, 2e-3: 0.8, 5e-3: 0.9, 1e-2: None}, (1e-3, 2e-3, 5e-3, 1e-2)),
        ({1e-3: 0.9, 2e-3: 0.8, 5e-3: 0.7}, (1e-3, 2e-3, 5e-3, 5e-4)),
    ],
)
def test_a_search_continues_while_its_best_rate_lies_on_the_edge(search, find, accuracies, tried):
    assert read_searches(search(accuracies), SCALE)[1].get(("mnist", "top-k")) == tried
    assert ("mnist" in find(accuracies)) == (tried is not None and set(tried) == set(accuracies))
    assert read_searches(search(accuracies), replace(SCALE, fixed_lr=1.0))[1].get(("mnist", "top-k"), GRID)[:3] == GRID
