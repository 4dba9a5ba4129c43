"""A sweep over training options: Optuna chooses values, the training loop trains, and trials that fall behind are pruned.

Everything is in one folder: Optuna's journal, a run folder per trial, the table and the picture. Many processes, also of
other machines that share the file system, may work on one sweep. A trial whose process ended is continued from its
checkpoint by the next process that comes by.
"""

import json
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from itertools import islice, product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytraced.files import lock_file, write_file
from raytraced.tasks.registry import find_task, whole_path
from raytraced.training.callbacks import Callback, Reporter, RunInfo
from raytraced.training.claims import ClaimedError, claim
from raytraced.training.config import write_config
from raytraced.training.evaluation import Diverged
from raytraced.training.loop import train
from raytraced.training.run_folder import RunFolder
from raytraced.training.sweep_file import Range, Sweep
from raytraced.training.trackers.registry import make_trackers

if TYPE_CHECKING:
    import optuna

STUDY = "sweep"
JOURNAL = "journal.log"
NUM_STARTUP = 4  # trials that are never pruned: the median of fewer says little


class Pruning(Callback):
    """Reports the validation figure of every epoch to a trial, and ends the training of one that falls behind.

    Args:
        trial: The trial.
        figure: Name of the figure.
    """

    def __init__(self, trial: "optuna.Trial", figure: str) -> None:
        self.trial, self.key = trial, f"validation_{figure}"

    def on_train_start(self, info: RunInfo, state: Any) -> None:
        self.report(state.history)

    def on_epoch_end(self, state: Any) -> None:
        import optuna

        self.report(state.history)
        if self.trial.should_prune():
            raise optuna.TrialPruned

    def report(self, history: list[dict[str, Any]]) -> None:
        """Report the epochs that the study does not know yet; those of a resumed trial may be known."""
        known = self.trial.storage.get_trial(self.trial._trial_id).intermediate_values
        for epoch in history:
            if epoch["epoch"] not in known:
                self.trial.report(epoch[self.key], epoch["epoch"])


def open_study(sweep: Sweep, folder: Path) -> "optuna.Study":
    """Open the study of a sweep, or begin it; a folder with another sweep is refused.

    Args:
        sweep: What the file says.
        folder: The folder of the sweep.

    Returns:
        The study, whose journal is in the folder.
    """
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    folder.mkdir(parents=True, exist_ok=True)
    task = find_task(sweep.configure({}).data)
    pruner = optuna.pruners.MedianPruner(NUM_STARTUP) if sweep.prune else optuna.pruners.NopPruner()
    study = optuna.create_study(
        storage=JournalStorage(JournalFileBackend(str(folder / JOURNAL))),
        study_name=STUDY,
        direction="maximize" if task.higher else "minimize",
        sampler=make_sampler(sweep, 0),
        pruner=pruner,
        load_if_exists=True,
    )
    described = json.loads(json.dumps({**asdict(sweep), "trials": None}))
    begun = study.user_attrs.get("sweep")
    if begun is None:
        study.set_user_attr("sweep", described)
    elif other := [name for name in described if described[name] != begun.get(name)]:
        remedy = "give another folder with --output, or undo the change"
        raise ValueError(f"{folder}: holds a sweep with other {' and '.join(other)}; {remedy}")
    return study


def make_sampler(sweep: Sweep, number: int) -> "optuna.samplers.BaseSampler":
    """The sampler of one trial: its draws follow from the seed of the study and the number of the trial alone."""
    import optuna

    seed = (sweep.seed * 1_000_003 + number) % 2**32
    kind = optuna.samplers.TPESampler if sweep.sampler == "tpe" else optuna.samplers.RandomSampler
    return kind(seed=seed)


def grid_values(one: Range) -> list[Any]:
    """The values of a range with a step, or its choices."""
    if one.choices is not None:
        return list(one.choices)
    assert one.step is not None
    num = int((one.high - one.low) / one.step + 1e-9) + 1
    return [one.low + at * one.step for at in range(num)]


def grid_trial(sweep: Sweep, number: int) -> dict[str, Any]:
    """The values of one trial of a grid; the last range changes fastest."""
    combinations = product(*(grid_values(one) for one in sweep.ranges))
    return dict(zip((one.name for one in sweep.ranges), next(islice(combinations, number, None)), strict=True))


def suggest(trial: "optuna.Trial", one: Range) -> Any:
    """The value of a range for a trial."""
    if one.choices is not None:
        return trial.suggest_categorical(one.name, one.choices)
    if one.is_whole and (one.step is None or isinstance(one.step, int)):
        step = 1 if one.step is None else int(one.step)
        return trial.suggest_int(one.name, int(one.low), int(one.high), log=one.log, step=step)
    return trial.suggest_float(one.name, one.low, one.high, log=one.log, step=one.step)


def run_sweep(sweep: Sweep, folder: Path, reporter: Reporter) -> "optuna.Study":
    """Train trials until there are as many as the sweep asks for.

    Args:
        sweep: What the file says.
        folder: The folder of the sweep.
        reporter: Shows a line per trial, and warnings.

    Returns:
        The study.

    Raises:
        Interrupted: A signal asked to stop; the trial is saved, and the next call continues it.
    """
    study = open_study(sweep, folder)
    while True:
        with ExitStack() as held:
            trial = take_trial(study, sweep, folder, held)
            if trial is None:
                return study
            train_trial(study, trial, sweep, folder, reporter)


def take_trial(study: "optuna.Study", sweep: Sweep, folder: Path, held: ExitStack) -> "optuna.Trial | None":
    """A trial whose process ended before it did, else a new one; None if there are enough.

    Args:
        study: The study.
        sweep: What the file says.
        folder: The folder of the sweep.
        held: Holds the claim of the trial.

    Returns:
        The trial, with a value for every range.
    """
    import optuna

    with (folder / ".take").open("a") as file:
        lock_file(file, wait=True)  # no process may see a trial before it is claimed
        trials = [one for one in study.get_trials(deepcopy=False) if one.state != optuna.trial.TrialState.WAITING]
        for one in trials:
            if one.state == optuna.trial.TrialState.RUNNING:
                with suppress(ClaimedError):
                    held.enter_context(claim(folder, trial_name(one.number)))
                    return optuna.trial.Trial(study, one._trial_id)
        if len(trials) >= num_trials(sweep):
            return None
        if sweep.sampler == "grid":
            study.enqueue_trial(grid_trial(sweep, len(trials)))
        trial = study.ask()
        study.sampler = make_sampler(sweep, trial.number)
        for one in sweep.ranges:
            suggest(trial, one)
        held.enter_context(claim(folder, trial_name(trial.number)))
        return trial


def num_trials(sweep: Sweep) -> int:
    """Number of trials; a grid has no more than its combinations."""
    if sweep.sampler != "grid":
        return sweep.trials
    return min(sweep.trials, prod(len(grid_values(one)) for one in sweep.ranges))


def trial_name(number: int) -> str:
    """The name of a trial's run folder."""
    return f"trial-{number:04d}"


def train_trial(study: "optuna.Study", trial: "optuna.Trial", sweep: Sweep, folder: Path, reporter: Reporter) -> None:
    """Train a trial to its end, or until it is pruned, and tell the study."""
    import optuna

    name = trial_name(trial.number)
    values = {one.name: suggest(trial, one) for one in sweep.ranges}
    config = sweep.configure(values, runs_dir=str(folder / "runs"), name=name)
    config = replace(config, data=whole_path(config.data))
    run, task = RunFolder(folder / "runs" / name), find_task(config.data)
    started = (run.path / "config.yaml").exists()
    callbacks = [Pruning(trial, task.better), *make_trackers(config.tracker, reporter)]
    try:
        if run.read_summary() is None:
            train(config, run if started else None, callbacks=callbacks)
    except optuna.TrialPruned:
        study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        outcome = "pruned"
    except Diverged as error:
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
        outcome = f"diverged: {str(error).partition(';')[0]}"
    except ValueError as error:
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
        raise ValueError(f"{name}: {error}") from error
    else:
        summary = run.read_summary()
        assert summary is not None
        study.tell(trial, summary["best_validation"])
        outcome = f"{task.better} {summary['best_validation']:{task.formats[task.better]}}"
    shown = ", ".join(f"{key}={show_value(value)}" for key, value in values.items())
    reporter.note(f"[{trial.number + 1}/{num_trials(sweep)}] {shown}: {outcome}")


def show_value(value: Any) -> str:
    """A value of a range, short."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def sweep_rows(study: "optuna.Study", sweep: Sweep, figure: str) -> list[dict[str, Any]]:
    """One row per trial, the best first, then those that were pruned, failed or still run.

    Args:
        study: The study.
        sweep: What the file says.
        figure: Name of the validation figure.

    Returns:
        Rows with the trial's number, the figure (of a pruned trial that of its last epoch; None where there is none), the
        state, the epochs and the values.
    """
    sign = -1 if study.direction.name == "MAXIMIZE" else 1
    rows = []
    for one in study.get_trials(deepcopy=False):
        row = {"trial": one.number, figure: one.value, "state": one.state.name.lower()}
        rows.append(row | {"epochs": len(one.intermediate_values), **one.params})
    return sorted(rows, key=lambda row: (row["state"] != "complete", sign * (row[figure] or 0.0), row["trial"]))


def write_best(study: "optuna.Study", sweep: Sweep, path: Path) -> Mapping[str, Any] | None:
    """Write the options of the best trial as a file for `raytraced train -c`.

    Args:
        study: The study.
        sweep: What the file says.
        path: The YAML file to write.

    Returns:
        The best values by name; None, and no file, while no trial is complete.
    """
    try:
        best = study.best_trial
    except ValueError:
        return None
    config = sweep.configure(best.params)
    write_file(path, write_config(replace(config, quiet=False, data=whole_path(config.data))))
    return best.params
