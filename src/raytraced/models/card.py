"""What a model knows about itself: how to build it again, and how it came about. Needs no torch."""

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class ModelCard:
    """A model's name, the spec of its inputs and answers, all options of its layer, its data and its training."""

    model: str
    spec: dict[str, Any]
    options: dict[str, Any]
    task: str | None = None
    data: str | None = None
    training: dict[str, Any] = field(default_factory=dict)
    calibration: dict[str, Any] = field(default_factory=dict)
    """how sure an answer must be ("sure"), after what one looks ("look"), and what that gave"""


def read_card(values: Any) -> ModelCard:
    """A card from plain values; a ValueError says what is missing, too much, or of another kind."""
    if not isinstance(values, dict):
        raise ValueError(f"its card is {type(values).__name__}, not a table of names and values")
    texts, tables = ("model", "task", "data"), ("spec", "options", "training", "calibration")
    kinds: dict[str, Any] = dict.fromkeys(texts, str | None) | dict.fromkeys(tables, dict) | {"model": str}
    known = {one.name for one in fields(ModelCard)}
    if extra := sorted(set(values) - known):
        raise ValueError(f"its card has entries that no card has: {', '.join(extra)}")
    if missing := [name for name in ("model", "spec", "options") if name not in values]:
        raise ValueError(f"its card lacks {', '.join(missing)}")
    for name, value in values.items():
        if not isinstance(value, kinds[name]):
            raise ValueError(f"its card's {name} is {value!r:.60}, of the wrong kind")
    if not isinstance(values.get("training", {}).get("data_options", {}), dict):
        raise ValueError("its card's training has data_options of the wrong kind")
    calibration = values.get("calibration") or {"sure": 1.0, "look": "layer"}
    if not isinstance(calibration.get("sure"), int | float) or calibration.get("look") not in ("layer", "expert"):
        raise ValueError(f"its card's calibration is {calibration!r:.60}, without a probability or where to look")
    return ModelCard(**values)
