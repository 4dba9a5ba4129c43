"""Records and their means."""

import json
import statistics

import pytest

from raytraced.reproduce.records import Results, read_record, shorten, spread, write_record


def test_a_record_survives_its_file(tmp_path, record):
    one = record(accuracy=0.875)
    write_record(tmp_path / "raw" / "one.json", one)
    assert read_record(tmp_path / "raw" / "one.json") == one


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"digest": "0", "unheard": 1}'])
def test_what_is_no_record_counts_as_none(tmp_path, content):
    (tmp_path / "one.json").write_text(content)
    assert read_record(tmp_path / "one.json") is None
    assert read_record(tmp_path / "absent.json") is None


def test_spread_is_the_mean_and_the_sample_deviation():
    values = [0.1, 0.4, 0.35, 0.9]
    one = spread(values)
    assert one.mean == pytest.approx(statistics.mean(values))
    assert one.std == pytest.approx(statistics.stdev(values))
    assert one.error == pytest.approx(statistics.stdev(values) / 2)
    assert spread([0.5]) == (0.5, 0.0, 1)


def test_numbers_are_shortened_everywhere():
    assert (
        json.dumps(shorten({"a": [0.123456789, {"b": 1e-12 / 3}], "c": 7}))
        == '{"a": [0.123457, {"b": 3.33333e-13}], "c": 7}'
    )


def test_results_tell_groups_data_and_labels_apart_and_leave_diverged_runs_out(record):
    results = Results([
        record("mnist", "mre", 1), record("mnist", "mre", 0), record("mnist", "mre", 0, group="equal-lr"),
        record("cifar10", "mre", 0), record("mnist", "top-k", 0), record("mnist", "top-k", 1, error="not finite"),
    ])  # fmt: skip
    assert [one.seed for one in results.of("mnist", "mre")] == [0, 1]
    assert len(results.of("mnist", "top-k")) == 1
    assert results.data() == ["mnist", "cifar10"]
    assert results.labels("mnist") == ["mre", "top-k"]
