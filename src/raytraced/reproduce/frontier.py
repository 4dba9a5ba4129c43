"""Accuracy against multiply-adds: every model a point, MRE a line along its costs and a line along budgets."""

from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from raytraced.reproduce.canvas import BLUE, GREY, GRID, LOOKS, add_legend, panels, set_range
from raytraced.reproduce.records import Record, Results, Spread, spread


class Point(NamedTuple):
    """What a model reaches on one data set at which cost, means over its seeds."""

    record: Record  # of one seed
    accuracy: Spread
    experts: float
    macs: float
    expert_macs: float
    fixed_macs: float  # of the input block and the output layer, which no routing can save


def make_point(records: list[Record], budget: int | None = None) -> Point:
    """A model as it runs by itself, or with at most so many experts; a seed whose sequences are shorter gives its last."""
    rows = [one.costs if budget is None else one.budgets[min(budget, len(one.budgets) - 1)] for one in records]
    experts, macs, expert_macs = (spread(row[name] for row in rows).mean for name in ("experts", "macs", "expert_macs"))
    fixed = spread(one.macs["input"] + one.macs["head"] for one in records).mean
    return Point(records[0], spread(row["accuracy"] for row in rows), experts, macs, expert_macs, fixed)


def model_points(results: Results, data: str) -> list[Point]:
    """One point for each model that was run on a data set."""
    return [make_point(results.of(data, label)) for label in results.labels(data)]


def frontier_figure(results: Results, shown: list[str]) -> Figure:
    """One panel a data set; the horizontal axis leaves out what the leanest input block and output layer take."""
    title = "Accuracy against cost, mean and deviation over the seeds"
    with panels(title, "test accuracy (%)", shown, 4.8, width=3.5, least=5.6) as grid:
        for axes, data in zip(grid[0], shown, strict=True):
            draw_frontier(axes, results, data)
        add_legend(grid)
        return grid[0, 0].figure


def draw_frontier(axes: Axes, results: Results, data: str) -> None:
    """All points of one data set."""
    points = model_points(results, data)
    common = min(point.fixed_macs for point in points)
    values = {point.record.label: 100 * point.accuracy.mean for point in points}
    best, middle = max(values.values()), sorted(values.values())[len(values) // 2]
    below = set_range(axes, values, max(2.5, 2.2 * (best - middle)))
    points = [point for point in points if values[point.record.label] >= axes.get_ylim()[0]]
    common_look: dict[str, Any] = {"markersize": 6, "linewidth": 1.5, "elinewidth": 0.8, "zorder": 4}

    def draw(chosen: list[Point], name: str, deviation: bool = True, **look: Any) -> None:
        """Points of one family, joined."""
        axes.errorbar(
            [(point.macs - common) / 1000 for point in chosen],
            [100 * point.accuracy.mean for point in chosen],
            [100 * point.accuracy.std for point in chosen] if deviation else None,
            label=name,
            **common_look | look,
        )

    ours, dense = (
        sorted((point for point in points if point.record.family == family), key=lambda point: point.macs)
        for family in ("mre", "dense")
    )
    if dense:
        draw(dense, "dense, 1 2 4 8 blocks", color=GREY, linestyle=":", marker="_", markeredgewidth=1.6)
    for point in dense:
        place = (point.macs - common) / 1000, 100 * point.accuracy.mean
        axes.annotate(f"{point.record.setting:g}", place, (4, 3), textcoords="offset points", fontsize=7.5, color=GREY)
    for point in points:
        if point not in ours and point not in dense:
            look = LOOKS[point.record.label]
            draw([point], point.record.label, color=look.colour, marker=look.marker, markerfacecolor=look.face,
                 linestyle="none", zorder=3)  # fmt: skip
    if ours:
        draw(ours, "MRE, cost dial", color=BLUE, linestyle="-", marker="o")
    records = results.of(data, "mre")
    longest = max((len(one.budgets) for one in records), default=0)
    budgets = [make_point(records, budget) for budget in range(1, longest)]
    if len(budgets) > 1:
        draw(budgets, "MRE, budgets 1, 2 …", deviation=False, color=BLUE, linestyle="--", marker=".")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(f"thousand multiply-adds an image,\nbeyond the common input block{below}", fontsize=8)
    axes.grid(color=GRID, linewidth=0.6, which="major")
