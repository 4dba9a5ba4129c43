"""The language models' tables and figure: bits per byte against MACs; all models share the decoder and the data."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.reproduce.canvas import Pen, panels
from experiments.reproduce.claims import num_dead
from experiments.reproduce.records import Record, Results, shorten, spread
from experiments.reproduce.tables import Table, count_seeds, search_table
from experiments.reproduce.variants import DATA_NAMES
from raytraced.colours import BLUE, GREY, INK, ORANGE
from raytraced.files import write_file

NUM_BLOCKS, NUM_IN_BLOCK = 4, 16  # of every decoder here, and of each of its blocks
TOP_K_LABELS = ("top-1", "top-2", "top-4", "top-8")
# Experts per block at which the elastic model is shown → the models that were trained to run as many.
BUDGETS = {1: ("top-1", "hash-1"), 2: ("top-2", "planned-2", "hash-2"), 4: ("top-4",), 8: ("top-8",)}
# The lines of the figure: name → labels of the models and style.
LINES = {
    "dense, 1 … 8 experts wide": (("dense-1", "dense-2", "dense-4", "dense-8"), Pen(GREY, "_", ":")),
    "top-1, 2, 4, 8": (TOP_K_LABELS, Pen(ORANGE, "s", "-.")),
    "hash": (("hash-1", "hash-2"), Pen(INK, "D", "--", False)),
    "planned-2": (("planned-2",), Pen(GREY, "^", "none", False)),
    "threshold": (("threshold",), Pen(GREY, "P", "none", False)),
    "aux-free": (("aux-free",), Pen(GREY, "v", "none", False)),
    "null-experts": (("null-experts",), Pen(GREY, "*", "none", False)),
    "chain": (("chain",), Pen(GREY, "h", "none", False)),
    "relu": (("relu",), Pen(GREY, "X", "none", False)),
    "MRE": (("mre",), Pen(BLUE, "o", "none", False)),
}
NOTE = (
    f"Test bytes, mean ± standard deviation over {{seeds}}. Experts: the mean per byte and block, of {NUM_IN_BLOCK}. MACs: "
    "thousand multiply-adds per byte of the whole model. Dead: experts that run for fewer than one byte in 1,000, of "
    f"{NUM_BLOCKS * NUM_IN_BLOCK}."
)
SEARCHED = (
    "Validation bits per byte after full runs, with one seed that no other run uses. The dense models share one search; so "
    "do the baselines that choose by the block's input, and those that plan by the token."
)


def text_means(records: list[Record]) -> dict[str, Any]:
    """The means of one model on one text over its seeds."""
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
    """The means of every model on one text, the cheapest first."""
    known = {label: text_means(results.of(data, label)) for label in results.labels(data)}
    return dict(sorted(known.items(), key=lambda item: item[1]["macs_mean"]))


def format_bits(one: dict[str, Any]) -> str:
    """Mean bits per byte, and the standard deviation if there are several seeds."""
    return f"{one['bits_mean']:.3f}" + (f" ± {one['bits_std']:.3f}" if one["seeds"] > 1 else "")


def text_table(results: Results, data: str) -> Table:
    """Every model on one text, the cheapest first."""
    known = cheapest_first(results, data)
    rows = [
        [label, format_bits(one), f"{one['experts_mean']:.2f}",
         f"{one['macs_mean'] / 1000:.0f}", f"{one['routing_macs'] / 1000:.1f}", f"{one['dead']:.1f}",
         f"{one['parameters']:,}"]
        for label, one in known.items()
    ]  # fmt: skip
    header = ["model", "bits per byte", "experts", "MACs", "of routing", "dead", "parameters"]
    note = NOTE.format(seeds=count_seeds(one["seeds"] for one in known.values()))
    return Table(f"Language models: {DATA_NAMES[data]}", header, rows, note)


def elastic_table(results: Results, data: str) -> Table:
    """One checkpoint at several budgets, beside models that were trained to run as many experts."""
    rows = []
    for budget, baselines in BUDGETS.items() if results.of(data, "mre-elastic") else ():
        found = [
            spread(
                one.budgets[min(NUM_BLOCKS * budget, len(one.budgets) - 1)]["bits_per_byte"]
                for one in results.of(data, label)
            )
            for label in ("mre-elastic", "mre")
        ]
        others = {label: spread(one.bits for one in results.of(data, label)) for label in baselines}
        shown = ", ".join(f"{label} {bits.mean:.3f}" for label, bits in others.items() if bits.num)
        rows.append([f"{budget}", *(f"{bits.mean:.3f}" if bits.num else "–" for bits in found), shown or "–"])
    header = ["most experts, per block on the mean", "mre-elastic", "mre", "trained to run as many"]
    note = "Bits per test byte, means over the seeds. mre-elastic and mre are one checkpoint per seed at all budgets."
    return Table(f"One checkpoint, any budget: {DATA_NAMES[data]}", header, rows, note)


def top_k_table(results: Results, data: str) -> Table:
    """Our models and baselines against top-k at the same MACs."""
    known = cheapest_first(results, data)
    line = [known[label] for label in TOP_K_LABELS if label in known]
    rows = []
    for label in ("mre", "planned-2", "hash-1", "hash-2", "threshold", "relu"):
        if label in known and len(line) == len(TOP_K_LABELS):
            one = known[label]
            macs, bits, stds = ([each[key] for each in line] for key in ("macs_mean", "bits_mean", "bits_std"))
            level, std = (np.interp(one["macs_mean"], macs, values) for values in (bits, stds))
            error = ((one["bits_std"] ** 2 + std**2) / one["seeds"]) ** 0.5
            rows.append([label, f"{one['macs_mean'] / 1000:.0f}", f"{one['bits_mean'] - level:+.3f} ± {error:.3f}"])
    note = (
        "Bits per test byte above the line through top-1, 2, 4 and 8 at the same MACs (thousands): difference of "
        "means ± its standard error over the seeds. Less is better."
    )
    return Table(f"Against top-k: {DATA_NAMES[data]}", ["model", "MACs", "bits"], rows, note)


def text_figure(results: Results, shown: list[str]) -> Figure:
    """Bits per byte against MACs."""

    def draw(data: str, axes: Axes) -> None:
        known = cheapest_first(results, data)
        for name, (labels, pen) in LINES.items():
            points = [one for label, one in known.items() if label in labels]
            if points:
                x, y, std = ([one[key] for one in points] for key in ("macs_mean", "bits_mean", "bits_std"))
                x = [macs / 1000 for macs in x]
                axes.errorbar(x, y, std, label=name, markersize=5, linewidth=1.4, elinewidth=0.8, **pen.style)
        for record in results.of(data, "mre-elastic")[:1]:
            rows = record.budgets[1 : 8 * NUM_BLOCKS + 1]
            x, y = [row["macs"] / 1000 for row in rows], [row["bits_per_byte"] for row in rows]
            axes.plot(x, y, "--", color=BLUE, marker=".", linewidth=1, label="MRE, budgets")
        best = min(one["bits_mean"] for one in known.values())
        axes.set_ylim(best - 0.04, best + 0.38)
        axes.set_xlabel("thousand MACs per byte", fontsize=8)

    seeds = count_seeds(len(results.of(data, label)) for data in shown for label in results.labels(data))
    title = f"Language models: bits per test byte against MACs per byte, mean ± standard deviation over {seeds}"
    return panels(title, "bits per byte (fewer is better)", shown, draw, 4.6, width=4.4)


def write_text(results: Results, folder: Path, quick: bool) -> Path:
    """Write tables.md and summary.json of the language models; return the path of tables.md."""
    shown = results.data()
    tables = [make(results, data) for data in shown for make in (text_table, elastic_table, top_k_table)]
    tables.append(search_table(results, lambda score: f"{-score:.3f}", SEARCHED))
    summary = {data: {label: text_means(results.of(data, label)) for label in results.labels(data)} for data in shown}
    first = ["# Language models", "", *(["**Quick run, not a result.**", ""] if quick else [])]
    first += ["Written by `python -m experiments.reproduce --only text`; docs/lab/text.md has the rules.", ""]
    write_file(folder / "summary.json", json.dumps(shorten(summary), indent=1) + "\n")
    page = folder / "tables.md"
    write_file(page, "\n".join([*first, *(table.markdown() for table in tables if table.rows)]))
    return page
