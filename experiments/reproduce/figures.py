"""The paper's figures, drawn from our own runs. Each function takes the results and returns a figure."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from experiments.reproduce.canvas import PALE, PENS, Pen, card, panels, set_range
from experiments.reproduce.claims import settled
from experiments.reproduce.plan import FULL, TEXT_PARTS
from experiments.reproduce.records import Point, Record, Results, budget_points, spread
from experiments.reproduce.tables import count_seeds
from experiments.reproduce.text import text_figure
from experiments.reproduce.variants import BUDGETS_NAME, COST_SETTINGS, DATA_NAMES, EQUAL_LR, MRE_BUDGETS, NAMES
from raytraced.colours import BLUE, FAINT, INK, ORANGE, SKY
from raytraced.tasks.registry import find_task

# Models whose cost can be set: their names in the legend, with the meaning of the number beside each point.
SETTING_NAMES = {
    "mre": "MRE, target",
    "dense": "dense, blocks",
    "threshold": "threshold, sum",
    "ada-k": "ada-k, cost",
    "null-experts": "null-experts, null",
}
# The models whose sequences are drawn, with their names: figures 2, 5 and 7.
SEQUENCES = {label: NAMES[label] for label in ("mre", "mre-paper")} | {MRE_BUDGETS.label: BUDGETS_NAME}
NUM_LENGTHS = 6  # curves in a panel
SPAN = 12.0  # points of accuracy that a panel shows at most
LEAST_SHARE = 0.01  # of the images, for a length to have a curve of its own

# Every figure by its file's name, with what it shows.
CAPTIONS = {
    "fig2": "Figure 2, our recipe: test accuracy after 0, 1, … experts, one line per sequence length, and the share of images "
            "with each number of experts; the images of 5 seeds together.",
    "fig2-paper": "Figure 2, as in the paper: the same for the recipe of the text.",
    "fig3": "Figure 3: test accuracy of single runs against the epochs until the validation accuracy was within 0.5 points of "
            "its best; one seed at the equal rate, 5 seeds at the best rate of each model.",
    "fig5": "Figure 5: for each class the share of its test images that activate each expert (rows: layers); one seed.",
    "fig2-budgets": "Figure 2, the second recipe: the same for the model that is trained for all budgets.",
    "fig5-budgets": "Figure 5, the second recipe: the same for the model that is trained for all budgets.",
    "fig7-budgets": "Figure 7, the second recipe: the same for the model that is trained for all budgets.",
    "fig5-paper": "Figure 5, as in the paper: the same for the recipe of the text.",
    "fig6": "Figure 6: validation accuracy over the epochs; line: mean, band: range from the lowest to the highest of 5 "
            "seeds.",
    "fig7": "Figure 7: the first correctly classified test images for each number of experts (left); one seed.",
    "fig7-paper": "Figure 7, as in the paper: the same for the recipe of the text.",
    "frontier": "Accuracy against MACs: test accuracy, mean ± standard error over 5 seeds (3 seeds for points with a "
                "setting other than the default), against mean MACs per image; numbers: the setting of a model's cost.",
    "early-exit": "Early exit: accuracy against MACs as the accepted loss of validation accuracy grows, for models that were "
                  "trained for early exit; means over 5 seeds (mre-target: 3). Below: experts that MRE ran, and "
                  "accuracy on these images, all seeds together.",
    "union": "Accuracy against MACs on the union of the three data sets (30 classes, width 64, 64-wide experts): mean ± "
             "standard error over 5 seeds (3 seeds for points with a setting other than the default).",
}  # fmt: skip


def save_figures(
    parts: list[str], results: Results, names: list[str], folder: Path, data_root: str | None, quick: bool = False
) -> list[Path]:
    """Draw the figures of some parts on some data sets into a folder, where there are runs for them."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for part in parts:
        for name, figure in draw_part(part, results, names, data_root):
            if quick:
                figure.suptitle(f"Quick run, not a result.\n{figure.get_suptitle()}", color=ORANGE, fontsize=10)
                figure.set_figheight(figure.get_figheight() + 0.2)
            written.append(folder / f"{name}.png")
            figure.savefig(written[-1], metadata={"Software": None})
    return written


def draw_part(part: str, results: Results, names: list[str], data_root: str | None) -> Iterator[tuple[str, Figure]]:
    """The figures of a part by file name, where there are runs for them."""
    if part in TEXT_PARTS:
        if names:  # else there are records of searches alone
            shared = {"text-searches": "text", "pairs": "text", "main-pairs": "main"}  # parts of one figure
            yield shared.get(part, part), text_figure(results, names)
        return
    wide = part in ("union", "wide")
    known = {data: set(results.labels(data)) for data in (FULL.data if wide else names) if FULL.data[data].wide == wide}
    for label in SEQUENCES:
        name, shown = part + label.removeprefix("mre"), [data for data in known if label in known[data]]
        if part == "fig2" and shown:
            yield name, sequence_figure(results, shown, label)
        for data in shown if part in ("fig5", "fig7") else []:
            record, dataset = results.of(data, label)[0], find_task(data).load(data, data_root)
            if part == "fig5":
                yield f"{name}-{data}", class_figure(record, dataset.class_names)
            else:
                yield f"{name}-{data}", gallery_figure(record, dataset.test.images.numpy())
    for data in known if part in ("frontier", "union", "wide") else []:
        if len(known[data]) > 1:
            yield part if wide else f"{part}-{data}", frontier_figure(results, data)
    columns = {
        "fig3": (epochs_figure, [data for data in known if known[data] or results.labels(data, "equal-lr")]),
        "fig6": (validation_figure, [data for data in known if known[data] & {*NAMES}]),
        "early-exit": (early_exit_figure, [data for data in FULL.data if len(results.with_early_exit(data)) > 1]),
    }
    if part in columns and columns[part][1]:
        draw, shown = columns[part]
        yield part, draw(results, shown)


def sequence_figure(results: Results, shown: list[str], label: str) -> Figure:
    """Figure 2: accuracy after 0, 1, … experts, a line for each sequence length; below, how long sequences are."""

    def draw(data: str, above: Axes, below: Axes) -> None:
        pooled = pool_lengths(results.of(data, label))
        draw_lengths(above, pooled, [point.accuracy.mean for point in budget_points(results.of(data, label))])
        below.bar(list(pooled), [100 * share for share, _ in pooled.values()], color=BLUE, width=0.8)
        mean = sum(length * share for length, (share, _) in pooled.items())
        below.axvline(mean, color=INK, linestyle="--", linewidth=1)
        below.set(xlabel=f"experts per image (mean {mean:.1f})", ylabel="images (%)" if data == shown[0] else "")
        below.grid(False)

    seeds = count_seeds(len(results.of(data, label)) for data in shown)
    title = f"{SEQUENCES[label]}: accuracy along the sequence, one line per sequence length; images of {seeds} together"
    return panels(title, "test accuracy (%)", shown, draw, 4.8, nrows=2, height_ratios=(2, 1))


Lengths = dict[int, tuple[float, list[float]]]
"""Sequence length → the share of the images, and their accuracy after 0, 1, … experts."""


def pool_lengths(records: list[Record]) -> Lengths:
    """Pool the images of all seeds."""
    tables = [{int(length): part for length, part in one.test["lengths"].items()} for one in records]
    total = sum(part["num"] for table in tables for part in table.values())
    pooled: Lengths = {}
    for length in sorted({length for table in tables for length in table}):
        parts = [table[length] for table in tables if length in table]
        num, depth = sum(part["num"] for part in parts), min(len(part["accuracy"]) for part in parts)
        curve = [sum(part["num"] * part["accuracy"][at] for part in parts) / num for at in range(depth)]
        pooled[length] = num / total, curve
    return pooled


def draw_lengths(axes: Axes, pooled: Lengths, all_images: list[float]) -> None:
    """Draw one line per sequence length, light for short and dark for long ones, and one for all images."""
    common = thin_out([length for length, (share, _) in pooled.items() if share >= LEAST_SHARE and length > 0])
    curves: list[tuple[str, list[float], dict[str, Any]]] = []
    for number, length in enumerate(common):
        # The lightness of this colour map changes evenly.
        colour = to_hex(colormaps["viridis_r"](0.25 + 0.6 * number / max(1, len(common) - 1)))
        curves.append((str(length), pooled[length][1], {"color": colour, "marker": "osD^vP"[number], "linewidth": 1.2}))
    longest = max(common, default=1) + 1
    curves.append(("all", all_images[: longest + 1], {"color": INK, "linestyle": "--", "linewidth": 1.6}))
    for name, curve, style in curves:
        axes.plot(range(len(curve)), [100 * value for value in curve], markersize=3.5, **style)
        # A name at the end of each line: a legend would cover lines.
        own: dict[str, Any] = {"va": "center", "fontsize": 7.5, "color": style["color"]}
        axes.annotate(name, (len(curve) - 1, 100 * curve[-1]), (4, 0), textcoords="offset points", **own)
    axes.set_xlim(-0.3, longest + 0.7)
    axes.set_xlabel("experts run so far")


def thin_out(lengths: list[Any]) -> list[Any]:
    """At most six of them, evenly spaced."""
    most = min(NUM_LENGTHS, len(lengths))
    return [lengths[round(at)] for at in np.linspace(0, len(lengths) - 1, most)]


def epochs_figure(results: Results, shown: list[str]) -> Figure:
    """Figure 3: test accuracy of runs against the epochs they took, at an equal rate and at each model's best rate."""
    groups = {"equal-lr": f"rate {EQUAL_LR:g} for all", "main": "each at its best rate"}

    def draw(data: str, *column: Axes) -> None:
        for axes, (group, rates) in zip(column, groups.items(), strict=True):
            lowest, best, last = {}, 0.0, 40
            for label, name in NAMES.items():
                if records := results.of(data, label, group):
                    accuracies, pen = [100 * one.accuracy for one in records], PENS[label]
                    axes.scatter([settled(one) for one in records], accuracies, s=34, marker=pen.marker,
                                 facecolor=pen.face, edgecolor=pen.colour, linewidth=1.2, label=name, zorder=3)  # fmt: skip
                    lowest[name], best, last = min(accuracies), max(best, *accuracies), records[0].config.epochs
            axes.set_xlim(0, 1 + last)
            below = set_range(axes, lowest, SPAN, best) if lowest else ""
            axes.set_title(f"{DATA_NAMES[data]}, {rates}", fontsize=8.5)
            axes.set_xlabel(f"epochs{below}", fontsize=8)

    title = "Test accuracy of runs, and epochs until their validation accuracy was within 0.5 points of its best"
    return panels(title, "test accuracy (%)", shown, draw, 5.4, nrows=2)


def validation_figure(results: Results, shown: list[str]) -> Figure:
    """Figure 6: validation accuracy over the epochs, mean and range over the seeds."""

    def draw(data: str, axes: Axes) -> None:
        finals = {}
        for label in (label for label in NAMES if results.of(data, label)):
            values = 100 * np.array([one.history["validation_accuracy"] for one in results.of(data, label)])
            epochs, pen = np.arange(1, values.shape[1] + 1), PENS[label]
            style = pen.style | {"linewidth": 1.5, "markersize": 4, "markevery": max(1, len(epochs) // 6)}
            axes.plot(epochs, values.mean(0), label=NAMES[label], **style)
            axes.fill_between(epochs, values.min(0), values.max(0), color=pen.colour, alpha=0.15, linewidth=0)
            finals[NAMES[label]] = spread(values[:, -1]).mean
        # Showing the first epochs would leave no room for the differences.
        below = set_range(axes, finals | {"": max(finals.values()) - SPAN / 2}, SPAN)
        axes.set_xlabel(f"epoch{below}")

    seeds = count_seeds(len(results.of(data, label)) for data in shown for label in NAMES)
    title = f"Validation accuracy over the epochs: mean and range over {seeds}"
    return panels(title, "validation accuracy (%)", shown, draw, 3.6)


def class_figure(record: Record, class_names: tuple[str, ...]) -> Figure:
    """Figure 5: the experts that the images of each class activate, their mean number, and the accuracy."""
    loads = np.array(record.test["class_load"])  # (C, L, N)
    columns = min(5, len(loads))
    num_rows = -(-len(loads) // columns)
    title = f"{DATA_NAMES[record.data]}, {SEQUENCES[record.label]}: the share of each class's images that activate each expert"
    with card(title, 1.85 * columns, 1.3 * num_rows + 0.5) as figure:
        grid = figure.subplots(num_rows, columns, squeeze=False)
        for axes in grid.flat[len(loads) :]:
            axes.set_axis_off()
        for number, (axes, load_LN) in enumerate(zip(grid.flat, loads, strict=False)):
            picture = axes.imshow(load_LN, cmap="Blues", vmin=0, vmax=1, aspect="equal")
            experts, accuracy = (record.test[name][number] for name in ("experts_per_class", "accuracy_per_class"))
            title = f"{class_names[number]}\n{experts:.1f} experts, {100 * accuracy:.1f} %"
            axes.set_title(title, fontsize=8, loc="center")
            axes.set_xticks([])
            layers = [] if number % columns else [str(layer + 1) for layer in range(len(load_LN))]
            axes.set_yticks(range(len(load_LN)), layers, fontsize=7)
            axes.tick_params(length=0)
            axes.spines[:].set(visible=True, color=PALE)
        grid[0, 0].set_ylabel("layer", fontsize=7, color=FAINT)
        scale = figure.colorbar(picture, ax=grid, shrink=0.6, aspect=18, pad=0.02)
        scale.set_label("share of images", fontsize=8)
        scale.outline.set_visible(False)
        return figure


def gallery_figure(record: Record, images: np.ndarray) -> Figure:
    """Figure 7: correctly classified test images (n, C, H, W), one row per number of experts."""
    gallery: dict[str, list[int]] = record.test["gallery"]
    lengths = thin_out([length for length, rows in gallery.items() if len(rows) >= 6] or list(gallery))
    title = f"{DATA_NAMES[record.data]}, {SEQUENCES[record.label]}: correctly classified images, by number of experts"
    with card(
        title, 7.6, 0.62 * len(lengths) + 0.5, dpi=100
    ) as figure:  # photographs need many bytes, and have few pixels
        grid = figure.subplots(len(lengths), max(map(len, gallery.values())), squeeze=False)
        for axes in grid.flat:
            axes.set_axis_off()
        for row, length in zip(grid, lengths, strict=True):
            for axes, index in zip(row, gallery[length], strict=False):
                pixels = images[index]
                axes.imshow(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0), cmap="gray_r")
            row[0].text(-0.35, 0.5, length, transform=row[0].transAxes, ha="right", va="center", fontsize=10)
        return figure


def frontier_figure(results: Results, data: str) -> Figure:
    """Accuracy against MACs on one data set: a line joins the settings of a model's cost; another joins MRE's budgets."""
    seeds = count_seeds(len(results.of(data, label)) for label in results.compared(data))
    draw = partial(draw_frontier, results)
    return panels(
        f"Accuracy against MACs: mean ± standard error over {seeds}",
        "test accuracy (%)",
        [data],
        draw,
        5.6,
        width=7.4,
    )


def draw_frontier(results: Results, data: str, axes: Axes) -> None:
    """Draw the frontier. The horizontal axis leaves out the MACs of the cheapest input block and output layer."""
    points = [results.point(data, label) for label in results.compared(data)]
    common = min(point.fixed_macs for point in points)
    values = {point.records[0].label: 100 * point.accuracy.mean for point in points}
    best, middle = max(values.values()), sorted(values.values())[len(values) // 2]
    below = set_range(axes, values, max(2.5, 2.2 * (best - middle)))
    axes.set_ylim(
        top=max(axes.get_ylim()[1], *(100 * (one.accuracy.mean + one.accuracy.error) + 0.05 for one in points))
    )
    families: dict[str, list[Point]] = {}
    for point in sorted(points, key=lambda one: one.macs):
        if values[point.records[0].label] >= axes.get_ylim()[0]:
            families.setdefault(point.records[0].family, []).append(point)

    def draw(chosen: list[Point], name: str, pen: Pen, error: list[float] | None) -> list[tuple[float, float]]:
        """Draw the points of one family, joined by a line; return their places."""
        x, y = [(point.macs - common) / 1000 for point in chosen], [100 * point.accuracy.mean for point in chosen]
        style = pen.style | ({"linestyle": "none"} if len(chosen) == 1 else {})
        axes.errorbar(x, y, error, label=name, markersize=6, linewidth=1.5, elinewidth=0.8, zorder=4, **style)
        return list(zip(x, y, strict=True))

    for family, chosen in families.items():
        pen, error = PENS[family], [100 * point.accuracy.error for point in chosen]
        places = draw(chosen, SETTING_NAMES.get(family, family), pen, error)
        own: dict[str, Any] = {"textcoords": "offset points", "fontsize": 7.5, "color": pen.colour}
        for point, place in zip(chosen, places, strict=True) if family in SETTING_NAMES else ():
            axes.annotate(setting_of(point.records[0]), place, (5, 4), **own)
    budgets = budget_points(results.of(data, "mre"))[1:]
    if len(budgets) > 1:
        draw(budgets, "MRE, budgets 1, 2 …", Pen(BLUE, ".", "--"), None)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(f"thousand MACs per image, beyond the common input block{below}", fontsize=8)


def setting_of(record: Record) -> str:
    """The setting of a model's cost, as text."""
    default = COST_SETTINGS[record.family][1] if record.family in COST_SETTINGS else record.config.target_experts
    setting = default if record.setting is None else record.setting
    return "" if setting is None else f"{setting:g}"


def early_exit_figure(results: Results, shown: list[str]) -> Figure:
    """Early exit of all models as the accepted loss of validation accuracy grows; below, the experts that MRE ran."""

    def draw(data: str, above: Axes, below: Axes) -> None:
        labels = results.with_early_exit(data)
        fixed = min(results.point(data, label).fixed_macs for label in labels)
        finals = {}
        for label in labels:
            records = [one.early_exit for one in results.of(data, label) if one.early_exit]
            rows = list(zip(*(one["points"] for one in records), strict=True))
            x, y = ([spread(row[name] for row in same).mean for same in rows] for name in ("macs", "accuracy"))
            axes_x, axes_y = [(value - fixed) / 1000 for value in x], [100 * value for value in y]
            above.plot(axes_x, axes_y, label=label, markersize=4, linewidth=1.4, **PENS[label].style)
            finals[label] = max(axes_y)
        names_below = set_range(above, finals | {"": max(finals.values()) - 2.5}, 4.0)
        above.set_xlabel(f"thousand MACs per image,\nbeyond the common input block{names_below}", fontsize=8)
        runs = [one.early_exit["runs"] for one in results.of(data, "mre") if one.early_exit]
        counts = {num: [sum(one.get(str(num), (0, 0))[at] for one in runs) for at in (0, 1)] for num in range(13)}
        total = max(1, sum(num for num, _ in counts.values()))
        shares = {num: 100 * images / total for num, (images, _) in counts.items() if images >= LEAST_SHARE * total}
        below.bar(list(shares), list(shares.values()), color=SKY, width=0.8, label="share of images")
        right = [100 * counts[num][1] / counts[num][0] for num in shares]
        below.plot(list(shares), right, color=INK, marker="D", markersize=4, label="accuracy on these images")
        below.set(xlabel="experts that MRE ran", ylabel="images (%)" if data == shown[0] else "", ylim=(0, 103))

    seeds = count_seeds(len(results.of(data, label)) for data in shown for label in results.with_early_exit(data))
    title = (
        f"Early exit: accuracy against MACs, mean over {seeds}; thresholds from validation images\n"
        "below: experts that MRE ran, and accuracy on these images, all seeds together"
    )
    return panels(title, "test accuracy (%)", shown, draw, 5.6, width=3.2, nrows=2, height_ratios=(2, 1))
