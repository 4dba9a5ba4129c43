"""What a run says while it goes: a live bar on a terminal, a line an epoch elsewhere, or nothing."""

import sys
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from raytraced.training.tables import clock

Figures = Callable[[], dict[str, float]]
"""the running means of an epoch; reading them may wait for the device, so only who shows them asks"""


class Reporter:
    """Hears all that the training loop tells, and says nothing but warnings, on stderr."""

    def start(self, formats: dict[str, str], num_epochs: int, num_batches: int, epoch: int, batch: int) -> None:
        """The run begins, or goes on, at this epoch and batch; `formats` are the task's figures."""
        self.formats, self.num_epochs, self.num_batches = formats, num_epochs, num_batches
        self.first_epoch, self.started = epoch, time.monotonic()

    def step(self, epoch: int, batch: int, figures: Figures) -> None:
        """A step is done."""

    def epoch(self, metrics: dict[str, Any]) -> None:
        """An epoch is done."""

    def note(self, text: str) -> None:
        """Something good to know."""

    def warn(self, text: str) -> None:
        """Something the user must know."""
        print(f"raytraced: {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """The run has ended, well or not."""

    def tell(self, means: dict[str, Any], part: str = "") -> str:
        """The figures of training, in as few words as a narrow terminal has room for."""
        shown = {"loss": ".3f", **self.formats, "experts": ".1f"}
        return " ".join(f"{name} {means[part + name]:{form}}" for name, form in shown.items())

    def tell_validation(self, metrics: dict[str, Any]) -> str:
        """The task's figures on validation data."""
        figures = [f"{metrics[f'validation_{name}']:{form}}" for name, form in self.formats.items()]
        return " ".join(["validation", *figures])


def make_reporter(quiet: bool) -> Reporter:
    """The reporter that fits where the output goes."""
    return Reporter() if quiet else LiveBar() if sys.stdout.isatty() else PlainLines()


class PlainLines(Reporter):
    """A line an epoch, for files and pipes."""

    def note(self, text: str) -> None:
        print(text, flush=True)

    def epoch(self, metrics: dict[str, Any]) -> None:
        done = metrics["epoch"] - self.first_epoch
        left = (time.monotonic() - self.started) / done * (self.num_epochs - metrics["epoch"])
        number = f"{metrics['epoch']:>{len(str(self.num_epochs))}}/{self.num_epochs}"
        told = f"{self.tell(metrics, 'train_')} {self.tell_validation(metrics)}"
        print(f"epoch {number} {told} {clock(left)} left", flush=True)


class LiveBar(Reporter):
    """Two bars that move: the epoch with its figures, and the run with the time left."""

    def __init__(self) -> None:
        what, figures = TextColumn("{task.description}"), TextColumn("{task.fields[figures]}")
        columns = (what, BarColumn(bar_width=None), MofNCompleteColumn(), TimeRemainingColumn(compact=True), figures)
        self.bars = Progress(*columns, console=Console(), refresh_per_second=8, expand=True)
        self.validation, self.shown = "", 0.0

    def start(self, formats: dict[str, str], num_epochs: int, num_batches: int, epoch: int, batch: int) -> None:
        super().start(formats, num_epochs, num_batches, epoch, batch)
        self.epoch_bar = self.bars.add_task("epoch", total=num_batches, completed=batch, figures="")
        done = epoch * num_batches + batch
        self.run_bar = self.bars.add_task("run  ", total=num_epochs * num_batches, completed=done, figures="")
        self.bars.start()

    def step(self, epoch: int, batch: int, figures: Figures) -> None:
        now = time.monotonic()
        if now - self.shown < 0.1 and batch < self.num_batches:  # reading the figures costs time: not at every step
            return
        self.shown = now
        told = self.tell(figures())
        self.bars.update(self.epoch_bar, completed=batch, description=f"epoch {epoch + 1}", figures=told)
        self.bars.update(self.run_bar, completed=epoch * self.num_batches + batch, figures=self.validation)

    def epoch(self, metrics: dict[str, Any]) -> None:
        self.validation = self.tell_validation(metrics)
        self.bars.update(self.run_bar, figures=self.validation)

    def note(self, text: str) -> None:
        self.bars.console.print(text, highlight=False, markup=False)

    warn = note  # a line on stderr would tear the bars

    def close(self) -> None:
        self.bars.stop()
