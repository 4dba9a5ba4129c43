"""Searches for learning rates as studies: what they try is what the rule says, and recorded results stay."""

from pathlib import Path

import pytest

pytest.importorskip("optuna", reason="needs optuna: pip install '.[sweep]'")

from experiments.reproduce import search
from experiments.reproduce.plan import FULL, Planner
from experiments.reproduce.records import Results, Store, read_searches
from experiments.reproduce.variants import PAPER_VARIANTS

ROOT = Path(__file__).parents[3]
MRE = PAPER_VARIANTS[0]


def runs_on(data="mnist", grid=None):
    planner = Planner(FULL, {}, {} if grid is None else {(data, MRE.label): grid})
    return planner.search(MRE, data)


def results_of(runs, scores, record):
    """Records of a search with these scores on validation data, by learning rate."""
    made = []
    for run in runs:
        if run.setting in scores:
            score = scores[run.setting]
            figures = {"error": "not finite"} if score is None else {"validation": score}
            made.append(
                record(run.data, run.label, run.seed, "search", config=run.config, family=run.family, **figures)
            )
    return Results(made)


@pytest.mark.parametrize(
    "scores",
    [
        {},
        {5e-4: 0.9},
        {5e-4: 0.5, 1e-3: 0.6, 2e-3: 0.7, 5e-3: 0.6, 1e-2: None},  # complete
        {5e-4: 0.5, 1e-3: 0.6, 2e-3: 0.7, 5e-3: 0.8, 1e-2: 0.9},  # the best is the largest
        {5e-4: 0.9, 1e-3: 0.6, 2e-3: 0.7, 5e-3: 0.8, 1e-2: 0.5},  # the best is the smallest
        {5e-4: 0.5, 1e-3: 0.6, 2e-3: 0.7, 5e-3: 0.8, 1e-2: 0.9, 2e-2: 0.95},  # and one beyond is better still
    ],
)
def test_a_study_tries_what_the_rule_of_the_records_says(tmp_path, record, scores):
    runs = runs_on(grid=(5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2))
    results = results_of(runs, scores, record)
    study = search.open_study(tmp_path, runs)
    search.report_scores(study, results.searches().get(("mnist", MRE.label), {}))
    rates = search.ask(study, FULL.data["mnist"].grid, extend=True)
    expected = read_searches(results, FULL)[1].get(("mnist", MRE.label), FULL.data["mnist"].grid)
    assert rates == tuple(sorted(expected))
    states = {lr: one.state.name for lr, one in search.rates_of(study).items()}
    ended = {None: "FAIL"}
    assert states == {lr: ended.get(scores[lr], "COMPLETE") if lr in scores else "RUNNING" for lr in rates}


def test_machines_share_a_study_and_begin_no_trial_twice(tmp_path, record):
    runs = runs_on()
    first = search.ask(search.open_study(tmp_path, runs), FULL.data["mnist"].grid, extend=True)
    study = search.open_study(tmp_path, runs)  # by another process
    assert search.ask(study, FULL.data["mnist"].grid, extend=True) == first
    assert len(study.trials) == len(first)
    search.report_searches(runs, results_of(runs, {lr: 0.5 + lr for lr in first}, record), tmp_path)
    assert search.ask(study, FULL.data["mnist"].grid, extend=True) == (*first, 2e-2)
    assert study.best_params == {"lr": 1e-2}


def test_another_recipe_has_another_study(tmp_path):
    one, other = runs_on("mnist"), runs_on("fashion-mnist")
    assert search.open_study(tmp_path, one).study_name != search.open_study(tmp_path, other).study_name
    names = {search.open_study(tmp_path, [run]).study_name for run in one}
    assert len(names) == 1  # the learning rate is not part of the recipe


def test_the_recorded_searches_keep_their_results_and_ask_for_nothing_more(tmp_path):
    from experiments.reproduce.command import find_plan
    from experiments.reproduce.plan import every_run

    planner = find_plan(FULL, ROOT / "results")
    results = Store(ROOT / "results/records").results(every_run(planner))
    assert planner.rates["mnist"]
    asked = search.ask_searches(planner, ["lr"], ("mnist",), results, tmp_path)
    assert asked == planner
