"""The language models' tables and figure: bits per byte against MACs and seconds; all models share the decoder and the data."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.reproduce.canvas import PALE, Pen, card, panels
from experiments.reproduce.plan import TEXT, TEXT_MAIN, TEXT_PARTS, WINDOWS, Scale
from experiments.reproduce.records import Record, Results, shorten, spread
from experiments.reproduce.tables import Table, count_seeds, search_table
from experiments.reproduce.text_aims import (
    BASELINES,
    NUM_BLOCKS,
    NUM_IN_BLOCK,
    TIMED,
    TWO_TOKENS,
    Aims,
    Level,
    Seconds,
    dead_experts,
    dial_levels,
    frontier,
    gap,
    model_level,
)
from experiments.reproduce.variants import DATA_NAMES, PAIR_ROWS, TEXT_ROWS
from raytraced.colours import BLUE, GREY, INK, ORANGE
from raytraced.files import write_file

SECONDS = "seconds.json"  # written by `python -m experiments.text_seconds`
# Models whose dial is turned after training → what its setting is.
DIALS = {"mre-range": "`stop`", "mre": "`stop`", "matryoshka": "k", "threshold": "threshold"}
PAIR_DIALS = {"mre-range-pair": "`stop`", "mre-pair": "`stop`"}
# The lines of the figure: name → labels of the models and style.
LINES = {
    "dense, 1 … 8 experts wide": (("dense-1", "dense-2", "dense-4", "dense-8"), Pen(GREY, "_", ":")),
    "top-1, 2, 4, 8": (("top-1", "top-2", "top-4", "top-8"), Pen(ORANGE, "s", "-.")),
    "top-1, 2, 4, 8, balanced": (
        ("top-1-balance", "top-2-balance", "top-4-balance", "top-8-balance"),
        Pen(ORANGE, "s", ":", False),
    ),
    "hash-1, 2": (("hash-1", "hash-2"), Pen(INK, "D", "--", False)),
    "planned-1, 2, 4": (("planned-1", "planned-2", "planned-4"), Pen(GREY, "^", "--", False)),
    "threshold": (("threshold",), Pen(GREY, "P", "none", False)),
    "aux-free-1, 2, 4": (("aux-free-1", "aux-free-2", "aux-free-4"), Pen(GREY, "v", ":", False)),
    "first-block-2": (("first-block-2",), Pen(GREY, "<", "none", False)),
    "seq-top-2": (("seq-top-2",), Pen(GREY, "*", "none", False)),
    "mixture of depths": (("depths-2",), Pen(GREY, "h", "none", False)),
    "relu-2": (("relu-2",), Pen(GREY, "X", "none", False)),
    "hash-1, 2, two tokens": (("hash-1-pair", "hash-2-pair"), Pen(INK, "d", ":")),
    "planned-2, two tokens": (("planned-2-pair",), Pen(GREY, "^", "none")),
    "MRE": (("mre", "mre-range"), Pen(BLUE, "o", "none", False)),
    "MRE, two tokens": (("mre-pair", "mre-range-pair"), Pen(BLUE, "o", "none")),
}
TURNED = {
    "mre-range": ("MRE, one checkpoint", BLUE, "."),
    "mre-range-pair": ("MRE, two tokens, one checkpoint", BLUE, "+"),
    "matryoshka": ("matryoshka, one checkpoint", ORANGE, "x"),
}
NOTE = (
    f"Test bytes, mean ± standard error over {{seeds}}. Experts: the mean per token and block, of {NUM_IN_BLOCK}. MACs: "
    "thousand multiply-adds per token of the whole model. Dead: experts that run for fewer than one token in 1,000, of "
    f"{NUM_BLOCKS * NUM_IN_BLOCK}. Step, token: milliseconds of a training step of 1,024 tokens and of a generated token, one "
    "thread of an idle machine; – where they were not measured."
)
DIAL_NOTE = (
    "One checkpoint per seed, its dial turned after training; test bytes, mean ± standard error. Last column: bits above the "
    "line of the baselines at the same MACs, as benchmarks/aims-paths.md defines it, with those baselines that have records."
)
PAIR_NOTE = "Every second block of a path is that of the token before; the line has the baselines of two tokens, too."
SEARCHED = "Validation bits per byte after {steps:,} steps, with one seed that no other run uses. {shared}"
SHARED = (
    "Every model has the rate of its group: MRE, dense, planned by the token, chosen by their own input; models of two tokens "
    "have searches of their own."
)
COMPARED = "The other models were searched afterwards, to compare: no run has their rates."
OWN = "Every model has a search of its own."


def part_of(scale: Scale) -> str:
    """The part of the plan that a scale belongs to; a quick run is of the first one."""
    return next((part for part, known in TEXT_PARTS.items() if known is scale), "text")


def read_seconds(folder: Path) -> Seconds:
    """The measured times of the models; empty where none were measured."""
    path = folder / SECONDS
    found: Seconds = json.loads(path.read_text(encoding="utf-8"))["models"] if path.exists() else {}
    return found


def text_means(records: list[Record]) -> dict[str, Any]:
    """The means of one model on one text over its seeds."""
    bits = spread(one.bits for one in records)
    means = {
        "experts_mean": (one.experts / NUM_BLOCKS for one in records),
        "macs_mean": (one.macs["total"] for one in records),
        "routing_macs": (one.macs["routing"] for one in records),
        "dead": (dead_experts(one) for one in records),
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


def format_level(level: Level, num_seeds: int) -> str:
    """Mean bits per byte, and its standard error if there are several seeds."""
    return f"{level.bits:.3f}" + (f" ± {level.error:.3f}" if num_seeds > 1 else "")


def text_table(results: Results, data: str, seconds: Seconds) -> Table:
    """Every model on one text, the cheapest first."""
    known = cheapest_first(results, data)
    rows = []
    for label, one in known.items():
        level = model_level(label, results.of(data, label))
        times = [f"{1e3 * seconds[label][name]:.1f}" if label in seconds else "–" for name in TIMED]
        costs = [f"{level.experts:.2f}", f"{level.macs / 1000:.0f}", f"{one['routing_macs'] / 1000:.1f}"]
        rows.append([f"`{label}`", format_level(level, one["seeds"]), *costs, f"{one['dead']:.1f}", *times,
                     f"{one['seeds']}"])  # fmt: skip
    header = ["model", "bits per byte", "experts", "MACs", "of routing", "dead", "step", "token", "seeds"]
    note = NOTE.format(seeds=count_seeds(one["seeds"] for one in known.values()))
    return Table(f"Language models: {DATA_NAMES[data]}", header, rows, note)


def dial_table(results: Results, data: str, scale: Scale = TEXT) -> Table:
    """The models with a dial at all of its settings, and how far each row is above the baselines at the same MACs."""
    planned = [one.label for one in TEXT_ROWS[part_of(scale)]() if one.label in BASELINES]
    return turned_table(f"One checkpoint, any budget: {DATA_NAMES[data]}", results, data, planned, DIALS, DIAL_NOTE)


def pair_dial_table(results: Results, data: str, scale: Scale = TEXT) -> Table:
    """The same for the models whose paths depend on two tokens."""
    title = f"Two tokens, one checkpoint, any budget: {DATA_NAMES[data]}"
    if not any(results.of(data, label) for label in TWO_TOKENS.ours):
        return Table(title, [], [])
    baselines = [label for label in pair_rows(scale) if label in TWO_TOKENS.baselines]
    return turned_table(title, results, data, baselines, PAIR_DIALS, PAIR_NOTE)


def pair_rows(scale: Scale) -> list[str]:
    """The models that the aims for two tokens name: those of the part, and those of two tokens."""
    part = part_of(scale)
    pairs = PAIR_ROWS[part]() if part in PAIR_ROWS else ()
    return [one.label for one in (*TEXT_ROWS[part](), *pairs)]


def turned_table(
    title: str, results: Results, data: str, baselines: Iterable[str], dials: Mapping[str, str], note: str
) -> Table:
    """Models at all settings of their dials, and how far each row is above the line of some baselines."""
    known = {label: found for label in baselines if (found := results.of(data, label))}
    line = frontier(model_level(label, records) for label, records in known.items())
    rows = []
    for label, setting in dials.items():
        records = results.of(data, label)
        for level in dial_levels(records) if records and line else ():
            above = gap(level, line)
            name = f"{setting} {level.name}"
            costs = [f"{level.experts:.2f}", f"{level.macs / 1000:.0f}"]
            rows.append([f"`{label}`", name, *costs, format_level(level, len(records)), above.figure])
    header = ["model", "dial", "experts", "MACs", "bits per byte", "above the baselines"]
    return Table(title, header, rows, note)


def aims_table(results: Results, data: str, seconds: Seconds, scale: Scale = TEXT) -> Table:
    """The aims of benchmarks/aims-paths.md, aims-words.md or aims-main.md, and what the runs say."""
    aims = Aims(results, data, seconds, scale.num_seeds, [one.label for one in TEXT_ROWS[part_of(scale)]()])
    verdicts = [*aims.all(), *([aims.size()] if scale is TEXT_MAIN else [])]
    rows = [[one.aim, one.words, one.found] for one in verdicts]
    note = (
        "Bits above a line at equal MACs, ± standard error; figures of aims that are not decided yet are those so far."
    )
    return Table(f"Aims: {DATA_NAMES[data]}", ["aim", "verdict", "found"], rows, note)


def pair_aims_table(results: Results, data: str, scale: Scale = TEXT) -> Table:
    """The aims of benchmarks/aims-pairs.md or aims-main-pairs.md, and what the runs say."""
    rows: list[list[str]] = []
    if any(results.of(data, label) for label in TWO_TOKENS.ours):
        aims = Aims(results, data, {}, scale.num_seeds, pair_rows(scale), TWO_TOKENS)
        rows = [[one.aim, one.words, one.found] for one in aims.of_pairs()]
    return Table(f"Aims for two tokens: {DATA_NAMES[data]}", ["aim", "verdict", "found"], rows)


def seconds_table(seconds: Seconds) -> Table:
    """Milliseconds of a training step and of a generated token, the fastest step first."""
    order = sorted(seconds, key=lambda label: seconds[label]["step"])
    rows = [[f"`{label}`", *(f"{1e3 * seconds[label][name]:.1f}" for name in TIMED)] for label in order]
    note = "One thread of an idle machine, medians over rounds in turns; python -m experiments.text_seconds."
    return Table("Milliseconds", ["model", "step", "token"], rows, note)


def text_figure(results: Results, shown: list[str]) -> Figure:
    """Bits per byte against MACs."""

    def draw(data: str, axes: Axes) -> None:
        known = {label: model_level(label, results.of(data, label)) for label in results.labels(data)}
        for name, (labels, pen) in LINES.items():
            points = sorted((known[label] for label in labels if label in known), key=lambda one: one.macs)
            if points:
                x, y, error = zip(*((one.macs / 1000, one.bits, one.error) for one in points), strict=True)
                axes.errorbar(x, y, error, label=name, markersize=5, linewidth=1.4, elinewidth=0.8, **pen.style)
        for label, (name, colour, marker) in TURNED.items():
            if records := results.of(data, label):
                rows = sorted(dial_levels(records), key=lambda one: one.macs)
                line = [one.macs / 1000 for one in rows], [one.bits for one in rows]
                axes.plot(*line, "--", color=colour, marker=marker, linewidth=1, label=name)
        best, worst = (choose(one.bits for one in known.values()) for choose in (min, max))
        axes.set_ylim(best - 0.04, min(best + 0.42, worst + 0.06))
        axes.set_xlabel("thousand MACs per token", fontsize=8)

    seeds = count_seeds(len(results.of(data, label)) for data in shown for label in results.labels(data))
    title = f"Language models: bits per test byte against MACs,\nmean ± standard error over {seeds}"
    return panels(title, "bits per byte (fewer is better)", shown, draw, 4.6, width=4.4)


def seconds_figure(results: Results, data: str, seconds: Seconds, steps: int) -> Figure:
    """Bits per byte against the minutes of training, and against generated tokens per second, of the models with times."""
    known = {label: results.of(data, label) for label in results.labels(data) if label in seconds}
    levels = {label: model_level(label, records) for label, records in known.items()}
    costs = {
        "minutes of training": {label: steps * seconds[label]["step"] / 60 for label in levels},
        "generated tokens per second": {label: 1 / seconds[label]["token"] for label in levels},
    }
    title = f"{DATA_NAMES[data]}: bits per test byte against time, one thread"
    with card(title, 7.6, 4.6) as figure:
        for number, (name, cost) in enumerate(costs.items(), 1):
            axes = figure.add_subplot(1, len(costs), number)
            axes.grid(color=PALE, linewidth=0.6)
            for line, (labels, pen) in LINES.items():
                shown = sorted((label for label in labels if label in levels), key=lambda label: cost[label])
                if shown:
                    bits = [levels[label].bits for label in shown]
                    axes.plot([cost[label] for label in shown], bits, label=line, markersize=5, **pen.style)
            axes.set_xlabel(name)
            axes.set_ylabel("bits per byte (fewer is better)" if number == 1 else "")
        handles, names = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=4, fontsize=8)
        return figure


def text_tables(results: Results, seconds: Seconds, scale: Scale = TEXT) -> list[Table]:
    """All tables for which there are records."""
    tables: list[Table] = []
    for data in results.data():
        tables += [
            text_table(results, data, seconds),
            dial_table(results, data, scale),
            aims_table(results, data, seconds, scale),
            pair_dial_table(results, data, scale),
            pair_aims_table(results, data, scale),
        ]
    tables.append(seconds_table(seconds))
    (steps,) = {one.search_epochs * WINDOWS["steps"] for one in scale.data.values()}
    whose = {"main": OWN, "text": f"{SHARED} {COMPARED}"}.get(part_of(scale), SHARED)
    searched = SEARCHED.format(steps=steps, shared=whose)
    tables.append(search_table(results, lambda score: f"{-score:.3f}", searched))
    return [table for table in tables if table.rows]


def write_text(results: Results, folder: Path, scale: Scale) -> Path:
    """Write tables.md and summary.json of the language models; return the path of tables.md."""
    shown = results.data()
    seconds = read_seconds(folder)
    tables = text_tables(results, seconds, scale)
    for data in shown if seconds else ():
        figure = seconds_figure(results, data, seconds, scale.data[data].epochs * WINDOWS["steps"])
        (folder / "figures").mkdir(parents=True, exist_ok=True)
        figure.savefig(folder / "figures" / f"seconds-{data}.png", metadata={"Software": None})
    summary = {data: {label: text_means(results.of(data, label)) for label in results.labels(data)} for data in shown}
    first = ["# Language models", "", *(["**Quick run, not a result.**", ""] if scale.name == "quick" else [])]
    first += [
        f"Written by `python -m experiments.reproduce --only {part_of(scale)}`; docs/lab/paths.md has the rules.",
        "",
    ]
    write_file(folder / "summary.json", json.dumps(shorten(summary), indent=1) + "\n")
    page = folder / "tables.md"
    write_file(page, "\n".join([*first, *(table.markdown() for table in tables)]))
    return page
