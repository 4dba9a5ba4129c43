"""trackio: the functions of Weights & Biases on a local database, shown by `trackio show`."""

import contextlib
import io
import os
from uuid import uuid4

from raytraced.training.callbacks import RunInfo
from raytraced.training.trackers.tracker import PROJECT, RunTracker, run_options


class TrackioTracker(RunTracker):
    """Writes into trackio's local folder (TRACKIO_DIR sets another); TRACKIO_SPACE_ID asks for a Space of the Hub."""

    name, package = "trackio", "trackio"

    def open(self, info: RunInfo, run_id: str | None) -> str:
        import trackio

        # A run is found by its name: two folders may hold runs with one name.
        name = run_id or f"{info.run.path.name}-{uuid4().hex[:6]}"
        with contextlib.redirect_stdout(io.StringIO()):  # the terminal shows our own progress
            self.tracked = trackio.init(
                project=os.environ.get("TRACKIO_PROJECT", PROJECT),
                name=name,
                resume="allow",
                config=run_options(info),
                space_id=os.environ.get("TRACKIO_SPACE_ID"),
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )
        return name

    def log_epoch(self, figures: dict[str, float], epoch: int) -> None:
        self.tracked.log(dict(figures), step=epoch)

    def end(self, results: dict[str, float] | None) -> None:
        import trackio

        if results:
            self.tracked.log(dict(results), step=self.num_logged)
        with contextlib.redirect_stdout(io.StringIO()):
            trackio.finish()  # the run's own method would be called a second time when the process ends
