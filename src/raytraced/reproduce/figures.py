"""The paper's figures, drawn again from our own runs. Each function takes the results and fills a figure."""

from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from raytraced.reproduce.canvas import BLUE, FAINT, GRID, INK, Look, card, look_of, set_range
from raytraced.reproduce.claims import mean_curve
from raytraced.reproduce.epochs import settled
from raytraced.reproduce.paper import DATA_NAMES, NAMES
from raytraced.reproduce.plan import EQUAL_LR
from raytraced.reproduce.records import Record, Results, spread

NUM_LENGTHS = 6  # curves in a panel
SPAN = 12.0  # points of accuracy that a panel shows at most
LEAST_SHARE = 0.01  # of the images, for a length to have a curve of its own


def sequence_figure(results: Results, data_names: list[str], label: str, quick: bool) -> Figure | None:
    """Figure 2: accuracy after 0, 1, … experts, a line for each sequence length; below, how long sequences are."""
    shown = [data for data in data_names if any(one.lengths for one in results.of(data, label))]
    if not shown:
        return None
    title = f"{NAMES[label]}: accuracy along the sequence, one line for each sequence length"
    with card(max(5.0, 3.3 * len(shown)), 4.8, title, quick) as figure:
        rows = figure.subplots(2, len(shown), squeeze=False, height_ratios=(2, 1))
        for column, data in enumerate(shown):
            records = results.of(data, label)
            draw_lengths(rows[0, column], records)
            rows[0, column].set_title(DATA_NAMES.get(data, data))
            draw_counts(rows[1, column], records)
        rows[0, 0].set_ylabel("test accuracy (%)")
        rows[1, 0].set_ylabel("images (%)")
    return figure


def pooled_lengths(records: list[Record]) -> dict[int, tuple[int, list[float]]]:
    """By sequence length: how many images of all seeds together, and their accuracy after 0, 1, … experts."""
    pooled: dict[int, tuple[int, list[float]]] = {}
    for length in sorted({int(length) for one in records for length in one.lengths}):
        parts = [one.lengths[str(length)] for one in records if str(length) in one.lengths]
        total = sum(part["num"] for part in parts)
        depth = min(len(part["accuracy"]) for part in parts)
        curve = [sum(part["num"] * part["accuracy"][at] for part in parts) / total for at in range(depth)]
        pooled[length] = total, curve
    return pooled


def draw_lengths(axes: Axes, records: list[Record]) -> None:
    """A line a length, light for short and dark for long sequences, and all images together."""
    pooled = pooled_lengths(records)
    total = sum(num for num, _ in pooled.values())
    common = [length for length, (num, _) in pooled.items() if num >= LEAST_SHARE * total and length > 0]
    if len(common) > NUM_LENGTHS:
        common = [common[round(at)] for at in np.linspace(0, len(common) - 1, NUM_LENGTHS)]
    curves: list[tuple[str, list[float], dict[str, Any]]] = []
    for number, length in enumerate(common):
        look: dict[str, Any] = {
            "color": shade(number / max(1, len(common) - 1)),
            "marker": "osD^vP"[number],
            "linewidth": 1.2,
        }
        curves.append((str(length), pooled[length][1], look))
    everyone = mean_curve([[row["accuracy"] for row in one.budgets] for one in records if one.budgets])
    reach = max(common, default=1) + 1
    curves.append(("all", everyone[: reach + 1], {"color": INK, "linestyle": "--", "linewidth": 1.6}))
    for name, curve, look in curves:
        axes.plot(range(len(curve)), [100 * value for value in curve], markersize=3.5, **look)
        # each line carries its own name: no legend to cover the others
        axes.annotate(
            name,
            (len(curve) - 1, 100 * curve[-1]),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=7.5,
            color=look["color"],
        )
    axes.set_xlim(-0.3, reach + 0.7)
    axes.set_xlabel("experts run so far")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color=GRID, linewidth=0.6)


def shade(share: float) -> str:
    """A colour of a map whose lightness changes evenly: light for 0, dark for 1."""
    return to_hex(colormaps["viridis_r"](0.25 + 0.6 * share))


def draw_counts(axes: Axes, records: list[Record]) -> None:
    """A histogram of sequence lengths, with its mean."""
    pooled = pooled_lengths(records)
    total = sum(num for num, _ in pooled.values())
    axes.bar(list(pooled), [100 * num / total for num, _ in pooled.values()], color=BLUE, width=0.8)
    mean = sum(length * num for length, (num, _) in pooled.items()) / total
    axes.axvline(mean, color=INK, linestyle="--", linewidth=1)
    axes.set_xlabel(f"experts an image uses (mean {mean:.1f})")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def epochs_figure(results: Results, data_names: list[str], quick: bool) -> Figure | None:
    """Figure 3: test accuracy of a run against the epochs it took to settle, at an equal rate and at each model's best."""
    groups = [("equal-lr", f"rate {EQUAL_LR:g} for all"), ("main", "each at its best rate")]
    shown = [
        data for data in data_names if any(results.of(data, label, group) for group, _ in groups for label in NAMES)
    ]
    if not shown:
        return None
    title = "Test accuracy of runs, and the epochs until they were within 0.5 points of their best"
    with card(max(5.0, 3.3 * len(shown)), 5.4, title, quick) as figure:
        panels = figure.subplots(2, len(shown), squeeze=False)
        for row, (group, rates) in enumerate(groups):
            for column, data in enumerate(shown):
                axes = panels[row, column]
                below = draw_settled(axes, results, data, group)
                axes.set_title(f"{DATA_NAMES.get(data, data)}, {rates}", fontsize=8.5)
                axes.set_xlabel(f"epochs{below}", fontsize=8)
            panels[row, 0].set_ylabel("test accuracy (%)")
        add_legend(figure, panels)
    return figure


def draw_settled(axes: Axes, results: Results, data: str, group: str) -> str:
    """A marker a run; returns what lies below the panel."""
    lowest, best = {}, 0.0
    for label, name in NAMES.items():
        points = [(settled(one), 100 * one.accuracy) for one in results.of(data, label, group) if one.history]
        if points:
            scatter(axes, points, look_of(label), name)
            lowest[name] = min(accuracy for _, accuracy in points)
            best = max(best, *(accuracy for _, accuracy in points))
    axes.grid(color=GRID, linewidth=0.6)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(0, 1 + max((one.epochs for one in results.of(data, "mre", group)), default=40))
    return set_range(axes, lowest, SPAN, best) if lowest else ""


def scatter(axes: Axes, points: list[tuple[int, float]], look: Look, name: str) -> None:
    """One marker a run."""
    epochs, accuracies = zip(*points, strict=True)
    face = look.colour if look.filled else "white"
    axes.scatter(
        epochs,
        accuracies,
        s=34,
        marker=look.marker,
        facecolor=face,
        edgecolor=look.colour,
        linewidth=1.2,
        label=name,
        zorder=3,
    )


def add_legend(figure: Figure, panels: np.ndarray) -> None:
    """One legend for all panels, below them."""
    handles: dict[str, Artist] = {}
    for axes in panels.flat:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        ncols=int(figure.get_figwidth() / 1.75),
        fontsize=8,
        handlelength=2.2,
    )


def validation_figure(results: Results, data_names: list[str], quick: bool) -> Figure | None:
    """Figure 6: validation accuracy over the epochs, the mean of the seeds and their range."""
    shown = [data for data in data_names if any(results.of(data, label) for label in NAMES)]
    if not shown:
        return None
    with card(max(5.0, 3.3 * len(shown)), 3.6, "Validation accuracy over the epochs", quick) as figure:
        panels = figure.subplots(1, len(shown), squeeze=False)
        for axes, data in zip(panels[0], shown, strict=True):
            finals = {}
            for label, name in NAMES.items():
                curves = [
                    [100 * epoch["validation_accuracy"] for epoch in one.history] for one in results.of(data, label)
                ]
                if not curves or not curves[0]:
                    continue
                values = np.array(curves)
                epochs, look = np.arange(1, values.shape[1] + 1), look_of(label)
                marks = max(1, len(epochs) // 6)
                axes.plot(epochs, values.mean(0), look.line, color=look.colour, linewidth=1.5, label=name, marker=look.marker,
                          markevery=marks, markersize=4, markerfacecolor=look.colour if look.filled else "white")  # fmt: skip
                axes.fill_between(epochs, values.min(0), values.max(0), color=look.colour, alpha=0.15, linewidth=0)
                finals[name] = spread(curve[-1] for curve in curves).mean
            # the first epochs would leave no room for the differences
            below = set_range(axes, finals | {"": max(finals.values()) - SPAN / 2}, SPAN)
            axes.set_title(DATA_NAMES.get(data, data))
            axes.set_xlabel(f"epoch{below}")
            axes.grid(color=GRID, linewidth=0.6)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        panels[0, 0].set_ylabel("validation accuracy (%)")
        add_legend(figure, panels)
    return figure


def class_figure(record: Record, class_names: tuple[str, ...], quick: bool) -> Figure | None:
    """Figure 5: for each class which experts its images activate, with the mean number and the accuracy."""
    if not record.class_load:
        return None
    load = np.array(record.class_load)  # (C, L, N)
    columns = min(5, len(load))
    rows = -(-len(load) // columns)
    title = f"{DATA_NAMES.get(record.data, record.data)}: the share of each class's images that activate each expert"
    with card(1.85 * columns, 1.3 * rows + (0.7 if quick else 0.5), title, quick) as figure:
        panels = figure.subplots(rows, columns, squeeze=False)
        for number, axes in enumerate(panels.flat):
            if number >= len(load):
                axes.set_axis_off()
                continue
            picture = axes.imshow(load[number], cmap="Blues", vmin=0, vmax=1, aspect="equal")
            experts, accuracy = (record.test[name][number] for name in ("experts_per_class", "accuracy_per_class"))
            axes.set_title(
                f"{class_names[number]}\n{experts:.1f} experts, {100 * accuracy:.1f} %", fontsize=8, loc="center"
            )
            axes.set_xticks([])
            axes.set_yticks(
                range(load.shape[1]),
                [f"{layer + 1}" for layer in range(load.shape[1])] if number % columns == 0 else [],
                fontsize=7,
            )
            axes.tick_params(length=0)
            axes.spines[:].set(visible=True, color=GRID)
        panels[0, 0].set_ylabel("layer", fontsize=7, color=FAINT)
        bar = figure.colorbar(picture, ax=panels, shrink=0.6, aspect=18, pad=0.02)
        bar.set_label("share of images", fontsize=8)
        bar.outline.set_visible(False)
    return figure


def gallery_figure(record: Record, images: np.ndarray, quick: bool) -> Figure | None:
    """Figure 7: correctly classified test images (n, C, H, W), a row for each number of experts they used."""
    if not record.gallery:
        return None
    lengths = [length for length, rows in record.gallery.items() if len(rows) >= 6] or list(record.gallery)
    if len(lengths) > 6:
        lengths = [lengths[round(at)] for at in np.linspace(0, len(lengths) - 1, 6)]
    columns = 12
    title = (
        f"{DATA_NAMES.get(record.data, record.data)}: correctly classified images, by the number of experts they used"
    )
    with card(7.6, 0.62 * len(lengths) + (0.7 if quick else 0.5), title, quick) as figure:
        panels = figure.subplots(len(lengths), columns, squeeze=False)
        for row, length in zip(panels, lengths, strict=True):
            for axes in row:
                axes.set_axis_off()
            for axes, index in zip(row, record.gallery[length], strict=False):
                pixels = images[index]
                axes.imshow(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0), cmap="gray_r")
            row[0].text(-0.35, 0.5, length, transform=row[0].transAxes, ha="right", va="center", fontsize=10)
    return figure
