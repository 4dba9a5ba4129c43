"""What all trackers share: figures of every epoch, a tracked run that a resumed run continues, and failures that cost nothing.

A tracker is a callback of the training loop. Whatever its library raises becomes one warning, and training continues
without the tracker.
"""

import importlib.util
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from raytraced.errors import printable
from raytraced.files import write_file
from raytraced.training.callbacks import Callback, Reporter, RunInfo

if TYPE_CHECKING:
    from raytraced.models.output import Model
    from raytraced.training.state import State

PROJECT = "raytraced"
"""the project, or experiment, that runs are filed under unless the tracker's own environment variable names another"""


class Tracker(Callback):
    """Base class of trackers: a subclass writes the history, and an exception of it is one warning.

    Args:
        reporter: Shows the warning.
    """

    name: ClassVar[str]
    package: ClassVar[str]
    """what is imported; the extra of the same tracker installs it"""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter
        self.info: RunInfo | None = None  # None: not started, or given up

    @classmethod
    def is_installed(cls) -> bool:
        """Whether the tracker's library can be imported."""
        return importlib.util.find_spec(cls.package) is not None

    def on_train_start(self, info: RunInfo, state: "State") -> None:
        self.info = info
        self._attempt(self.start, state.history)

    def on_epoch_end(self, state: "State") -> None:
        self._attempt(self.log, state.history)

    def on_train_end(self, state: "State", model: "Model") -> None:
        self._attempt(self.finish)

    def close(self) -> None:
        self._attempt(self.stop)
        self.info = None

    def start(self, history: list[dict[str, Any]]) -> None:
        """Open what is written to.

        Args:
            history: The epochs that are done already, of a resumed run.
        """

    def log(self, history: list[dict[str, Any]]) -> None:
        """Write the epochs that are not written yet.

        Args:
            history: All epochs so far, one dict each.
        """

    def finish(self) -> None:
        """The run is complete and its summary is written."""

    def stop(self) -> None:
        """Training has ended, with success or not."""

    def _attempt(self, action: Callable[..., None], *args: Any) -> None:
        """Call a method of the subclass; after an exception the tracker is not used any more."""
        if self.info is None:
            return
        try:
            action(*args)
        except Exception as error:  # of a library, a server or a disk: a run must not lose its result by it
            self.info = None
            reason = printable(f"{type(error).__name__}: {error}".splitlines()[0])
            self.reporter.warn(f"tracker {self.name} failed ({reason}); training continues without it")


class RunTracker(Tracker):
    """Base class of trackers that file runs in a library's own store.

    The identifier of the tracked run, and the number of epochs that were logged, are kept in trackers.json of the run
    folder. A resumed run continues the same tracked run, and no epoch is logged twice or left out.
    """

    run_id: str
    num_logged: int

    def open(self, info: RunInfo, run_id: str | None) -> str:
        """Start a tracked run, or continue one.

        Args:
            info: What stays the same during the run.
            run_id: The identifier that an earlier call returned; None for a new run.

        Returns:
            The identifier of the tracked run.
        """
        raise NotImplementedError

    def log_epoch(self, figures: dict[str, float], epoch: int) -> None:
        """Log the figures of an epoch.

        Args:
            figures: Names and values.
            epoch: Number of the epoch, from 1.
        """
        raise NotImplementedError

    def end(self, results: dict[str, float] | None) -> None:
        """Close the tracked run.

        Args:
            results: Figures on test data; None if training stopped before its end.
        """
        raise NotImplementedError

    def start(self, history: list[dict[str, Any]]) -> None:
        assert self.info is not None
        self.path, self.is_open = self.info.run.path / "trackers.json", False
        known = self._read().get(self.name, {})
        self.run_id, self.num_logged = self.open(self.info, known.get("id")), known.get("epochs", 0)
        self.is_open = True
        self._note()
        self.log(history)

    def log(self, history: list[dict[str, Any]]) -> None:
        for epoch in history[self.num_logged :]:
            self.log_epoch(scalars(epoch), epoch["epoch"])
            self.num_logged = epoch["epoch"]
        self._note()

    def finish(self) -> None:
        assert self.info is not None
        summary = self.info.run.read_summary()
        assert summary is not None
        self.is_open = False
        self.end({f"test_{name}": value for name, value in scalars(summary["test"]).items()})

    def stop(self) -> None:
        if self.is_open:
            self.end(None)

    def _read(self) -> dict[str, Any]:
        return json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}

    def _note(self) -> None:
        known = self._read() | {self.name: {"id": self.run_id, "epochs": self.num_logged}}
        write_file(self.path, json.dumps(known, indent=2) + "\n")


def scalars(figures: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among figures; lists and tables are left to the run folder's files."""
    return {name: value for name, value in figures.items() if isinstance(value, float)}


def run_options(info: RunInfo) -> dict[str, Any]:
    """The options of a run as a tracker shows them, without local paths."""
    return info.run.config.public() | {"data": info.data.name}


def local_store(info: RunInfo) -> Path:
    """The folder that holds the run folders, where a tracker's own store has its place."""
    return info.run.path.resolve().parent
