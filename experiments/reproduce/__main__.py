"""`python -m experiments.reproduce`."""

import sys

from experiments.reproduce.command import reproduce
from raytraced.cli.main import run_command

if __name__ == "__main__":
    sys.exit(run_command(reproduce, prog="experiments.reproduce"))
