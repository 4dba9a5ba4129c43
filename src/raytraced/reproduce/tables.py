"""Our numbers beside the paper's, as tables of text."""

from collections.abc import Iterable
from dataclasses import dataclass

from raytraced.grid import MLPExperts
from raytraced.models.table import GRID
from raytraced.reproduce.claims import RECIPES, load_figures
from raytraced.reproduce.frontier import model_points
from raytraced.reproduce.plan import FULL
from raytraced.reproduce.records import Results, Spread, choose_rate
from raytraced.reproduce.variants import BALANCE_VARIANTS, DATA_NAMES, NAMES

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

# The models of README's table, in its words.
README_NAMES = {
    "mre": "MRE, our recipe",
    "mre-cost-0.0003": "MRE, an expert at the price of 0.0003",
    "mre-cost-0.003": "MRE, an expert at the price of 0.003",
    "mre-paper": "MRE, the paper's text as written",
    "paper": "*as the paper reports it*",
    "top-k": "top-2",
    "top-any": "top-any",
    "threshold": "threshold",
    "mlp-total": "MLP of width 36",
    "mlp-avg": "MLP of width 24",
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
        rule = ["---", *["---:"] * (len(self.header) - 1)]
        return [f"| {' | '.join(cells)} |" for cells in (self.header, rule, *self.rows)]

    def markdown(self) -> str:
        """With its title and its note."""
        return "\n".join([f"### {self.title}", "", *self.lines(), "", *([self.note, ""] if self.note else [])])


def count_seeds(numbers: Iterable[int]) -> str:
    """3 seeds, or 3 seeds or 5 seeds where rows differ."""
    return " or ".join("1 seed" if number == 1 else f"{number} seeds" for number in sorted(set(numbers) - {0}))


def percent(value: Spread) -> str:
    """96.3 (0.1), as the paper prints it."""
    return f"{100 * value.mean:.1f} ({100 * value.std:.1f})" if value.num else "–"


def mean(value: Spread, digits: int = 1) -> str:
    """The mean alone."""
    return f"{value.mean:.{digits}f}" if value.num else "–"


def accuracy_table(results: Results) -> Table:
    """Table 1, on the data sets where MRE and another were run."""
    others = {label for label in NAMES if label not in RECIPES}
    names = [
        data for data in results.data(wide=False) if "mre" in (known := results.labels(data)) and others & {*known}
    ]
    header, rows = ["model"], [[name] for name in NAMES.values()]
    for data in names:
        header += [DATA_NAMES[data], "paper", "experts"] if data in USE else [DATA_NAMES[data], "experts"]
        for row, label in zip(rows, NAMES, strict=True):
            paper = ["{} ({})".format(*ACCURACY[label][data])] if data in USE else []
            row += [percent(results.accuracy(data, label)), *paper, mean(results.experts(data, label))]
    seeds = count_seeds(len(results.of(data, label)) for data in names for label in NAMES)
    note = f"Test accuracy in percent, mean and deviation over {seeds}; experts: the mean number an image runs."
    return Table("Table 1: accuracy", header, rows if names else [], note)


def readme_table(results: Results) -> Table:
    """What README shows of the paper's data sets."""
    header = ["", *(cell for data in USE for cell in (DATA_NAMES[data], "experts"))]
    rows = [[name] for name in README_NAMES.values()]
    for row, label in zip(rows, README_NAMES, strict=True):
        for data in USE:
            row += [percent(results.accuracy(data, label)), mean(results.experts(data, label))]
            if label == "paper":
                row[-2:] = ["*{} ({})*".format(*ACCURACY["mre"][data]), f"*{USE[data][2]}*"]
            elif label in ("mlp-total", "mlp-avg"):
                row[-1] = ""  # its layers are no experts
    seeds = count_seeds(len(results.of(data, label)) for data in USE for label in README_NAMES)
    note = f"Test accuracy in percent, mean (deviation) over {seeds}; experts: the mean number an image runs."
    return Table("", header, rows, note)


def use_table(results: Results) -> Table:
    """Table 2: parameters used are counted as the paper does, total less the experts that did not run."""
    expert_size = sum(parameter.numel() for parameter in MLPExperts(1, 1, GRID["dim"]).parameters())
    rows = []
    for data in results.data(wide=False):
        for label in (label for label in RECIPES if results.of(data, label)):
            total, experts = results.of(data, label)[0].parameters, results.experts(data, label)
            used = total - (NUM_NODES - experts.mean) * expert_size
            paper = "{:,} {:,} {}".format(*USE[data]).split() if data in USE else ["–"] * 3
            name = f"{DATA_NAMES[data]}, {NAMES[label]}"
            rows.append([name, f"{total:,}", f"{used:,.0f}", mean(experts, 2), *paper])
    header = ["", "parameters", "used on average", "experts", "paper", "used", "experts"]
    return Table("Table 2: parameters and experts used", header, rows)


def balance_table(results: Results) -> Table:
    """How evenly each model uses its experts."""
    rows = []
    for data in results.data(wide=False):
        for label in (*(variant.label for variant in BALANCE_VARIANTS), "threshold"):
            one = load_figures(results, data, label)
            if one is not None:
                numbers = [f"{one.entropy:.3f}", f"{one.grid_entropy:.3f}", f"{one.num_dead:.1f}"]
                rows.append([DATA_NAMES[data], label, *numbers])
    note = "Entropy of the load, 1 if even: within layers (weighted by load), over the grid. Dead: under one image in 1000."
    header = ["data", "model", "entropy within layers", "entropy over the grid", f"dead experts of {NUM_NODES}"]
    return Table("How evenly experts are used", header, rows, note)


def search_table(results: Results) -> Table:
    """Validation accuracy of every learning rate that was tried."""
    found = results.searches()
    rates = sorted({lr for accuracies in found.values() for lr in accuracies})
    rows = []
    for (data, label), accuracies in found.items():
        cells = {lr: "diverged" if one is None else f"{100 * one:.1f}" for lr, one in accuracies.items()}
        if (best := choose_rate(accuracies)) is not None:
            cells[best] = f"**{cells[best]}**"
        rows.append([f"{DATA_NAMES[data]}, {label}", *(cells.get(lr, "–") for lr in rates)])
    wide = " and ".join(data for data, plan in FULL.data.items() if plan.wide)
    note = (
        f"Validation accuracy in percent after a short run (on the {wide} a whole one); one seed, which no other run "
        "uses. In bold the rate that was taken: the best, or the smallest within 0.1 points of it; mre-paper keeps the "
        "paper's 5e-3."
    )
    return Table("Learning-rate search", ["", *(f"{lr:g}" for lr in rates)], rows, note)


def frontier_table(results: Results, data: str) -> Table:
    """Every model on one data set: accuracy and cost, the cheapest first."""
    points = sorted(model_points(results, data), key=lambda one: one.macs)
    rows = []
    for point in points:
        accuracy = f"{100 * point.accuracy.mean:.2f} ± {100 * point.accuracy.std:.2f}"
        routing = point.macs - point.fixed_macs - point.expert_macs
        macs = [f"{value:,.0f}" for value in (point.macs, point.expert_macs, routing)]
        record = point.record
        rows.append([record.label, accuracy, f"{point.experts:.2f}", *macs, f"{record.parameters:,}"])
    note = f"Mean multiply-adds of a test image; {count_seeds(point.accuracy.num for point in points)}."
    header = ["model", "accuracy %", "experts", "multiply-adds", "of experts", "of routing", "parameters"]
    return Table(f"Accuracy and cost: {DATA_NAMES[data]}", header, rows, note)


def all_tables(results: Results) -> list[Table]:
    """Every table that the results allow."""
    compared = (frontier_table(results, data) for data in results.data())
    tables = (accuracy_table(results), use_table(results), balance_table(results), *compared, search_table(results))
    return [table for table in tables if table.rows]
