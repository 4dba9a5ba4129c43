"""Measure reading experts along a known path, against guessing it.

python -m experiments.store prepare FOLDER      # trains two small decoders, writes a store of 2.1 GB
python -m experiments.store measure FOLDER      # every contender at every limit, on an idle machine; resumes where it was
python -m experiments.store measure FOLDER --minutes 7      # ends after the run that passes 7 minutes
python -m experiments.store report FOLDER       # benchmarks/store.md, benchmarks/store.jsonl, docs/lab/store.png
python -m experiments.store quality             # benchmarks/store-quality.md, two sentences of docs/lab/store.md; a minute
"""

import argparse
from pathlib import Path

from experiments.store.measure import LIMITS, ROUNDS, measure
from experiments.store.quality import quality
from experiments.store.report import report
from experiments.store.traces import SMALL, Sizes, prepare

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["prepare", "measure", "report", "quality"])
    parser.add_argument("folder", type=Path, nargs="?", help="of all actions but quality")
    parser.add_argument("--limits", type=float, nargs="+", default=list(LIMITS), help="percent of all experts")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after so many minutes")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="how often each contender is measured")
    parser.add_argument("--small", action="store_true", help="a store of 2 MB, to try the commands")
    arguments = parser.parse_args()
    if arguments.action == "quality":
        quality()
    elif arguments.folder is None:
        parser.error(f"{arguments.action}: give a folder")
    elif arguments.action == "prepare":
        prepare(arguments.folder, SMALL if arguments.small else Sizes())
    elif arguments.action == "measure":
        measure(arguments.folder, arguments.limits, arguments.minutes, arguments.rounds)
    else:
        report(arguments.folder)
