"""Our numbers beside the paper's, as tables of text. MACs are multiply-add operations."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.reproduce.claims import RECIPES, expert_loads, grid_entropy, load_entropy, num_dead
from experiments.reproduce.image_aims import EXITS, OURS, above_line, baselines, equal_cost, verdicts
from experiments.reproduce.plan import FULL
from experiments.reproduce.reading_aims import Difference, FinalLoss, compare_final_loss, compare_longer
from experiments.reproduce.records import SHOWN_WITHIN, Point, Results, choose_rate, spread
from experiments.reproduce.variants import BALANCE_VARIANTS, DATA_NAMES, MRE, MRE_FINAL, MRE_PAPER, NAMES
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

# Models without and with a loss on exits: name in print → label of the one, label of the other.
TERMS: dict[str, tuple[str, str]] = {
    "MRE, our recipe": ("mre-final-loss", "mre"),
    "{cheap}": ("", "mre-target-2"),
    "MRE, all budgets": ("mre-budgets", "mre-budgets-exits"),
    "MRE, fitted to the paper": ("mre-paper", ""),
    "*as the paper reports it*": ("paper", ""),
    "top-1": ("top-1", "top-1-exits"),
    "top-2": ("top-k", "top-k-exits"),
    "threshold": ("threshold", "threshold-exits"),
    "MLP of width 36": ("mlp-total", ""),
    "one dense block": ("dense-1", "dense-1-exits"),
    "two dense blocks": ("dense-2", "dense-2-exits"),
    "four dense blocks": ("dense-4", "dense-4-exits"),
    "eight dense blocks": ("dense-8", "dense-8-exits"),
}
# Those of README's table.
README_NAMES = tuple(
    name for name in TERMS if name not in ("top-1", "two dense blocks", "MLP of width 36", "MRE, all budgets")
)


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
        "Test accuracy in percent, mean (standard deviation) over {seeds}: a deviation, since the paper reports one. Experts: "
        "the mean number that an image runs."
    )
    terms = (
        ' "MRE, our recipe" is trained with half of its loss on exits and a target, the baselines here are not: '
        "equal terms have a table of their own."
    )
    yield accuracy_table(results, "Table 1: accuracy", names, strong, note + terms)
    theirs = ("mlp-total", "mlp-avg", "top-k", "threshold", "mre")
    weak = {f"{label}-paper": (NAMES[label].partition(",")[0], label) for label in theirs}
    names = [data for data in USE if known.get(data, set()) & {*weak} - {"mre-paper"}]
    yield accuracy_table(results, "Table 1, all models as in the paper", names, weak, note)


def equal_terms_table(results: Results, names: Iterable[str] = TERMS) -> Table:
    """Every model without and with a loss on exits, run to the end."""
    known = [data for data in FULL.data if FULL.data[data].compared and results.labels(data)]
    header = ["", *(cell for data in known for cell in (DATA_NAMES[data].partition(" (")[0], "with exit loss"))]
    rows = []
    for name in names:
        pairs = [[term_cell(results, data, label) for label in TERMS[name]] for data in known]
        rows.append([name.format(cheap=cheap_name(results)), *(cell for pair in pairs for cell in pair)])
    seeds = count_seeds(len(results.of(data, label)) for data in known for name in names for label in TERMS[name])
    note = (
        f"Test accuracy in percent, mean ± standard error over {seeds}, and in brackets the mean number of experts that an "
        "image runs; all models run to the end. *With exit loss*: half of the training loss is on the answers after each "
        "layer or block, and our recipe has a target for the number of experts. In the paper's own row ± is the standard "
        "deviation over three seeds that it reports."
    )
    return Table("Equal terms: without and with a loss on exits", header, rows if known else [], note)


def term_cell(results: Results, data: str, label: str) -> str:
    """Accuracy with its standard error, and experts; a dash where the model was not trained."""
    if label == "paper":
        return "*{} ± {}* ({})".format(*ACCURACY["mre"][data], USE[data][2]) if data in USE else "–"
    point = results.point(data, label)
    if not point.records:
        return "–"
    experts = "" if label.startswith("mlp") else f" ({point.experts:.1f})"  # they have no experts
    return percent(point) + experts


def cheap_name(results: Results) -> str:
    """MRE with a target of 2, named by what it runs."""
    points = (results.point(data, "mre-target-2") for data in results.data())
    means = [point.experts for point in points if point.records]
    return f"MRE, {min(means):.1f} to {max(means):.1f} experts" if means else "MRE, fewer experts"


def readme_table(results: Results, wide: Results | None = None) -> Table:
    """README's table: the models that it explains. Its note is short, as README's lines are.

    Args:
        results: The records.
        wide: Those of the union at width 128, where they are known: one more column.
    """
    table = equal_terms_table(results, README_NAMES)
    header, rows = table.header, table.rows
    if wide is not None and wide.labels("union"):
        header = [*header, "Union, 128 wide"]
        cells = [term_cell(wide, "union", TERMS[name][0]) for name in README_NAMES]
        rows = [[*row, cell] for row, cell in zip(rows, cells, strict=True)]
    note = "Test accuracy in percent ± standard error (the paper: deviation); in brackets experts per image."
    return Table("", header, rows, note)


def final_loss_table(results: Results) -> Table:
    """Rule 3 of benchmarks/aims-readings.md on every data set."""
    found = {data: one for data in results.data() if (one := compare_final_loss(results, data))}
    rows = [
        [*final_loss_row(DATA_NAMES[data], one), *verdict_cells(above_line(one.ours, baselines(results, data)))]
        for data, one in found.items()
    ]
    header = ["", "MRE %", "experts", "MACs", "best baseline of at most its MACs", "its %", "its MACs", "points above it",
              "verdict", "points above threshold", "its MACs", "verdict", "points above the line", "verdict"]  # fmt: skip
    note = (
        "MRE here is `mre-final-loss`: our recipe without a loss on exits and without a target, as the baselines are trained; "
        "test images, mean ± standard error over 5 seeds, or as many as stand beside the baseline's name. *Level*: the "
        "difference is below two standard errors (rules: benchmarks/aims-readings.md). *The line* joins the baselines that no "
        "cheaper one surpasses; it is read at MRE's multiply-adds, and was not part of the rules."
    )
    return Table("A loss on the last answer alone", header, rows, note)


def final_loss_row(name: str, one: FinalLoss) -> list[str]:
    """The row of one data set."""
    ours = one.ours
    row = [name, percent(ours), f"{ours.experts:.1f}", f"{ours.macs:,.0f}"]
    if one.best is None:
        row += ["none", "–", "–", "–", "–"]
    else:
        best, label = one.best, one.best.records[0].label
        seeds = "" if best.accuracy.num == ours.accuracy.num else f" ({count_seeds([best.accuracy.num])})"
        row += [
            f"{label}{seeds}",
            percent(best),
            f"{best.macs:,.0f}",
            str(one.against(best)),
            one.against(best).verdict,
        ]
    above = one.against(one.threshold)
    return [*row, str(above), f"{one.threshold.macs:,.0f}", above.verdict]


def verdict_cells(one: Difference) -> list[str]:
    """A difference, and whether the first model is ahead."""
    return [str(one), one.verdict]


def equal_cost_table(results: Results) -> Table:
    """The second recipe less the first at equal multiply-adds."""
    recipes = (MRE_FINAL.label, MRE.label, OURS, EXITS)
    known = [data for data in results.data() if all(results.of(data, label) for label in recipes)]
    rows = [
        [DATA_NAMES[data], *(cell for one in equal_cost(results, data) for cell in verdict_cells(one))]
        for data in known
    ]
    header = ["", "to the end", "", "with as few experts", "", "early exit", ""]
    note = (
        "Points of accuracy of the second recipe above the first at equal multiply-adds, ± the standard error of the "
        "difference. *To the end*: the dial of `mre-budgets` at the cost of `mre-final-loss`. *With as few experts*: "
        "`mre-final-loss` with at most so many experts that it costs what `mre-budgets` costs. *Early exit*: "
        "`mre-budgets-exits` against `mre` with thresholds of that cost; where `mre` has none so cheap, its cheapest."
    )
    return Table("The two recipes at equal cost", header, rows, note)


def percent(point: Point) -> str:
    """Accuracy in percent ± standard error."""
    return f"{100 * point.accuracy.mean:.2f} ± {100 * point.accuracy.error:.2f}"


def second_recipe_table(results: Results) -> Table:
    """The rules of benchmarks/aims-images.md and what the runs say."""
    rows = verdicts(results)
    note = (
        "The second recipe is `mre-budgets`, one checkpoint for all budgets, and `mre-budgets-exits`, the same with half of "
        "its loss on exits. Points of accuracy on test images, ± the standard error of a difference; rules: "
        "benchmarks/aims-images.md. Rule 4 is in benchmarks/difficulty.md, rule 5 in results/wide/tables.md."
    )
    known = any(verdict != "not decided yet" for _, verdict, _ in rows)
    return Table("The second recipe, by its rules", ["rule", "verdict", "found"], rows if known else [], note)


def longer_table(results: Results) -> Table:
    """Rule 2 of benchmarks/aims-readings.md."""
    one = compare_longer(results)
    if one is None:
        return Table("", [], [])
    rows = []
    for point in (one.short, one.long):
        best = spread(record.best_epoch for record in point.records)
        rows.append([str(point.records[0].config.epochs), percent(point), f"{point.experts:.2f}", f"{best.mean:.1f}"])
    note = (
        f"CIFAR-10, test images, mean ± standard error over {count_seeds([one.long.accuracy.num])}: {one.accuracy} points; "
        f"that longer training changes little {'holds' if one.little else 'does not hold'} "
        "(rules: benchmarks/aims-readings.md)."
    )
    return Table("mre-paper trained for longer", ["epochs", "accuracy %", "experts", "best epoch"], rows, note)


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
            counts = spread(one.experts for one in results.of(data, label))
            rows.append([name, f"{total:,}", f"{used:,.0f}", f"{counts.mean:.2f} ± {counts.std:.2f}", *paper])
    header = ["", "parameters", "used on average", "experts", "paper", "used", "experts"]
    note = "Means over the test images and all seeds; experts ± standard deviation over the seeds."
    return Table("Table 2: parameters and experts used", header, rows, note)


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
        routing = point.macs - point.fixed_macs - point.expert_macs
        macs = [f"{value:,.0f}" for value in (point.macs, point.expert_macs, routing)]
        record = point.records[0]
        rows.append([record.label, percent(point), f"{point.experts:.2f}", *macs, f"{record.parameters:,}"])
    seeds = count_seeds(point.accuracy.num for point in points)
    note = f"Test images; accuracy: mean ± standard error over {seeds}. MACs: mean multiply-adds per image."
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
        shown_gain = f"{gain.mean:+.2f} ± {gain.error:.2f}"
        cells = [f"{one.mean:.2f} ± {one.error:.2f}" for one in (whole, accuracy)]
        rows.append((macs, [label, *cells, f"{experts:.2f}", f"{macs:,.0f}", shown_gain]))
    note = (
        f"Test images. The confidence threshold is the cheapest that loses at most {SHOWN_WITHIN} points on the validation "
        "images. There is an exit after each layer or block; the MACs of all exits are counted. Mean ± standard "
        f"error over {count_seeds(num_seeds)}. Last column: points above the same model with one exit for all images, at the "
        "same MACs."
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
    terms = (
        equal_terms_table(results),
        final_loss_table(results),
        second_recipe_table(results),
        equal_cost_table(results),
        longer_table(results),
    )
    first = (*accuracy_tables(results), *terms, use_table(results), balance_table(results))
    tables = (*first, *compared, *stopped, searched)
    return [table for table in tables if table.rows]
