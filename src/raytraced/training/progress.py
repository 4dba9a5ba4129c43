"""What a run says while it goes: a live bar on a terminal, a line an epoch elsewhere, or nothing."""

import sys
import time
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class Reporter(Protocol):
    """What the training loop tells."""

    def start(self, num_epochs: int, num_batches: int, epoch: int, batch: int) -> None:
        """The run begins, or goes on, at this epoch and batch."""

    def step(self, epoch: int, batch: int, figures: "Figures") -> None:
        """A step is done."""

    def epoch(self, metrics: dict[str, Any]) -> None:
        """An epoch is done."""

    def note(self, text: str) -> None:
        """Something good to know."""

    def warn(self, text: str) -> None:
        """Something the user must know."""

    def close(self) -> None:
        """The run has ended, well or not."""


class Figures(Protocol):
    """The running means of an epoch; reading them may wait for the device, so only who shows them asks."""

    def __call__(self) -> dict[str, float]: ...


def make_reporter(quiet: bool) -> Reporter:
    """The reporter that fits where the output goes."""
    if quiet:
        return Silent()
    return LiveBar() if sys.stdout.isatty() else PlainLines()


class Mute:
    """Says nothing at all: the processes that do not lead."""

    def start(self, num_epochs: int, num_batches: int, epoch: int, batch: int) -> None: ...

    def step(self, epoch: int, batch: int, figures: Figures) -> None: ...

    def epoch(self, metrics: dict[str, Any]) -> None: ...

    def note(self, text: str) -> None: ...

    def warn(self, text: str) -> None: ...

    def close(self) -> None: ...


class Silent(Mute):
    """Says nothing but warnings, and those on stderr."""

    def warn(self, text: str) -> None:
        print(f"raytraced: {text}", file=sys.stderr, flush=True)


class PlainLines(Silent):
    """A line an epoch, for files and pipes."""

    def __init__(self) -> None:
        self.num_epochs = 0
        self.started = time.monotonic()
        self.first_epoch = 0

    def note(self, text: str) -> None:
        print(text, flush=True)

    def start(self, num_epochs: int, num_batches: int, epoch: int, batch: int) -> None:
        self.num_epochs, self.first_epoch = num_epochs, epoch
        self.started = time.monotonic()

    def epoch(self, metrics: dict[str, Any]) -> None:
        done = metrics["epoch"] - self.first_epoch
        left = (time.monotonic() - self.started) / done * (self.num_epochs - metrics["epoch"])
        print(
            f"epoch {metrics['epoch']:>3}/{self.num_epochs}  loss {metrics['train_loss']:.4f}  "
            f"accuracy {metrics['train_accuracy']:.2%} / validation {metrics['validation_accuracy']:.2%}  "
            f"experts {metrics['train_experts']:.2f} / {metrics['validation_experts']:.2f}  "
            f"{metrics['samples_per_second']:,.0f} samples/s  {clock(left)} left",
            flush=True,
        )


class LiveBar(Silent):
    """Two bars that move: the epoch with its figures, and the run with the time left."""

    def __init__(self) -> None:
        self.bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=Console(),
            refresh_per_second=8,
        )
        self.num_batches = 0
        self.validation = ""
        self.shown = 0.0
        self.epoch_bar = self.run_bar = TaskID(0)

    def start(self, num_epochs: int, num_batches: int, epoch: int, batch: int) -> None:
        self.num_batches = num_batches
        self.epoch_bar = self.bars.add_task("epoch", total=num_batches, completed=batch, figures="")
        self.run_bar = self.bars.add_task(
            "run  ", total=num_epochs * num_batches, completed=epoch * num_batches + batch, figures=""
        )
        self.bars.start()

    def step(self, epoch: int, batch: int, figures: Figures) -> None:
        now = time.monotonic()
        if now - self.shown < 0.1 and batch < self.num_batches:  # reading the figures costs time: not at every step
            return
        self.shown = now
        means = figures()
        text = (
            f"loss {means['loss']:.4f}  accuracy {means['accuracy']:.2%}  experts {means['experts']:.2f}  "
            f"{means['samples_per_second']:,.0f} samples/s"
        )
        self.bars.update(self.epoch_bar, completed=batch, description=f"epoch {epoch + 1}", figures=text)
        self.bars.update(self.run_bar, completed=epoch * self.num_batches + batch, figures=self.validation)

    def epoch(self, metrics: dict[str, Any]) -> None:
        self.validation = (
            f"validation {metrics['validation_accuracy']:.2%} with {metrics['validation_experts']:.2f} experts"
        )
        self.bars.update(self.run_bar, figures=self.validation)

    def note(self, text: str) -> None:
        self.bars.console.print(text, highlight=False, markup=False)

    def warn(self, text: str) -> None:
        self.note(text)  # a line on stderr would tear the bars

    def close(self) -> None:
        self.bars.stop()


def clock(seconds: float) -> str:
    """A duration as 1:02:03 or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
