"""Lines of baselines at equal MACs, and the verdicts on the aims, with made-up records."""

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.reproduce.command import find_plan
from experiments.reproduce.figures import save_figures
from experiments.reproduce.plan import TEXT, TEXT_MAIN, TEXT_WORDS, every_run
from experiments.reproduce.records import Results, Store
from experiments.reproduce.text import (
    aims_table,
    dial_table,
    pair_aims_table,
    pair_dial_table,
    read_seconds,
    seconds_table,
    text_table,
    text_tables,
    write_text,
)
from experiments.reproduce.text_aims import BASELINES, HASH, TOP_K, TWO_TOKENS, Aims, Level, frontier, gap
from experiments.reproduce.variants import MAIN_ROWS, pair_text_variants, text_variants
from experiments.text_seconds import measure

STOPS = (4.0, 1.0, 0.5, 0.2, 0.1, 0.05, 0.02)
SECONDS = {label: {"step": 0.1 * k, "token": 0.002 * k} for label, k in zip(TOP_K, (1, 2, 4), strict=True)}


def level(bits, macs, error=0.0):
    return Level("any", bits, error, macs, 1.0)


@pytest.fixture
def make(record):
    """Makes the records of all models: the bits of each, at 100 MACs and 25 more per expert."""

    def make_all(seeds=range(5), above=0.0, dead=False, skipped=(), **bits):
        records = []
        experts = {label: 2.0 for label in (*BASELINES, "mre", "mre-range")} | {
            "top-1": 1.0,
            "hash-1": 1.0,
            "top-4": 4.0,
        }
        given = {label: 2.5 for label in experts} | {"hash-1": 2.6, "top-1": 2.7, "top-4": 2.45} | bits
        for label, num in experts.items():
            for seed in seeds if label not in skipped else ():
                value = given[label] + 0.001 * (seed % 2)
                load = [[0.1] * 16 for _ in range(4)]
                load[3][5] = 0.0005 if dead and label == "mre-range" and seed == 1 else 0.1
                test = {"bits_per_byte": value, "mean_experts": 4 * num, "expert_load": load}
                macs = {"total": 100 + 25 * num, "routing": 1.0}
                counts = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0)
                dial = [
                    {"setting": stop, "experts": 4 * count, "macs": 100 + 25 * count,
                     "bits_per_byte": 2.6 - 0.1 * min(count - 1, 1) - 0.025 * max(count - 2, 0) + above + 0.001 * (seed % 2)}
                    for stop, count in zip(STOPS, counts, strict=True)
                ]  # fmt: skip
                own = {"dial": dial} if label == "mre-range" else {}
                records.append(record("enwik8", label, seed, test=test | {"macs": macs}, budgets=[], **own))
        return Results(records)

    return make_all


def verdicts(results, seconds=SECONDS | {"mre": {"step": 0.15, "token": 0.003}}):
    return {one.aim[0]: one for one in Aims(results, "enwik8", seconds).all()}


def test_a_frontier_leaves_out_what_another_undercuts():
    levels = [level(2.5, 200), level(2.6, 100), level(2.55, 210), level(2.4, 300), level(2.7, 100)]
    assert [(one.macs, one.bits) for one in frontier(levels)] == [(100, 2.6), (200, 2.5), (300, 2.4)]


def test_a_gap_is_taken_at_equal_macs_and_level_beyond_the_ends():
    line = [level(2.6, 100, 0.03), level(2.4, 300, 0.01)]
    middle = gap(level(2.45, 200, 0.02), line)
    assert middle.bits == pytest.approx(-0.05)
    assert middle.error == pytest.approx((0.02**2 + 0.02**2) ** 0.5)
    assert gap(level(2.45, 400), line).bits == pytest.approx(0.05)
    assert gap(level(2.55, 50), line).bits == pytest.approx(-0.05)


def test_aims_hold_and_fail_by_their_rules(make):
    level_with_all = verdicts(make())
    assert [level_with_all[n].holds for n in "123456"] == [True, True, False, False, True, True]
    assert [verdicts(make(mre=2.47))[n].holds for n in "134"] == [True, True, True]
    assert not verdicts(make(mre=2.506))["1"].holds
    assert not verdicts(make(**{"planned-2": 2.506}))["1"].holds
    assert not verdicts(make(above=0.021))["2"].holds
    assert verdicts(make(above=0.019))["2"].holds
    assert not verdicts(make(mre=2.47, above=0.011))["3"].holds
    assert not verdicts(make(mre=2.485))["3"].holds  # ahead, but not by 0.02
    assert not verdicts(make(dead=True))["5"].holds
    assert "mre-range 0, 1, 0, 0, 0" in verdicts(make(dead=True))["5"].found


def test_time_is_compared_at_equal_bits(make):
    # top-2 has as many bits as mre: a step of 0.2 s and a token of 0.004 s
    assert verdicts(make())["6"].found == "step 150.0 against 200.0 ms; token 3.0 against 4.0 ms"
    slow = SECONDS | {"mre": {"step": 0.15, "token": 0.005}}
    assert verdicts(make(), slow)["6"].holds is False
    # below all top-k: against the one with the lowest bits
    assert "against 400.0 ms" in verdicts(make(mre=2.3))["6"].found
    assert verdicts(make(), {})["6"].holds is None


def test_an_aim_with_missing_runs_is_not_judged(make):
    two = verdicts(make(seeds=range(2)))
    assert two["4"].words == "not decided yet, 6 of 15 runs"
    assert two["4"].found.startswith("mre ")  # figures so far
    without = verdicts(make(skipped=("hash-2",)))
    assert (without["4"].words, without["4"].found) == ("not decided yet, 10 of 15 runs", "–")
    assert without["5"].words == "holds"
    assert verdicts(Results([]))["1"].words == "not decided yet, 0 of 55 runs"


def test_the_tables_show_means_errors_and_what_was_not_measured(make):
    results = make()
    rows = {row[0]: row for row in text_table(results, "enwik8", SECONDS).rows}
    assert rows["`top-2`"] == ["`top-2`", "2.500 ± 0.000", "2.00", "0", "0.0", "0.0", "200.0", "4.0", "5"]
    assert rows["`mre`"][-3:-1] == ["–", "–"]
    assert seconds_table(SECONDS).rows[1:] == [["`top-2`", "200.0", "4.0"], ["`top-4`", "400.0", "8.0"]]
    (first, *_) = dial_table(results, "enwik8").rows
    assert first[:5] == ["`mre-range`", "`stop` 4", "1.00", "0", "2.600 ± 0.000"]
    assert first[5].lstrip("+-") == "0.000 ± 0.000"  # on the line up to rounding, from either side
    assert [row[1] for row in aims_table(results, "enwik8", {}).rows][:2] == ["holds", "holds"]
    assert not dial_table(Results([one for one in results.whole if one.label in HASH]), "enwik8").rows


def test_searches_alone_give_their_table_and_no_figure(record, tmp_path):
    one = record("enwik8", "mre-lr-0.003", 100, "search", family="mre")
    results = Results([replace(one, validation={"bits_per_byte": 3.3})])
    page = write_text(results, tmp_path, TEXT).read_text()
    assert "| enwik8, mre | **3.300** |" in page
    assert "Aims" not in page
    assert not save_figures(["text"], results, results.data(), tmp_path, None)


def test_a_step_and_a_token_are_timed_for_every_model(tmp_path):
    some = [one for one in text_variants() if one.label in ("mre", "hash-1")]
    found = measure(some, tmp_path, num_rounds=1)
    assert found.keys() == {"mre", "hash-1"}
    assert all(one.keys() == {"step", "token"} and min(one.values()) > 0 for one in found.values())


@pytest.mark.parametrize(("name", "scale"), [("text", TEXT), ("text-words", TEXT_WORDS), ("text-main", TEXT_MAIN)])
def test_the_committed_tables_are_those_of_the_records(name, scale):
    folder = Path(__file__).parents[3] / "results" / name
    results = Store(folder / "records").results(every_run(find_plan(scale, folder)))
    page = (folder / "tables.md").read_text(encoding="utf-8")
    for table in text_tables(results, read_seconds(folder), scale):
        assert table.markdown() in page, table.title


def main_record(record, label, seed, bits, experts, **own):
    test = {"bits_per_byte": bits + 0.001 * (seed % 2), "mean_experts": 4 * experts, "expert_load": [[0.1] * 16] * 4}
    return record(
        "enwik8", label, seed, budgets=[], test=test | {"macs": {"total": 100 + 25 * experts, "routing": 0.0}}, **own
    )


@pytest.mark.parametrize(("ours", "holds"), [(1.95, True), (2.05, False)])
def test_at_the_main_size_one_model_of_ours_stands_for_all_and_balanced_models_for_top_k(record, ours, holds):
    experts = {"top-4-balance": 4.0, "hash-1": 1.0, "dense-2": 1.0}
    dial = [{"setting": stop, "experts": 4 * num, "macs": 100 + 25 * num, "bits_per_byte": ours}
            for stop, num in ((1.0, 1.1), (0.2, 2.0), (0.02, 4.0))]  # fmt: skip
    records = [
        main_record(record, label, seed, ours if label == "mre-range" else 2.01, experts.get(label, 2.0),
                    **({"dial": dial} if label == "mre-range" else {}))
        for label in MAIN_ROWS for seed in range(3)
    ]  # fmt: skip
    times = {label: {"step": 0.1, "token": 0.01} for label in ("top-2-balance", "top-4-balance")}
    times["mre-range"] = {"step": 0.09, "token": 0.009}
    aims = Aims(Results(records), "enwik8", times, 3, MAIN_ROWS)
    assert [one.holds for one in aims.all()] == [holds, holds, holds, holds, True, True]
    assert aims.size().holds == holds
    assert "mre-range" in aims.planned().found
    fewer = Aims(Results(records[1:]), "enwik8", times, 3, MAIN_ROWS)
    assert fewer.size().holds is None


@pytest.mark.parametrize(
    ("ours", "table", "expected"),
    [(2.30, 2.40, [True, True]), (2.40, 2.30, [True, False]), (2.60, 2.70, [False, True])],
)
def test_pairs_are_compared_with_one_token_and_with_pairs_of_tables(make, record, ours, table, expected):
    """All cost as much, so that a line is level; `mre` has 2.5 bits."""
    bits = {"mre-pair": ours, "mre-range-pair": ours, "hash-1-pair": table, "hash-2-pair": table, "planned-2-pair": 2.5}
    dial = [{"setting": stop, "experts": 4 * num, "macs": 100 + 25 * num, "bits_per_byte": ours}
            for stop, num in ((1.0, 1.1), (0.2, 2.0), (0.02, 4.0))]  # fmt: skip
    pairs = [
        main_record(record, label, seed, value, 2.0, **({"dial": dial} if label == "mre-range-pair" else {}))
        for label, value in bits.items() for seed in range(5)
    ]  # fmt: skip
    results = Results([*make().whole, *pairs])
    rows = [one.label for variants in (text_variants(), pair_text_variants()) for one in variants]
    first, one_checkpoint, ahead, learned, alive = Aims(
        results, "enwik8", {}, rows=rows, compared=TWO_TOKENS
    ).of_pairs()
    assert [first.holds, learned.holds] == expected
    assert (
        one_checkpoint.holds == ahead.holds == (ours < min(table, 2.45))
    )  # the line of all baselines, pairs among them
    assert len(pair_dial_table(results, "enwik8").rows) == 3
    assert alive.holds
    assert pair_aims_table(results, "enwik8").rows[0][1] == first.words
    assert not pair_aims_table(make(), "enwik8").rows


@pytest.mark.parametrize(("ours", "holds"), [(2.30, True), (2.45, False)])
def test_at_the_main_size_one_model_of_two_tokens_is_compared_with_itself_of_one(record, ours, holds):
    bits = dict.fromkeys(MAIN_ROWS, 2.45) | dict.fromkeys(("hash-1-pair", "hash-2-pair", "planned-2-pair"), 2.5)
    bits["mre-range-pair"] = ours
    dial = [{"setting": 0.2, "experts": 8, "macs": 150, "bits_per_byte": ours}]
    records = [
        main_record(record, label, seed, value, 2.0, **({"dial": dial} if label.startswith("mre") else {}))
        for label, value in bits.items() for seed in range(3)
    ]  # fmt: skip
    rows = pair_aims_table(Results(records), "enwik8", TEXT_MAIN).rows
    assert rows[0] == ["1. two tokens below one by two standard errors", "holds" if holds else "fails", rows[0][2]]
    assert rows[0][2].startswith(f"mre-range-pair {ours - 2.45:+.3f}")
    undecided = pair_aims_table(Results(records[1:]), "enwik8", TEXT_MAIN).rows
    assert undecided[0][1] == "not decided yet, 5 of 6 runs"  # the first one left out is a seed of mre-range
