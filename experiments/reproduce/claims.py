"""The paper's claims, tested on our own runs: a verdict, a number, and the evidence (± is the standard error of the mean).

Axes: C classes, L layers, N experts per layer.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from typing import NamedTuple

import torch
from torch import Tensor

from experiments.reproduce.plan import FULL
from experiments.reproduce.records import Record, Results, budget_points, choose_rate, make_point, spread
from experiments.reproduce.variants import BALANCE_VARIANTS, DATA_NAMES, PAPER_VARIANTS

HOLDS, PARTLY, FAILS, UNKNOWN = "holds", "partly", "does not hold", "not measured"
RECIPES = ("mre-paper", "mre")
MARGIN = 0.005  # as in the paper: within 0.5 points of the final validation accuracy of the baseline
FALL = 0.003  # of the accuracy along a sequence that still counts as rising


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, whether it holds in our runs, and the number behind the verdict."""

    claim: str
    verdict: str = UNKNOWN
    number: float | None = None
    number_is: str = ""
    evidence: str = ""


class Case(NamedTuple):
    """One data set, recipe or comparison: whether the claim holds for it, a number, and the evidence in words."""

    holds: bool
    number: float | None
    evidence: str


def evaluate_claims(results: Results) -> dict[str, Claim]:
    """Test every claim: it holds in all of its cases, in some, or in none; its number is the mean over the cases."""
    claims = {}
    for name, (claim, number_is, find_cases) in CLAIMS.items():
        cases = list(find_cases(results))
        numbers = [case.number for case in cases if case.number is not None]
        number_is = number_is.format(known=len(numbers), all=len(cases))
        holding = sum(case.holds for case in cases)
        verdict = HOLDS if holding == len(cases) else PARTLY if holding else FAILS
        evidence = "; ".join(case.evidence for case in cases if case.evidence)
        number = spread(numbers).mean if numbers else None
        claims[name] = Claim(claim, verdict, number, number_is, evidence) if cases else Claim(claim)
    return claims


def harder_data(results: Results) -> Iterator[Case]:
    order = [data for data in results.data() if FULL.data[data].paper]
    for label in RECIPES:
        experts = {data: point.experts for data in order if (point := results.point(data, label)).records}
        if 1 < len(experts) == len(order):
            means = list(experts.values())
            rising = all(first < second for first, second in pairwise(means))
            evidence = ", ".join(f"{DATA_NAMES[data]} {mean:.2f}" for data, mean in experts.items())
            yield Case(rising, means[-1] / max(means[0], 1e-9) if label == "mre" else None, f"{label}: {evidence}")


def easy_classes(results: Results) -> Iterator[Case]:
    for data, label in product(results.data(wide=False), RECIPES):
        tests = [one.test for one in results.of(data, label)]
        one = spread(correlation(test["experts_per_class"], test["accuracy_per_class"]) for test in tests)
        if one.num:
            yield Case(one.mean < -0.2, one.mean, f"{label}, {DATA_NAMES[data]} {one.mean:+.2f} ± {one.error:.2f}")


def easy_images(results: Results) -> Iterator[Case]:
    for data, label in product(results.data(), RECIPES):
        one = spread(100 * shorter_gain(record) for record in results.of(data, label))
        if one.num:
            evidence = f"{label}, {DATA_NAMES[data]} {one.mean:+.1f} ± {one.error:.1f} points"
            yield Case(one.mean >= 100 * MARGIN, one.mean, evidence)


def shorter_gain(record: Record) -> float:
    """Accuracy on images with short sequences less that on images with long ones, in two halves as equal as possible."""
    parts = sorted((int(length), part["num"], part["accuracy"][-1]) for length, part in record.test["lengths"].items())
    halves = [(parts[:at], parts[at:]) for at in range(1, len(parts))]
    if not halves:
        return 0.0
    chosen = max(halves, key=lambda pair: min(sum(num for _, num, _ in half) for half in pair))
    short, long = (sum(num * right for _, num, right in half) / sum(num for _, num, _ in half) for half in chosen)
    return short - long


def outperforms(results: Results) -> Iterator[Case]:
    """Against mixtures of experts: the paper's recipe against the paper's baselines, ours against tuned baselines."""
    for label, baselines in (("mre-paper", ("top-k-paper", "threshold-paper")), ("mre", ("top-k", "threshold"))):
        for data in results.data(wide=False):
            ours, theirs = results.point(data, label), [results.point(data, baseline) for baseline in baselines]
            if ours.records and all(point.records for point in theirs):
                best = max(theirs, key=lambda point: point.accuracy.mean)
                gain = 100 * (ours.accuracy.mean - best.accuracy.mean)
                accuracies = f"{100 * ours.accuracy.mean:.1f} against {100 * best.accuracy.mean:.1f} %"
                evidence = f"{label}, {DATA_NAMES[data]}: {accuracies} of {best.records[0].label}"
                yield Case(gain > 0, gain, evidence)


def correlation(first: list[float], second: list[float]) -> float:
    """Pearson's correlation of two lists; 0 where one of them does not vary."""
    found = float(torch.tensor([first, second], dtype=torch.float64).corrcoef()[0, 1])
    return 0.0 if math.isnan(found) else found


def rising_sequence(results: Results) -> Iterator[Case]:
    for data, label in product(results.data(), RECIPES):
        curve = [point.accuracy.mean for point in budget_points(results.of(data, label))]
        if curve:
            singles = [[row["accuracy"] for row in one.budgets] for one in results.of(data, label)]
            gain, fall, worst = curve[-1] - curve[0], largest_fall(curve), max(map(largest_fall, singles))
            shown = ", ".join(f"{100 * curve[at]:.1f}" for at in (0, 1, 2, 4) if at < len(curve))
            evidence = f"{label}, {DATA_NAMES[data]}: {shown} … {100 * curve[-1]:.1f} % after 0, 1, 2, 4 … experts"
            evidence += f", largest fall {100 * fall:.2f} points, of a single seed {100 * worst:.2f}"
            yield Case(gain > 0 and fall <= FALL, 100 * gain, evidence)


def largest_fall(curve: list[float]) -> float:
    """The largest fall of accuracy below that of fewer experts; 0 if it only rises."""
    return max(best - accuracy for best, accuracy in zip(accumulate(curve, max), curve, strict=True))


def load_entropy(load_LN: Tensor) -> float:
    """The entropy of the load within layers, 1 if it is even, averaged over layers.

    Layers are weighted by their load, so that a layer that few samples reach counts little.
    """
    load_LN = load_LN.double()
    share_LN = load_LN / load_LN.sum(1, keepdim=True).clamp_min(1e-300)
    most = load_LN.sum() * math.log(load_LN.shape[1])
    return float(-torch.xlogy(load_LN, share_LN).sum() / most) if most else 1.0


def grid_entropy(load_LN: Tensor) -> float:
    """The entropy of the load over the whole grid, 1 if it is even."""
    return load_entropy(load_LN.reshape(1, -1))


def num_dead(load_LN: Tensor) -> int:
    """The number of experts that run for fewer than one sample in 1,000."""
    return int((load_LN < 1e-3).sum())


def expert_loads(results: Results, data: str, label: str) -> list[Tensor]:
    """The share of the samples that activate each expert (L, N), for each seed."""
    return [torch.tensor(one.test["expert_load"]) for one in results.of(data, label)]


def balanced(results: Results) -> Iterator[Case]:
    for data in results.data(wide=False):
        known: dict[str, tuple[float, float]] = {}
        for label in (variant.label for variant in BALANCE_VARIANTS):
            if loads := expert_loads(results, data, label):
                known[label] = spread(map(load_entropy, loads)).mean, spread(map(num_dead, loads)).mean
        evidence = ", ".join(f"{label} {entropy:.2f} ({dead:.1f} dead)" for label, (entropy, dead) in known.items())
        for label in (label for label in RECIPES if label in known and "top-k" in known):
            entropy, dead = known[label]
            holds = entropy >= known["top-k"][0] and dead == 0
            yield Case(holds, entropy, f"{DATA_NAMES[data]}: {evidence}" if label == RECIPES[0] else "")


def first_reach(record: Record, accuracy: float) -> int | None:
    """The first epoch whose validation accuracy is at least so high."""
    values = record.history["validation_accuracy"]
    return next((epoch for epoch, value in enumerate(values, 1) if value >= accuracy), None)


def settled(record: Record) -> int:
    """The epoch at which a run came within the margin of its own best."""
    return first_reach(record, max(record.history["validation_accuracy"]) - MARGIN) or 0


def fewer_epochs(results: Results) -> Iterator[Case]:
    """Epochs to the final validation accuracy of top-k less the margin: means over the seeds that reach it."""
    for group, rates in (("equal-lr", "equal learning rate"), ("main", "each at its best")):
        for data, label in product(results.data(group, wide=False), RECIPES):
            baselines, own = results.of(data, "top-k", group), results.of(data, label, group)
            if not baselines or not own:
                continue
            target = spread(one.history["validation_accuracy"][-1] for one in baselines).mean - MARGIN
            theirs, ours = ([epoch for one in some if (epoch := first_reach(one, target))] for some in (baselines, own))
            evidence = (
                f"{label}, {DATA_NAMES[data]}, {rates}: to {target:.1%}: top-k {describe_race(theirs, baselines)}, MRE "
            )
            if len(ours) < len(own):
                yield Case(False, None, f"{evidence}{describe_race(ours, own)}")
            else:
                saved = 1 - spread(ours).mean / spread(theirs).mean
                evidence += f"{describe_race(ours, own)} ({-saved:+z.0%} epochs)"
                yield Case(saved >= 0.1 - 1e-9, 100 * saved, evidence)  # 1 - 9 / 10 is a little less than a tenth


def describe_race(epochs: list[int], records: list[Record]) -> str:
    """Mean epochs, and their seconds at the fastest pace of any epoch: other work may have slowed the machine."""
    if not epochs:
        return "never"
    mean, pace = spread(epochs).mean, min(min(one.history["seconds"]) for one in records)
    some = "" if len(epochs) == len(records) else f" ({len(epochs)} of {len(records)} seeds reach it)"
    return f"{mean:.1f} epochs, {mean * pace:.0f} s{some}"


def robust_temperature(results: Results) -> Iterator[Case]:
    for data in results.data("temperature"):
        runs = [one for one in results.whole if (one.data, one.group) == (data, "temperature")]
        taus = sorted({one.setting for one in runs if one.setting is not None})
        known = {tau: spread(one.accuracy for one in runs if one.setting == tau) for tau in taus}
        means = [one.mean for tau, one in known.items() if 10 <= tau <= 50]
        if len(means) > 1:
            width = max(means) - min(means)
            shown = (f"τ {tau:g}: {100 * one.mean:.1f} ± {100 * one.error:.1f}" for tau, one in known.items())
            evidence = f"mre-paper (Gumbel), {DATA_NAMES[data]}: {', '.join(shown)}"
            # A difference of more than a point between temperatures is not robust.
            yield Case(width <= 0.01, 100 * width, evidence)


def learning_rate(results: Results) -> Iterator[Case]:
    best: dict[str, list[float]] = {}
    compared = {variant.label for variant in PAPER_VARIANTS}
    found = results.searches()
    for (data, label), accuracies in found.items():
        # Wide models are not in the paper; without a search for top-k there is nothing to compare with.
        if label in compared and not FULL.data[data].wide and (data, "top-k") in found and len(accuracies) > 1:
            lr = choose_rate(accuracies)
            best.setdefault(label, []).extend([] if lr is None else [lr])
    ours = [math.log(lr) for label in RECIPES for lr in best.get(label, [])]
    theirs = [math.log(lr) for label, rates in best.items() if label not in RECIPES for lr in rates]
    if ours and theirs:
        ratio = math.exp(spread(ours).mean - spread(theirs).mean)
        evidence = "; ".join(f"{label}: {', '.join(f'{lr:g}' for lr in rates)}" for label, rates in best.items())
        yield Case(ratio >= 5, ratio, evidence)
        yield Case(ratio >= 2, None, "")  # twice as high is part of the claim


def initialisation(results: Results) -> Iterator[Case]:
    """The difference between classes in their use of experts after training, with scaled and with plain initial gates."""
    for data in results.data("init"):
        evidence, found = [], []
        for name in ("scaled", "plain"):
            records = results.of(data, f"mre-paper-init-{name}", "init")
            differ, point = spread(map(class_difference, records)), make_point(records)
            accuracy = f"{100 * point.accuracy.mean:.1f} ± {100 * point.accuracy.error:.1f} %"
            evidence.append(f"{name}: {differ.mean:.3f} ± {differ.error:.3f}, {accuracy}, {point.experts:.1f} experts")
            found.append(differ.mean)
        yield Case(found[0] > found[1], found[0] - found[1], f"{DATA_NAMES[data]}, {'; '.join(evidence)}")


def class_difference(record: Record) -> float:
    """The mean difference between the load of an expert on one class and on all images."""
    load_CLN = torch.tensor(record.test["class_load"], dtype=torch.float64)
    return float((load_CLN - load_CLN.mean(0)).abs().mean())


# Name → the claim, the meaning of its number, and the function that finds its cases.
CLAIMS: dict[str, tuple[str, str, Callable[[Results], Iterator[Case]]]] = {
    "harder data": ("Harder data sets use more experts", "experts on the hardest over the easiest", harder_data),
    "easy classes": ("Classes that use fewer experts are classified better",
                     "correlation over classes, mean of data sets", easy_classes),
    "easy images": ("Images that use fewer experts are classified better",
                    "points between images with short and long sequences, mean of cases", easy_images),
    "outperforms": ("More accurate than top-k and threshold mixtures", "points above the better one, mean of cases",
                    outperforms),
    "rising sequence": ("Accuracy rises along the activation sequence",
                        "points gained from no expert to the last", rising_sequence),
    "balanced use": ("Experts are used evenly without a balancing loss",
                     "entropy of the load within layers (1: even)", balanced),
    "fewer epochs": ("10 to 40 % fewer epochs than top-k to a given accuracy",
                     "% of epochs saved, mean of the {known} of {all} comparisons in which MRE reaches it", fewer_epochs),
    "temperature": ("Results are robust for temperatures between 10 and 50",
                    "points between the best and the worst temperature", robust_temperature),
    "learning rate": ("The best learning rate is 5e-3 for MRE and 5e-4 for the others: ten times",
                      "MRE's best rate over the others', geometric means", learning_rate),
    "initialisation": ("Scaling the initialisation makes routing more heterogeneous",
                       "how much more classes differ in their use of an expert", initialisation),
}  # fmt: skip
