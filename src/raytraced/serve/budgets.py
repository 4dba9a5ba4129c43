"""What a query may spend, by the table in its model's card."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Self

from raytraced.errors import require
from raytraced.models.dial import effort_at, find_stop
from raytraced.serve.models import Served


@dataclass(frozen=True)
class Budget:
    """A share of a model's full cost, and the value of `stop` that stands for it."""

    dial: dict[str, Any]
    """the table of the model's card"""
    effort: float
    """share of the full cost"""
    stop: float
    """how much the output node's rate counts"""
    lowest: float
    """the least effort that the request allows"""

    def lowered(self) -> Self | None:
        """The budget one row of the table below this one; None where the request allows none."""
        rows = self.dial["rows"]
        full = rows[-1]["macs"]
        below = [row for row in rows if self.lowest * (1 - 1e-9) <= row["macs"] / full < self.effort * (1 - 1e-9)]
        return replace(self, effort=below[-1]["macs"] / full, stop=below[-1]["stop"]) if below else None

    @property
    def least(self) -> float:
        """The least effort that the request allows and the table has."""
        budget, below = self, self.lowered()
        while below is not None:
            budget, below = below, below.lowered()
        return budget.effort

    @property
    def loss(self) -> float:
        """The loss on validation data at this effort, interpolated between the rows of the table."""
        rows = self.dial["rows"]
        full = rows[-1]["macs"]
        for row, after in pairwise(rows):
            low, high = row["macs"] / full, after["macs"] / full
            if self.effort <= high:
                share = (self.effort - low) / (high - low) if high > low else 0.0
                return float(row["loss"] + share * (after["loss"] - row["loss"]))
        return float(rows[-1]["loss"])


def read_budget(served: Served, experts: float | None, effort: float | list[float] | None) -> Budget | None:
    """The budget that a request states; of a range the highest effort. A ValueError where the model has no such budget."""
    if experts is None and effort is None:
        return None
    low, high = effort if isinstance(effort, list) else (effort, effort)
    if isinstance(effort, list):
        require(experts is None, "experts", experts, f"give either experts or effort={effort}, not both")
        assert low is not None
        assert high is not None
        require(low <= high, "effort", effort, "must be [lowest, highest]; exchange the two numbers")
        find_stop(served.name, served.model.card.dial, None, low)
    dial = served.model.card.dial
    stop = find_stop(served.name, dial, experts, high)
    found = effort_at(dial, stop)
    return Budget(dial, found, stop, min(found, low) if isinstance(effort, list) and low is not None else found)
