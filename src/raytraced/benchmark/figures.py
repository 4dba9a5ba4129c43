"""Plots of results.json as PNG: on a white card, in colours and marks that colour-blind eyes tell apart; needs no torch."""

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from raytraced.analysis.curves import COLOURS

BLUE, ORANGE, GREEN = COLOURS[:3]
STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}


def draw_all(content: dict[str, Any], folder: Path) -> list[str]:
    """Draw what there are results for; the file names."""
    drawn = []
    with matplotlib.rc_context(STYLE):
        for name, needs, draw in (
            ("bars.png", "", draw_bars),
            ("peers.png", "g", draw_peers),
            ("growth.png", "j", draw_growth),
        ):
            if content["bars"] and all(letter in content["bars"] for letter in needs):
                draw(content).savefig(folder / name, dpi=130)
                drawn.append(name)
    return drawn


def draw_bars(content: dict[str, Any]) -> Figure:
    """Every check's distance from its limit: left of the line it holds."""
    checks = [(letter, check) for letter, bar in content["bars"].items() for check in bar["detail"]["checks"]]
    figure = Figure(figsize=(10, 1.1 + 0.24 * len(checks)), layout="constrained")
    axes = figure.subplots()
    for place, (_, check) in enumerate(checks):
        if check["value"] is None or check["value"] <= 0:
            axes.text(1.0, place, "  not measured", va="center", color="#555555")
            continue
        excess = check["bar"] / check["value"] if check["rule"] == "at least" else check["value"] / check["bar"]
        colour, mark = (BLUE, "o") if check["holds"] else (ORANGE, "D")
        axes.plot([1, excess], [place, place], color=colour, linewidth=2.5, solid_capstyle="round")
        axes.plot(excess, place, mark, color=colour, markersize=6)
        sign = {"at least": "≥", "at most": "≤", "below": "<"}[check["rule"]]
        text = f"{check['value']:.3g} ({sign} {check['bar']:g})"
        side = -1 if excess < 1 else 1
        axes.annotate(
            text,
            (excess, place),
            (8 * side, 0),
            textcoords="offset points",
            va="center",
            ha="right" if side < 0 else "left",
        )
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.margins(x=0.25)
    axes.set_yticks(range(len(checks)), [f"{letter}  {check['what']}" for letter, check in checks])
    axes.set_ylim(len(checks) - 0.4, -0.6)
    axes.set_xlabel("value over its limit (log): ● left of the line holds, ◆ right of it does not")
    axes.set_title("Every check against its limit", loc="left", fontsize=11)
    axes.grid(axis="x", alpha=0.25)
    return figure


def draw_peers(content: dict[str, Any]) -> Figure:
    """Forward and backward of top-2 stacks: ours and other libraries', each in its fastest variant."""
    detail = content["bars"]["g"]["detail"]
    sizes = list(dict.fromkeys(name.rsplit(", ", 1)[1] for name in detail["times"]))
    figure = Figure(figsize=(10, 2.9), layout="constrained")
    panels = figure.subplots(1, len(sizes), squeeze=False)[0]
    for axes, size in zip(panels, sizes, strict=True):
        fastest: dict[str, dict[str, Any]] = {}
        for name, row in detail["times"].items():
            library = name.split(", ")[0]
            if name.endswith(f", {size}") and row["median_ms"] <= fastest.get(library, row)["median_ms"]:
                fastest[library] = row
        draw_times(axes, fastest)
        axes.set_title(f"experts {size}", loc="left", fontsize=10)
        axes.set_xlabel("ms, forward and backward, batch 256, one thread")
    figure.suptitle("Top-2, four layers of 8 experts", x=0.01, ha="left", fontsize=11)
    return figure


def draw_times(axes: Axes, times: dict[str, dict[str, Any]]) -> None:
    """Medians as bars with their quartiles; ours is the first, in its own colour and hatched."""
    for place, row in enumerate(times.values()):
        low, high = row["quartiles_ms"]
        median = row["median_ms"]
        axes.barh(
            place,
            median,
            color=BLUE if place == 0 else "#999999",
            hatch="//" if place == 0 else None,
            edgecolor="white",
        )
        axes.errorbar(median, place, xerr=[[median - low], [high - median]], color="black", capsize=3, linewidth=1)
        axes.annotate(
            f"{median:,.0f}" if median >= 100 else f"{median:.3g}",
            (high, place),
            (5, 0),
            textcoords="offset points",
            va="center",
        )
    axes.set_yticks(range(len(times)), list(times))
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.grid(axis="x", alpha=0.25)


def draw_growth(content: dict[str, Any]) -> Figure:
    """Time of the sequence against the work of the whole grid, and against that of the active nodes."""
    detail = content["bars"]["j"]["detail"]
    table, exponents = detail["table"], detail["exponents"]
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    lines = (
        ("training", "whole_grid_work_in_training", "training_us", ORANGE, "D", "training against T·L·N³"),
        ("inference", "whole_grid_work", "inference_us", BLUE, "o", "inference against T·L·N³"),
    )
    for name, work, time, colour, mark, fit in lines:
        draw_fit(left, table, work, time, colour, mark, f"{name}: exponent {exponents[fit]:.2f}")
    left.set_xlabel("T·L·N³, what recomputing the whole grid at every step would multiply")
    fit = exponents["inference against the multiply-adds of active nodes"]
    draw_fit(right, table, "active_work", "inference_us", BLUE, "o", f"inference: exponent {fit:.2f}")
    right.set_xlabel("multiply-adds of the gates of active nodes")
    for axes in (left, right):
        axes.set_ylabel("µs a sample")
        axes.grid(alpha=0.25, which="both")
        axes.legend(frameon=False, loc="upper left")
    figure.suptitle(
        "The sequence as the grid grows (one thread, batch 256, at initialisation)", x=0.01, ha="left", fontsize=11
    )
    return figure


def draw_fit(axes: Axes, table: list[dict[str, Any]], work: str, time: str, colour: str, mark: str, label: str) -> None:
    """Points, labelled with their grids, and the fitted power law."""
    import numpy as np

    x, y = (np.array([row[key] for row in table]) for key in (work, time))
    slope, start = np.polyfit(np.log(x), np.log(y), 1)
    ends = np.array([x.min(), x.max()])
    axes.loglog(ends, np.exp(start) * ends**slope, "--", color=colour, linewidth=1)
    axes.loglog(x, y, mark, color=colour, label=label)
    for row in table:
        # grids of eight layers can lie on those of four: their names go above
        place = (0, 6 if row["grid"].startswith("8") else -13)
        axes.annotate(
            row["grid"],
            (row[work], row[time]),
            place,
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color=colour,
        )
