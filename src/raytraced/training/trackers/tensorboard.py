"""TensorBoard: the figures of every epoch as an event file in the run folder."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytraced.training.trackers.tracker import Tracker, scalars

if TYPE_CHECKING:
    from raytraced.training.run_folder import RunFolder


class TensorBoardTracker(Tracker):
    """Writes events/ in the run folder; `tensorboard --logdir runs` shows all runs."""

    name, package = "tensorboard", "tensorboard"

    def log(self, history: list[dict[str, Any]]) -> None:
        assert self.info is not None
        write_event(self.info.run, history)


def write_event(run: "RunFolder", history: list[dict[str, Any]]) -> None:
    """Write all epochs so far for TensorBoard: one file per run, resumed or not."""
    from torch.utils.tensorboard import SummaryWriter

    folder = run.path / "events"
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(".tmp", ".events-", run.path) as fresh:
        with SummaryWriter(fresh) as writer:
            for epoch in history:
                for name, value in scalars(epoch).items():
                    writer.add_scalar(name, value, epoch["epoch"])
        (written,) = Path(fresh).iterdir()
        written.replace(folder / "events.out.tfevents.run")
