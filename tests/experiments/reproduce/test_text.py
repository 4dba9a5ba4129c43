"""The language models' part: fair, resumable, and written as a table and a figure."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.reproduce import command, plan
from experiments.reproduce.plan import BYTES, FULL, TEXT, TEXT_MAIN, TEXT_WORDS, TOKENIZER, Planner, collect_runs
from experiments.reproduce.records import Record, Results, Store, read_searches
from experiments.reproduce.variants import (
    MAIN_ROWS,
    main_pair_variants,
    main_text_variants,
    more_text_variants,
    pair_text_variants,
    text_variants,
    word_variants,
)
from raytraced.models.registry import build

RATES = {"enwik8": {"mre": 4e-3, "planned-2": 2e-3, "dense-2": 8e-3, "top-2": 1e-3}}
TINY = replace(
    BYTES,
    epochs=1,
    options={"dim": 8, "hidden": 8, "num_heads": 2, "depth": 4},
    training={"batch_size": 2, "data_options": {"context": 8, "steps": 2, "eval_tokens": 64}},
)


def test_all_models_are_trained_alike_except_for_their_recipe():
    runs = collect_runs(["text"], Planner(TEXT, RATES), None)
    assert {run.data for run in runs} == {"enwik8"}
    shared = (
        "epochs",
        "batch_size",
        "optimizer",
        "schedule",
        "warmup",
        "weight_decay",
        "clip",
        "patience",
        "data_options",
    )
    assert len({str([getattr(run.config, name) for name in shared]) for run in runs}) == 1
    assert {run.config.target_experts for run in runs} == {None}
    assert {run.config.lr_routing for run in runs if "mre" not in run.label} == {None}
    groups = {"mre": ("mre",), "dense-2": ("dense",), "planned-2": ("planned", "hash", "first-block")}
    for label, rate in RATES["enwik8"].items():
        others = tuple(prefix for source, group in groups.items() if source != label for prefix in group)
        mine = [run for run in runs if run.label.startswith(groups.get(label, ""))]
        mine = mine if label in groups else [run for run in runs if not run.label.startswith(others)]
        assert {run.config.lr for run in mine} == {rate}, label


def test_all_searches_have_as_many_runs():
    runs = collect_runs(["text"], Planner(TEXT, {}), None)
    assert {(run.group, run.data) for run in runs} == {("search", "enwik8")}
    searched = Counter(run.family for run in runs)
    assert searched == {"mre": 3, "top-2": 3, "planned-2": 3, "dense-2": 3}
    best_at_the_edge = {lr: -2.5 - lr for lr in BYTES.grid}
    found = Results(search_record(run, best_at_the_edge[run.config.lr]) for run in runs)
    rates, grids = read_searches(found, TEXT)
    assert rates == {"enwik8": dict.fromkeys(searched, BYTES.grid[0])}
    assert set(grids.values()) == {BYTES.grid}  # no model gets a fourth run


def test_every_model_on_bytes_may_be_searched_and_no_run_follows():
    labels = {one.label for one in (*text_variants(), *more_text_variants())}
    runs = collect_runs(["text-searches"], Planner(TEXT, {}), None)
    assert {run.group for run in runs} == {"search"}
    assert Counter(run.family for run in runs) == dict.fromkeys(labels, len(BYTES.grid))
    rates, _ = read_searches(Results(search_record(run, -2.5 - run.config.lr) for run in runs), TEXT)
    assert set(rates["enwik8"]) == labels
    shared = {label: rates["enwik8"][label] for label in RATES["enwik8"]}
    own = dict.fromkeys(labels, 1.0) | shared  # the rates of the groups count, not those of the models
    configs = [
        [run.digest for run in collect_runs(["text"], Planner(TEXT, {"enwik8": known}), None)]
        for known in (own, shared)
    ]
    assert configs[0] == configs[1]


def search_record(run, score):
    return Record(**vars(run), validation={"bits_per_byte": -score})


def test_runs_are_ordered_by_seed_so_that_a_stop_leaves_whole_seeds():
    runs = collect_runs(["text"], Planner(TEXT, RATES), ("enwik8",))
    labels = [one.label for one in text_variants()]
    main = [run.seed for run in runs if run.label in labels]
    assert main == sorted(main)
    assert [run.label for run in runs][: len(main)] == labels * 5


def test_all_routed_models_have_the_same_experts():
    sizes = set()
    for variant in (*text_variants(), *more_text_variants()):
        if variant.model != "gpt-dense":
            model = build(variant.model, context=64, **BYTES.options | variant.options)
            sizes |= {sum(one.numel() for one in layer.experts.parameters()) for layer in model.routed_layers()}
    assert sizes == {4 * 16 * (64 * 128 + 128 + 128 * 64 + 64)}


def test_every_model_of_pairs_has_a_search_of_its_own_on_bytes_alone():
    labels = [one.label for one in pair_text_variants()]
    searches = collect_runs(["pairs"], Planner(TEXT, {}), None)
    assert Counter((run.data, run.family) for run in searches) == {("enwik8", label): 3 for label in labels}
    runs = collect_runs(["pairs"], Planner(TEXT, {"enwik8": dict.fromkeys(labels, 6e-3)}), None)
    assert [(run.seed, run.label) for run in runs] == [(seed, label) for seed in range(5) for label in labels]
    first = {one.label: one for one in text_variants()}
    for variant in pair_text_variants():
        one = first[variant.label.removesuffix("-pair")]
        assert (variant.options, variant.training) == (one.options | {"path_tokens": 2}, one.training)


def test_texts_are_no_part_of_the_images_evidence():
    assert not any(run.config.model.startswith("gpt") for run in plan.every_run(Planner(FULL, {})))


def test_text_is_asked_for_by_itself():
    with pytest.raises(ValueError, match="only=text,fig2: text has a folder of its own"):
        command.reproduce(only="text,fig2", dry_run=True)


def test_words_are_trained_alike_too_and_longer_than_bytes():
    rates = {"enwik8": {"mre": 4e-3, "planned-2": 2e-3, "dense-2": 8e-3, "top-2": 1e-3}}
    runs = collect_runs(["words"], Planner(TEXT_WORDS, rates), None)
    labels = [one.label for one in word_variants()]
    assert [run.label for run in runs] == 3 * labels
    assert [run.seed for run in runs] == sorted(run.seed for run in runs)
    (options,) = {str(run.config.data_options) for run in runs}
    assert TOKENIZER in options
    (length,) = {run.config.epochs * run.config.data_options["steps"] for run in runs}
    assert length == 3 * BYTES.epochs * BYTES.training["data_options"]["steps"]
    definition = json.loads(Path(__file__).parents[3].joinpath(TOKENIZER).read_text())
    assert len(definition["model"]["vocab"]) == 2048
    searched = Counter(run.family for run in collect_runs(["words"], Planner(TEXT_WORDS, {}), None))
    assert searched == {"mre": 4, "top-2": 4, "planned-2": 4, "dense-2": 4}


def test_every_model_of_the_main_size_has_a_search_of_its_own_and_the_longest_training():
    labels = [one.label for one in main_text_variants()]
    searches = collect_runs(["main"], Planner(TEXT_MAIN, {}), None)
    assert Counter(run.family for run in searches) == dict.fromkeys(labels, 3)
    assert {run.config.epochs * run.config.data_options["steps"] for run in searches} == {1000}
    runs = collect_runs(["main"], Planner(TEXT_MAIN, {"enwik8": dict.fromkeys(labels, 6e-3)}), None)
    assert [(run.seed, run.label) for run in runs] == [(seed, label) for seed in range(3) for label in labels]
    assert {run.config.epochs * run.config.data_options["steps"] for run in runs} == {5000}
    bytes_and_words = {one.label: one for one in (*text_variants(), *more_text_variants())}
    assert all(one.options == bytes_and_words[one.label].options for one in main_text_variants())


def test_pairs_at_the_main_size_differ_from_its_rows_in_the_path_alone():
    labels = [one.label for one in main_pair_variants()]
    searches = collect_runs(["main-pairs"], Planner(TEXT_MAIN, {}), None)
    assert Counter(run.family for run in searches) == dict.fromkeys(labels, 3)
    rates = {"enwik8": dict.fromkeys([*labels, *MAIN_ROWS], 6e-3)}
    pairs, rows = (collect_runs([part], Planner(TEXT_MAIN, rates), None) for part in ("main-pairs", "main"))
    assert [(run.seed, run.label) for run in pairs] == [(seed, label) for seed in range(3) for label in labels]
    configs = {(run.seed, run.label): run.config for run in rows}
    for run in pairs:
        one = configs[run.seed, run.label.removesuffix("-pair")]
        assert run.config == replace(one, model_options=one.model_options | {"path_tokens": 2})


@pytest.mark.parametrize("part", ["words", "main"])
def test_each_comparison_has_a_folder_of_its_own(part):
    with pytest.raises(ValueError, match=f"only={part},fig2: {part} has a folder of its own"):
        command.reproduce(only=f"{part},fig2", dry_run=True)
    with pytest.raises(ValueError, match=f"only={part}: a quick run of text is --only text"):
        command.reproduce(quick=True, only=part, dry_run=True)


def test_a_quick_run_trains_evaluates_bits_and_writes_the_page(tmp_path, monkeypatch, capsys):
    kept = [one for one in text_variants() if one.label in ("mre", "mre-range", "dense-2", "top-2", "matryoshka")]
    monkeypatch.setattr(plan.variants, "text_variants", lambda: tuple(kept))
    monkeypatch.setattr(plan.variants, "pair_text_variants", lambda: ())
    monkeypatch.setattr(plan.variants, "more_text_variants", lambda: ())
    monkeypatch.setattr(plan.variants, "word_variants", lambda: ())
    monkeypatch.setattr(plan.variants, "main_text_variants", lambda: ())
    monkeypatch.setattr(plan.variants, "main_pair_variants", lambda: ())
    monkeypatch.setattr(plan, "BYTES", TINY)
    monkeypatch.setattr(command, "TEXT_QUICK", replace(plan.TEXT_QUICK, data={"shakespeare": TINY}))
    assert command.reproduce(quick=True, only="text", output=str(tmp_path), workers=1) == 0
    folder = tmp_path / "quick" / "text"
    assert capsys.readouterr().out.strip().endswith("tables.md")
    summary = json.loads((folder / "summary.json").read_text())["shakespeare"]
    assert summary.keys() == {one.label for one in kept}
    records = Store(folder / "records").records.values()
    for record in records:
        assert summary[record.label]["bits_mean"] == pytest.approx(record.test["bits_per_byte"], rel=1e-5)
        assert summary[record.label]["macs_mean"] == pytest.approx(record.macs["total"], rel=1e-5)
        assert summary[record.label]["experts_mean"] == pytest.approx(record.experts / 4, rel=1e-4)
        assert record.score == -record.validation["bits_per_byte"]
        assert record.history["validation_bits_per_byte"]
    assert 0 < summary["top-2"]["experts_mean"] <= 2
    (nested,) = [one for one in records if one.label == "matryoshka"]
    assert [(row["setting"], row["experts"]) for row in nested.dial] == [(1, 4), (2, 8), (4, 16), (8, 32)]
    assert nested.dial[1]["bits_per_byte"] == pytest.approx(nested.bits, rel=1e-4)  # as it was evaluated
    (turned,) = [one for one in records if one.label == "mre-range"]
    assert [row["setting"] for row in turned.dial] == [4, 1, 0.5, 0.2, 0.1, 0.05, 0.02]
    assert turned.dial[3]["bits_per_byte"] == pytest.approx(turned.bits, rel=1e-4)
    assert turned.dial[0]["experts"] < turned.dial[-1]["experts"]
    assert not any(one.dial for one in records if one.label in ("top-2", "dense-2"))
    assert (folder / "figures" / "text.png").stat().st_size > 10_000
    before = [one for one in folder.rglob("record.json")]
    assert command.reproduce(quick=True, only="text", output=str(tmp_path), workers=1) == 0  # nothing is left to train
    assert [one for one in folder.rglob("record.json")] == before


@pytest.mark.parametrize(("name", "scale"), [("text", TEXT), ("text-words", TEXT_WORDS)])
def test_every_record_in_results_is_of_a_run_that_is_still_planned(name, scale):
    folder = Path(__file__).parents[3] / "results" / name
    planner = command.find_plan(scale, folder)
    planned = {run.key: run.digest for run in plan.every_run(planner)}
    records = Store(folder / "records").records
    assert records
    assert {key: record.digest for key, record in records.items()}.items() <= planned.items()
