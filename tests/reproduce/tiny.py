"""Runs that are over in seconds, for workers of their own: `python tiny.py WORK RECORDS WORKERS` brings them to their end."""

import sys
from pathlib import Path

from raytraced.reproduce.plan import QUICK, Planner
from raytraced.reproduce.run import Stopped, run_all
from raytraced.reproduce.variants import Variant

VARIANTS = (
    Variant("mre", "mre", {"num_layers": 2, "num_experts": 3}),
    Variant("mlp-avg", "mlp-avg", {"num_layers": 1}),
)
RUNS = Planner(QUICK, {}).runs("main", VARIANTS, ("digits",), [0], epochs=20)

if __name__ == "__main__":
    try:
        failures = run_all(RUNS, Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
    except Stopped as stop:
        sys.exit(stop.exit_code)
    print(failures)
    sys.exit(1 if failures else 0)
