"""The language models' table and figure: bits a byte against multiply-adds, everyone with the same decoder and bytes."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from raytraced.files import write_file
from raytraced.reproduce.canvas import BLUE, GREY, INK, ORANGE, SKY, panels
from raytraced.reproduce.records import Record, Results, choose_rate, shorten, spread
from raytraced.reproduce.tables import Table, count_seeds
from raytraced.reproduce.variants import DATA_NAMES

BUDGETS = (1, 2, 4, 8)  # experts a block that the elastic model is shown with
DEAD = 0.001  # of the bytes: who runs for fewer is dead
NOTE = (
    "Test bytes, mean and deviation over {seeds}. Experts: the mean that a byte runs in a block, of 32. Multiply-adds: of a "
    "byte, in thousands, everything counted. Dead: experts that fewer than one byte in a thousand runs, of 64."
)


def figures(records: list[Record]) -> dict[str, Any]:
    """The means of one model on one text, over its seeds."""
    bits = spread(one.bits for one in records)
    loads = [[share for layer in one.test["expert_load"] for share in layer] for one in records]
    means = {
        "experts_mean": (one.experts / 2 for one in records),
        "macs_mean": (one.macs["total"] for one in records),
        "routing_macs": (one.macs["routing"] for one in records),
        "dead": (sum(share < DEAD for share in load) for load in loads),
    }
    first = {"bits_mean": bits.mean, "bits_std": bits.std, "seeds": bits.num, "parameters": records[0].parameters}
    return first | {name: spread(values).mean for name, values in means.items()}


def told(one: dict[str, Any]) -> str:
    """Bits, and their deviation where there is one."""
    return f"{one['bits_mean']:.3f}" + (f" ± {one['bits_std']:.3f}" if one["seeds"] > 1 else "")


def text_table(results: Results, data: str) -> Table:
    """Every model on one text, the cheapest first."""
    rows = [(label, figures(results.of(data, label))) for label in results.labels(data)]
    rows.sort(key=lambda row: row[1]["macs_mean"])
    cells = [
        [label, told(one), f"{one['experts_mean']:.2f}",
         f"{one['macs_mean'] / 1000:.0f}", f"{one['routing_macs'] / 1000:.1f}", f"{one['dead']:.1f}",
         f"{one['parameters']:,}"]
        for label, one in rows
    ]  # fmt: skip
    header = ["model", "bits a byte", "experts", "multiply-adds", "of routing", "dead", "parameters"]
    note = NOTE.format(seeds=count_seeds(one["seeds"] for _, one in rows))
    return Table(f"Language models: {DATA_NAMES[data]}", header, cells, note)


def elastic_table(results: Results, data: str) -> Table:
    """One checkpoint under budgets, beside those that were trained to run as many experts."""
    known = results.labels(data)
    rivals = {1: ("top-1-of-32",), 2: ("top-2-of-32",), 4: ("stack-1", "top-4-of-32"), 8: ("stack-2",)}
    rows = []
    for budget in BUDGETS:
        row = [f"{budget}"]
        for label in ("mre-elastic", "mre"):
            found = [one.budgets[min(budget, len(one.budgets) - 1)]["bits_per_byte"] for one in results.of(data, label)]
            row.append(f"{spread(found).mean:.3f}" if found else "–")
        others = {
            label: spread(one.bits for one in results.of(data, label)).mean
            for label in rivals[budget]
            if label in known
        }
        row.append(", ".join(f"{label} {bits:.3f}" for label, bits in others.items()) or "–")
        rows.append(row)
    header = ["experts a block, at most", "mre-elastic", "mre", "trained to run as many"]
    note = "Bits a test byte, means over seeds. The first two are one checkpoint each."
    return Table(
        f"One checkpoint, any budget: {DATA_NAMES[data]}", header, rows if "mre-elastic" in known else [], note
    )


def wide_table(results: Results, data: str) -> Table:
    """Ours and rivals against one layer of top-k of 32 at their own multiply-adds."""
    known = {label: figures(results.of(data, label)) for label in results.labels(data)}
    line = [known[label] for label in (f"top-{k}-of-32" for k in (1, 2, 4)) if label in known]
    rows = []
    for label in ("mre-wide-target-4", "mre-wide", "threshold-of-32", "relu-of-32", "mre"):
        if label in known and len(line) == 3:
            one, macs = known[label], [each["macs_mean"] for each in line]
            bits, std = (
                np.interp(one["macs_mean"], macs, [each[key] for each in line]) for key in ("bits_mean", "bits_std")
            )
            error = ((one["bits_std"] ** 2 + std**2) / one["seeds"]) ** 0.5
            rows.append([label, f"{one['macs_mean'] / 1000:.0f}", f"{one['bits_mean'] - bits:+.3f} ± {error:.3f}"])
    note = "Bits a test byte above the line through top-1, 2 and 4 of 32, with the standard error; less is better."
    return Table(f"Against one layer of top-k: {DATA_NAMES[data]}", ["model", "multiply-adds", "bits"], rows, note)


def search_rows(results: Results) -> Table:
    """Every learning rate that was tried, in bits a validation byte."""
    found = results.searches()
    rates = sorted({lr for tried in found.values() for lr in tried})
    rows = []
    for (data, label), tried in found.items():
        best = choose_rate(tried)
        told = {lr: "diverged" if score is None else f"{-score:.3f}" for lr, score in tried.items()}
        told |= {} if best is None else {best: f"**{told[best]}**"}
        rows.append([f"{DATA_NAMES[data]}, {label}", *(told.get(lr, "–") for lr in rates)])
    note = "Whole runs, a seed that no other run has. All of dense blocks, of rivals' 32 in one layer, and of stacks share one."
    return Table("Learning-rate search", ["", *(f"{lr:g}" for lr in rates)], rows, note)


def text_figure(results: Results, shown: list[str]) -> Figure:
    """Bits a byte against multiply-adds."""

    def draw(data: str, axes: Axes) -> None:
        points = {label: figures(results.of(data, label)) for label in results.labels(data)}

        def line(labels: Iterable[str], name: str, **look: Any) -> None:
            chosen = sorted((points[label] for label in labels if label in points), key=lambda one: one["macs_mean"])
            x, y, std = ([one[key] for one in chosen] for key in ("macs_mean", "bits_mean", "bits_std"))
            axes.errorbar(
                [value / 1000 for value in x], y, std, label=name, markersize=5, linewidth=1.4, elinewidth=0.8, **look
            )

        line(("dense-1", "dense-2", "dense-4", "dense-8"), "dense, 1 … 8 blocks", color=GREY, marker="_", linestyle=":")
        line((f"top-{k}-of-32" for k in (1, 2, 4)), "top-1, 2, 4 of 32", color=ORANGE, marker="s", linestyle="-.")
        line(
            ("stack-1", "stack-2"),
            "4 × top-1, top-2 of 8",
            color=INK,
            marker="D",
            linestyle="--",
            markerfacecolor="white",
        )
        looks = {
            "planned-1": "^",
            "threshold": "P",
            "aux-free": "v",
            "null-experts": "*",
            "chain": "h",
            "relu": "X",
            "threshold-of-32": "P",
            "relu-of-32": "X",
        }
        for label, marker in looks.items():
            if label in points:
                color = ORANGE if label.endswith("-of-32") else GREY
                line((label,), label, color=color, marker=marker, linestyle="none", markerfacecolor="white")
        line(("mre-target-4", "mre-target-8"), "MRE, trained for 4, 8", color=BLUE, marker="o", linestyle="-")
        line(("mre-wide-target-4", "mre-wide"), "MRE, one layer", color=SKY, marker="o")
        line(("mre",), "MRE, its own end", color=BLUE, marker="o", linestyle="none", markerfacecolor="white")
        for record in results.of(data, "mre-elastic")[:1]:
            rows = record.budgets[1:9]
            x, y = [row["macs"] / 1000 for row in rows], [row["bits_per_byte"] for row in rows]
            axes.plot(x, y, "--", color=BLUE, marker=".", linewidth=1, label="MRE, budgets 1 … 8")
        best = min(one["bits_mean"] for one in points.values())
        axes.set_ylim(best - 0.04, best + 0.38)
        axes.set_xlabel("thousand multiply-adds a byte", fontsize=8)

    title = "Language models: bits a test byte against what a byte costs, mean and deviation over seeds"
    return panels(title, "bits a byte (fewer is better)", shown, draw, 4.6, width=4.4)


def write_text(results: Results, folder: Path, quick: bool) -> Path:
    """tables.md, summary.json and the figure of the language models; returns the page."""
    shown = list(dict.fromkeys(one.data for one in results.whole if one.group == "main"))
    tables = [search_rows(results)]
    for data in reversed(shown):
        tables[:0] = [text_table(results, data), elastic_table(results, data), wide_table(results, data)]
    summary = {data: {label: figures(results.of(data, label)) for label in results.labels(data)} for data in shown}
    first = ["# Language models", "", *(["**Quick run, not a result.**", ""] if quick else [])]
    first += ["Written by `raytraced reproduce --only text`; the rules are in docs/text.md.", ""]
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    figure = text_figure(results, shown)
    figure.savefig(folder / "figures" / "text.png", dpi=150, metadata={"Software": None})
    write_file(folder / "summary.json", json.dumps(shorten(summary), indent=1) + "\n")
    page = folder / "tables.md"
    write_file(page, "\n".join([*first, *(table.markdown() for table in tables if table.rows)]))
    return page
