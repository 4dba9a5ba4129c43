"""Turn results.json into a table for the terminal, one in Markdown, and a plot. Needs no new measurement."""

from pathlib import Path
from typing import Any

from experiments.benchmark.results import LOADED, WORKLOADS
from raytraced.colours import BLUE
from raytraced.files import write_file
from raytraced.tables import markdown_table

HEAD = (
    "workload",
    "what",
    "against",
    "ratio",
    "quartiles",
    "median of the first",
    "of the second",
    "threads",
    "experts",
)


def write(content: dict[str, Any], folder: Path) -> None:
    """Write results.md and ratios.png beside results.json."""
    workloads, machine, code = content["workloads"], content["machine"], content["code"]
    rows = [(name, *row_cells(row)) for name, entry in workloads.items() for row in entry["rows"]]
    lines = [
        "# Speed, measured",
        "",
        "Written by `python -m experiments.benchmark`; docs/lab/speed.md describes the method. A ratio is the median time of",
        "the first contender divided by that of the second, both measured in turns in one process: below 1 the first is",
        "faster. The quartiles are those of the ratios of single rounds.",
        "",
        "; ".join(f"{key.replace('_', ' ')}: {value}" for key, value in machine.items()) + ".",
        "",
        *markdown_table(HEAD, rows),
        "",
        *(f"- **{name}**: {'; '.join([WORKLOADS[name], *remarks(e, code)])}." for name, e in workloads.items()),
        "",
        "![Every ratio, with its quartiles](ratios.png)",
    ]
    write_file(folder / "results.md", "\n".join(lines) + "\n")
    draw(workloads, folder / "ratios.png")


def row_cells(row: dict[str, Any]) -> tuple[str, ...]:
    """The cells of a row; a row that could not be measured has the reason in place of numbers."""
    if row["ratio"] is None:
        return row["what"], row["against"], "–", row["note"], "", "", "", ""
    ratio = f"{row['ratio']:.3g}" + (f" (1/{1 / row['ratio']:.3g})" if row["ratio"] < 0.2 else "")
    spread = " … ".join(f"{value:.3g}" for value in row.get("quartiles", ()))
    unit = "ms" if "median_ms" in row else "MB"
    medians = (f"{row[key]:.4g} {unit}" for key in row if key.endswith(("median_ms", "mb")))
    experts = ["–" if row.get(key) is None else f"{row[key]:.3g}" for key in ("experts", "against_experts")]
    return row["what"], row["against"], ratio, spread, *medians, str(row.get("threads", 1)), " against ".join(experts)


def remarks(entry: dict[str, Any], code: str | None = None) -> list[str]:
    """The conditions that a workload checked, and reasons for doubt: other processes on the machine, other code."""
    found = [f"{what}: {'yes' if holds else '**no**'}" for what, holds in entry["conditions"].items()]
    if (share := entry["others_share_of_cores"] or 0) >= LOADED:
        found.append(f"**measured while other processes took {share:.0%} of the cores**")
    return found + ["**measured with other code than the rest**"] * (code not in (None, entry["measured"]["code"]))


def text(name: str, entry: dict[str, Any]) -> str:
    """A finished workload as text for the terminal."""
    lines = [f"{name}: {WORKLOADS[name]}"]
    for what, against, ratio, spread, *_ in map(row_cells, entry["rows"]):
        lines.append(f"  {what} ÷ {against}: {ratio}" + (f" ({spread})" if spread else ""))
    return "\n".join([*lines, *(f"  {remark.replace('**', '')}" for remark in remarks(entry))])


def draw(workloads: dict[str, Any], path: Path) -> None:
    """Plot every ratio with its quartiles on a logarithmic axis."""
    from matplotlib.figure import Figure

    rows = [(name, row) for name, entry in workloads.items() for row in entry["rows"] if row["ratio"]]
    figure = Figure(figsize=(10, 1.1 + 0.2 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for place, (_, row) in enumerate(rows):
        ends = row.get("quartiles", (row["ratio"], row["ratio"]))
        axes.plot(ends, [place, place], color=BLUE, linewidth=2.5, solid_capstyle="round")
        axes.plot(row["ratio"], place, "o", color=BLUE, markersize=5)
        # On a white ground, so that the line at 1 does not cross a number.
        white = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
        label = f"{row['ratio']:.3g}"
        axes.annotate(label, (ends[1], place), (6, 0), textcoords="offset points", va="center", bbox=white)
    axes.axvline(1, color="black", linewidth=1)
    axes.set(
        xscale="log",
        xlabel="ratio, with its quartiles (log)\nleft of the line the first contender is faster, or smaller",
    )
    axes.set_yticks(range(len(rows)), [f"{name}:  {row['what']} ÷ {row['against']}" for name, row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.25)
    figure.savefig(path, dpi=130)
