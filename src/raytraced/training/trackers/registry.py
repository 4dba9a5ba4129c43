"""The trackers by name; needs none of their libraries."""

from raytraced.errors import did_you_mean, install_extra
from raytraced.training.callbacks import Reporter
from raytraced.training.trackers.mlflow import MLflowTracker
from raytraced.training.trackers.tensorboard import TensorBoardTracker
from raytraced.training.trackers.tracker import Tracker
from raytraced.training.trackers.trackio import TrackioTracker
from raytraced.training.trackers.wandb import WandbTracker

TRACKERS: dict[str, type[Tracker]] = {
    kind.name: kind for kind in (TensorBoardTracker, WandbTracker, TrackioTracker, MLflowTracker)
}


def find_trackers(names: str | None) -> list[type[Tracker]]:
    """The trackers that a run writes to.

    Args:
        names: Names, separated by commas. TensorBoard's events are written without being named, if it is installed.

    Returns:
        The classes; refuses a name that does not exist and a library that is not installed.
    """
    chosen = list(dict.fromkeys(name.strip() for name in (names or "").split(",") if name.strip()))
    for name in chosen:
        if name not in TRACKERS:
            raise ValueError(f"tracker={name}: no such tracker; {did_you_mean(name, TRACKERS)}")
        if not TRACKERS[name].is_installed():
            package = TRACKERS[name].package
            raise ValueError(
                f"tracker={name}: the package {package} is not installed; install it with {install_extra(name)}"
            )
    if TensorBoardTracker.name not in chosen and TensorBoardTracker.is_installed():
        chosen.insert(0, TensorBoardTracker.name)
    return [TRACKERS[name] for name in chosen]


def make_trackers(names: str | None, reporter: Reporter) -> list[Tracker]:
    """One tracker for each name.

    Args:
        names: What `find_trackers` takes.
        reporter: Shows the warning of a tracker that fails.

    Returns:
        Callbacks of the training loop.
    """
    return [kind(reporter) for kind in find_trackers(names)]
