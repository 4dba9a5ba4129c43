"""Tables for a terminal and for Markdown; needs no torch."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from raytraced.errors import printable

FORMATS = {"experts": ".2f", "probability": ".1%"}
"""format specifications of the fractions that every task has"""


def clock(seconds: float) -> str:
    """Format a duration as 1:02:03 or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def make_table(
    rows: Sequence[Mapping[str, Any]], formats: Mapping[str, str] = FORMATS, whole: Sequence[str] = ()
) -> Table:
    """Make a table for a terminal with one row per mapping; text is aligned left, numbers are aligned right.

    Args:
        rows: Mappings with the same keys, which are the titles of the columns.
        formats: Format specification of a column's fractions, by the last word of its title ("2. probability").
        whole: Titles of columns whose content is never cut.

    Returns:
        A rich table; every cell is escaped by `errors.printable`.
    """
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name, first in rows[0].items():
        side: Literal["left", "right"] = "left" if isinstance(first, str) and name not in formats else "right"
        table.add_column(escape(printable(name)), justify=side, no_wrap=name in whole)
    for row in rows:
        table.add_row(*(_cell(value, formats.get(name.rpartition(" ")[2], "")) for name, value in row.items()))
    return table


def _cell(value: Any, form: str) -> str:
    """One value as the text of a cell."""
    if value is None or isinstance(value, str):
        return escape(printable(value or ""))
    return f"{value:{form}}" if isinstance(value, float) else f"{value:,}"


def table_width(table: Table) -> int:
    """Return the number of columns of a terminal that a table needs to be shown whole."""
    # rich ignores a width below the terminal's unless a height is given, too
    return Console(width=100_000, height=100).measure(table).maximum


def print_table(table: Table) -> None:
    """Print a table: fitted to the terminal, or whole where the output goes to a file or a pipe."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(1, table_width(table)), height=100)
    console.print(table)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], rule: str = "---") -> list[str]:
    """Make the lines of a Markdown table; the content of a cell cannot end the cell.

    Args:
        header: Titles of the columns.
        rows: One sequence of cells per row.
        rule: What stands below the titles of all columns but the first; ``---:`` aligns them right.

    Returns:
        The lines, without line breaks.
    """
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in (header, *rows)]
    cells.insert(1, ["---", *[rule] * (len(header) - 1)])
    return [f"| {' | '.join(row)} |" for row in cells]
