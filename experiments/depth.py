"""What a path through a decoder gains by: one change at a time to the recipe of `gpt-mre`, in short runs on validation bytes.

    python -m experiments.depth             # trains what is missing, writes benchmarks/depth.md; resumable
    python -m experiments.depth --redraw    # the table again, from the records

Every run has 750 steps of 1,024 bytes of enwik8, and there is one seed: differences below some hundredths of a bit say nothing.
"""

import argparse
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments import BENCHMARKS
from experiments.reproduce.plan import SEARCH_SEED, TEXT, Planner, Run
from experiments.reproduce.records import Record, Store, spread
from experiments.reproduce.tables import Table
from experiments.reproduce.text_aims import dead_experts
from experiments.reproduce.variants import Variant, text_variants
from raytraced.files import write_file

EPOCHS = 3  # of 250 steps
RATE = 6e-3  # what the search of the comparison chose for MRE
SEEDS = (SEARCH_SEED,)
# name → options of the model, options of the training
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as in the comparison": ({}, {}),
    "plain start": ({"entry_scale": 1.0, "input_init_std": 0.0}, {}),
    "sharp entry, plain gates": ({"input_init_std": 0.0}, {}),
    "plain entry, sharp gates": ({"entry_scale": 1.0}, {}),
    "output offset 0": ({"output_logit_offset": 0.0}, {}),
    "output offset 3": ({"output_logit_offset": 3.0}, {}),
    "clipped at 0.1": ({}, {"clip": 0.1}),
    "gates as fast as the rest": ({}, {"lr_routing": RATE}),
    "gates nearly at rest": ({}, {"lr_routing": 1e-6}),
    "target 4 for all blocks together": ({}, {"target_experts": 4.0}),
    "target 8 for all blocks together": ({}, {"target_experts": 8.0}),
    "routing embedding of 4": ({"routing_dim": 4}, {}),
    "routing embedding of 64": ({"routing_dim": 64}, {}),
    "reads the embedding": ({"routing_input": "embedding", "routing_dim": None}, {}),
    "reads the first block's input": ({"routing_input": "first-block", "routing_dim": None}, {}),
    "weights × 1": ({"weight_scale": 1.0}, {}),
    "weights × 3": ({"weight_scale": 3.0}, {}),
    "weights that sum to the count": ({"weighting": "rates"}, {}),
    "ReinMax through the draws": ({"estimator": "reinmax"}, {}),
    "`stop` 0.05": ({"stop": 0.05}, {}),
    "`stop` 1": ({"stop": 1.0}, {}),
}


def make_runs() -> list[Run]:
    """All runs, seed by seed."""
    planner = Planner(TEXT, {})
    (base,) = [one for one in text_variants() if one.label == "mre"]
    return [make_run(planner, base, name, seed) for seed in SEEDS for name in CHANGES]


def make_run(planner: Planner, base: Variant, name: str, seed: int) -> Run:
    """The recipe with one change."""
    options, training = CHANGES[name]
    label = re.sub("[^a-z0-9.]+", "-", name.lower()).strip("-")
    changed = replace(base, label=label, options=base.options | options, training=base.training | training)
    return Run("reading", label, planner.configure(changed, "enwik8", seed, EPOCHS, RATE), name)


def make_table(records: dict[str, list[Record]]) -> Table:
    """A row for every change, in the order of CHANGES."""
    rows = []
    for name in CHANGES:
        found = [one for one in records.get(name, []) if not one.error]
        if found:
            bits = spread(one.validation["bits_per_byte"] for one in found)
            by_block = zip(*(one.test["expert_load"] for one in found), strict=True)
            shares = [spread(sum(load) for load in block).mean for block in by_block]
            dead = spread(dead_experts(one) for one in found).mean
            spread_out = " + ".join(f"{share:.1f}" for share in shares)
            rows.append([name, f"{bits.mean:.3f}", spread_out, f"{dead:.1f}"])
    header = ["change", "validation bits", "experts per block", "dead of 64"]
    return Table("One change at a time", header, rows)


def read_records(folder: Path) -> dict[str, list[Record]]:
    """The records of today's runs, by the name of their change."""
    store, found = Store(folder), dict[str, list[Record]]()
    for run in make_runs():
        record = store.find(run)
        if record is not None:
            found.setdefault(run.family, []).append(record)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--redraw", action="store_true", help="train nothing")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="runs at the same time")
    options = parser.parse_args()
    folder = BENCHMARKS / "depth"
    if not options.redraw:
        from experiments.reproduce.run import run_all

        run_all(make_runs(), Path("runs/depth"), folder, options.workers)
    table = make_table(read_records(folder))
    write_file(BENCHMARKS / "depth.md", f"# Depth\n\n{__doc__}\n" + "\n".join(table.lines()) + "\n")
    print(BENCHMARKS / "depth.md")


if __name__ == "__main__":
    main()
