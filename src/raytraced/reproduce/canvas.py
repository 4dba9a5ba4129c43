"""What all figures share: white cards that read on dark pages too, one look for each model, one legend below."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from raytraced.colours import BLUE, FAINT, GREEN, GREY, INK, ORANGE, PURPLE, SKY, YELLOW
from raytraced.reproduce.variants import DATA_NAMES

PALE = "#D9DCE1"  # of lines behind all others
STYLE: dict[Any, Any] = {
    "font.size": 9, "text.color": INK, "axes.titlesize": 10, "axes.titlelocation": "left", "legend.frameon": False,
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": FAINT, "axes.labelcolor": INK,
    "xtick.color": INK, "ytick.color": INK,
}  # fmt: skip


class Pen(NamedTuple):
    """How a model is drawn, wherever it appears; what its colour tells, its marker and line tell once more."""

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
        """The same in matplotlib's words."""
        return {"color": self.colour, "marker": self.marker, "linestyle": self.line, "markerfacecolor": self.face}


PENS = {
    "mre": Pen(BLUE, "o"),
    "mre-paper": Pen(SKY, "o", "--", False),
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
    "dense-1-sure": Pen(GREY, "1", ":"),
    "dense-2-sure": Pen(GREY, "2", ":"),
    "dense-4-sure": Pen(GREY, "_", ":"),
    "dense-8-sure": Pen(INK, "x", ":"),
    "top-1-sure": Pen(YELLOW, "v", "-."),
    "top-k-sure": Pen(ORANGE, "s", "-."),
    "threshold-sure": Pen(GREEN, "P", "-."),
    "multi-exit-sure": Pen(PURPLE, "p", ":", False),
}


@contextmanager
def card(title: str, width: float, height: float, dpi: float = 150) -> Iterator[Figure]:
    """A figure on white under its title."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), dpi=dpi, facecolor="white", layout="constrained")
        figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)  # type: ignore[union-attr, call-arg]
        figure.suptitle(title, fontsize=10)
        yield figure


def panels(
    title: str, label: str, shown: Sequence[str], draw: Callable[..., None], height: float,
    width: float = 3.3, least: float = 5.0, **rows: Any,
) -> Figure:  # fmt: skip
    """A card where `draw(data, *axes)` fills a column for each data set; `label` is for the vertical axes, one legend below."""
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
    """End the vertical axis `span` points below the best: one failure would squeeze all else. Names what is below."""
    best = max(values.values()) if top is None else top
    lowest = min((value for value in values.values() if value >= best - span), default=best - span)
    room = 0.06 * max(best - lowest, 1.0)
    axes.set_ylim(lowest - room, best + room)
    below = [f"{name} {value:.1f}" for name, value in values.items() if value < lowest]
    return "\n".join(["", "below:", *below]) if below else ""
