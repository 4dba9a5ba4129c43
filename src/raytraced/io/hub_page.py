"""README.md of a shared model: the page that the Hub shows. Names that a user or a file made up cannot become markup."""

import json
from pathlib import Path
from typing import Any

import yaml

from raytraced.errors import printable
from raytraced.models.card import ModelCard
from raytraced.models.registry import find_model
from raytraced.tables import markdown_table

CALIBRATION_ROWS = {"stopped": "with early exit", "to_the_end": "without early exit"}
_ENDS_CODE = frozenset("`|\\<>&")
_PLAIN_SIGNS = frozenset(" .,:;-_/")


def run_figures(run: Path, card: ModelCard, num_parameters: int) -> dict[str, dict[str, float]]:
    """Read the figures of a run from its summary.json.

    Args:
        run: The run folder.
        card: The card of the model that the figures are for.
        num_parameters: Its number of parameters.

    Returns:
        The figures of "validation" and "test", by name.

    Raises:
        ValueError: The run is not complete, or is a run of another model.
    """
    try:
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        splits = {split: summary[split] for split in ("validation", "test")}
        found = (summary["model"], summary["parameters"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"{run}: is not a complete run, its summary.json cannot be read: {reason}") from error
    if found != (card.model, num_parameters):
        raise ValueError(f"{run}: is a run of {found[0]} with {found[1]} parameters, not of this {card.model}")
    figures = {}
    for split, values in splits.items():
        numbers = {name: value for name, value in values.items() if is_number(value)}
        figures[split] = numbers | ({"macs": values["macs"]["total"]} if "macs" in values else {})
    return figures


def write_page(
    name: str, source: str, card: ModelCard, num_parameters: int, figures: dict[str, dict[str, float]]
) -> str:
    """Write the page of a model: the head that the Hub reads, how to use the model, its figures and its training.

    Args:
        name: Title of the page.
        source: What a reader gives to `from_pretrained`: a repository "owner/name", or "." for the page's own folder.
        card: The model's card.
        num_parameters: The model's number of parameters.
        figures: The figures of a run by split, or an empty table.

    Returns:
        The text of README.md.
    """
    is_text = find_model(card.model)[0] == "gpt"
    head = {
        "library_name": "raytraced",
        "pipeline_tag": "text-generation" if is_text else "image-classification",
        "tags": ["raytraced", "mixture-of-experts"],
    }
    origin = f"trained on {plain(card.data)}" if card.data else "not trained by `raytraced train`"
    lines = ["---", yaml.safe_dump(head, sort_keys=False).strip(), "---", "", f"# {plain(name)}", ""]
    lines += [f"A mixture of experts, `{card.model}` of raytraced, {origin}; {num_parameters:,} parameters.", ""]
    if card.plugins:
        lines += [f"Besides raytraced it needs: {', '.join(map(plain, card.plugins))}.", ""]
    lines += _usage(source, is_text)
    if figures:
        rows = [[plain(key), *(in_short(figures[split].get(key)) for split in figures)] for key in figures["test"]]
        lines += ["## Figures", "", *markdown_table(["", *figures], rows), ""]
    if card.calibration:
        lines += _calibration(card.calibration)
    lines += ["## Options", ""]
    for part, values in {"inputs and outputs": card.spec, "layer": card.options, "training": card.training}.items():
        # A tokenizer is a whole file, too long for a page.
        shown = {key: value for key, value in values.items() if value not in (None, {}) and key != "tokenizer"}
        rows = [[code(key), code(value)] for key, value in shown.items()]
        lines += [*markdown_table([part, ""], rows), ""] if rows else []
    return "\n".join(lines)


def _usage(source: str, is_text: bool) -> list[str]:
    """The lines that show how to load the model."""
    comment = "  # the folder that holds this page" if source == "." else ""
    argument = json.dumps(source)
    lines = ["```python", "import raytraced as rt", "", f"model = rt.from_pretrained({argument}){comment}", "```", ""]
    if is_text:
        lines += ["With transformers:", "", "```python", "import raytraced.integrations.transformers"]
        lines += ["from transformers import pipeline", ""]
        lines += [f'generate = pipeline("text-generation", {argument}){comment}', "```", ""]
    return lines


def _calibration(calibration: dict[str, Any]) -> list[str]:
    """The lines on the confidence threshold, with the figures measured on test data."""
    threshold, place = calibration["confidence"], calibration["exit_every"]
    lines = ["## Early exit", "", f'`model(inputs, confidence="calibrated")` stops at a confidence of {threshold:.3f},']
    lines += [f"with an exit after every {place}.", ""]
    figures = {label: values for label, values in _table(calibration, "test").items() if isinstance(values, dict)}
    if not figures:
        return lines
    names = list(dict.fromkeys(name for values in figures.values() for name in values))
    rows = [
        [plain(CALIBRATION_ROWS.get(label, label)), *(in_short(values.get(name)) for name in names)]
        for label, values in figures.items()
    ]
    lines += ["Means over the test data:", "", *markdown_table(["", *map(plain, names)], rows), ""]
    interval = _table(calibration, "interval").get("test")
    if isinstance(interval, list) and len(interval) == 2 and all(map(is_number, interval)):
        lines += [f"Accuracy lost by early exit: {interval[0]:.2f} to {interval[1]:.2f} points (95 % interval).", ""]
    return lines


def _table(values: dict[str, Any], name: str) -> dict[str, Any]:
    """The table under a name, or an empty one where there is none."""
    table = values.get(name)
    return table if isinstance(table, dict) else {}


def plain(text: object) -> str:
    """Text that Markdown and HTML show as it is: every sign that could be markup becomes a character reference."""
    shown = printable(text)
    return "".join(one if one.isalnum() or one in _PLAIN_SIGNS else f"&#{ord(one)};" for one in shown)


def code(value: object) -> str:
    """A value as code in a cell of a table, whatever it holds."""
    shown = printable(value)
    return f"<code>{plain(shown)}</code>" if _ENDS_CODE & set(shown) or not shown else f"`{shown}`"


def is_number(value: object) -> bool:
    """Whether a value is a number; true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def in_short(value: Any) -> str:
    """A figure with four digits, nothing for none, anything else as code."""
    if value is None:
        return ""
    if not is_number(value):
        return code(value)
    return f"{value:,.4g}" if isinstance(value, float) and abs(value) < 1e4 else f"{value:,.0f}"
