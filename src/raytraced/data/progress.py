"""What the user sees while data is being fetched: lines and bars on stderr."""

import contextlib
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn


def say(line: str) -> None:
    """Print one line on stderr."""
    print(line, file=sys.stderr, flush=True)


class Bar:
    """A progress bar with the interface that pooch asks for; without a total it only shows that time passes."""

    def __init__(self, progress: Progress, label: str) -> None:
        self._progress = progress
        self._task = progress.add_task(escape(label), total=None)

    @property
    def total(self) -> float | None:
        """Number of bytes to come."""
        return self._progress.tasks[self._task].total

    @total.setter
    def total(self, num_bytes: int) -> None:
        self._progress.update(self._task, total=num_bytes or None)

    def update(self, num_bytes: int) -> None:
        """Count bytes that have come."""
        self._progress.update(self._task, advance=num_bytes)

    def reset(self) -> None:
        """Start again from 0."""
        self._progress.update(self._task, completed=0)

    def close(self) -> None:
        """Do nothing: the bar ends with its block."""


@contextlib.contextmanager
def show_bar(label: str) -> Iterator[Bar]:
    """Show a bar while the block runs; where stderr is no terminal nothing is drawn."""
    console = Console(stderr=True)
    columns = (
        TextColumn("  {task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield Bar(progress, label)
