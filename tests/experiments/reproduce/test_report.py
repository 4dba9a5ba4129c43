"""What is written: the summary's shape, the tables, and a page that needs no other file."""

import json
import re
from dataclasses import replace

import pytest

from experiments.reproduce.figures import save_figures
from experiments.reproduce.plan import FULL, QUICK
from experiments.reproduce.records import Results
from experiments.reproduce.report import write_report
from experiments.reproduce.tables import README_NAMES, all_tables, equal_terms_table, readme_table
from experiments.reproduce.variants import PAPER_VARIANTS

FIELDS = ["accuracy_mean", "accuracy_std", "seeds", "experts_mean", "macs_mean", "parameters", "epochs", "seconds"]


@pytest.fixture
def results(record):
    labels = [variant.label for variant in PAPER_VARIANTS]
    settings = [("dense-1", "dense", 1), ("dense-4", "dense", 4), ("mre-target-2", "mre", 2.0)]
    main = [
        record(data, label, seed, family=family, setting=setting, accuracy=0.9 + 0.01 * seed, curve=[0.8, 0.9], experts=3.0 + len(data))
        for data in ("mnist", "digits")
        for label, family, setting in [*((label, label, None) for label in labels), *settings]
        for seed in range(2)
    ]  # fmt: skip
    equal = [record("mnist", label, 0, group="equal-lr", curve=[0.7, 0.8]) for label in labels]
    search = [
        record("mnist", f"top-k-lr-{lr:g}", 100, group="search", family="top-k", setting=lr, lr=lr, validation=10 * lr)
        for lr in (1e-3, 5e-3)
    ]
    return Results([*main, *equal, *search])


def tables(results):
    return {table.title: table for table in all_tables(results)}


def test_the_summary_has_the_shape_that_was_asked_for(results, tmp_path):
    write_report(results, FULL, tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert list(summary) == ["digits", "mnist", "claims"]
    assert list(summary["mnist"]["mre"]) == FIELDS
    one = summary["mnist"]["mre"]
    assert one["accuracy_mean"] == pytest.approx(0.905)
    assert one["accuracy_std"] == pytest.approx(0.00707107)
    assert (one["seeds"], one["parameters"], one["epochs"], one["seconds"]) == (2, 40_202, 2, 4.0)
    assert one["experts_mean"] == pytest.approx(8)
    assert one["macs_mean"] == pytest.approx(12_704 + 300 + 768 * 8)
    for claim in summary["claims"].values():
        assert {"claim", "verdict", "number"} <= set(claim)


def test_table_1_shows_our_numbers_beside_the_papers(results):
    text = tables(results)["Table 1: accuracy"].markdown()
    assert "| Top-2 MoE | 90.5 (0.7) | 9.0 | 90.5 (0.7) | 95.3 (0.3) | 8.0 |" in text


def test_table_2_counts_parameters_as_the_paper_does(results):
    rows = {row[0]: row for row in tables(results)["Table 2: parameters and experts used"].rows}
    # 8 of 32 experts run: 40,202 less 24 experts of 816
    assert rows["MNIST, MRE, our recipe"] == [
        "MNIST, MRE, our recipe",
        "40,202",
        "20,618",
        "8.00 ± 0.00",
        "40,202",
        "20,275",
        "7.5",
    ]


def test_the_readmes_table_has_both_terms_for_a_model_and_says_what_is_missing(results):
    table = readme_table(results)
    assert table.header == ["", "MNIST", "with exit loss"]
    rows = dict(zip(README_NAMES, (row[1:] for row in table.rows), strict=True))
    assert rows["MRE, our recipe"] == ["–", "90.50 ± 0.50 (8.0)"]
    assert rows["{cheap}"] == ["–", "90.50 ± 0.50 (8.0)"]
    assert "MRE, 8.0 to 9.0 experts" in [row[0] for row in table.rows]
    assert rows["*as the paper reports it*"] == ["*96.3 ± 0.1* (7.5)", "–"]
    assert len(table.note) <= 100
    assert ["MLP of width 36", "90.50 ± 0.50", "–"] in equal_terms_table(results).rows
    assert "standard error over 2 seeds" in tables(results)["Equal terms: without and with a loss on exits"].note


def test_the_readmes_table_has_a_column_for_wide_models_where_they_were_trained(results, record):
    wide = Results([record("union", "threshold", seed, accuracy=0.75 + 0.01 * seed) for seed in range(2)])
    table = readme_table(results, wide)
    assert table.header[-1] == "Union, 128 wide"
    column = dict(zip(README_NAMES, (row[-1] for row in table.rows), strict=True))
    assert column.pop("threshold").startswith("75.50 ± 0.50")
    assert set(column.values()) == {"–"}
    assert readme_table(results, Results([])).header == readme_table(results).header


def test_the_search_shows_every_rate_and_the_one_taken_in_bold(results):
    assert tables(results)["Learning-rate search"].rows == [["MNIST, top-k", "1.0", "**5.0**"]]


def test_the_page_needs_no_other_file_and_reads_in_the_dark(results, tmp_path):
    save_figures(
        ["fig2", "fig3", "fig6", "frontier"], results, ["mnist", "digits"], tmp_path / "figures", None, quick=False
    )
    write_report(results, FULL, tmp_path)
    page = (tmp_path / "report.html").read_text()
    sources = re.findall(r'(?:src|href)="([^"]{0,22})', page)
    assert len(sources) == 6
    assert all(source.startswith("data:image/png;base64") for source in sources)
    assert "http" not in page
    assert "prefers-color-scheme: dark" in page
    assert "quick" not in page.lower()


def test_quick_is_written_on_every_output(results, tmp_path):
    write_report(results, QUICK, tmp_path)
    for name in ("summary.json", "about.json", "tables.md", "table.md", "report.html"):
        assert "quick" in (tmp_path / name).read_text().lower(), name


def test_examples_are_drawn_from_the_data(results, tmp_path):
    written = save_figures(["fig5", "fig7"], results, ["digits"], tmp_path, None, quick=True)
    assert [path.stem for path in written] == ["fig5-digits", "fig5-paper-digits", "fig7-digits", "fig7-paper-digits"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_what_was_not_run_is_not_drawn(tmp_path):
    parts = ["fig2", "fig3", "fig5", "fig6", "fig7", "frontier", "union"]
    assert save_figures(parts, Results([]), ["mnist"], tmp_path, None, quick=False) == []
    assert all_tables(Results([])) == []


def test_early_stops_stand_beside_one_depth_for_all(record, tmp_path):
    """At 15 multiply-adds the line between the two depths is at 70 %; the two seeds gain 20 and 21 points on it."""
    exits = [{"accuracy": 0.5, "experts": 0.0, "macs": 10.0}, {"accuracy": 0.9, "experts": 4.0, "macs": 20.0}]

    def stopped(label, seed):
        cheap = {"within": 0.1, "accuracy": 0.9 + 0.01 * seed, "experts": 1.5, "macs": 15.0}
        dear = cheap | {"within": 0.0, "macs": 18.0}
        return replace(
            record("mnist", label, seed),
            early_exit={"points": [dear, cheap], "exits": exits, "runs": {"0": [6, 6], "3": [4, 2]}},
        )

    results = Results([stopped(label, seed) for label in ("mre", "dense-8-exits") for seed in range(2)])
    (row, other) = tables(results)["Early exit: MNIST"].rows
    assert row == ["dense-8-exits", "90.00 ± 0.00", "90.50 ± 0.50", "1.50", "15", "+20.50 ± 0.50"]
    assert other[1:] == row[1:]
    assert "dense-8-exits" not in str(tables(results)["Accuracy and cost: MNIST"].rows)
    (path,) = save_figures(["early-exit"], results, ["mnist"], tmp_path, None)
    assert path.name == "early-exit.png"


def test_the_papers_baselines_have_a_table_of_their_own(record):
    results = Results([record("mnist", "top-k-paper", accuracy=0.93), record("mnist", "mre-paper", accuracy=0.96)])
    rows = {row[0]: row[1:] for row in tables(results)["Table 1, all models as in the paper"].rows}
    assert rows["Top-2 MoE"][:2] == ["93.0 (0.0)", "95.3 (0.3)"]
    assert rows["MRE"][:2] == ["96.0 (0.0)", "96.3 (0.1)"]
    assert "top-k-paper" not in str(tables(results)["Accuracy and cost: MNIST"].rows)
