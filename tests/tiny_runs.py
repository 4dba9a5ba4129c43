"""Runs that take seconds, for tests with real workers: `main(WORK, RECORDS, WORKERS)` completes them."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from experiments.reproduce import run as running
from experiments.reproduce.plan import QUICK, Planner, Run
from experiments.reproduce.variants import Variant
from forked import context

VARIANTS = (
    Variant("mre", "mre", {"num_layers": 2, "num_experts": 3}),
    Variant("mlp-avg", "mlp-avg", {"num_layers": 1}),
)
RUNS = Planner(QUICK, {}).runs("main", VARIANTS, ("digits",), [0], epochs=20)


def ignore_signals(run: Run, work: Path, data_root: str | None) -> str:
    """A run that SIGTERM does not stop, as while a model is evaluated; it ends when a file appears."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (work / "started").touch()
    while not (work / "may-end").exists():
        time.sleep(0.005)
    return "not trained"


def crash(run: Run, work: Path, data_root: str | None) -> str | None:
    """The first of the runs ends its process, however often it is tried; the other runs are performed."""
    if run.key == RUNS[0].key:
        with (work / "tries").open("a") as file:
            file.write("x")
        os.kill(os.getpid(), signal.SIGKILL)
    return run_in_worker(run, work, data_root)


run_in_worker = running.perform_in_worker


def main(work: Path, records: Path, num_workers: int, perform: Callable[..., str | None] = run_in_worker) -> int:
    running.perform_in_worker = perform
    # Workers are forked from a server that has imported PyTorch; test_text.py has workers that are spawned.
    multiprocessing.get_context = lambda _: context
    failures = running.run_all(RUNS, work, records, num_workers)
    print(failures)
    return 1 if failures else 0
