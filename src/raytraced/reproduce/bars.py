"""The four bars that MRE is to clear, judged from the results: reached or not, with the numbers.

Every choice is made on validation images: which rival, and which of MRE's points (settings of the dial, budgets) among those
that cost no more than a bar allows.
"""

from dataclasses import dataclass
from math import hypot

from raytraced.analysis.load import largest_fall
from raytraced.reproduce.claims import mean_curve
from raytraced.reproduce.epochs import best_rival, race
from raytraced.reproduce.points import Point, make_point, model_points, our_points
from raytraced.reproduce.records import Results, spread
from raytraced.reproduce.variants import DENSE_CONTROLS, ROUTED_RIVALS, is_ours

ACCURACY = {"mnist": 0.969, "fashion-mnist": 0.876, "cifar10": 0.646}
MOST_EXPERTS = 4.0
COST_SHARE = 0.4
EPOCHS_SAVED = 0.4
LARGEST_FALL = 0.003
FIRST_BELOW_LAST = 0.03
EQUAL_COST = 1.1  # multiply-adds up to this ratio count as equal: routing is not free


@dataclass(frozen=True)
class Bar:
    """What is asked, whether it is reached (None: not measured), and the numbers by data set."""

    bar: str
    reached: bool | None
    by_data: dict[str, str]
    reached_by_data: dict[str, bool]


def make_bar(text: str, verdicts: dict[str, tuple[bool, str]]) -> Bar:
    """A bar is reached if it is on every data set it was measured on."""
    return Bar(
        text,
        all(reached for reached, _ in verdicts.values()) if verdicts else None,
        {data: told for data, (_, told) in verdicts.items()},
        {data: reached for data, (reached, _) in verdicts.items()},
    )


def judge_bars(results: Results) -> dict[str, Bar]:
    """All four, by number."""
    return {"1": accuracy_bar(results), "2": cost_bar(results), "3": epochs_bar(results), "4": prefix_bar(results)}


def our_labels(results: Results, data: str) -> list[str]:
    """MRE at every setting of its dial that was run."""
    return [label for label in results.labels(data) if is_ours(label)]


def accuracy_bar(results: Results) -> Bar:
    verdicts = {}
    for data, least in ACCURACY.items():
        points = our_points(results, data, our_labels(results, data))
        frugal = [one for one in points if is_frugal(results, data, one)] or points
        if not frugal:
            continue
        chosen = max(frugal, key=lambda one: one.validation.mean)
        reached = chosen.test.mean >= least and chosen.experts <= MOST_EXPERTS
        verdicts[data] = reached, f"{tell(chosen)}, asked for {least:.1%} with at most {MOST_EXPERTS:g}"
    return make_bar("MRE (ours) reaches 96.9 / 87.6 / 64.6 % with at most 4 experts on average", verdicts)


def is_frugal(results: Results, data: str, point: Point) -> bool:
    """Whether a point is known to use few enough experts without a look at the test images: by its budget, or on validation."""
    if point.budget is not None:
        return point.budget <= MOST_EXPERTS
    return spread(one.validation["mean_experts"] for one in results.of(data, point.label)).mean <= MOST_EXPERTS


def cost_bar(results: Results) -> Bar:
    verdicts = {data: one for data in results.data() if data != "union" and (one := against_best_rival(results, data))}
    if (union := on_union(results)) is not None:
        verdicts["union"] = union
    text = (
        "MRE reaches the best routed rival's accuracy with at most 40 % of its expert multiply-adds, or beats it at "
        "equal multiply-adds by two standard errors; on the union it beats every control and rival of equal cost"
    )
    return make_bar(text, verdicts)


def against_best_rival(results: Results, data: str) -> tuple[bool, str] | None:
    """The best routed rival, matched to one standard error at two fifths of its cost, or beaten by two at its own."""
    label = best_rival(results, data, among=ROUTED_RIVALS)
    ours = our_points(results, data, our_labels(results, data))
    if label is None or not ours:
        return None
    rival = make_point(label, results.of(data, label))
    frugal = [one for one in ours if one.expert_macs <= COST_SHARE * rival.expert_macs]
    equal = [one for one in ours if one.macs <= rival.macs]
    told, reached = [f"best rival {tell(rival)}"], False
    for name, points, least in ((f"{100 * COST_SHARE:.0f} % of its expert", frugal, -1), ("its", equal, 2)):
        if points:
            chosen = max(points, key=lambda one: one.validation.mean)
            margin, doubt = chosen.test.mean - rival.test.mean, error(chosen, rival)
            reached |= margin >= least * doubt and (least < 0 or margin > 0)
            told.append(
                f"with at most {name} multiply-adds, {tell(chosen)} ({100 * margin:+.2f} ± {100 * doubt:.2f} points)"
            )
    return reached, "; ".join(told)


def on_union(results: Results) -> tuple[bool, str] | None:
    """Every control and rival against the best point of MRE that costs no more."""
    ours = our_points(results, "union", our_labels(results, "union"))
    others = model_points(results, "union", [*DENSE_CONTROLS, *ROUTED_RIVALS])
    if not ours or not others:
        return None
    told, lost = [], 0
    for other in others:
        equal = [one for one in ours if layer_macs(one) <= EQUAL_COST * layer_macs(other)]
        if not equal:
            told.append(f"{other.label}: no point of MRE is as cheap")
            lost += 1
            continue
        chosen = max(equal, key=lambda one: one.validation.mean)
        margin = chosen.test.mean - other.test.mean
        lost += margin <= 0
        told.append(f"{other.label}: {100 * margin:+.2f} ± {100 * error(chosen, other):.2f}")
    return lost == 0, "points ahead at equal cost: " + "; ".join(told)


def layer_macs(point: Point) -> float:
    """Multiply-adds of routing and experts."""
    return point.macs - point.fixed_macs


def epochs_bar(results: Results) -> Bar:
    verdicts = {}
    for data in results.data():
        rival = best_rival(results, data) if data != "union" else None
        one = race(results, data, rival) if rival else None
        if one is None:
            continue
        sooner = one.saved is not None and one.saved >= EPOCHS_SAVED
        faster = one.ours is not None and one.ours.seconds < one.rival_reached.seconds
        verdicts[data] = sooner and faster, one.tell()
    text = "40 % fewer epochs, and less time, than the best rival to its own final validation accuracy minus 0.5"
    return make_bar(text, verdicts)


def prefix_bar(results: Results) -> Bar:
    verdicts = {}
    for data in results.data():
        curves = [[row["accuracy"] for row in one.budgets] for one in results.of(data, "mre") if one.budgets]
        if not curves:
            continue
        curve = mean_curve(curves)
        fall, first = largest_fall(curve), curve[-1] - curve[min(1, len(curve) - 1)]
        told = f"largest fall {100 * fall:.2f} points, the first expert alone {100 * first:.2f} points below the end"
        verdicts[data] = fall <= LARGEST_FALL and first <= FIRST_BELOW_LAST, told
    text = (
        "Accuracy by prefix never falls by more than 0.3 points; the first expert alone is within 3 points of the end"
    )
    return make_bar(text, verdicts)


def error(first: Point, second: Point) -> float:
    """The standard error of the difference of two mean accuracies on test images."""
    return hypot(first.test.error, second.test.error)


def tell(point: Point) -> str:
    """A point in one phrase."""
    return f"{point.name}: {100 * point.test.mean:.2f} ± {100 * point.test.std:.2f} % with {point.experts:.2f} experts"
