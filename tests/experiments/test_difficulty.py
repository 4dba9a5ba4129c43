"""The table of benchmarks/difficulty.md follows from the arrays beside it."""

import numpy as np
import pytest

from experiments import BENCHMARKS
from experiments.difficulty import FILE, MODELS, UNION_PARTS, correlations, make_rows, page, second_recipe
from raytraced.tasks.images.catalog import CATALOG


def run_of(early, end, first, last):
    return {"early": np.array(early, np.uint8), "end": np.array(end, np.uint8),
            "first": np.array(first, np.float16), "last": np.array(last, np.float16)}  # fmt: skip


def test_correlations_are_of_ranks_with_the_other_loss_and_with_the_gain():
    hard = np.array([0.1, 0.2, 0.3, 4.0], np.float16)
    found = correlations(hard, run_of([1, 2, 3, 9], [9, 3, 2, 1], first=[4, 3, 2, 1], last=[0, 0, 0, 0]))
    assert found == pytest.approx([1, -1, -1, 1])


def test_the_union_has_a_row_for_each_data_set_within():
    """Between the parts experts rise with the loss; within each they fall."""
    hard = np.array([2, 1, 4, 3, 6, 5], np.float16)
    counts = [1, 2, 3, 4, 5, 6]
    run = run_of(counts, counts, first=hard, last=hard * 0)
    arrays = {"union/hard": hard, "union/part": np.array([0, 0, 1, 1, 2, 2], np.uint8)}
    arrays |= {f"union/mre/{seed}/{name}": values for seed in range(2) for name, values in run.items()}
    whole, *parts = make_rows(arrays, "union")
    assert whole[0] == "Union (30 classes)"
    assert float(whole[1].partition(" ")[0]) > 0.8
    assert [row[1] for row in parts] == ["-1.00 ± 0.00"] * 3
    assert [row[-1] for row in parts] == ["2 seeds"] * 3


def test_a_single_seed_has_no_error():
    run = run_of([1, 2, 3], [1, 2, 3], first=[1, 2, 3], last=[0, 0, 0])
    arrays = {"mnist/hard": np.array([1, 2, 3], np.float16)} | {f"mnist/mre/0/{name}": one for name, one in run.items()}
    assert list(make_rows(arrays, "mnist")) == [["MNIST", "1.00", "1.00", "1.00", "1.00", "1 seed"]]


@pytest.mark.parametrize(
    ("ranks", "words"), [(([0, 1, 3, 2], [0, 1, 2, 3]), "holds"), (([0, 1, 2, 3], [3, 1, 2, 0]), "fails")]
)
def test_the_fourth_rule_compares_the_second_recipe_with_the_first(ranks, words):
    arrays = {}
    for data in ("mnist", "fashion-mnist", "cifar10", "union"):
        arrays[f"{data}/hard"] = np.array([1, 2, 3, 4], np.float16)
        for label, counts in zip(("mre", "mre-budgets-exits"), ranks, strict=True):
            for seed in range(5):
                run = run_of(counts, counts, first=[1, 2, 3, 4], last=[0, 0, 0, 0])
                arrays |= {f"{data}/{label}/{seed}/{name}": values for name, values in run.items()}
    assert words in second_recipe(arrays)
    arrays.pop("union/mre-budgets-exits/4/early")
    arrays = {key: values for key, values in arrays.items() if not key.startswith("union/mre-budgets-exits/4")}
    assert "not decided yet" in second_recipe(arrays)


def test_the_parts_of_the_union_are_in_the_order_of_its_classes():
    assert tuple(part.name for part in CATALOG["union"].parts) == UNION_PARTS


def test_the_page_is_what_the_arrays_say():
    with np.load(FILE) as arrays:
        assert (BENCHMARKS / "difficulty.md").read_text(encoding="utf-8") == page(dict(arrays))
    assert FILE.stat().st_size < 3e5 * sum(MODELS.values())  # what a run of a model may take
