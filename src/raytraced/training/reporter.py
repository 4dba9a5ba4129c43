"""What a run says while it goes: a live bar on a terminal, a line an epoch elsewhere, or nothing."""

import sys
import time
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from raytraced.progress import clock


class Figures(Protocol):
    """The running means of an epoch; reading them may wait for the device, so only who shows them asks."""

    def __call__(self) -> dict[str, float]: ...


class Reporter:
    """Hears all that the training loop tells, and says nothing: for the processes that do not lead."""

    def start(self, formats: dict[str, str], num_epochs: int, num_batches: int, epoch: int, batch: int) -> None:
        """The run begins, or goes on, at this epoch and batch; `formats` are the task's figures."""

    def step(self, epoch: int, batch: int, figures: Figures) -> None:
        """A step is done."""

    def epoch(self, metrics: dict[str, Any]) -> None:
        """An epoch is done."""

    def note(self, text: str) -> None:
        """Something good to know."""

    def warn(self, text: str) -> None:
        """Something the user must know."""

    def close(self) -> None:
        """The run has ended, well or not."""


def make_reporter(quiet: bool) -> Reporter:
    """The reporter that fits where the output goes."""
    if quiet:
        return Silent()
    return LiveBar() if sys.stdout.isatty() else PlainLines()


class Silent(Reporter):
    """Says nothing but warnings, and those on stderr."""

    def warn(self, text: str) -> None:
        print(f"raytraced: {text}", file=sys.stderr, flush=True)


class PlainLines(Silent):
    """A line an epoch, for files and pipes."""

    def note(self, text: str) -> None:
        print(text, flush=True)

    def start(self, formats: dict[str, str], num_epochs: int, num_batches: int, epoch: int, batch: int) -> None:
        self.formats, self.num_epochs, self.first_epoch = formats, num_epochs, epoch
        self.started = time.monotonic()

    def epoch(self, metrics: dict[str, Any]) -> None:
        done = metrics["epoch"] - self.first_epoch
        left = (time.monotonic() - self.started) / done * (self.num_epochs - metrics["epoch"])
        number = f"{metrics['epoch']:>{len(str(self.num_epochs))}}/{self.num_epochs}"
        told = f"{tell(metrics, self.formats, 'train_')} {tell_validation(metrics, self.formats)}"
        print(f"epoch {number} {told} {clock(left)} left", flush=True)


def tell(means: dict[str, Any], formats: dict[str, str], part: str = "") -> str:
    """The figures of training, in as few words as a narrow terminal has room for."""
    shown = {"loss": ".3f", **formats, "experts": ".1f"}
    return " ".join(f"{name} {means[part + name]:{form}}" for name, form in shown.items())


def tell_validation(metrics: dict[str, Any], formats: dict[str, str]) -> str:
    """The task's figures on validation data."""
    return " ".join(["validation", *(f"{metrics[f'validation_{name}']:{form}}" for name, form in formats.items())])


class LiveBar(Silent):
    """Two bars that move: the epoch with its figures, and the run with the time left."""

    def __init__(self) -> None:
        self.bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[figures]}"),
            console=Console(),
            refresh_per_second=8,
            expand=True,
        )
        self.num_batches, self.validation, self.shown = 0, "", 0.0
        self.formats: dict[str, str] = {}
        self.epoch_bar = self.run_bar = TaskID(0)

    def start(self, formats: dict[str, str], num_epochs: int, num_batches: int, epoch: int, batch: int) -> None:
        self.formats, self.num_batches = formats, num_batches
        self.epoch_bar = self.bars.add_task("epoch", total=num_batches, completed=batch, figures="")
        done = epoch * num_batches + batch
        self.run_bar = self.bars.add_task("run  ", total=num_epochs * num_batches, completed=done, figures="")
        self.bars.start()

    def step(self, epoch: int, batch: int, figures: Figures) -> None:
        now = time.monotonic()
        if now - self.shown < 0.1 and batch < self.num_batches:  # reading the figures costs time: not at every step
            return
        self.shown = now
        told = tell(figures(), self.formats)
        self.bars.update(self.epoch_bar, completed=batch, description=f"epoch {epoch + 1}", figures=told)
        self.bars.update(self.run_bar, completed=epoch * self.num_batches + batch, figures=self.validation)

    def epoch(self, metrics: dict[str, Any]) -> None:
        self.validation = tell_validation(metrics, self.formats)
        self.bars.update(self.run_bar, figures=self.validation)

    def note(self, text: str) -> None:
        self.bars.console.print(text, highlight=False, markup=False)

    def warn(self, text: str) -> None:
        self.note(text)  # a line on stderr would tear the bars

    def close(self) -> None:
        self.bars.stop()
