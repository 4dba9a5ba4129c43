"""The aims of language models in benchmarks/aims-*.md: lines of baselines in bits against MACs, and the verdicts."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from experiments.reproduce.claims import num_dead
from experiments.reproduce.plan import TEXT
from experiments.reproduce.records import Record, Results, spread
from experiments.reproduce.variants import text_variants

NUM_BLOCKS, NUM_IN_BLOCK = 4, 16  # of every decoder here, and of each of its blocks
TOP_K = ("top-1", "top-2", "top-4")
BALANCED = ("top-2-balance", "top-4-balance")
OWN_INPUT = (*TOP_K, *BALANCED, "aux-free-2", "threshold", "seq-top-2", "depths-2", "matryoshka")
HASH = ("hash-1", "hash-2")
BASELINES = ("dense-2", *OWN_INPUT, *HASH, "planned-2")
OURS = ("mre", "mre-range")
ELASTIC = "mre-range"  # its dial is turned after training
PAIRS = {
    "mre": "mre-pair",
    ELASTIC: "mre-range-pair",
    "hash-1": "hash-1-pair",
    "hash-2": "hash-2-pair",
    "planned-2": "planned-2-pair",
}
FEWEST, MOST = 1.0, 4.5  # experts per block between which rows of the dial are compared with the aims
REACHED = (1.25, 3.5)  # and which they must reach

RIGHT_SIZE = 2.0  # bits that the best model at the main size is to be below
TIMED = ("step", "token")
Seconds = Mapping[
    str, Mapping[str, float]
]  # model → "step" and "token": seconds of a training step, of a generated token


class Level(NamedTuple):
    """Mean bits and MACs per test byte of a model, or of a setting of its dial.

    `error` is the standard error of the bits; NaN where there is one seed.
    """

    name: str
    bits: float
    error: float
    macs: float
    experts: float  # per block


class Verdict(NamedTuple):
    """What the runs say about an aim; `holds` is None while runs are missing."""

    aim: str
    holds: bool | None
    found: str
    num_runs: int
    num_planned: int

    @property
    def words(self) -> str:
        """The verdict as text."""
        if self.holds is None:
            return f"not decided yet, {self.num_runs} of {self.num_planned} runs"
        return "holds" if self.holds else "fails"


class Gap(NamedTuple):
    """Bits above a line at equal MACs, and the standard error of this difference."""

    name: str
    bits: float
    error: float

    @property
    def figure(self) -> str:
        """The difference, and its standard error if there are several seeds."""
        return f"{self.bits:+.3f}" + ("" if math.isnan(self.error) else f" ± {self.error:.3f}")

    def __str__(self) -> str:
        return f"{self.name} {self.figure}"


def make_level(name: str, rows: Iterable[tuple[float, float, float]]) -> Level:
    """The means over seeds of (bits, MACs, experts in all blocks)."""
    bits, macs, experts = (spread(column) for column in zip(*rows, strict=True))
    error = bits.std / bits.num**0.5 if bits.num > 1 else math.nan
    return Level(name, bits.mean, error, macs.mean, experts.mean / NUM_BLOCKS)


def model_level(label: str, records: Sequence[Record]) -> Level:
    """A model as it was trained."""
    return make_level(label, ((one.bits, one.macs["total"], one.experts) for one in records))


def dial_levels(records: Sequence[Record]) -> list[Level]:
    """One checkpoint per seed at all settings of its dial, in the order in which they were measured."""
    columns = zip(*(one.dial for one in records), strict=True)
    return [
        make_level(f"{rows[0]['setting']:g}", ((row["bits_per_byte"], row["macs"], row["experts"]) for row in rows))
        for rows in columns
    ]


def frontier(levels: Iterable[Level]) -> list[Level]:
    """The levels that no other undercuts in bits with as many or fewer MACs, the cheapest first."""
    kept: list[Level] = []
    for one in sorted(levels, key=lambda level: (level.macs, level.bits)):
        if not kept or one.bits < kept[-1].bits:
            kept.append(one)
    return kept


def gap(level: Level, line: Sequence[Level]) -> Gap:
    """How far a level is above the line through a frontier, at the level's MACs."""
    macs, bits, errors = ([getattr(one, name) for one in line] for name in ("macs", "bits", "error"))
    expected, error = (float(np.interp(level.macs, macs, values)) for values in (bits, errors))
    return Gap(level.name, level.bits - expected, (level.error**2 + error**2) ** 0.5)


def dead_experts(record: Record) -> int:
    """How many experts fewer than one test byte in 1,000 runs."""
    return int(num_dead(torch.tensor(record.test["expert_load"])))


class Compared(NamedTuple):
    """Which rows a comparison is about."""

    ours: tuple[str, ...]
    elastic: str
    hash: tuple[str, ...]
    baselines: tuple[str, ...]


ONE_TOKEN = Compared(OURS, ELASTIC, HASH, BASELINES)
HASH_PAIRS = tuple(PAIRS[label] for label in HASH)
TWO_TOKENS = Compared(
    tuple(PAIRS[label] for label in OURS), PAIRS[ELASTIC], HASH_PAIRS, (*BASELINES, *HASH_PAIRS, PAIRS["planned-2"])
)


class Aims:
    """Compares the records of one text with the aims.

    Args:
        results: The records.
        data: The text.
        seconds: Measured times; empty where there are none yet.
        num_seeds: Number of seeds that are planned.
        rows: The labels that are planned; baselines are those among them. Default: those over bytes.
        compared: Which rows are ours and which are baselines.
    """

    def __init__(
        self,
        results: Results,
        data: str,
        seconds: Seconds,
        num_seeds: int = TEXT.num_seeds,
        rows: Sequence[str] | None = None,
        compared: Compared = ONE_TOKEN,
    ) -> None:
        self.seconds, self.num_seeds, self.compared = seconds, num_seeds, compared
        self.rows = [one.label for one in text_variants()] if rows is None else rows
        self.ours, self.elastic = self.among(compared.ours)[0], compared.elastic
        self.own_input, self.baselines = self.among(OWN_INPUT), self.among(compared.baselines)
        self.top_k = self.among(TOP_K) or self.among(BALANCED)
        labels = self.among((*OURS, *compared.ours, *compared.baselines))
        self.records = {label: found for label in labels if (found := results.of(data, label))}
        self.levels = {label: model_level(label, records) for label, records in self.records.items()}
        turned = dial_levels(self.records[self.elastic]) if self.elastic in self.records else []
        self.dial = [one._replace(name=f"stop {one.name}") for one in turned if FEWEST <= one.experts <= MOST]

    def among(self, labels: Iterable[str]) -> tuple[str, ...]:
        """Those of some labels that are planned."""
        return tuple(label for label in labels if label in self.rows)

    def line(self, labels: Iterable[str]) -> list[Level]:
        """The line of some models."""
        return frontier(self.levels[label] for label in labels if label in self.levels)

    def all(self) -> list[Verdict]:
        """The verdicts on all aims."""
        return [self.planned(), self.one_checkpoint(), self.ahead(), self.learned(), self.alive(), self.time()]

    def of_pairs(self) -> list[Verdict]:
        """The verdicts on the aims of benchmarks/aims-pairs.md or aims-main-pairs.md."""
        return [self.below_one_token(), self.one_checkpoint(), self.ahead(), self.learned(), self.alive()]

    def below_one_token(self) -> Verdict:
        (of_one_token,) = (label for label, pair in PAIRS.items() if pair == self.ours)

        def check() -> tuple[bool, str]:
            one = gap(self.levels[self.ours], [self.levels[of_one_token]])
            return one.bits <= -2 * one.error, str(one)

        return self.verdict("1. two tokens below one by two standard errors", (self.ours, of_one_token), check)

    def size(self) -> Verdict:
        """Whether the models are large enough, and trained for long enough, for the comparison at the main size."""

        def check() -> tuple[bool, str]:
            best = min((self.levels[label] for label in self.records), key=lambda level: level.bits)
            return best.bits < RIGHT_SIZE, f"{best.name} {best.bits:.3f} ± {best.error:.3f}"

        return self.verdict(f"the best model is below {RIGHT_SIZE:g} bits", self.rows, check)

    def verdict(self, aim: str, labels: Iterable[str], check: Callable[[], tuple[bool, str]]) -> Verdict:
        """The verdict on an aim that names some models; figures are shown as soon as each of them has a record."""
        named = list(dict.fromkeys(labels))
        num = sum(min(len(self.records.get(label, ())), self.num_seeds) for label in named)
        planned = len(named) * self.num_seeds
        holds, found = check() if all(label in self.records for label in named) else (False, "–")
        return Verdict(aim, holds if num == planned else None, found, num, planned)

    def planned(self) -> Verdict:
        def check() -> tuple[bool, str]:
            gaps = [gap(self.levels[label], self.line(self.own_input)) for label in ("planned-2", self.ours)]
            return all(one.bits <= 0.005 for one in gaps), say(gaps)

        return self.verdict(
            "1. planned from the token, at most +0.005", ("planned-2", self.ours, *self.own_input), check
        )

    def one_checkpoint(self) -> Verdict:
        def check() -> tuple[bool, str]:
            gaps, experts = (
                [gap(one, self.line(self.baselines)) for one in self.dial],
                [one.experts for one in self.dial],
            )
            reached = bool(experts) and min(experts) <= REACHED[0] and max(experts) >= REACHED[1]
            span = f"{min(experts):.2f} to {max(experts):.2f} experts per block: " if experts else "no row"
            return reached and all(one.bits <= 0.02 for one in gaps), span + say(gaps)

        reach = f"from {REACHED[0]} or fewer to {REACHED[1]} or more experts"
        return self.verdict(f"2. one checkpoint, at most +0.02, {reach}", (self.elastic, *self.baselines), check)

    def ahead(self) -> Verdict:
        def check() -> tuple[bool, str]:
            gaps = [gap(one, self.line(self.baselines)) for one in (self.levels[self.ours], *self.dial)]
            level = all(one.bits <= 0.01 for one in gaps)
            return level and any(one.bits <= -max(0.02, 2 * one.error) for one in gaps), say(gaps)

        named = (self.ours, self.elastic, *self.baselines)
        return self.verdict("3. nowhere above +0.01, somewhere at most −0.02", named, check)

    def learned(self) -> Verdict:
        def check() -> tuple[bool, str]:
            one = gap(self.levels[self.ours], self.line(self.compared.hash))
            return one.bits <= -2 * one.error, str(one)

        named = (self.ours, *self.compared.hash)
        return self.verdict("4. learned paths below hash by two standard errors", named, check)

    def alive(self) -> Verdict:
        def check() -> tuple[bool, str]:
            ours = self.among(self.compared.ours)
            dead = {label: [dead_experts(one) for one in self.records[label]] for label in ours}
            found = "; ".join(f"{label} {', '.join(map(str, counts))}" for label, counts in dead.items())
            return not any(map(sum, dead.values())), f"dead per seed: {found}"

        return self.verdict("5. no dead expert", self.among(self.compared.ours), check)

    def time(self) -> Verdict:
        def check() -> tuple[bool, str]:
            if any(label not in self.seconds for label in (self.ours, *self.top_k)):
                return False, "no times yet"
            ours = self.levels[self.ours].bits
            line = sorted((self.levels[label] for label in self.top_k), key=lambda level: level.bits)
            compared = []
            for name in TIMED:
                values = [self.seconds[one.name][name] for one in line]
                expected = float(np.interp(ours, [one.bits for one in line], values))
                compared.append((name, self.seconds[self.ours][name], expected))
            found = "; ".join(f"{name} {1e3 * mine:.1f} against {1e3 * other:.1f} ms" for name, mine, other in compared)
            return all(mine < other for _, mine, other in compared), found

        verdict = self.verdict("6. less time than top-k at equal bits", (self.ours, *self.top_k), check)
        return verdict if self.ours in self.seconds else verdict._replace(holds=None)


def say(gaps: Iterable[Gap]) -> str:
    """Some gaps as text."""
    return ", ".join(str(one) for one in gaps)
