"""Our numbers beside the paper's, as tables of text. MACs are multiply-add operations."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.reproduce.claims import RECIPES, expert_loads, grid_entropy, load_entropy, num_dead
from experiments.reproduce.plan import FULL
from experiments.reproduce.records import SHOWN_WITHIN, Point, Results, choose_rate, spread
from experiments.reproduce.variants import BALANCE_VARIANTS, DATA_NAMES, MRE_PAPER, NAMES
from raytraced.experts import MLPExperts
from raytraced.models.registry import GRID
from raytraced.tables import markdown_table

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
    f"Validation accuracy in percent after a short run (on {WHOLE} a full one); one seed, which no other run uses. "
    "While the best rate is at the edge of the grid, the next rate is tried too. Bold: the chosen rate, which is the "
    f"best one, or the smallest within 0.1 points of it; mre-paper keeps its {MRE_PAPER.lr:g}."
)

# The models of README's table, and their names there.
README_NAMES = {
    "mre": "MRE, our recipe",
    "mre-target-2": "MRE, with a target of 2 experts",
    "mre-paper": "MRE, fitted to the paper",
    "paper": "*as the paper reports it*",
    "top-k": "top-2",
    "threshold": "threshold",
    "mlp-total": "MLP of width 36",
    "dense-1": "one dense block, no routing",
    "dense-4": "four dense blocks, no routing",
    "dense-8": "eight dense blocks, no routing",
}


@dataclass(frozen=True)
class Table:
    """A title, column names, rows of text, and a note below."""

    title: str
    header: list[str]
    rows: list[list[str]]
    note: str = ""

    def lines(self) -> list[str]:
        """The table in Markdown, without title and note."""
        return markdown_table(self.header, self.rows, "---:")

    def markdown(self) -> str:
        """The table in Markdown, with its title and its note."""
        return "\n".join([f"### {self.title}", "", *self.lines(), "", *([self.note, ""] if self.note else [])])


def count_seeds(numbers: Iterable[int]) -> str:
    """The number of seeds in words, such as "3 seeds", or "3 or 5 seeds" where rows differ."""
    known = sorted(set(numbers) - {0})
    return f"{' or '.join(map(str, known))} {'seed' if known == [1] else 'seeds'}"


def cells(point: Point) -> list[str]:
    """Accuracy as the paper prints it, 96.3 (0.1), and the mean number of experts."""
    accuracy = f"{100 * point.accuracy.mean:.1f} ({100 * point.accuracy.std:.1f})"
    return [accuracy, f"{point.experts:.1f}"] if point.records else ["–", "–"]


def accuracy_table(
    results: Results, title: str, names: list[str], labels: Mapping[str, tuple[str, str]], note: str
) -> Table:
    """Table 1 on some data sets. `labels`: label → the model's name, and the paper's model to compare it with."""
    header, rows = ["model"], [[name] for name, _ in labels.values()]
    for data in names:
        header += [DATA_NAMES[data], "paper", "experts"] if data in USE else [DATA_NAMES[data], "experts"]
        for row, (label, (_, base)) in zip(rows, labels.items(), strict=True):
            accuracy, experts = cells(results.point(data, label))
            row += [accuracy, *(["{} ({})".format(*ACCURACY[base][data])] if data in USE else []), experts]
    seeds = count_seeds(len(results.of(data, label)) for data in names for label in labels)
    return Table(title, header, rows if names else [], note.format(seeds=seeds))


def accuracy_tables(results: Results) -> Iterator[Table]:
    """Table 1 with our baselines, then with the paper's: no residual stream, a constant learning rate of 5e-4."""
    known = {data: {*results.labels(data)} for data in results.data(wide=False)}
    strong = {label: (name, label) for label, name in NAMES.items()}
    names = [data for data, labels in known.items() if "mre" in labels and labels & {*NAMES} - {*RECIPES}]
    note = (
        "Test accuracy in percent, mean (standard deviation) over {seeds}. Experts: the mean number that an image runs."
    )
    yield accuracy_table(results, "Table 1: accuracy", names, strong, note)
    theirs = ("mlp-total", "mlp-avg", "top-k", "threshold", "mre")
    weak = {f"{label}-paper": (NAMES[label].partition(",")[0], label) for label in theirs}
    names = [data for data in USE if known.get(data, set()) & {*weak} - {"mre-paper"}]
    yield accuracy_table(results, "Table 1, all models as in the paper", names, weak, note)


def readme_table(results: Results) -> Table:
    """README's table: the paper's data sets."""
    header = ["", *(cell for data in USE for cell in (DATA_NAMES[data], "experts"))]
    rows = [[name] for name in README_NAMES.values()]
    for row, label in zip(rows, README_NAMES, strict=True):
        for data in USE:
            row += cells(results.point(data, label))
            if label == "paper":
                row[-2:] = ["*{} ({})*".format(*ACCURACY["mre"][data]), f"*{USE[data][2]}*"]
            elif label == "mlp-total":
                row[-1] = ""  # it has no experts
    seeds = count_seeds(len(results.of(data, label)) for data in USE for label in README_NAMES)
    note = f"Test accuracy in percent, mean (standard deviation) over {seeds}; mean number of experts."
    return Table("", header, rows, note)


def use_table(results: Results) -> Table:
    """Table 2. As in the paper, used parameters are all parameters less those of experts that did not run."""
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
    return Table("Table 2: parameters and experts used", header, rows, "Means over the test images and all seeds.")


def balance_table(results: Results) -> Table:
    """How evenly each model uses its experts."""
    rows = []
    for data in results.data(wide=False):
        for label in (*(variant.label for variant in BALANCE_VARIANTS), "threshold"):
            if loads := expert_loads(results, data, label):
                entropies = [f"{spread(map(entropy, loads)).mean:.3f}" for entropy in (load_entropy, grid_entropy)]
                rows.append([DATA_NAMES[data], label, *entropies, f"{spread(map(num_dead, loads)).mean:.1f}"])
    note = (
        "Means over the seeds. Entropy of the load, 1 if it is even: within layers (weighted by load), and over the grid. "
        "Dead experts run for fewer than one image in 1,000."
    )
    header = ["data", "model", "entropy within layers", "entropy over the grid", f"dead experts of {NUM_NODES}"]
    return Table("How evenly experts are used", header, rows, note)


def search_table(results: Results, format_score: Callable[[float], str], note: str) -> Table:
    """The score of every learning rate that was tried, as `format_score` prints it."""
    found = results.searches()
    rates = sorted({lr for scores in found.values() for lr in scores})
    rows = []
    for (data, label), scores in found.items():
        cells = {lr: "diverged" if score is None else format_score(score) for lr, score in scores.items()}
        if (best := choose_rate(scores)) is not None:
            cells[best] = f"**{cells[best]}**"
        rows.append([f"{DATA_NAMES[data]}, {label}", *(cells.get(lr, "–") for lr in rates)])
    return Table("Learning-rate search", ["", *(f"{lr:g}" for lr in rates)], rows, note)


def frontier_table(results: Results, data: str) -> Table:
    """Accuracy and cost of all models on one data set, the cheapest first."""
    points = sorted((results.point(data, label) for label in results.compared(data)), key=lambda one: one.macs)
    rows = []
    for point in points:
        accuracy = f"{100 * point.accuracy.mean:.2f} ± {100 * point.accuracy.std:.2f}"
        routing = point.macs - point.fixed_macs - point.expert_macs
        macs = [f"{value:,.0f}" for value in (point.macs, point.expert_macs, routing)]
        record = point.records[0]
        rows.append([record.label, accuracy, f"{point.experts:.2f}", *macs, f"{record.parameters:,}"])
    seeds = count_seeds(point.accuracy.num for point in points)
    note = f"Test images; accuracy: mean ± standard deviation over {seeds}. MACs: mean multiply-adds per image."
    header = ["model", "accuracy %", "experts", "MACs", "of experts", "of routing", "parameters"]
    return Table(f"Accuracy and cost: {DATA_NAMES[data]}", header, rows, note)


def early_exit_table(results: Results, data: str) -> Table:
    """All models that were trained for early exit, stopped at a confidence threshold; the cheapest first."""
    rows: list[tuple[float, list[str]]] = []
    num_seeds = []
    for label in results.with_early_exit(data):
        records = results.of(data, label)
        points = [next(row for row in one.early_exit["points"] if row["within"] == SHOWN_WITHIN) for one in records]
        whole = spread(100 * one.early_exit["exits"][-1]["accuracy"] for one in records)
        accuracy = spread(100 * row["accuracy"] for row in points)
        experts, macs = (spread(row[name] for row in points).mean for name in ("experts", "macs"))
        gain = spread(100 * gain_over_fixed(one.early_exit, SHOWN_WITHIN) for one in records)
        num_seeds.append(gain.num)
        shown_gain = f"{gain.mean:+.2f} ± {gain.std / math.sqrt(gain.num):.2f}"
        cells = [f"{one.mean:.2f} ± {one.std:.2f}" for one in (whole, accuracy)]
        rows.append((macs, [label, *cells, f"{experts:.2f}", f"{macs:,.0f}", shown_gain]))
    note = (
        f"Test images. The confidence threshold is the cheapest that loses at most {SHOWN_WITHIN} points on the validation "
        "images. There is an exit after each layer or block; the MACs of all exits are counted. Accuracy: mean ± standard "
        f"deviation over {count_seeds(num_seeds)}. Last column: points above the same model with one exit for all images, "
        "at the same MACs; mean ± standard error of the mean over these seeds."
    )
    header = ["model", "no early exit %", "early exit %", "experts run", "MACs", "above a fixed exit, points"]
    return Table(f"Early exit: {DATA_NAMES[data]}", header, [row for _, row in sorted(rows)], note)


def gain_over_fixed(early_exit: Mapping[str, Any], within: float) -> float:
    """Accuracy above that of a fixed exit for all images at the same MACs, interpolated linearly between exits."""
    point = next(row for row in early_exit["points"] if row["within"] == within)
    costs, accuracies = ([row[name] for row in early_exit["exits"]] for name in ("macs", "accuracy"))
    return float(point["accuracy"] - np.interp(point["macs"], costs, accuracies))


def all_tables(results: Results) -> list[Table]:
    """All tables for which there are records."""
    compared = (frontier_table(results, data) for data in results.data())
    stopped = (early_exit_table(results, data) for data in results.data())
    searched = search_table(results, lambda score: f"{100 * score:.1f}", SEARCH_NOTE)
    first = (*accuracy_tables(results), use_table(results), balance_table(results))
    tables = (*first, *compared, *stopped, searched)
    return [table for table in tables if table.rows]
