"""Our numbers beside the paper's, as tables of text. Needs no torch, but for the claims."""

from collections.abc import Iterable
from dataclasses import dataclass

from raytraced.reproduce.claims import load_figures
from raytraced.reproduce.paper import ACCURACY, DATA_NAMES, NAMES, USE
from raytraced.reproduce.points import Point, model_points
from raytraced.reproduce.records import Results, Spread, spread
from raytraced.reproduce.search import choose_rate, searched


@dataclass(frozen=True)
class Table:
    """A title, column names, rows of text, and a line below."""

    title: str
    header: list[str]
    rows: list[list[str]]
    note: str = ""

    def markdown(self) -> str:
        """As text for a README."""
        lines = [f"### {self.title}", "", row_text(self.header), row_text(["---", *["---:"] * (len(self.header) - 1)])]
        lines += [row_text(row) for row in self.rows]
        return "\n".join([*lines, "", *([self.note, ""] if self.note else [])])


def row_text(cells: list[str]) -> str:
    """One line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def count(number: int, noun: str) -> str:
    """1 seed, 3 seeds."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def count_seeds(numbers: Iterable[int]) -> str:
    """3 seeds, or 3 seeds or 5 seeds where rows differ."""
    return " or ".join(count(number, "seed") for number in sorted(set(numbers) - {0}))


def percent(value: Spread | None) -> str:
    """96.3 (0.1), as the paper prints it."""
    return "–" if value is None else f"{100 * value.mean:.1f} ({100 * value.std:.1f})"


def accuracy_table(results: Results) -> Table | None:
    """Table 1."""
    ours = ("mre", "mre-paper")
    data_names = [
        data
        for data in results.data()
        if data != "union"
        and results.of(data, "mre")
        and any(results.of(data, one) for one in NAMES if one not in ours)
    ]
    if not data_names:
        return None
    header = ["model"]
    for data in data_names:
        header += (
            [DATA_NAMES.get(data, data), "paper", "experts"] if data in USE else [DATA_NAMES.get(data, data), "experts"]
        )
    rows = []
    for label, name in NAMES.items():
        row = [name]
        for data in data_names:
            row.append(percent(results.spread(data, label, lambda one: one.accuracy)))
            if data in USE:
                mean, std = ACCURACY[label][data]
                row.append(f"{mean} ({std})")
            experts = results.spread(data, label, lambda one: one.experts)
            row.append("–" if experts is None else f"{experts.mean:.1f}")
        rows.append(row)
    seeds = count_seeds(len(results.of(data, label)) for data in data_names for label in NAMES)
    note = f"Test accuracy in percent, mean and deviation over {seeds}; experts: the mean number an image runs."
    return Table("Table 1: accuracy", header, rows, note)


def use_table(results: Results) -> Table | None:
    """Table 2: parameters used are counted as the paper does, total less the experts that did not run."""
    rows = []
    for data in results.data():
        for label in ("mre", "mre-paper"):
            records = results.of(data, label)
            if not records or data == "union":
                continue
            experts = spread(one.experts for one in records).mean
            total = records[0].parameters
            expert_size = 3 * (16 * 16 + 16)
            used = total - (32 - experts) * expert_size
            row = [f"{DATA_NAMES.get(data, data)}, {NAMES[label]}", f"{total:,}", f"{used:,.0f}", f"{experts:.2f}"]
            paper = USE.get(data)
            row += [f"{paper[0]:,}", f"{paper[1]:,}", f"{paper[2]}"] if paper else ["–"] * 3
            rows.append(row)
    header = ["", "parameters", "used on average", "experts", "paper", "used", "experts"]
    return Table("Table 2: parameters and experts used", header, rows) if rows else None


def balance_table(results: Results) -> Table | None:
    """How evenly each model uses its experts."""
    rows = []
    for data in results.data():
        for label in ("mre", "mre-paper", "top-k", "top-k-balance", "aux-free", "threshold"):
            figures = load_figures(results, data, label)
            if figures is not None and data != "union":
                entropy, grid, dead = figures
                rows.append([DATA_NAMES.get(data, data), label, f"{entropy:.3f}", f"{grid:.3f}", f"{dead:.1f}"])
    note = "Entropy of the load, 1 if even: within layers (weighted by load), over the grid. Dead: under one image in 1000."
    header = ["data", "model", "entropy within layers", "entropy over the grid", "dead experts of 32"]
    return Table("How evenly experts are used", header, rows, note) if rows else None


def search_table(results: Results) -> Table | None:
    """Validation accuracy of every learning rate that was tried."""
    found = searched(results)
    rates = sorted({lr for accuracies in found.values() for lr in accuracies})
    rows = []
    for (data, label), accuracies in found.items():
        known = {lr: accuracy for lr, accuracy in accuracies.items() if accuracy is not None}
        best = choose_rate(known) if known else None
        cells = [tell_rate(accuracies, lr, lr == best) for lr in rates]
        rows.append([f"{DATA_NAMES.get(data, data)}, {label}", *cells])
    note = (
        "Validation accuracy in percent after a short run (on the union a whole one); one seed, which no other run uses. In "
        "bold the rate that was taken: the best, or the smallest within 0.1 points of it; mre-paper keeps the paper's 5e-3."
    )
    return Table("Learning-rate search", ["", *(f"{lr:g}" for lr in rates)], rows, note) if rows else None


def tell_rate(accuracies: dict[float, float | None], lr: float, is_best: bool) -> str:
    """One cell of the search."""
    if lr not in accuracies:
        return "–"
    accuracy = accuracies[lr]
    if accuracy is None:
        return "diverged"
    return f"**{100 * accuracy:.1f}**" if is_best else f"{100 * accuracy:.1f}"


def frontier_table(results: Results, data: str) -> Table | None:
    """Every model on one data set: accuracy and cost, the cheapest first."""
    points = sorted(model_points(results, data, results.labels(data)), key=lambda one: one.macs)
    if not points:
        return None
    rows = [point_row(point, results.of(data, point.label)[0].parameters) for point in points]
    note = f"Mean multiply-adds of a test image; {count_seeds(point.test.num for point in points)}."
    header = ["model", "accuracy %", "experts", "multiply-adds", "of experts", "of routing", "parameters"]
    return Table(f"Accuracy and cost: {DATA_NAMES.get(data, data)}", header, rows, note)


def point_row(point: Point, parameters: int) -> list[str]:
    """One row of the frontier's table."""
    routing = point.macs - point.fixed_macs - point.expert_macs
    macs = [f"{value:,.0f}" for value in (point.macs, point.expert_macs, routing)]
    return [point.label, percent_precise(point.test), f"{point.experts:.2f}", *macs, f"{parameters:,}"]


def percent_precise(value: Spread) -> str:
    """With two digits: frontiers are close."""
    return f"{100 * value.mean:.2f} ± {100 * value.std:.2f}"


def all_tables(results: Results) -> dict[str, Table]:
    """Every table that the results allow, by its part."""
    tables = {
        "table1": accuracy_table(results),
        "table2": use_table(results),
        "balance": balance_table(results),
    }
    for data in results.data():
        tables["union" if data == "union" else f"frontier-{data}"] = frontier_table(results, data)
    tables["lr"] = search_table(results)
    return {name: table for name, table in tables.items() if table is not None}
