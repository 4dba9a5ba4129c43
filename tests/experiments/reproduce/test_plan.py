"""The table of runs: fair, separable, and named by what is in it."""

from dataclasses import replace

import pytest

from experiments.reproduce.plan import FULL, PARTS, QUICK, SEARCH_SEED, SETS, Planner, choose_parts, collect_runs
from experiments.reproduce.variants import (
    COST_SETTINGS,
    MRE_PAPER,
    PAPER_BASELINES,
    PAPER_VARIANTS,
    RECIPE,
    compared_variants,
)
from raytraced import PAPER, build
from raytraced.routers.raytraced_config import RaytracedConfig

EVERY_LABEL = {variant.label for variant in compared_variants(wide=False)}
KNOWN_RATES = {data: dict.fromkeys(EVERY_LABEL, 2e-3) for data in FULL.data}


@pytest.fixture
def planner():
    return Planner(FULL, KNOWN_RATES)


def test_the_recipes_of_the_records_are_those_that_the_code_builds():
    built = RaytracedConfig().for_grid(num_layers=4, num_experts=8)  # the grid of the records
    assert {name: getattr(built, name) for name in RECIPE} == RECIPE
    built = build("mre-paper", image_shape=(1, 8, 8), num_classes=10).card.options
    assert {name: built[name] for name in MRE_PAPER.options} == MRE_PAPER.options


@pytest.mark.parametrize("part", [*SETS["default"], "frontier", "union"])
def test_every_model_is_trained_alike_but_for_the_papers_own_recipe(planner, part):
    shared = ("epochs", "batch_size", "optimizer", "schedule", "warmup", "patience", "data_options", "label_smoothing", "weight_decay")  # fmt: skip
    for data in FULL.data:
        runs = [
            run
            for run in collect_runs([part], planner, None)
            if run.data == data and not run.label.endswith("-paper") and run.group == "main"
        ]
        assert len({str([getattr(run.config, name) for name in shared]) for run in runs}) <= 1


def test_the_best_epoch_by_validation_is_kept_for_every_model(planner):
    for run in collect_runs(["frontier"], planner, None):
        assert run.config.patience == run.config.epochs  # cannot run out, and patience keeps the best weights


def test_the_default_set_is_the_papers_models_over_three_data_sets_and_seeds(planner):
    runs = collect_runs(["table1"], planner, None)
    assert {(run.data, run.label, run.seed) for run in runs} == {
        (data, variant.label, seed)
        for data in ("mnist", "fashion-mnist", "cifar10")
        for variant in (*PAPER_VARIANTS, *PAPER_BASELINES)
        for seed in range(3)
    }


def test_an_unknown_learning_rate_asks_for_its_search_first():
    runs = collect_runs(["table1"], Planner(FULL, {}), ("mnist",))
    searched = {run.family for run in runs if run.group == "search"}
    assert searched == {variant.label for variant in PAPER_VARIANTS} - {"mre-paper"}
    tried = {run.setting: run.config.lr for run in runs if run.family == "top-k"}
    assert tried == {lr: lr for lr in FULL.data["mnist"].grid}
    assert {run.label for run in runs if run.group == "main"} == {"mre-paper", *(one.label for one in PAPER_BASELINES)}


def test_a_search_that_continues_plans_the_rates_beyond_its_grid():
    wider = (*FULL.data["mnist"].grid, 2e-2)
    runs = collect_runs(["table1"], Planner(FULL, {}, {("mnist", "top-k"): wider}), ("mnist",))
    tried = {label: {run.config.lr for run in runs if run.family == label} for label in ("top-k", "mre")}
    assert tried == {"top-k": {*wider}, "mre": {*FULL.data["mnist"].grid}}


def test_every_setting_of_a_baseline_is_trained_at_the_rate_of_its_default(planner):
    runs = collect_runs(["frontier"], planner, ("mnist",))
    for name, (option, default, settings) in COST_SETTINGS.items():
        assert getattr(build(name, image_shape=(1, 8, 8), num_classes=2).layer.router, option) == default
        points = [run for run in runs if run.family == name and run.setting is not None]
        assert {(run.setting, run.seed) for run in points} == {(one, seed) for one in settings for seed in range(3)}
        assert all(run.config.model_options[option] == run.setting and run.config.lr == 2e-3 for run in points)


@pytest.mark.parametrize("scale", [FULL, QUICK], ids=["full", "quick"])
def test_every_part_can_be_planned_with_no_learning_rate_known(scale):
    runs = collect_runs(PARTS, Planner(scale, {}), None)
    searched = {(run.data, run.family) for run in runs if run.group == "search"}
    if scale is FULL:
        assert {("mnist", "dense-4"), ("union", "dense-8"), ("cifar10", "top-k")} <= searched
    else:  # one rate for all models; the search is only run on digits
        assert {data for data, _ in searched} == {"digits"}


def test_the_searchs_seed_is_that_of_no_other_run(planner):
    for run in collect_runs(PARTS, planner, None):
        assert (run.seed == SEARCH_SEED) == (run.group == "search")


def test_at_an_equal_learning_rate_nothing_else_differs_from_a_models_own_run(planner):
    runs = collect_runs(["fig3"], planner, ("mnist",))
    main = {run.label: run.public_config for run in runs if run.group == "main" and run.seed == 0}
    equal = {run.label: run.public_config for run in runs if run.group == "equal-lr"}
    assert set(equal) == {variant.label for variant in PAPER_VARIANTS}
    for label, config in equal.items():
        assert config == main[label] | {"lr": 1e-3, "schedule": "constant"}


def test_wide_models_are_searched_for_and_trained_with_their_width():
    runs = collect_runs(["union"], Planner(FULL, {}), None)
    assert runs
    assert {run.config.model_options["dim"] for run in runs} == {64}


def test_settings_of_one_model_are_one_family_and_differ_in_a_number(planner):
    runs = {run.label: run for run in collect_runs(["frontier", "temperature"], planner, None)}
    found = {label: (run.family, run.setting) for label, run in runs.items()}
    assert found["mre"] == ("mre", None)
    assert found["mre-target-2"] == ("mre", 2.0)
    assert found["dense-4"] == ("dense", 4)
    assert found["mre-paper-tau-20"] == ("mre-paper", 20)
    assert runs["mre-target-2"].config.target_experts == 2.0
    assert runs["mre-paper-tau-50"].config.model_options == PAPER | {"temperature": 50.0}


def test_one_figure_needs_no_more_than_its_own_runs(planner):
    runs = collect_runs(["fig5"], planner, ("mnist",))
    assert [(run.data, run.label, run.seed) for run in runs] == [("mnist", "mre", 0), ("mnist", "mre-paper", 0)]


def test_runs_of_several_parts_are_shared(planner):
    together = collect_runs(["table2", "fig6", "frontier"], planner, None)
    assert len({run.key for run in together}) == len(together)
    frontier = collect_runs(["frontier"], planner, None)
    assert len(together) == len(frontier)  # it holds the seeds of table 1 too


def test_no_two_parts_mean_different_runs_by_one_name(planner):
    for wanted in (None, tuple(FULL.data)):
        runs = [run for part in PARTS for run in collect_runs([part], planner, wanted)]
        assert len({run.key for run in runs}) == len({(run.key, run.digest) for run in runs})


def test_another_configuration_is_another_run_but_another_folder_is_not(planner):
    run, _ = collect_runs(["fig5"], planner, ("mnist",))

    def digest(**changes):
        return replace(run, config=replace(run.config, **changes)).digest

    assert digest(lr=1e-3) != run.digest
    assert digest(model_options={"dim": 8}) != run.digest
    assert digest(runs_dir="elsewhere", threads=2) == run.digest


def test_the_quick_scale_has_every_part():
    runs = collect_runs([part for part in PARTS if part not in ("union", "ship")], Planner(QUICK, {}), None)
    steps = sum(run.config.epochs * {"digits": 1_294 / 64, "fashion-mnist": 54_000 / 256}[run.data] for run in runs)
    full_runs = collect_runs([part for part in PARTS if part != "ship"], Planner(FULL, KNOWN_RATES), None)
    assert steps < 0.01 * sum(run.config.epochs * 200 for run in full_runs)


@pytest.mark.parametrize(("name", "hint"), [("figg5", "did you mean fig5?"), ("zzz", "must be one of table1")])
def test_a_part_that_does_not_exist_is_refused_with_what_was_meant(name, hint):
    with pytest.raises(ValueError, match=f"only={name}: no such part; {hint}"):
        choose_parts([name])


def test_sets_stand_for_their_parts_in_the_tables_order():
    assert choose_parts(["fig6", "claims", "table1"]) == ["table1", "fig6", "lr", "balance", "temperature", "init"]
