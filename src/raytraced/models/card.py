"""The card of a model: how to build it again, and how it was trained. Needs no torch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from raytraced.models.dial import check_dial


@dataclass(frozen=True)
class ModelCard:
    """The description that is saved with a model's weights.

    Args:
        model: Name of the model, as `raytraced.build` takes it.
        spec: Shape of the inputs and outputs: `image_shape`, `num_classes` and so on for images, `vocab_size`, `context`
            and so on for text.
        options: All options of the model's routed layer, the defaults included.
        task: Name of the task that the model was trained for, "images" or "text".
        data: Name of the data set that the model was trained on; never a path.
        training: Options of the training run.
        calibration: The confidence threshold ("confidence"), where the exits are ("exit_every"), and the figures that
            were measured with them; empty for a model that is not calibrated.
        plugins: What the model needs besides raytraced: "package NAME VERSION" or "file NAME" for each. It is a note for
            the reader: nothing is imported because a card names it.
        dial: The table of budgets: under "rows" the mean number of experts, the multiply-adds and the loss on validation
            data at several values of `stop`; empty for a model that is not calibrated.
    """

    model: str
    spec: dict[str, Any]
    options: dict[str, Any]
    task: str | None = None
    data: str | None = None
    training: dict[str, Any] = field(default_factory=dict)
    calibration: dict[str, Any] = field(default_factory=dict)
    plugins: list[str] = field(default_factory=list)
    dial: dict[str, Any] = field(default_factory=dict)


# Options that had other names before version 0.2: cards, runs and records written then are still read.
OLD_NAMES = {
    "sure": "confidence",
    "look": "exit_every",
    "look_loss": "exit_loss",
    "sight_rank": "input_rank",
    "reach": "output_logit_offset",
    "vocabulary": "vocab_size",
    "judged": "eval_tokens",
}
_ENTRIES: dict[str, Any] = {
    "model": str,
    "spec": dict,
    "options": dict,
    "task": str | None,
    "data": str | None,
    "training": dict,
    "calibration": dict,
    "plugins": list,
    "dial": dict,
}


def translate_old_names(values: Any) -> Any:
    """Replace the names of options that were renamed.

    Args:
        values: A table of names and values, which may hold further tables; anything else is returned as it is.

    Returns:
        The same values, with the present name of every option.
    """
    if not isinstance(values, dict):
        return values
    return {OLD_NAMES.get(name, name): translate_old_names(value) for name, value in values.items()}


def read_card(values: Any) -> ModelCard:
    """Read a card from plain values, such as those of a JSON file.

    Args:
        values: The table of a card's entries, under their present or their old names.

    Returns:
        The card.

    Raises:
        ValueError: An entry is missing, unknown, of the wrong kind, or not a value that a card may hold.
    """
    if not isinstance(values, dict):
        raise ValueError(f"its card is {type(values).__name__}, not a table of names and values")
    values = translate_old_names(values)
    if extra := sorted(set(values) - {one.name for one in fields(ModelCard)}):
        raise ValueError(f"its card has entries that no card has: {', '.join(extra)}")
    if missing := [name for name in ("model", "spec", "options") if name not in values]:
        raise ValueError(f"its card lacks {', '.join(missing)}")
    for name, value in values.items():
        if not isinstance(value, _ENTRIES[name]):
            raise ValueError(f"its card's {name} is {value!r:.60}, of the wrong kind")
    card = ModelCard(**values)
    check_card(card)
    return card


def check_card(card: ModelCard) -> None:
    """Refuse values that no card may hold, with a ValueError that names the entry, its value and the rule."""
    for name in ("spec", "options", "training", "calibration", "dial"):
        if (number := next(_not_finite(getattr(card, name)), None)) is not None:
            raise ValueError(f"its card's {name} holds {number}; numbers must be finite")
    if shared := [name for name in card.options if name in card.spec]:  # both become arguments of `build`
        raise ValueError(f"its card's options repeat {', '.join(map(repr, shared)):.60}; its spec holds that already")
    if card.data is not None and "/" in card.data:
        raise ValueError(f"its card's data is {card.data!r:.60}; must be the name of a data set, not a path")
    if not all(isinstance(origin, str) for origin in card.plugins):
        raise ValueError(f"its card's plugins are {card.plugins!r:.60}; must be texts")
    if not isinstance(card.training.get("data_options", {}), dict):
        raise ValueError("its card's training has data_options of the wrong kind")
    if card.calibration:
        _check_calibration(card.calibration)
    if card.dial:
        check_dial(card.dial)


def _check_calibration(calibration: dict[str, Any]) -> None:
    """Refuse a calibration without a probability, or without a place for its exits."""
    confidence: Any = calibration.get("confidence")
    is_number = isinstance(confidence, int | float) and not isinstance(confidence, bool)
    if not is_number or calibration.get("exit_every") not in ("layer", "expert"):
        rule = "must have a confidence and exit_every, which is layer or expert"
        raise ValueError(f"its card's calibration is {calibration!r:.60}; {rule}")
    if not 0 <= confidence <= 1:
        raise ValueError(f"its card's calibration has confidence={confidence}; must lie in 0 … 1, it is a probability")


def _not_finite(values: Any) -> Iterator[float]:
    """All numbers within tables and lists that are NaN or infinite."""
    if isinstance(values, float) and not math.isfinite(values):
        yield values
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, list | tuple):
        for value in values:
            yield from _not_finite(value)
