"""Our numbers beside the paper's, as tables of text."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from raytraced.grid import MLPExperts
from raytraced.models.table import GRID
from raytraced.reproduce.claims import RECIPES, expert_loads, grid_entropy, load_entropy, num_dead
from raytraced.reproduce.plan import FULL
from raytraced.reproduce.records import SHOWN_WITHIN, Point, Results, choose_rate, spread
from raytraced.reproduce.variants import BALANCE_VARIANTS, DATA_NAMES, MRE_PAPER, NAMES
from raytraced.words import markdown_table

NUM_NODES = GRID["num_layers"] * GRID["num_experts"]

# The paper's table 1: accuracy in percent, mean and standard deviation over three seeds.
ACCURACY = {
    "mlp-total": {"mnist": (95.3, 0.4), "fashion-mnist": (86.4, 0.1), "cifar10": (59.7, 0.6)},
    "mlp-avg": {"mnist": (94.8, 0.2), "fashion-mnist": (85.3, 0.8), "cifar10": (59.1, 0.1)},
    "top-k": {"mnist": (95.3, 0.3), "fashion-mnist": (85.1, 0.4), "cifar10": (55.7, 0.9)},
    "threshold": {"mnist": (93.1, 0.9), "fashion-mnist": (85.1, 0.2), "cifar10": (51.3, 6.1)},
    "mre": {"mnist": (96.3, 0.1), "fashion-mnist": (87.1, 0.1), "cifar10": (60.4, 1.2)},
    "mre-paper": {"mnist": (96.3, 0.1), "fashion-mnist": (87.1, 0.1), "cifar10": (60.4, 1.2)},
}
# Its table 2: total parameters, mean parameters used, mean experts used.
USE = {"mnist": (40_202, 20_275, 7.5), "fashion-mnist": (40_202, 21_735, 9.4), "cifar10": (33_330, 16_520, 11.4)}
WHOLE = " and ".join(DATA_NAMES[data] for data, plan in FULL.data.items() if plan.search_epochs == plan.epochs)
SEARCH_NOTE = (
    f"Validation accuracy in percent after a short run (on {WHOLE} a whole one); one seed, which no other run uses. "
    "While the best rate lies on the edge of those tried, the next one is tried too. In bold the rate that was taken: "
    f"the best, or the smallest within 0.1 points of it; mre-paper keeps its {MRE_PAPER.lr:g}."
)

# The models of README's table, in its words.
README_NAMES = {
    "mre": "MRE, our recipe",
    "mre-target-2": "MRE, trained for 2 experts",
    "mre-paper": "MRE, as in the paper",
    "paper": "*as the paper reports it*",
    "top-k": "top-2",
    "threshold": "threshold",
    "mlp-total": "MLP of width 36",
    "dense-1": "one dense block, no routing",
    "dense-4": "four dense blocks, no routing",
}


@dataclass(frozen=True)
class Table:
    """A title, column names, rows of text, and a line below."""

    title: str
    header: list[str]
    rows: list[list[str]]
    note: str = ""

    def lines(self) -> list[str]:
        """The rows as Markdown."""
        return markdown_table(self.header, self.rows, "---:")

    def markdown(self) -> str:
        """With its title and its note."""
        return "\n".join([f"### {self.title}", "", *self.lines(), "", *([self.note, ""] if self.note else [])])


def count_seeds(numbers: Iterable[int]) -> str:
    """3 seeds, or 3 seeds or 5 seeds where rows differ."""
    return " or ".join("1 seed" if number == 1 else f"{number} seeds" for number in sorted(set(numbers) - {0}))


def cells(point: Point) -> list[str]:
    """Accuracy as the paper prints it, 96.3 (0.1), and the mean number of experts."""
    accuracy = f"{100 * point.accuracy.mean:.1f} ({100 * point.accuracy.std:.1f})"
    return [accuracy, f"{point.experts:.1f}"] if point.records else ["–", "–"]


def accuracy_table(
    results: Results, title: str, names: list[str], labels: Mapping[str, tuple[str, str]], note: str
) -> Table:
    """Table 1 on some data sets; label → the model's name, and the paper's model that its numbers stand beside."""
    header, rows = ["model"], [[name] for name, _ in labels.values()]
    for data in names:
        header += [DATA_NAMES[data], "paper", "experts"] if data in USE else [DATA_NAMES[data], "experts"]
        for row, (label, (_, base)) in zip(rows, labels.items(), strict=True):
            accuracy, experts = cells(results.point(data, label))
            row += [accuracy, *(["{} ({})".format(*ACCURACY[base][data])] if data in USE else []), experts]
    seeds = count_seeds(len(results.of(data, label)) for data in names for label in labels)
    return Table(title, header, rows if names else [], note.format(seeds=seeds))


def accuracy_tables(results: Results) -> Iterator[Table]:
    """Where MRE and another were run; then with rivals as the paper has them: no residual stream, a constant rate of 5e-4."""
    known = {data: {*results.labels(data)} for data in results.data(wide=False)}
    strong = {label: (name, label) for label, name in NAMES.items()}
    names = [data for data, labels in known.items() if "mre" in labels and labels & {*NAMES} - {*RECIPES}]
    note = "Test accuracy in percent, mean and deviation over {seeds}; experts: the mean number an image runs."
    yield accuracy_table(results, "Table 1: accuracy", names, strong, note)
    theirs = ("mlp-total", "mlp-avg", "top-k", "threshold", "mre")
    weak = {f"{label}-paper": (NAMES[label].partition(",")[0], label) for label in theirs}
    names = [data for data in USE if known.get(data, set()) & {*weak} - {"mre-paper"}]
    yield accuracy_table(results, "Table 1, everyone as in the paper", names, weak, "As above; {seeds}.")


def readme_table(results: Results) -> Table:
    """What README shows of the paper's data sets."""
    header = ["", *(cell for data in USE for cell in (DATA_NAMES[data], "experts"))]
    rows = [[name] for name in README_NAMES.values()]
    for row, label in zip(rows, README_NAMES, strict=True):
        for data in USE:
            row += cells(results.point(data, label))
            if label == "paper":
                row[-2:] = ["*{} ({})*".format(*ACCURACY["mre"][data]), f"*{USE[data][2]}*"]
            elif label == "mlp-total":
                row[-1] = ""  # its layers are no experts
    seeds = count_seeds(len(results.of(data, label)) for data in USE for label in README_NAMES)
    note = f"Test accuracy in percent, mean (deviation) over {seeds}; experts: the mean of an image."
    return Table("", header, rows, note)


def use_table(results: Results) -> Table:
    """Table 2: parameters used are counted as the paper does, total less the experts that did not run."""
    expert_size = sum(parameter.numel() for parameter in MLPExperts(1, 1, GRID["dim"]).parameters())
    rows = []
    for data in results.data(wide=False):
        for label in (label for label in RECIPES if results.of(data, label)):
            total, experts = results.of(data, label)[0].parameters, results.point(data, label).experts
            used = total - (NUM_NODES - experts) * expert_size
            paper = "{:,} {:,} {}".format(*USE[data]).split() if data in USE else ["–"] * 3
            name = f"{DATA_NAMES[data]}, {NAMES[label]}"
            rows.append([name, f"{total:,}", f"{used:,.0f}", f"{experts:.2f}", *paper])
    header = ["", "parameters", "used on average", "experts", "paper", "used", "experts"]
    return Table("Table 2: parameters and experts used", header, rows)


def balance_table(results: Results) -> Table:
    """How evenly each model uses its experts."""
    rows = []
    for data in results.data(wide=False):
        for label in (*(variant.label for variant in BALANCE_VARIANTS), "threshold"):
            if loads := expert_loads(results, data, label):
                entropies = [f"{spread(map(entropy, loads)).mean:.3f}" for entropy in (load_entropy, grid_entropy)]
                rows.append([DATA_NAMES[data], label, *entropies, f"{spread(map(num_dead, loads)).mean:.1f}"])
    note = "Entropy of the load, 1 if even: within layers (weighted by load), over the grid. Dead: under one image in 1000."
    header = ["data", "model", "entropy within layers", "entropy over the grid", f"dead experts of {NUM_NODES}"]
    return Table("How evenly experts are used", header, rows, note)


def search_table(results: Results, tell: Callable[[float], str], note: str) -> Table:
    """The score of every learning rate that was tried, in some words."""
    found = results.searches()
    rates = sorted({lr for scores in found.values() for lr in scores})
    rows = []
    for (data, label), scores in found.items():
        cells = {lr: "diverged" if score is None else tell(score) for lr, score in scores.items()}
        if (best := choose_rate(scores)) is not None:
            cells[best] = f"**{cells[best]}**"
        rows.append([f"{DATA_NAMES[data]}, {label}", *(cells.get(lr, "–") for lr in rates)])
    return Table("Learning-rate search", ["", *(f"{lr:g}" for lr in rates)], rows, note)


def frontier_table(results: Results, data: str) -> Table:
    """Every model on one data set: accuracy and cost, the cheapest first."""
    points = sorted((results.point(data, label) for label in results.compared(data)), key=lambda one: one.macs)
    rows = []
    for point in points:
        accuracy = f"{100 * point.accuracy.mean:.2f} ± {100 * point.accuracy.std:.2f}"
        routing = point.macs - point.fixed_macs - point.expert_macs
        macs = [f"{value:,.0f}" for value in (point.macs, point.expert_macs, routing)]
        record = point.records[0]
        rows.append([record.label, accuracy, f"{point.experts:.2f}", *macs, f"{record.parameters:,}"])
    note = f"Mean multiply-adds of a test image; {count_seeds(point.accuracy.num for point in points)}."
    header = ["model", "accuracy %", "experts", "multiply-adds", "of experts", "of routing", "parameters"]
    return Table(f"Accuracy and cost: {DATA_NAMES[data]}", header, rows, note)


def sure_table(results: Results, data: str) -> Table:
    """Everyone who learnt to answer early, stopped where the answer is sure; the cheapest first."""
    rows: list[tuple[float, list[str]]] = []
    for label in results.stopped(data):
        records = results.of(data, label)
        points = [next(row for row in one.sure["points"] if row["within"] == SHOWN_WITHIN) for one in records]
        whole = spread(100 * one.sure["looks"][-1]["accuracy"] for one in records)
        accuracy = spread(100 * row["accuracy"] for row in points)
        experts, macs = (spread(row[name] for row in points).mean for name in ("experts", "macs"))
        gain = spread(100 * gain_over_fixed(one.sure, SHOWN_WITHIN) for one in records)
        told = f"{gain.mean:+.2f} ± {gain.std / math.sqrt(gain.num):.2f}"
        cells = [f"{one.mean:.2f} ± {one.std:.2f}" for one in (whole, accuracy)]
        rows.append((macs, [label, *cells, f"{experts:.2f}", f"{macs:,.0f}", told]))
    note = (
        f"Test images; thresholds from validation images: the cheapest that loses at most {SHOWN_WITHIN} points there. Looks "
        "after each layer or block, all counted. Last: against everyone's stopping at one depth, at the same multiply-adds, "
        "with the standard error of the mean over seeds."
    )
    header = ["model", "to the end %", "stopped when sure %", "experts run", "multiply-adds"]
    header.append("against a fixed depth, points")
    return Table(f"Stopping when sure: {DATA_NAMES[data]}", header, [row for _, row in sorted(rows)], note)


def gain_over_fixed(sure: Mapping[str, Any], within: float) -> float:
    """What an image's own stop gains over the same cost for all: the fixed depths' accuracies, joined by straight lines."""
    point = next(row for row in sure["points"] if row["within"] == within)
    costs, accuracies = ([row[name] for row in sure["looks"]] for name in ("macs", "accuracy"))
    return float(point["accuracy"] - np.interp(point["macs"], costs, accuracies))


def all_tables(results: Results) -> list[Table]:
    """Every table that the results allow."""
    compared = (frontier_table(results, data) for data in results.data())
    stopped = (sure_table(results, data) for data in results.data())
    searched = search_table(results, lambda score: f"{100 * score:.1f}", SEARCH_NOTE)
    first = (*accuracy_tables(results), use_table(results), balance_table(results))
    tables = (*first, *compared, *stopped, searched)
    return [table for table in tables if table.rows]
