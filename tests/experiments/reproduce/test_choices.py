"""Whatever is chosen is chosen on validation images: budgets, learning rates, shipped seeds. Test images say the reverse here."""

from types import SimpleNamespace

import pytest

from experiments.reproduce import ship as shipping
from experiments.reproduce.plan import FULL, Planner
from experiments.reproduce.records import Results, read_searches
from experiments.reproduce.run import HISTORY, METRICS, MOST_BUDGETS, make_record
from experiments.reproduce.ship import ship_all
from experiments.reproduce.variants import MRE


def budget_rows(accuracies, macs):
    return [
        {"accuracy": accuracy, "experts": float(at), "macs": macs + at, "expert_macs": 10.0 * at}
        for at, accuracy in enumerate(accuracies)
    ]


@pytest.fixture
def folder():
    """A finished run whose validation and test figures have nothing in common."""

    def make(validation, test):
        own = dict.fromkeys(METRICS, 0.5)
        summary = {
            "best_epoch": 2, "parameters": 7, "seconds": 3.0, "versions": {},
            "validation": own | {"accuracy": validation[-1], "budgets": budget_rows(validation, 1000.0)},
            "test": own | {"accuracy": test[-1], "budgets": budget_rows(test, 2000.0)},
        }  # fmt: skip
        epochs = [dict.fromkeys(HISTORY, 0.1), dict.fromkeys(HISTORY, 0.2)]
        return SimpleNamespace(read_summary=lambda: summary, read_metrics=lambda: epochs)

    return make


@pytest.fixture
def run():
    return Planner(FULL, {"mnist": {"mre": 5e-3}}).runs("main", [MRE], ["mnist"], [0])[0]


def test_a_budgets_validation_figures_are_of_validation_images_and_the_rest_of_test_images(run, folder):
    record = make_record(run, folder([0.1, 0.2, 0.3], [0.6, 0.7, 0.8]))
    assert [row["validation_accuracy"] for row in record.budgets] == [0.1, 0.2, 0.3]
    assert [row["validation_macs"] for row in record.budgets] == [1000, 1001, 1002]
    assert [row["accuracy"] for row in record.budgets] == [0.6, 0.7, 0.8]
    assert [row["macs"] for row in record.budgets] == [2000, 2001, 2002]
    assert (record.validation["accuracy"], record.accuracy) == (0.3, 0.8)
    assert record.history["validation_accuracy"] == [0.1, 0.2]


@pytest.mark.parametrize(("num_validated", "num_tested"), [(2, 4), (4, 2), (1, 3)])
def test_where_one_split_has_longer_sequences_the_others_last_answers_stay(run, folder, num_validated, num_tested):
    validation, test = [0.1, 0.2, 0.3, 0.4][:num_validated], [0.6, 0.7, 0.8, 0.9][:num_tested]
    rows = make_record(run, folder(validation, test)).budgets
    assert [row["accuracy"] for row in rows] == test
    assert [row["validation_accuracy"] for row in rows] == (validation + validation[-1:] * 4)[:num_tested]


def test_a_record_has_no_more_budgets_than_a_figure_shows(run, folder):
    rows = make_record(run, folder([0.1] * 40, [0.2] * 40)).budgets
    assert len(rows) == MOST_BUDGETS + 1 == 21  # none, and 1 to 20
    assert rows[-1]["experts"] == 20


def test_the_learning_rate_is_chosen_on_validation_images_though_test_images_say_the_reverse(record):
    grid = FULL.data["mnist"].grid
    searches = [
        record("mnist", f"mre-lr-{lr:g}", 100, group="search", family="mre", setting=lr, lr=lr,
               validation=0.5 + 0.1 * place, accuracy=0.9 - 0.1 * place)
        for place, lr in enumerate(grid)
    ]  # fmt: skip
    beyond = record("mnist", "mre-lr-0.02", 100, group="search", family="mre", lr=2e-2, validation=0.1, accuracy=0.99)
    assert read_searches(Results([*searches, beyond]), FULL)[0] == {"mnist": {"mre": grid[-1]}}


def test_the_shipped_seed_is_chosen_on_validation_images_though_test_images_say_the_reverse(
    record, monkeypatch, tmp_path
):
    shipped = []
    monkeypatch.setattr(shipping, "ship", lambda name, one, run, folder, data_root: shipped.append((name, one.seed)))
    seeds = [
        record("mnist", "mre", seed, validation=0.7 + 0.05 * seed, accuracy=0.9 - 0.05 * seed) for seed in range(3)
    ]
    ship_all(Results(seeds), tmp_path)
    assert shipped == [("mre-mnist", 2)]
