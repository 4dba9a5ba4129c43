"""Runs that are over in seconds, for workers of their own: `main(WORK, RECORDS, WORKERS)` brings them to their end."""

import multiprocessing
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from forked import context
from raytraced.reproduce import run
from raytraced.reproduce.plan import QUICK, Planner
from raytraced.reproduce.variants import Variant

VARIANTS = (
    Variant("mre", "mre", {"num_layers": 2, "num_experts": 3}),
    Variant("mlp-avg", "mlp-avg", {"num_layers": 1}),
)
RUNS = Planner(QUICK, {}).runs("main", VARIANTS, ("digits",), [0], epochs=20)


def deaf(pipe: Connection, work: Path, data_root: str | None) -> None:
    """A worker that trains nothing, and whom no signal stops, as one that was judging a model when it came."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with suppress(EOFError):
        while True:
            pipe.recv()
            pipe.send("not trained")


def main(work: Path, records: Path, num_workers: int, worker: Callable[..., None] = run.be_worker) -> int:
    run.be_worker = worker
    multiprocessing.get_context = lambda _: (
        context
    )  # workers too need not import PyTorch; test_text.py has some that do
    failures = run.run_all(RUNS, work, records, num_workers)
    print(failures)
    return 1 if failures else 0
