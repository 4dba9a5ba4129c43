"""What a bar came to: checks against a limit, and what they rest on."""

from dataclasses import dataclass, field
from typing import Any, Literal

Rule = Literal["at most", "at least", "below"]


@dataclass(frozen=True)
class Check:
    """One measured value against its limit; None where it could not be measured, which does not count as reached."""

    what: str
    value: float | None
    bar: float
    rule: Rule
    spread: tuple[float, float] | None = None
    note: str = ""

    @property
    def holds(self) -> bool:
        if self.value is None:
            return False
        if self.rule == "below":
            return self.value < self.bar
        return self.value <= self.bar if self.rule == "at most" else self.value >= self.bar

    @property
    def excess(self) -> float:
        """How far past its limit a value is: above 1 where it fails."""
        if self.value is None or self.value <= 0:
            return float("inf") if self.value is None or self.rule == "at least" else 0.0
        return self.bar / self.value if self.rule == "at least" else self.value / self.bar

    def as_dict(self) -> dict[str, Any]:
        row: dict[str, Any] = {"what": self.what, "value": _short(self.value), "rule": self.rule, "bar": self.bar}
        row["holds"] = self.holds
        if self.spread is not None:
            row["quartiles"] = [_short(value) for value in self.spread]
        if self.note:
            row["note"] = self.note
        return row


@dataclass(frozen=True)
class Outcome:
    """All checks of a bar; conditions must hold too (results equal); samples are seconds (or bytes) as they were taken."""

    checks: list[Check]
    detail: dict[str, Any] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)
    conditions: dict[str, bool] = field(default_factory=dict)

    @property
    def worst(self) -> Check:
        """The check that is furthest past its limit, or nearest to it."""
        return max(self.checks, key=lambda check: check.excess)

    @property
    def holds(self) -> bool:
        return all(check.holds for check in self.checks) and all(self.conditions.values())

    def as_dict(self) -> dict[str, Any]:
        """The bar's entry in results.json: of several checks, the worst gives `value` and `bar`."""
        worst = self.worst
        detail: dict[str, Any] = {"rule": worst.rule, "worst": worst.what}
        detail["checks"] = [check.as_dict() for check in self.checks]
        if self.conditions:
            detail["conditions"] = self.conditions
        return {
            "value": _short(worst.value),
            "bar": worst.bar,
            "holds": self.holds,
            "detail": detail | self.detail,
        }


def _short(value: float | None) -> float | None:
    """Five significant digits: more would pretend."""
    return None if value is None else float(f"{value:.5g}")
