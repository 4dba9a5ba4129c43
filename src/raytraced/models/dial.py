"""Budgets in a user's terms: a mean number of experts, or a share of the full cost, turned into a `stop`. Needs no torch.

`raytraced calibrate` measures a model at several values of `stop` and writes the table into its card.
"""

import math
from typing import Any

from raytraced.errors import require

DIAL_COLUMNS = ("stop", "experts", "macs", "loss")


def find_stop(name: str, dial: dict[str, Any], experts: float | None, effort: float | None) -> float:
    """The value of `stop` at which a model runs a mean number of experts, or a share of its full cost.

    Args:
        name: The model's name, for errors.
        dial: The table of the model's card: under "rows" the measured `stop`, `experts`, `macs` and `loss`, in the order of
            the number of experts.
        experts: Mean number of experts per sample or token.
        effort: Share of the full cost, that of the last row; exactly one of the two is given.

    Returns:
        The value, interpolated between the rows.
    """
    option, value = ("experts", experts) if effort is None else ("effort", effort)
    require(experts is None or effort is None, "experts", experts, f"give either experts or effort={effort}, not both")
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    require(is_number, option, repr(value), "must be a number")
    rows = dial.get("rows", ())
    require(bool(rows), option, value, f"the card of {name} has no table of budgets; run raytraced calibrate first")
    full = rows[-1]["macs"]
    costs = [row["experts"] if effort is None else row["macs"] / full for row in rows]
    least, most = costs[0], costs[-1]
    unit = "experts on average" if effort is None else "of the full cost"
    rule = f"{name} runs at least {least:.3g} {unit} and at most {most:.3g}, as calibrated; give a value in between"
    assert value is not None
    # Rounded bounds, as an error states them, are accepted.
    slack = 0.005 * most
    require(least - slack <= value <= most + slack, option, f"{value:g}", rule)
    wanted = min(max(value, least), most)
    for row, after, low, high in zip(rows, rows[1:], costs, costs[1:], strict=False):
        if wanted <= high:
            share = (wanted - low) / (high - low) if high > low else 0.0
            return math.exp(math.log(row["stop"]) * (1 - share) + math.log(after["stop"]) * share)
    return float(rows[-1]["stop"])


def check_greedy(select: str | None, experts: float | None, effort: float | None) -> None:
    """Refuse a budget where experts are drawn: its table was measured with greedy choices, and draws run others."""
    for name, value in (("experts", experts), ("effort", effort)):
        rule = (
            "must be left out with select=sample: budgets were measured with greedy choices; give max_experts instead"
        )
        require(value is None or select != "sample", name, value, rule)


def effort_at(dial: dict[str, Any], stop: float) -> float:
    """The share of the full cost that a model spends at a value of `stop`, interpolated between the rows of its table."""
    rows = dial["rows"]
    efforts = [row["macs"] / rows[-1]["macs"] for row in rows]
    for row, after, low, high in zip(rows, rows[1:], efforts, efforts[1:], strict=False):
        if stop >= after["stop"]:
            share = math.log(row["stop"] / min(stop, row["stop"])) / math.log(row["stop"] / after["stop"])
            return float(low + share * (high - low))
    return float(efforts[-1])


def check_dial(dial: dict[str, Any]) -> None:
    """Refuse a table of budgets that is none: rows of positive, finite numbers whose experts increase."""
    rows = dial.get("rows")
    fits = isinstance(rows, list) and all(isinstance(row, dict) and set(DIAL_COLUMNS) <= set(row) for row in rows)
    numbers = [row[column] for row in rows or () for column in DIAL_COLUMNS] if fits else []
    fits = fits and all(isinstance(one, int | float) and not isinstance(one, bool) for one in numbers)
    fits = fits and all(row["stop"] > 0 and row["macs"] > 0 for row in rows or ())
    fits = fits and all(
        one["experts"] < after["experts"] for one, after in zip(rows or (), (rows or ())[1:], strict=False)
    )
    if not fits:
        rule = f"must have rows of {', '.join(DIAL_COLUMNS)} in the order of the number of experts"
        raise ValueError(f"its card's dial is {dial!r:.60}; {rule}")
