"""The style of all figures: a white ground that is readable on dark pages too, one style per model, one legend below."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments.reproduce.variants import DATA_NAMES
from raytraced.colours import BLUE, FAINT, GREEN, GREY, INK, ORANGE, PURPLE, SKY, YELLOW

PALE = "#D9DCE1"  # grid lines
STYLE: dict[Any, Any] = {
    "font.size": 9, "text.color": INK, "axes.titlesize": 10, "axes.titlelocation": "left", "legend.frameon": False,
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": FAINT, "axes.labelcolor": INK,
    "xtick.color": INK, "ytick.color": INK,
}  # fmt: skip


class Pen(NamedTuple):
    """The style of a model in every figure; colour, marker and line each identify it."""

    colour: str
    marker: str
    line: str = "-"
    filled: bool = True

    @property
    def face(self) -> str:
        """The colour inside its marker."""
        return self.colour if self.filled else "white"

    @property
    def style(self) -> dict[str, Any]:
        """The same as keyword arguments of matplotlib."""
        return {"color": self.colour, "marker": self.marker, "linestyle": self.line, "markerfacecolor": self.face}


PENS = {
    "mre": Pen(BLUE, "o"),
    "mre-paper": Pen(SKY, "o", "--", False),
    "mre-final-loss": Pen(BLUE, "o", "--", False),
    "mre-budgets": Pen(BLUE, "D", "-", False),
    "mre-budgets-exits": Pen(SKY, "D", "-", False),
    "top-k": Pen(ORANGE, "s"),
    "top-1": Pen(ORANGE, "v"),
    "top-k-balance": Pen(ORANGE, "s", "--", False),
    "aux-free": Pen(YELLOW, "D", "-."),
    "threshold": Pen(GREEN, "P", "-."),
    "ada-k": Pen(PURPLE, "X", "--"),
    "top-any": Pen(INK, "d"),
    "null-experts": Pen(YELLOW, "*", ":"),
    "chain": Pen(YELLOW, "h", "-", False),
    "dense": Pen(GREY, "_", ":"),
    "multi-exit": Pen(GREY, "p", ":", False),
    "mlp-total": Pen(PURPLE, "<", ":"),
    "mlp-avg": Pen(YELLOW, ">", ":"),
    "mre-target-2": Pen(SKY, "v", "--"),
    "mre-target-12": Pen(SKY, "^", "--"),
    "dense-1-exits": Pen(GREY, "1", ":"),
    "dense-2-exits": Pen(GREY, "2", ":"),
    "dense-4-exits": Pen(GREY, "_", ":"),
    "dense-8-exits": Pen(INK, "x", ":"),
    "top-1-exits": Pen(YELLOW, "v", "-."),
    "top-k-exits": Pen(ORANGE, "s", "-."),
    "threshold-exits": Pen(GREEN, "P", "-."),
    "multi-exit-exits": Pen(PURPLE, "p", ":", False),
}


@contextmanager
def card(title: str, width: float, height: float, dpi: float = 150) -> Iterator[Figure]:
    """A figure on a white ground with a title."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), dpi=dpi, facecolor="white", layout="constrained")
        figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)  # type: ignore[union-attr, call-arg]
        figure.suptitle(title, fontsize=10)
        yield figure


def panels(
    title: str, label: str, shown: Sequence[str], draw: Callable[..., None], height: float,
    width: float = 3.3, least: float = 5.0, **rows: Any,
) -> Figure:  # fmt: skip
    """A figure with a column per data set, which `draw(data, *axes)` fills; `label` names the vertical axes."""
    with card(title, max(least, width * len(shown)), height) as figure:
        grid, handles = figure.subplots(ncols=len(shown), squeeze=False, **rows), dict[str, Artist]()
        for axes in grid[:, 0]:
            axes.set_ylabel(label)
        for axes in grid.flat:
            axes.grid(color=PALE, linewidth=0.6)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        for column, data in zip(grid.T, shown, strict=True):
            column[0].set_title(DATA_NAMES[data])
            draw(data, *column)
        for axes in grid.flat:
            for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
                handles.setdefault(name, handle)
        if handles:
            place = {"ncols": int(figure.get_figwidth() / 1.75), "fontsize": 8, "handlelength": 2.2}
            figure.legend(list(handles.values()), list(handles), loc="outside lower center", **place)
        return figure


def set_range(axes: Axes, values: Mapping[str, float], span: float, top: float | None = None) -> str:
    """End the vertical axis `span` points below the best, so that one failure does not squeeze the rest.

    Returns:
        The values below that end as text, with their names; empty if there are none.
    """
    best = max(values.values()) if top is None else top
    lowest = min((value for value in values.values() if value >= best - span), default=best - span)
    room = 0.06 * max(best - lowest, 1.0)
    axes.set_ylim(lowest - room, best + room)
    below = [f"{name} {value:.1f}" for name, value in values.items() if value < lowest]
    return "\n".join(["", "below:", *below]) if below else ""
