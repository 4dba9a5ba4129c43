"""The union with experts of width 128, an image task where experts take most of the multiply-adds: its tables."""

from pathlib import Path

from experiments.reproduce.image_aims import above_line
from experiments.reproduce.reading_aims import Difference, difference, in_percent, strongest
from experiments.reproduce.records import Point, Results
from experiments.reproduce.tables import SEARCH_NOTE, Table, count_seeds, frontier_table, percent, search_table
from raytraced.files import write_file

DATA = "union"
OURS = ("mre",)  # names in the registry


def ours_and_baselines(results: Results) -> tuple[list[Point], list[Point]]:
    """Our models, and the others."""
    points = [results.point(DATA, label) for label in results.labels(DATA)]
    ours = [one for one in points if is_ours(one)]
    return ours, [one for one in points if not is_ours(one)]


def is_ours(point: Point) -> bool:
    return point.records[0].config.model in OURS


def against_table(results: Results) -> Table:
    """Each of our models beside the most accurate baseline of at most its multiply-adds."""
    ours, baselines = ours_and_baselines(results)
    rows = []
    for one in sorted(ours, key=lambda point: point.macs):
        best = strongest(baselines, one.macs)
        if best is not None:
            above: Difference = difference(in_percent(one.accuracy), in_percent(best.accuracy))
            row = [one.records[0].label, percent(one), f"{one.macs:,.0f}", best.records[0].label, percent(best)]
            line = above_line(one, baselines)
            rows.append([*row, f"{best.macs:,.0f}", str(above), above.verdict, str(line), line.verdict])
    header = [
        "model",
        "accuracy %",
        "MACs",
        "best baseline of at most its MACs",
        "its %",
        "its MACs",
        "points above",
        "",
        "points above the line",
        "",
    ]
    note = (
        f"Mean ± standard error over {count_seeds(one.accuracy.num for one in ours)}. *Level*: the difference is below two "
        "standard errors. *The line* joins the baselines that no cheaper one surpasses, read at the model's multiply-adds."
    )
    return Table("MRE beside the best baseline of its cost", header, rows, note)


def wide_tables(results: Results) -> list[Table]:
    """All tables for which there are records."""
    searched = search_table(results, lambda score: f"{100 * score:.1f}", SEARCH_NOTE)
    return [one for one in (frontier_table(results, DATA), against_table(results), searched) if one.rows]


def write_wide(results: Results, folder: Path) -> Path:
    """Write tables.md; return its path."""
    first = [
        "# The union with experts of width 128",
        "",
        "Written by `python -m experiments.reproduce --only wide`.",
        "",
    ]
    page = folder / "tables.md"
    write_file(page, "\n".join([*first, *(table.markdown() for table in wide_tables(results))]))
    return page
