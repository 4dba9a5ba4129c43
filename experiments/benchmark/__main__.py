"""`python -m experiments.benchmark`."""

import sys

from experiments.benchmark.command import benchmark
from raytraced.cli.main import run_command

if __name__ == "__main__":
    sys.exit(run_command(benchmark, prog="experiments.benchmark"))
