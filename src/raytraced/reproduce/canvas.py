"""What all figures share: a white card that reads on dark pages too, and one look for each model everywhere."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, FAINT, GRID = "#222222", "#6B7280", "#D9DCE1"

# Okabe and Ito's colours, which colour-blind eyes tell apart; markers and line styles tell the same once more.
BLUE, ORANGE, GREEN, PURPLE, YELLOW, SKY, GREY = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#7F7F7F",
)


class Look(NamedTuple):
    """How a model is drawn."""

    colour: str
    marker: str
    line: str = "-"
    filled: bool = True


LOOKS = {
    "mre": Look(BLUE, "o"),
    "mre-paper": Look(SKY, "o", "--", False),
    "top-k": Look(ORANGE, "s"),
    "top-1": Look(ORANGE, "v"),
    "top-k-balance": Look(ORANGE, "s", "--", False),
    "aux-free": Look(YELLOW, "D", "-."),
    "threshold": Look(GREEN, "P", "-."),
    "ada-k": Look(PURPLE, "X"),
    "top-any": Look(PURPLE, "d"),
    "null-experts": Look(PURPLE, "*"),
    "chain": Look(YELLOW, "h", "-", False),
    "multi-exit": Look(GREY, "p", ":", False),
    "mlp-total": Look(PURPLE, "<", ":"),
    "mlp-avg": Look(YELLOW, ">", ":"),
}
DENSE_LOOK = Look(GREY, "_", ":")


def look_of(label: str) -> Look:
    """The look of a model, wherever it appears."""
    return LOOKS.get(label, DENSE_LOOK)


@contextmanager
def card(width: float, height: float, title: str, quick: bool) -> Iterator[Figure]:
    """A figure on white under its title; a quick likeness is stamped as such."""
    style: dict[Any, Any] = {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": FAINT,
        "axes.labelcolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "text.color": INK,
        "axes.titlesize": 10,
        "axes.titlelocation": "left",
        "legend.frameon": False,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(width, height), facecolor="white", layout="constrained")
        figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)  # type: ignore[union-attr, call-arg]
        if quick:
            figure.suptitle(f"Quick run, not a result.\n{title}", fontsize=10, color=ORANGE)
        else:
            figure.suptitle(title, fontsize=10)
        yield figure


def set_range(axes: Axes, values: Mapping[str, float], span: float, top: float | None = None) -> str:
    """End the vertical axis `span` points below the best: one failure would squeeze all else. Names what is below."""
    best = max(values.values()) if top is None else top
    lowest = min((value for value in values.values() if value >= best - span), default=best - span)
    room = 0.06 * max(best - lowest, 1.0)
    axes.set_ylim(lowest - room, best + room)
    below = [f"{name} {value:.1f}" for name, value in values.items() if value < lowest]
    return "\n".join(["", "below:", *below]) if below else ""
