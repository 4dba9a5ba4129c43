"""The language models' tables and figure: bits a byte against multiply-adds, everyone with the same decoder and bytes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from raytraced.colours import BLUE, GREY, INK, ORANGE, SKY
from raytraced.files import write_file
from raytraced.reproduce.canvas import Pen, panels
from raytraced.reproduce.claims import num_dead
from raytraced.reproduce.records import Record, Results, shorten, spread
from raytraced.reproduce.tables import Table, count_seeds, search_table
from raytraced.reproduce.variants import DATA_NAMES

NUM_BLOCKS, NUM_IN_BLOCK = 2, 32  # of every decoder here, and of each of its blocks
TOP_K_LABELS = ("top-1-of-32", "top-2-of-32", "top-4-of-32")
# Experts a block that the elastic model is shown with, and who was trained to run as many.
BUDGETS = {1: ("top-1-of-32",), 2: ("top-2-of-32",), 4: ("stack-1", "top-4-of-32"), 8: ("stack-2",)}
# What the figure joins by a line, by its name there.
LINES = {
    "dense, 1 … 8 blocks": (("dense-1", "dense-2", "dense-4", "dense-8"), Pen(GREY, "_", ":")),
    "top-1, 2, 4 of 32": (TOP_K_LABELS, Pen(ORANGE, "s", "-.")),
    "4 × top-1, top-2 of 8": (("stack-1", "stack-2"), Pen(INK, "D", "--", False)),
    "planned-1": (("planned-1",), Pen(GREY, "^", "none", False)),
    "threshold": (("threshold",), Pen(GREY, "P", "none", False)),
    "aux-free": (("aux-free",), Pen(GREY, "v", "none", False)),
    "null-experts": (("null-experts",), Pen(GREY, "*", "none", False)),
    "chain": (("chain",), Pen(GREY, "h", "none", False)),
    "relu": (("relu",), Pen(GREY, "X", "none", False)),
    "threshold-of-32": (("threshold-of-32",), Pen(ORANGE, "P", "none", False)),
    "relu-of-32": (("relu-of-32",), Pen(ORANGE, "X", "none", False)),
    "MRE, trained for 4, 8": (("mre-target-4", "mre-target-8"), Pen(BLUE, "o")),
    "MRE, one layer": (("mre-wide-target-4", "mre-wide"), Pen(SKY, "o")),
    "MRE, its own end": (("mre",), Pen(BLUE, "o", "none", False)),
}
NOTE = (
    f"Test bytes, mean and deviation over {{seeds}}. Experts: the mean that a byte runs in a block, of {NUM_IN_BLOCK}. "
    "Multiply-adds: of a byte, in thousands, everything counted. Dead: experts that fewer than one byte in a thousand runs, "
    f"of {NUM_BLOCKS * NUM_IN_BLOCK}."
)
SEARCHED = "Whole runs, a seed that no other run has. All of dense blocks, of rivals' 32 in one layer, and of stacks share one."


def text_means(records: list[Record]) -> dict[str, Any]:
    """The means of one model on one text, over its seeds."""
    bits = spread(one.bits for one in records)
    means = {
        "experts_mean": (one.experts / NUM_BLOCKS for one in records),
        "macs_mean": (one.macs["total"] for one in records),
        "routing_macs": (one.macs["routing"] for one in records),
        "dead": (num_dead(torch.tensor(one.test["expert_load"])) for one in records),
    }
    first = {"bits_mean": bits.mean, "bits_std": bits.std, "seeds": bits.num, "parameters": records[0].parameters}
    return first | {name: spread(values).mean for name, values in means.items()}


def cheapest_first(results: Results, data: str) -> dict[str, dict[str, Any]]:
    """The figures of every model on one text."""
    known = {label: text_means(results.of(data, label)) for label in results.labels(data)}
    return dict(sorted(known.items(), key=lambda item: item[1]["macs_mean"]))


def tell_bits(one: dict[str, Any]) -> str:
    """Bits, and their deviation where there is one."""
    return f"{one['bits_mean']:.3f}" + (f" ± {one['bits_std']:.3f}" if one["seeds"] > 1 else "")


def text_table(results: Results, data: str) -> Table:
    """Every model on one text, the cheapest first."""
    known = cheapest_first(results, data)
    rows = [
        [label, tell_bits(one), f"{one['experts_mean']:.2f}",
         f"{one['macs_mean'] / 1000:.0f}", f"{one['routing_macs'] / 1000:.1f}", f"{one['dead']:.1f}",
         f"{one['parameters']:,}"]
        for label, one in known.items()
    ]  # fmt: skip
    header = ["model", "bits a byte", "experts", "multiply-adds", "of routing", "dead", "parameters"]
    note = NOTE.format(seeds=count_seeds(one["seeds"] for one in known.values()))
    return Table(f"Language models: {DATA_NAMES[data]}", header, rows, note)


def elastic_table(results: Results, data: str) -> Table:
    """One checkpoint under budgets, beside those that were trained to run as many experts."""
    rows = []
    for budget, rivals in BUDGETS.items() if results.of(data, "mre-elastic") else ():
        found = [
            spread(one.budgets[min(budget, len(one.budgets) - 1)]["bits_per_byte"] for one in results.of(data, label))
            for label in ("mre-elastic", "mre")
        ]
        others = {label: spread(one.bits for one in results.of(data, label)) for label in rivals}
        shown = ", ".join(f"{label} {bits.mean:.3f}" for label, bits in others.items() if bits.num)
        rows.append([f"{budget}", *(f"{bits.mean:.3f}" if bits.num else "–" for bits in found), shown or "–"])
    header = ["experts a block, at most", "mre-elastic", "mre", "trained to run as many"]
    note = "Bits a test byte, means over seeds. The first two are one checkpoint each."
    return Table(f"One checkpoint, any budget: {DATA_NAMES[data]}", header, rows, note)


def wide_table(results: Results, data: str) -> Table:
    """Ours and rivals against one layer of top-k of 32 at their own multiply-adds."""
    known = cheapest_first(results, data)
    line = [known[label] for label in TOP_K_LABELS if label in known]
    rows = []
    for label in ("mre-wide-target-4", "mre-wide", "threshold-of-32", "relu-of-32", "mre"):
        if label in known and len(line) == len(TOP_K_LABELS):
            one = known[label]
            macs, bits, stds = ([each[key] for each in line] for key in ("macs_mean", "bits_mean", "bits_std"))
            level, std = (np.interp(one["macs_mean"], macs, values) for values in (bits, stds))
            error = ((one["bits_std"] ** 2 + std**2) / one["seeds"]) ** 0.5
            rows.append([label, f"{one['macs_mean'] / 1000:.0f}", f"{one['bits_mean'] - level:+.3f} ± {error:.3f}"])
    note = "Bits a test byte above the line through top-1, 2 and 4 of 32, with the standard error; less is better."
    return Table(f"Against one layer of top-k: {DATA_NAMES[data]}", ["model", "multiply-adds", "bits"], rows, note)


def text_figure(results: Results, shown: list[str]) -> Figure:
    """Bits a byte against multiply-adds."""

    def draw(data: str, axes: Axes) -> None:
        known = cheapest_first(results, data)
        for name, (labels, pen) in LINES.items():
            points = [one for label, one in known.items() if label in labels]
            if points:
                x, y, std = ([one[key] for one in points] for key in ("macs_mean", "bits_mean", "bits_std"))
                x = [macs / 1000 for macs in x]
                axes.errorbar(x, y, std, label=name, markersize=5, linewidth=1.4, elinewidth=0.8, **pen.style)
        for record in results.of(data, "mre-elastic")[:1]:
            rows = record.budgets[1:9]
            x, y = [row["macs"] / 1000 for row in rows], [row["bits_per_byte"] for row in rows]
            axes.plot(x, y, "--", color=BLUE, marker=".", linewidth=1, label="MRE, budgets 1 … 8")
        best = min(one["bits_mean"] for one in known.values())
        axes.set_ylim(best - 0.04, best + 0.38)
        axes.set_xlabel("thousand multiply-adds a byte", fontsize=8)

    title = "Language models: bits a test byte against what a byte costs, mean and deviation over seeds"
    return panels(title, "bits a byte (fewer is better)", shown, draw, 4.6, width=4.4)


def write_text(results: Results, folder: Path, quick: bool) -> Path:
    """tables.md and summary.json of the language models; returns the page."""
    shown = results.data()
    tables = [make(results, data) for data in shown for make in (text_table, elastic_table, wide_table)]
    tables.append(search_table(results, lambda score: f"{-score:.3f}", SEARCHED))
    summary = {data: {label: text_means(results.of(data, label)) for label in results.labels(data)} for data in shown}
    first = ["# Language models", "", *(["**Quick run, not a result.**", ""] if quick else [])]
    first += ["Written by `raytraced reproduce --only text`; the rules are in docs/text.md.", ""]
    write_file(folder / "summary.json", json.dumps(shorten(summary), indent=1) + "\n")
    page = folder / "tables.md"
    write_file(page, "\n".join([*first, *(table.markdown() for table in tables if table.rows)]))
    return page
