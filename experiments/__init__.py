"""Reproduction of the paper, benchmarks and studies. They run from a clone of the repository and are not installed."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"  # what `python -m experiments.reproduce` writes
BENCHMARKS = ROOT / "benchmarks"  # what `python -m experiments.benchmark` and the single scripts write
