"""What is told while runs go: how many are done, what is at work, and the time left. Needs no torch."""

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from raytraced.reproduce.plan import Run
from raytraced.reproduce.records import Record
from raytraced.training.progress import clock


class Progress:
    """Counts runs and guesses the time left from how long runs took against what was expected of them."""

    def __init__(self, runs: Sequence[Run], num_done: int, num_workers: int, work: Path) -> None:
        self.runs = {run.key: run for run in runs}
        self.total, self.done, self.failed = len(runs) + num_done, num_done, 0
        self.num_workers, self.work = num_workers, work
        self.waiting = {run.key: run.expected_seconds for run in runs}
        self.started: dict[str, float] = {}
        self.expected, self.taken = 0.0, 0.0  # of what was finished
        self.console = Console(stderr=True)
        self.live = Live(console=self.console, refresh_per_second=2, transient=True)
        if self.console.is_terminal:
            self.live.start()

    def start(self, run: Run) -> None:
        """A worker has begun, or goes on with, a run."""
        self.started[run.key] = time.monotonic()

    def finish(self, run: Run, record: Record | None, problem: str | None = None) -> None:
        """A run has ended, well or not."""
        self.expected += self.waiting.pop(run.key)
        self.taken += time.monotonic() - self.started.pop(run.key)
        self.done += 1
        if problem or record is None or record.error:
            self.failed += 1
            told = f"failed: {problem or (record and record.error)}"
        else:
            told = f"test {record.accuracy:.2%}, {record.experts:.2f} experts, {clock(record.seconds)}"
        left = f"{clock(self.seconds_left())} left" if self.waiting else "all done"
        self.say(f"[{self.done}/{self.total}] {name_run(run)}: {told}  ({left})")

    def say(self, line: str) -> None:
        """A line that stays."""
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def tick(self) -> None:
        """Show what is at work; called now and then."""
        if self.live.is_started:
            self.live.update(Text(self.describe()))

    def describe(self) -> str:
        """The lines of the live display."""
        lines = [f"{self.done} of {self.total} runs done, {clock(self.seconds_left())} left"]
        for key in self.started:
            run = self.runs[key]
            epochs = len(read_lines(self.work / run.folder / "metrics.jsonl"))
            lines.append(f"  {name_run(run)}: epoch {epochs} of {run.config.epochs}")
        return "\n".join(lines)

    def seconds_left(self) -> float:
        """The work that waits, less what is done of the runs at work, at the pace so far, shared by the workers."""
        at_work = sum(self.waiting[key] * self.share_done(self.runs[key]) for key in self.started)
        pace = self.taken / self.expected if self.expected else 1.0
        return (sum(self.waiting.values()) - at_work) * pace / self.num_workers

    def share_done(self, run: Run) -> float:
        """How much of a run's epochs are over."""
        return len(read_lines(self.work / run.folder / "metrics.jsonl")) / max(1, run.config.epochs)

    def close(self) -> None:
        """Take the live display away."""
        if self.live.is_started:
            self.live.stop()


def name_run(run: Run) -> str:
    """A run in a reader's words."""
    purpose = "" if run.group == "main" else f" ({run.group})"
    return f"{run.data} {run.label} seed {run.seed}{purpose}"


def read_lines(path: Path) -> list[str]:
    """The lines of a file that may not be there yet."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
