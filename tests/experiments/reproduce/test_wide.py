"""The union at a larger width: equal terms, a folder of its own, and verdicts on hand-made records."""

from collections import Counter

import pytest

from experiments.reproduce import command
from experiments.reproduce.plan import FULL, WIDE, Planner, collect_runs
from experiments.reproduce.records import Record, Results
from experiments.reproduce.variants import wide_variants
from experiments.reproduce.wide import against_table
from raytraced.cost import sample_cost
from raytraced.models.registry import build

LABELS = [one.label for one in wide_variants()]
RATES = {"union": dict.fromkeys(LABELS, 2e-3)}


def test_every_model_has_a_search_of_its_own_over_the_same_rates():
    runs = collect_runs(["wide"], Planner(WIDE, {}), None)
    assert {run.group for run in runs} == {"search"}
    assert Counter(run.family for run in runs) == dict.fromkeys(LABELS, 3)
    assert len({run.config.lr for run in runs}) == 3


def test_the_runs_are_those_of_the_union_but_for_the_width():
    runs = collect_runs(["wide"], Planner(WIDE, RATES), None)
    assert Counter(run.label for run in runs) == dict.fromkeys(LABELS, 5)
    assert {run.config.model_options["dim"] for run in runs} == {128}
    assert {run.config.exit_loss for run in runs} == {0.0}
    narrow = {
        run.label: run
        for run in collect_runs(["union"], Planner(FULL, RATES), None)
        if run.seed == 0 and run.label in LABELS
    }
    assert {"threshold", "top-k", "dense-8"} <= set(narrow)
    for run in runs:
        if run.seed == 0 and run.label in narrow:
            ours, theirs = run.public_config, narrow[run.label].public_config
            assert {key for key in ours if ours[key] != theirs[key]} == {"model_options"}
            assert ours["model_options"] == theirs["model_options"] | {"dim": 128}


def test_no_other_scale_plans_it():
    assert not collect_runs(["wide"], Planner(FULL, RATES), None)


def test_eight_experts_take_more_multiply_adds_than_all_the_rest():
    import torch

    model = build("dense", image_shape=(3, 32, 32), num_classes=30, num_blocks=8, dim=128).eval()
    images = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    cost = sample_cost(model, images, model(images))
    assert float(cost.expert_macs) > float(cost.macs) / 2


def test_it_is_asked_for_alone_and_in_full(tmp_path):
    with pytest.raises(ValueError, match="only=wide,fig2: wide has a folder of its own"):
        command.reproduce(only="wide,fig2", dry_run=True)
    with pytest.raises(ValueError, match="only=wide: a quick run of the union is --only union"):
        command.reproduce(quick=True, only="wide", dry_run=True)


def record(label: str, seed: int, accuracy: float, macs: float) -> Record:
    runs = collect_runs(["wide"], Planner(WIDE, RATES), None)
    run = next(one for one in runs if one.label == label and one.seed == seed)
    cost = dict.fromkeys(("input", "routing", "experts", "head"), macs / 4) | {"total": macs}
    test = {"accuracy": accuracy, "mean_experts": 4.0, "macs": cost}
    return Record(**vars(run), validation={"accuracy": accuracy}, test=test)


@pytest.mark.parametrize(("ours", "verdict"), [(0.80, "ahead"), (0.7505, "level"), (0.70, "behind")])
def test_ours_is_compared_with_the_best_of_at_most_its_cost(ours, verdict):
    found = [record("mre-final-loss", seed, ours + seed / 1000, 100.0) for seed in range(5)]
    found += [record("dense-1", seed, 0.70, 50.0) for seed in range(5)]
    found += [record("threshold", seed, 0.75 + seed / 1000, 90.0) for seed in range(5)]
    found += [record("top-k", seed, 0.99, 110.0) for seed in range(5)]  # more accurate, but costs more
    ((name, _, _, best, _, _, _, shown, _, on_line),) = against_table(Results(found)).rows
    assert (name, best, shown) == ("mre-final-loss", "threshold", verdict)
    assert on_line == "behind"  # halfway between 75 and 99 %
