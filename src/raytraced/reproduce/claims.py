"""The paper's claims, each judged by our own runs: a verdict, a number, and what it rests on."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from raytraced.models.table import GRID
from raytraced.pictures.load import correlation, grid_entropy, largest_fall, load_entropy, num_dead
from raytraced.rays import gate_splits
from raytraced.reproduce.plan import FULL
from raytraced.reproduce.records import Record, Results, choose_rate, spread
from raytraced.reproduce.variants import BALANCE_VARIANTS, DATA_NAMES, PAPER_VARIANTS
from raytraced.routing import RoutingNetwork

HOLDS, PARTLY, FAILS, UNKNOWN = "holds", "partly", "does not hold", "not measured"
RECIPES = ("mre", "mre-paper")
MARGIN = 0.005  # "the rival's own final validation accuracy minus 0.5" points
FALL = 0.003  # of the accuracy along a sequence that still counts as rising


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, whether our runs bear it out, and the number behind the verdict."""

    claim: str
    verdict: str = UNKNOWN
    number: float | None = None
    number_is: str = ""
    evidence: str = ""


class Case(NamedTuple):
    """One data set, recipe or race: whether the claim holds there, a number, and the numbers in words."""

    holds: bool
    number: float | None
    told: str


def judge_all(results: Results) -> dict[str, Claim]:
    """Every claim by name: it holds in all of its cases, in some, or in none; the number is the mean of the cases'."""
    claims = {}
    for name, (claim, number_is, judge) in CLAIMS.items():
        cases = list(judge(results))
        numbers = [case.number for case in cases if case.number is not None]
        number_is = number_is.format(known=len(numbers), all=len(cases))
        holding = sum(case.holds for case in cases)
        verdict = HOLDS if holding == len(cases) else PARTLY if holding else FAILS
        told = "; ".join(case.told for case in cases if case.told)
        number = spread(numbers).mean if numbers else None
        claims[name] = Claim(claim, verdict, number, number_is, told) if cases else Claim(claim)
    return claims


def harder_data(results: Results) -> Iterator[Case]:
    order = [data for data in results.data() if FULL.data[data].paper]
    for label in RECIPES:
        experts = {data: one.mean for data in order if (one := results.experts(data, label)).num}
        if 1 < len(experts) == len(order):
            means = list(experts.values())
            rising = all(first < second for first, second in pairwise(means))
            told = ", ".join(f"{DATA_NAMES[data]} {mean:.2f}" for data, mean in experts.items())
            yield Case(rising, means[-1] / max(means[0], 1e-9) if label == "mre" else None, f"{label}: {told}")


def easy_classes(results: Results) -> Iterator[Case]:
    for data in results.data(wide=False):
        tests = [one.test for one in results.of(data, "mre")]
        one = spread(correlation(test["experts_per_class"], test["accuracy_per_class"]) for test in tests)
        if one.num:
            yield Case(one.mean < -0.2, one.mean, f"{DATA_NAMES[data]} {one.mean:+.2f} ± {one.std:.2f}")


def rising_sequence(results: Results) -> Iterator[Case]:
    for data in results.data():
        curve = accuracy_by_budget(results.of(data, "mre"))
        if curve:
            gain, fall = curve[-1] - curve[0], largest_fall(curve)
            shown = ", ".join(f"{100 * curve[at]:.1f}" for at in (0, 1, 2, 4) if at < len(curve))
            told = f"{DATA_NAMES[data]}: {shown} … {100 * curve[-1]:.1f} % after 0, 1, 2, 4 … experts"
            yield Case(gain > 0 and fall <= FALL, 100 * gain, f"{told}, largest fall {100 * fall:.2f} points")


def accuracy_by_budget(records: list[Record]) -> list[float]:
    """The mean over seeds with at most 0, 1, … experts, each seed going on at its last value."""
    curves = [[row["accuracy"] for row in one.budgets] for one in records if one.budgets]
    longest = max(map(len, curves), default=0)
    return [spread(curve[min(at, len(curve) - 1)] for curve in curves).mean for at in range(longest)]


class LoadFigures(NamedTuple):
    """How evenly a model uses its experts, means over seeds."""

    entropy: float  # within layers
    grid_entropy: float
    num_dead: float


def load_figures(results: Results, data: str, label: str) -> LoadFigures | None:
    """The figures of a model on a data set; None if it was not run there."""
    loads = [torch.tensor(one.test["expert_load"]) for one in results.of(data, label)]
    figures = (load_entropy, grid_entropy, num_dead)
    return LoadFigures(*(spread(map(figure, loads)).mean for figure in figures)) if loads else None


def balanced(results: Results) -> Iterator[Case]:
    for data in results.data(wide=False):
        labels = (variant.label for variant in BALANCE_VARIANTS)
        known = {label: one for label in labels if (one := load_figures(results, data, label)) is not None}
        if "mre" in known and "top-k" in known:
            ours, theirs = known["mre"], known["top-k"]
            told = ", ".join(f"{label} {one.entropy:.2f} ({one.num_dead:.1f} dead)" for label, one in known.items())
            holds = ours.entropy >= theirs.entropy and ours.num_dead == 0
            yield Case(holds, ours.entropy, f"{DATA_NAMES[data]}: {told}")


class Reached(NamedTuple):
    """When a model first had an accuracy on validation images, means over seeds."""

    epochs: float
    seconds: float


def first_reach(record: Record, accuracy: float) -> int | None:
    """The first epoch whose validation accuracy is at least so high."""
    values = record.history["validation_accuracy"]
    return next((epoch for epoch, value in enumerate(values, 1) if value >= accuracy), None)


def settled(record: Record) -> int:
    """The epoch at which a run came within the margin of its own best."""
    return first_reach(record, max(record.history["validation_accuracy"]) - MARGIN) or 0


def mean_reach(records: list[Record], accuracy: float, cut: bool = False) -> Reached | None:
    """None if one of the seeds never has that accuracy, unless its whole run shall count: it took as much at least."""
    epochs = [first_reach(one, accuracy) or (one.config.epochs if cut else None) for one in records]
    if None in epochs:
        return None
    mean = spread(epoch for epoch in epochs if epoch).mean
    # at the pace of its fastest epoch: runs share the machine with one another and with other work
    return Reached(mean, mean * min(min(one.history["seconds"]) for one in records))


def fewer_epochs(results: Results) -> Iterator[Case]:
    """To the rival's own final validation accuracy, minus the margin."""
    for group, rates in (("equal-lr", "equal learning rate"), ("main", "each at its best")):
        for data in results.data(group, wide=False):
            rivals, own = results.of(data, "top-k", group), results.of(data, "mre", group)
            if not rivals or not own:
                continue
            target = spread(one.history["validation_accuracy"][-1] for one in rivals).mean - MARGIN
            theirs, ours = mean_reach(rivals, target, cut=True), mean_reach(own, target)
            assert theirs is not None
            told = f"{DATA_NAMES[data]}, {rates}: to {target:.1%}: "
            told += f"top-k {theirs.epochs:.1f} epochs, {theirs.seconds:.0f} s, MRE "
            if ours is None:
                yield Case(False, None, f"{told}never")
            else:
                saved = 1 - ours.epochs / theirs.epochs
                told += f"{ours.epochs:.1f} epochs, {ours.seconds:.0f} s ({-saved:+z.0%} epochs)"
                yield Case(saved >= 0.1 - 1e-9, 100 * saved, told)  # 1 - 9 / 10 is a little less than a tenth


def robust_temperature(results: Results) -> Iterator[Case]:
    for data in results.data("temperature"):
        for family in reversed(RECIPES):
            found: dict[float, list[float]] = {}
            for one in results.whole:
                if (one.data, one.family, one.group) == (data, family, "temperature") and one.setting is not None:
                    found.setdefault(one.setting, []).append(one.accuracy)
            known = {tau: spread(accuracies) for tau, accuracies in sorted(found.items())}
            means = [one.mean for tau, one in known.items() if 10 <= tau <= 50]
            if len(means) > 1:
                width = max(means) - min(means)
                shown = (f"τ {tau:g}: {100 * one.mean:.1f} ± {100 * one.std:.1f}" for tau, one in known.items())
                told = f"{family} (Gumbel), {DATA_NAMES[data]}: {', '.join(shown)}"
                # where seeds differ by more than a point, so does the method: not robust
                yield Case(width <= 0.01, 100 * width if family == "mre-paper" else None, told)


def learning_rate(results: Results) -> Iterator[Case]:
    best: dict[str, list[float]] = {}
    compared = {variant.label for variant in PAPER_VARIANTS}
    found = results.searches()
    for (data, label), accuracies in found.items():
        # wide models are not the paper's; where no rival was searched for, there is nothing to compare with
        if label in compared and not FULL.data[data].wide and (data, "top-k") in found and len(accuracies) > 1:
            lr = choose_rate(accuracies)
            best.setdefault(label, []).extend([] if lr is None else [lr])
    ours = [math.log(lr) for label in RECIPES for lr in best.get(label, [])]
    theirs = [math.log(lr) for label, rates in best.items() if label not in RECIPES for lr in rates]
    if ours and theirs:
        ratio = math.exp(spread(ours).mean - spread(theirs).mean)
        told = "; ".join(f"{label}: {', '.join(f'{lr:g}' for lr in rates)}" for label, rates in best.items())
        yield Case(ratio >= 5, ratio, told)
        yield Case(ratio >= 2, None, "")  # twice as high is part of the claim


def initialisation(results: Results) -> Iterator[Case]:
    scaled, plain = (gate_entropy(scale) for scale in (True, False))
    lines = [f"entropy of a fresh gate (1: even): {scaled:.3f} scaled, {plain:.3f} not"]
    for data in results.data("init"):
        for name in ("scaled", "plain"):
            accuracy, experts = (get(data, f"mre-init-{name}", "init") for get in (results.accuracy, results.experts))
            if accuracy.num:
                shown = f"{100 * accuracy.mean:.1f} ± {100 * accuracy.std:.1f} %, {experts.mean:.1f} experts"
                lines.append(f"trained on {data}, {name}: {shown}")
    yield Case(scaled < plain, plain - scaled, "; ".join(lines))


@torch.no_grad()
def gate_entropy(scale_init: bool, num_samples: int = 200, num_seeds: int = 10) -> float:
    """The mean entropy of fresh gates' splits, 1 if even, on random entry rates with every node active."""
    num_layers, num_experts = GRID["num_layers"], GRID["num_experts"]
    generator = torch.Generator().manual_seed(0)
    entropies = []
    for seed in range(num_seeds):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            routing = RoutingNetwork(num_layers, num_experts, scale_init=scale_init)
        entry_BN = torch.randn(num_samples, num_experts, generator=generator).softmax(-1)
        active_BLN = torch.ones(num_samples, num_layers, num_experts)
        for split_BNO in gate_splits(routing, entry_BN, active_BLN):
            entropies.append(-torch.special.xlogy(split_BNO, split_BNO).sum(-1).mean())
    return float(torch.stack(entropies).mean() / math.log(num_experts + 1))


# name: the claim, what the number is, and the cases
CLAIMS: dict[str, tuple[str, str, Callable[[Results], Iterator[Case]]]] = {
    "harder data": ("Harder data sets use more experts", "experts on the hardest over the easiest", harder_data),
    "easy classes": ("Classes that use fewer experts are classified better",
                     "correlation over classes, mean of data sets", easy_classes),
    "rising sequence": ("Accuracy rises along the activation sequence",
                        "points gained from no expert to the last", rising_sequence),
    "balanced use": ("Experts are used evenly without a balancing loss",
                     "entropy of the load within layers (1: even)", balanced),
    "fewer epochs": ("10 to 40 % fewer epochs than top-k to a given accuracy",
                     "% of epochs saved, mean of the {known} of {all} races that MRE finishes", fewer_epochs),
    "temperature": ("Results are robust for temperatures between 10 and 50",
                    "points between the best and the worst temperature", robust_temperature),
    "learning rate": ("The best learning rate is 5e-3 for MRE and 5e-4 for the others: ten times",
                      "MRE's best rate over the others', geometric means", learning_rate),
    "initialisation": ("Scaling the initialisation makes routing more heterogeneous",
                       "entropy lost by the gates at the start", initialisation),
}  # fmt: skip
