"""The experiment on experts in a store, at a size of kilobytes, with paths drawn at random."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest

import raytraced
from experiments import BENCHMARKS
from experiments.store import quality
from experiments.store.contenders import CONTENDERS
from experiments.store.measure import load_records, measure
from experiments.store.report import BEST, check_aims, report
from experiments.store.traces import SMALL, STORE, write_experts
from raytraced.io.routes import model_digest

QUALITY = json.loads((BENCHMARKS / "store-quality.json").read_text())
SIZES = replace(SMALL, num_prompts=2, prefill=2, decoded=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("store")
    write_experts(path / STORE, SIZES)
    (path / "sizes.json").write_text(json.dumps(asdict(SIZES)))
    shape = (SIZES.num_prompts, SIZES.context, SIZES.depth, SIZES.num_experts)
    rng = np.random.default_rng(0)
    active, guess = rng.random((2, *shape)) < 0.25
    order = np.argsort(~active.reshape(*shape[:2], -1), axis=-1, kind="stable")
    counts = active.sum((2, 3))[..., None]
    nodes = np.where(np.arange(order.shape[-1]) < counts, order, -1)
    np.savez_compressed(path / "mre.npz", active=active, nodes=nodes)
    np.savez_compressed(path / "top-k.npz", active=active, guess=guess)
    measure(path, [25.0], rounds=2)
    return path


def test_every_contender_is_measured_in_each_round_and_a_second_run_resumes(folder):
    names = [row["name"] for row in load_records(folder)]
    assert names == [contender.name for contender in CONTENDERS] * 2
    measure(folder, [25.0], rounds=2)
    assert len(load_records(folder)) == len(names)


def test_planned_reads_waste_nothing_and_never_exceed_those_on_demand(folder):
    rows = {row["name"]: row for row in load_records(folder)}
    on_demand, best = rows["LRU on demand"], rows[BEST]
    assert best["num_wasted"] == best["unused"] == 0
    assert best["num_uses"] == on_demand["num_uses"] > 0
    assert best["num_reads"] <= on_demand["num_reads"]
    guessed = rows["top-k: LRU + next block's gate"]
    assert guessed["num_wasted"] + guessed["unused"] > 0  # random guesses are wrong


def test_an_aim_that_is_missed_is_reported_as_missed(folder):
    rows = load_records(folder)
    slow = [row | {"compute": 1e-9, "bytes_read": 1} if row["name"] == BEST else row for row in rows]
    wasteful = [row | {"num_wasted": 1} if row["name"] == BEST else row for row in rows]
    assert next(line for line in check_aims(slow) if "bound" in line[1])[-1] == "missed"
    assert next(line for line in check_aims(wasteful) if "wasted" in line[1])[-1] == "missed"
    quick = [row | {"compute": 1e9} for row in rows]  # the least of all runs counts
    assert next(line for line in check_aims(quick) if "bound" in line[1])[-1] == "met"


def test_the_report_has_every_contender_and_a_picture(folder, tmp_path):
    report(folder, tmp_path, tmp_path / "store.png")
    text = (tmp_path / "store.md").read_text()
    assert all(text.count(f"| {contender.name} |") == 2 for contender in CONTENDERS)
    assert (tmp_path / "store.png").stat().st_size > 10_000
    assert all("timeline" not in json.loads(line) for line in (tmp_path / "store.jsonl").read_text().splitlines())


def test_the_quality_of_a_deadline_on_the_pages_is_that_of_the_records():
    assert (BENCHMARKS / "store-quality.md").read_text() == quality.quality_page(QUALITY)
    page = quality.PAGE.read_text(encoding="utf-8")
    assert quality.quality_words(QUALITY) in page
    assert quality.with_words(page, QUALITY) == page


def test_the_quality_of_a_deadline_is_that_of_the_shipped_model():
    digest = model_digest(raytraced.load(quality.MODEL))
    assert QUALITY["sha256"] == digest, "the model is another one: run `python -m experiments.store quality`"


def test_more_reads_or_more_memory_run_more_experts_and_a_large_deadline_leaves_nothing_out():
    experts = {(row["limit"], row["reads"]): row["experts"] for row in QUALITY["rows"]}
    for limit in quality.LIMITS:
        column = [experts[limit, reads] for reads in quality.READS]
        assert column == sorted(column)
        assert column[0] == 0
    for reads in quality.READS:
        row = [experts[limit, reads] for limit in quality.LIMITS]
        assert row == sorted(row)
    model = raytraced.load(quality.MODEL)
    found = quality.measure_quality(model, (50.0,), (32,), eval_tokens=512)
    (row,) = found["rows"]
    assert found["windows"] == 4
    assert {"bits": row["bits"], "experts": row["experts"]} == pytest.approx(found["all"])
