"""Curves of training over the epochs, for one run or several; needs no torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from raytraced.colours import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, YELLOW
from raytraced.errors import printable

COLOURS = (BLUE, ORANGE, GREEN, PURPLE, YELLOW, SKY, GREY)


def draw_curves(histories: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Draw the figures of each run over its epochs, training dashed and validation solid.

    Args:
        histories: For each run its name and one mapping per epoch, as metrics.jsonl holds them.
        path: The PNG file to write.
    """
    names = [
        key.removeprefix("validation_") for key in next(iter(histories.values()))[0] if key.startswith("validation_")
    ]
    # Names of runs may hold "$": they are not formulas.
    with matplotlib.rc_context(
        {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "text.parse_math": False}
    ):
        figure = Figure(figsize=(3.3 * len(names), 3.2), layout="constrained")
        for axes, title in zip(figure.subplots(1, len(names)), names, strict=True):
            for number, (name, history) in enumerate(histories.items()):
                colour = COLOURS[number % len(COLOURS)]
                epochs = [epoch["epoch"] for epoch in history]
                marker = "o" if len(epochs) == 1 else None
                for part, style, width in (("train", "--", 1.0), ("validation", "-", 1.8)):
                    values = [epoch[f"{part}_{title}"] for epoch in history]
                    label = printable(name) if part == "validation" else None
                    axes.plot(epochs, values, style, color=colour, linewidth=width, label=label, marker=marker)
            axes.set_xlabel("epoch")
            axes.set_title(title, loc="left", fontsize=10)
            axes.grid(alpha=0.25)
        figure.supylabel("dashed: training, solid: validation", fontsize=8)
        if len(histories) > 1:
            figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
        figure.savefig(path, dpi=130)
