"""`raytraced benchmark`; torch is imported only when measuring begins."""

import sys
from pathlib import Path
from typing import Any

LETTERS = "abcdefghijkl"


def benchmark(quick: bool = False, only: str = "", output: str = "benchmarks", fresh: bool = False) -> int:
    """Measure every bar side by side in one process; writes results.json, a table and plots; goes on where it was stopped.

    Args:
        quick: Fewer repeats, under two minutes in all; written to the sub-folder quick.
        only: Letters of the bars to measure, such as a or a,c (default: all, a to l).
        output: Folder for the results.
        fresh: Measure everything anew, also what was measured with the same code on this machine.
    """
    letters = chosen_letters(only)
    folder = Path(output) / "quick" if quick else Path(output)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output={output}: {folder} is a file; name a folder")

    from raytraced.benchmark.timing import FULL, QUICK

    return run(letters, folder, QUICK if quick else FULL, fresh)


def chosen_letters(only: str) -> list[str]:
    """The bars that were asked for, in order."""
    asked = {letter for letter in only.lower() if letter not in ", "}
    for letter in sorted(asked):
        if letter not in LETTERS:
            raise ValueError(f"only={only}: {letter!r} is no bar; must be letters of a to {LETTERS[-1]}, such as a,c")
    return [letter for letter in LETTERS if not asked or letter in asked]


def run(letters: list[str], folder: Path, settings: Any, fresh: bool) -> int:
    """Measure what is not yet measured, save each bar at once, then write the report."""
    import time

    import torch

    from raytraced.benchmark import machine, report
    from raytraced.benchmark.bars import BARS
    from raytraced.benchmark.progress import Display
    from raytraced.benchmark.results import ResultsFile, code_hash, git_commit
    from raytraced.benchmark.workloads import Bench

    package = Path(__file__).parent.parent
    stamp = {"code": code_hash(package), "commit": git_commit(package), "settings": list(settings)}
    results = ResultsFile(folder / "results.json", machine.describe_machine(), stamp, fresh=fresh)
    todo = [letter for letter in letters if fresh or not results.is_done(letter)]
    load = machine.load()
    if todo and load is not None and load > 0.7:
        print(f"raytraced: other processes are running (load {load:.1f}): times will be off", file=sys.stderr)
    torch.set_num_threads(1)
    with Display(letters, todo) as display:
        bench = Bench(settings, display.tick)
        for letter in todo:
            display.start(letter, BARS[letter].title)
            started = time.monotonic()
            torch.manual_seed(0)
            outcome = BARS[letter].measure(bench)
            display.finish(letter, results.add(letter, outcome, time.monotonic() - started))
    report.write(results.content, folder)
    print(report.text_table(results.content))
    print(f"\n{folder / 'results.json'}, {folder / 'results.md'} and plots written.")
    return 0
