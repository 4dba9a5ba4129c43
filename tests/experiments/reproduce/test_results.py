"""What is committed in results/: every record is of a run that the code still plans, and every table is what it makes of them."""

import json
from pathlib import Path

import pytest

from experiments.reproduce.command import find_plan
from experiments.reproduce.plan import FULL, every_run
from experiments.reproduce.records import Store, write_line
from experiments.reproduce.report import over_seeds, wide_results
from experiments.reproduce.tables import all_tables, readme_table

RESULTS = Path(__file__).parents[3] / "results"


@pytest.fixture(scope="module")
def store():
    return Store(RESULTS / "records")


@pytest.fixture(scope="module")
def planned():
    return every_run(find_plan(FULL, RESULTS))


def test_every_record_is_of_a_run_with_the_configuration_in_the_code(store, planned):
    runs = {run.key: run for run in planned}
    assert len(store.records) >= 600
    for key, record in store.records.items():
        assert key in runs, key
        assert record.public_config == runs[key].public_config, key
        assert (record.family, record.setting, record.digest) == (runs[key].family, runs[key].setting, runs[key].digest)


def test_the_files_are_as_the_store_writes_them(store):
    for path in (RESULTS / "records").iterdir():
        lines = [write_line(one) for _, one in sorted(store.records.items()) if one.data == path.stem]
        assert path.read_text(encoding="utf-8") == "".join(lines), path.name


def test_summary_and_tables_are_what_the_records_say(store, planned):
    results = store.results(planned)
    summary = json.loads((RESULTS / "summary.json").read_text(encoding="utf-8"))
    assert [name for name in summary if name != "claims"] == results.data()
    for data in results.data():
        assert list(summary[data]) == results.labels(data)
        for label in results.labels(data):
            assert summary[data][label] == pytest.approx(over_seeds(results.of(data, label)), rel=1e-5)
    written = (RESULTS / "tables.md").read_text(encoding="utf-8")
    assert all(table.markdown() in written for table in all_tables(results))
    table = readme_table(results, wide_results(RESULTS))
    assert (RESULTS / "table.md").read_text(encoding="utf-8") == "\n".join([*table.lines(), "", table.note, ""])
