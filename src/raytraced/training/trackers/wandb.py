"""Weights & Biases: offline, into the run folder, unless WANDB_MODE asks for something else."""

import os
from typing import Any

from raytraced.training.callbacks import RunInfo
from raytraced.training.trackers.tracker import PROJECT, RunTracker, run_options


class WandbTracker(RunTracker):
    """Writes wandb/ in the run folder; `wandb sync` sends it, and WANDB_MODE=online sends it while the run trains.

    WANDB_PROJECT, WANDB_ENTITY and the library's other variables have their usual meaning.
    """

    name, package = "wandb", "wandb"

    def open(self, info: RunInfo, run_id: str | None) -> str:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # read when the library is imported
        import wandb

        mode: Any = os.environ.get("WANDB_MODE", "offline")
        self.tracked: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run_id,
            # Without a server there is nothing to resume from: records with one identifier are joined by `wandb sync`.
            resume="allow" if mode == "online" else None,
            name=info.run.path.name,
            dir=str(info.run.path),
            config=run_options(info),
            mode=mode,
            settings=wandb.Settings(console="off", silent=True),  # the terminal shows our own progress
        )
        self.tracked.define_metric("*", step_metric="epoch")
        return str(self.tracked.id)

    def log_epoch(self, figures: dict[str, float], epoch: int) -> None:
        self.tracked.log({**figures, "epoch": epoch}, step=epoch)

    def end(self, results: dict[str, float] | None) -> None:
        for name, value in (results or {}).items():
            self.tracked.summary[name] = value
        self.tracked.finish(exit_code=0 if results is not None else 1)
