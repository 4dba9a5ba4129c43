"""Accuracy against multiply-adds: every model a point, MRE a line along its dial and a line along budgets."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from raytraced.reproduce.canvas import BLUE, GREY, GRID, card, look_of, set_range
from raytraced.reproduce.figures import add_legend
from raytraced.reproduce.paper import DATA_NAMES
from raytraced.reproduce.points import Point, budget_points, model_points
from raytraced.reproduce.records import Results
from raytraced.reproduce.variants import DENSE_CONTROLS, is_ours


def frontier_figure(results: Results, data_names: list[str], quick: bool) -> Figure | None:
    """One panel a data set; the horizontal axis leaves out what the leanest input block and output layer take."""
    shown = [data for data in data_names if len(results.labels(data)) > 1]
    if not shown:
        return None
    title = "Accuracy against cost, mean and deviation over the seeds"
    with card(max(5.6, 3.5 * len(shown)), 4.8, title, quick) as figure:
        panels = figure.subplots(1, len(shown), squeeze=False)
        for axes, data in zip(panels[0], shown, strict=True):
            draw_frontier(axes, results, data)
            axes.set_title(DATA_NAMES.get(data, data))
        panels[0, 0].set_ylabel("test accuracy (%)")
        add_legend(figure, panels)
    return figure


def draw_frontier(axes: Axes, results: Results, data: str) -> None:
    """All points of one data set."""
    points = model_points(results, data, results.labels(data))
    common = min(point.fixed_macs for point in points)
    values = {point.label: 100 * point.test.mean for point in points}
    best, middle = max(values.values()), sorted(values.values())[len(values) // 2]
    below = set_range(axes, values, max(2.5, 2.2 * (best - middle)))
    lowest = axes.get_ylim()[0]
    points = [point for point in points if values[point.label] >= lowest]
    ours = sorted((point for point in points if is_ours(point.label)), key=lambda point: point.macs)
    dense = sorted((point for point in points if point.label in DENSE_CONTROLS), key=lambda point: point.macs)
    others = [point for point in points if point not in ours and point not in dense]
    if dense:
        line(axes, dense, common, GREY, ":", "_", "dense, 1 2 4 8 blocks")
        for point in dense:
            place = (point.macs - common) / 1000, 100 * point.test.mean
            blocks = point.label.removeprefix("dense-")
            axes.annotate(blocks, place, (4, 3), textcoords="offset points", ha="left", fontsize=7.5, color=GREY)
    for point in others:
        look = look_of(point.label)
        axes.errorbar(
            (point.macs - common) / 1000,
            100 * point.test.mean,
            100 * point.test.std,
            color=look.colour,
            marker=look.marker,
            markerfacecolor=look.colour if look.filled else "white",
            markersize=6,
            linestyle="none",
            elinewidth=0.8,
            label=point.label,
            zorder=3,
        )
    if ours:
        line(axes, ours, common, BLUE, "-", "o", "MRE, cost dial")
    budgets = budget_points("mre", results.of(data, "mre"))[1:]
    if len(budgets) > 1:
        line(axes, budgets, common, BLUE, "--", ".", "MRE, budgets 1, 2 …", bars=False)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(f"thousand multiply-adds an image,\nbeyond the common input block{below}", fontsize=8)
    axes.grid(color=GRID, linewidth=0.6, which="major")


def line(
    axes: Axes, points: list[Point], common: float, colour: str, style: str, marker: str, name: str, bars: bool = True
) -> None:
    """Points of one family, joined."""
    axes.errorbar(
        [(point.macs - common) / 1000 for point in points],
        [100 * point.test.mean for point in points],
        [100 * point.test.std for point in points] if bars else None,
        color=colour,
        marker=marker,
        markersize=6,
        markeredgewidth=1.6 if marker == "_" else 1.0,
        linestyle=style,
        linewidth=1.5,
        elinewidth=0.8,
        label=name,
        zorder=4,
    )
