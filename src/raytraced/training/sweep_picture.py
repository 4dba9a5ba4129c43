"""The picture of a sweep: the figure of every trial over the values of each option; needs no torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from raytraced.colours import BLUE, GREY, ORANGE
from raytraced.errors import printable
from raytraced.training.sweep_file import Range


def draw_sweep(rows: Sequence[Mapping[str, Any]], ranges: Sequence[Range], figure: str, path: Path) -> None:
    """Draw one panel per range, and one with the trials in their order; the best trial is marked.

    Args:
        rows: What `sweep_rows` returned, the best first.
        ranges: The ranges of the sweep.
        figure: Name of the validation figure.
        path: The PNG file to write.
    """
    known = [row for row in rows if row[figure] is not None]
    settings: dict[Any, Any] = {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "text.parse_math": False,
    }
    with matplotlib.rc_context(settings):
        picture = Figure(figsize=(3.3 * (1 + len(ranges)), 3.2), layout="constrained")
        panels = picture.subplots(1, 1 + len(ranges), sharey=True)
        figures = [row[figure] for row in known]
        colours = [ORANGE, *[BLUE] * len(known)][: len(known)]
        insides = [
            colour if row["state"] == "complete" else "white" for colour, row in zip(colours, known, strict=True)
        ]
        for axes, one in zip(panels, [Range("trial"), *ranges], strict=True):
            values = [row[one.name] for row in known]
            if one.choices is not None:
                axes.set_xticks(range(len(one.choices)), [printable(choice) for choice in one.choices])
                values = [one.choices.index(value) for value in values]
            axes.scatter(values, figures, s=18, edgecolors=colours, facecolors=insides, zorder=2)
            axes.set_title(printable(one.name), loc="left", fontsize=10)
            axes.grid(alpha=0.25)
            if one.log:
                axes.set_xscale("log")
                axes.xaxis.set_major_formatter("{x:g}")
                axes.xaxis.set_minor_formatter(NullFormatter())
        panels[0].set_ylabel(f"validation {figure}")
        missing = len(rows) - len(known)
        legend = "orange: the best trial; empty: ended early" + (f"; {missing} without a figure" if missing else "")
        picture.supxlabel(legend, fontsize=8, color=GREY)
        picture.savefig(path, dpi=130)
