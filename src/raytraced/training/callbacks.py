"""What is attached to the training loop: progress on the terminal, pictures, trackers, and whatever you add.

The loop calls the methods of a `Callback` in the leading process. A callback reads the state and never changes it, so that
a run has the same result with it or without.
"""

import importlib.util
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from raytraced.errors import printable
from raytraced.tables import clock

if TYPE_CHECKING:
    from raytraced.models.output import Model
    from raytraced.tasks.task import Data, Task
    from raytraced.training.run_folder import RunFolder
    from raytraced.training.state import State


class RunInfo(NamedTuple):
    """What stays the same during a run.

    Args:
        run: The run folder.
        task: The task, which knows its figures.
        data: The data set.
        num_epochs: Number of epochs of the whole run.
        num_batches: Number of steps per epoch.
    """

    run: "RunFolder"
    task: "Task[Any]"
    data: "Data[Any]"
    num_epochs: int
    num_batches: int


class Callback:
    """Base class of what is attached to training; each method does nothing unless a subclass defines it."""

    def on_train_start(self, info: RunInfo, state: "State") -> None:
        """Training starts, or continues from a checkpoint.

        Args:
            info: What stays the same during the run.
            state: Where the run is; the loop updates this object.
        """

    def on_step(self, state: "State") -> None:
        """A step is done.

        Args:
            state: Where the run is; `batch` counts the steps of this epoch. Reading its sums may wait for the device.
        """

    def on_epoch_end(self, state: "State") -> None:
        """An epoch is done and its checkpoint is written.

        Args:
            state: Where the run is; `history[-1]` holds the figures of the epoch.
        """

    def on_checkpoint(self, path: Path) -> None:
        """A checkpoint is written.

        Args:
            path: The checkpoint's file.
        """

    def on_train_end(self, state: "State", model: "Model") -> None:
        """The run is complete: the model and summary.json are written.

        Args:
            state: Where the run is.
            model: The trained model, on the CPU.
        """

    def close(self) -> None:
        """Training has ended, with success or not."""


class Reporter(Callback):
    """The progress of a run; this one shows nothing but warnings, on stderr."""

    info: RunInfo

    def on_train_start(self, info: RunInfo, state: "State") -> None:
        self.info, self.first_epoch, self.started = info, state.epoch, time.monotonic()

    def note(self, text: str) -> None:
        """Show something that is good to know.

        Args:
            text: One line.
        """

    def warn(self, text: str) -> None:
        """Show something that the user must know.

        Args:
            text: One line.
        """
        print(f"raytraced: {printable(text)}", file=sys.stderr, flush=True)

    def format_figures(self, means: dict[str, Any], part: str = "") -> str:
        """The figures of training, short enough for a narrow terminal."""
        shown = {"loss": ".3f", **self.info.task.formats, "experts": ".1f"}
        return " ".join(f"{name} {means[part + name]:{form}}" for name, form in shown.items())

    def format_validation(self, metrics: dict[str, Any]) -> str:
        """The task's figures on validation data."""
        figures = [f"{metrics[f'validation_{name}']:{form}}" for name, form in self.info.task.formats.items()]
        return " ".join(["validation", *figures])


def make_reporter(quiet: bool) -> Reporter:
    """Choose how progress is shown.

    Args:
        quiet: Show warnings only.

    Returns:
        A bar for a terminal, lines for a file or a pipe, or the silent reporter.
    """
    if quiet:
        return Reporter()
    return LiveBar() if sys.stdout.isatty() else PlainLines()


class PlainLines(Reporter):
    """One line per epoch, for files and pipes."""

    def note(self, text: str) -> None:
        print(printable(text), flush=True)

    def on_epoch_end(self, state: "State") -> None:
        metrics, num_epochs = state.history[-1], self.info.num_epochs
        done = metrics["epoch"] - self.first_epoch
        left = (time.monotonic() - self.started) / done * (num_epochs - metrics["epoch"])
        number = f"{metrics['epoch']:>{len(str(num_epochs))}}/{num_epochs}"
        text = f"{self.format_figures(metrics, 'train_')} {self.format_validation(metrics)}"
        print(f"epoch {number} {text} {clock(left)} left", flush=True)


class LiveBar(Reporter):
    """Two bars that move: the epoch with its figures, and the run with the time left."""

    def __init__(self) -> None:
        name, figures = TextColumn("{task.description}"), TextColumn("{task.fields[figures]}")
        columns = (name, BarColumn(bar_width=None), MofNCompleteColumn(), TimeRemainingColumn(compact=True), figures)
        self.bars = Progress(*columns, console=Console(), refresh_per_second=8, expand=True)
        self.validation, self.shown = "", 0.0

    def on_train_start(self, info: RunInfo, state: "State") -> None:
        super().on_train_start(info, state)
        self.epoch_bar = self.bars.add_task("epoch", total=info.num_batches, completed=state.batch, figures="")
        total = info.num_epochs * info.num_batches
        done = state.epoch * info.num_batches + state.batch
        self.run_bar = self.bars.add_task("run  ", total=total, completed=done, figures="")
        self.bars.start()

    def on_step(self, state: "State") -> None:
        now = time.monotonic()
        if now - self.shown < 0.1 and state.batch < self.info.num_batches:  # reading the sums waits for the device
            return
        self.shown = now
        text = self.format_figures(state.means(self.info.task))
        self.bars.update(self.epoch_bar, completed=state.batch, description=f"epoch {state.epoch + 1}", figures=text)
        done = state.epoch * self.info.num_batches + state.batch
        self.bars.update(self.run_bar, completed=done, figures=self.validation)

    def on_epoch_end(self, state: "State") -> None:
        self.validation = self.format_validation(state.history[-1])
        self.bars.update(self.run_bar, figures=self.validation)

    def note(self, text: str) -> None:
        self.bars.console.print(printable(text), highlight=False, markup=False)

    warn = note  # a line on stderr would tear the bars

    def close(self) -> None:
        self.bars.stop()


class Pictures(Callback):
    """Draws curves.png and the task's pictures once the run is complete, if matplotlib is installed.

    The run's result is written before: an exception of drawing becomes one warning.

    Args:
        reporter: Shows the warning.
    """

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter

    def on_train_start(self, info: RunInfo, state: "State") -> None:
        self.info = info

    def on_train_end(self, state: "State", model: "Model") -> None:
        try:
            draw_pictures(self.info, state.history, model)
        except Exception as error:  # names and figures of any data are drawn: whatever goes wrong costs a picture only
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            self.reporter.warn(f"{self.info.run.path}: a picture could not be drawn ({reason}); the run is complete")


def draw_pictures(info: RunInfo, history: list[dict[str, Any]], model: "Model") -> None:
    """Draw the curves of training and the task's pictures into the run folder; none without the extra "plots"."""
    if importlib.util.find_spec("matplotlib") is None:
        return
    from raytraced.training.curves import draw_curves

    if history:
        draw_curves({info.run.path.name: history}, info.run.path / "curves.png")
    info.task.draw(model, info.data, info.run.path)
