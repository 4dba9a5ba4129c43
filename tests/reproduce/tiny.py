"""Runs that are over in seconds, for workers of their own: `main(WORK, RECORDS, WORKERS)` brings them to their end."""

import multiprocessing
from pathlib import Path

from forked import context
from raytraced.reproduce.plan import QUICK, Planner
from raytraced.reproduce.run import Stopped, run_all
from raytraced.reproduce.variants import Variant

VARIANTS = (
    Variant("mre", "mre", {"num_layers": 2, "num_experts": 3}),
    Variant("mlp-avg", "mlp-avg", {"num_layers": 1}),
)
RUNS = Planner(QUICK, {}).runs("main", VARIANTS, ("digits",), [0], epochs=20)


def main(work: Path, records: Path, num_workers: int) -> int:
    multiprocessing.get_context = lambda _: (
        context
    )  # workers too need not import PyTorch; test_text.py has some that do
    try:
        failures = run_all(RUNS, work, records, num_workers)
    except Stopped as stop:
        return stop.exit_code
    print(failures)
    return 1 if failures else 0
