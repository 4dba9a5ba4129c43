"""Runs that take seconds, for tests with real workers: `main(WORK, RECORDS, WORKERS)` completes them."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from experiments.reproduce import run as running
from experiments.reproduce.plan import QUICK, Planner, Run
from experiments.reproduce.records import Store
from experiments.reproduce.variants import Variant
from forked import Forked, context
from raytraced.training.run_folder import RunFolder

VARIANTS = (
    Variant("mre", "mre", {"num_layers": 2, "num_experts": 3}),
    Variant("mlp-avg", "mlp-avg", {"num_layers": 1}),
)
NUM_EPOCHS = 60  # more than a fast machine trains before a worker notices that it is to stop
RUNS = Planner(QUICK, {}).runs("main", VARIANTS, ("digits",), [0], epochs=NUM_EPOCHS)


SECONDS = 300  # for what takes a few: only a hang is longer


def start(folder, num_workers):
    """A runner of these runs, as a process."""
    return Forked(main, folder / "work", folder / "records", num_workers)


def wait_for(condition, process):
    """Wait until a condition holds; the process must not end before."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def epochs_done(folder):
    return [len(RunFolder(folder / "work" / run.folder).read_metrics()) for run in RUNS]


def outcome(folder):
    """Everything in the records that does not depend on the clock."""
    store = Store(folder / "records")
    records = [store.find(run) for run in RUNS]
    histories = [{name: one.history[name] for name in one.history if name != "seconds"} for one in records]
    return [(one.test, one.validation, one.budgets, one.best_epoch) for one in records], histories


def ignore_signals(run: Run, work: Path, data_root: str | None, stop_file: Path) -> running.Outcome:
    """A run that SIGTERM does not stop, as while a model is evaluated; it ends when a file appears."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (work / "started").touch()
    while not (work / "may-end").exists():
        time.sleep(0.005)
    return running.Outcome("failed", "not trained")


def crash(run: Run, work: Path, data_root: str | None, stop_file: Path) -> running.Outcome:
    """The first of the runs ends its process, however often it is tried; the other runs are performed."""
    if run.key == RUNS[0].key:
        with (work / "tries").open("a") as file:
            file.write("x")
        os.kill(os.getpid(), signal.SIGKILL)
    return run_in_worker(run, work, data_root, stop_file)


run_in_worker = running.perform_in_worker


def main(
    work: Path,
    records: Path,
    num_workers: int,
    perform: Callable[..., running.Outcome] = run_in_worker,
    executor="local",
) -> int:
    running.perform_in_worker = perform
    # Workers are forked from a server that has imported PyTorch; test_text.py has workers that are spawned.
    multiprocessing.get_context = lambda _: context
    failures = running.run_all(RUNS, work, records, num_workers, executor=executor)
    print(failures)
    return 1 if failures else 0
