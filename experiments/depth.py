"""Which options of a recipe matter: one is changed at a time, in short runs on validation data.

    python -m experiments.depth             # text: trains what is missing, writes benchmarks/depth.md
    python -m experiments.depth images      # images: writes benchmarks/image-recipe.md
    python -m experiments.depth --redraw    # the table again, from the records

Runs that were made are kept: the same command continues after a stop.
"""

import argparse
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments import BENCHMARKS
from experiments.reproduce.plan import FULL, SEARCH_SEED, TEXT, Planner, Run, Scale
from experiments.reproduce.records import Record, Store, spread
from experiments.reproduce.tables import Table
from experiments.reproduce.text_aims import dead_experts
from experiments.reproduce.variants import DATA_NAMES, DECODER, MRE_FINAL, Variant, text_variants
from raytraced.files import write_file

# name → options of the model, options of the training; "model" among the former is another router, with its own options
Changes = dict[str, tuple[dict[str, Any], dict[str, Any]]]


@dataclass(frozen=True)
class Study:
    """One recipe, the changes to it, and how its runs are trained."""

    name: str  # of the page and of the folder of records in benchmarks/
    about: str
    scale: Scale
    base: Variant
    trained: Mapping[str, tuple[int, float]]  # data set → epochs, learning rate
    seeds: tuple[int, ...]
    changes: Changes

    @property
    def folder(self) -> Path:
        """Where its records are."""
        return BENCHMARKS / self.name

    def runs(self) -> list[Run]:
        """All runs, seed by seed."""
        planner = Planner(self.scale, {})
        return [
            self.make_run(planner, name, data, seed)
            for seed in self.seeds
            for data in self.trained
            for name in self.changes
        ]

    def make_run(self, planner: Planner, name: str, data: str, seed: int) -> Run:
        """The recipe with one change."""
        options, training = self.changes[name]
        epochs, lr = self.trained[data]
        label = re.sub("[^a-z0-9.]+", "-", name.lower()).strip("-")
        base = replace(self.base, options=self.base.options | options)
        if "model" in options:  # another router: of the recipe's options only those of the decoder are its own
            own = {key: value for key, value in options.items() if key != "model"}
            base = replace(base, model=options["model"], options=DECODER_ALONE | own)
        changed = replace(base, label=label, training=self.base.training | training)
        return Run("reading", label, planner.configure(changed, data, seed, epochs, training.get("lr", lr)), name)

    def records(self) -> dict[tuple[str, str], list[Record]]:
        """The records of today's runs that did not diverge, by data set and name of their change."""
        store, found = Store(self.folder), dict[tuple[str, str], list[Record]]()
        for run in self.runs():
            record = store.find(run)
            if record is not None and not record.error:
                found.setdefault((run.data, run.family), []).append(record)
        return found


DECODER_ALONE = {key: DECODER[key] for key in ("num_experts", "routing_input", "routing_dim")}
TEXT_RATE = 6e-3  # what the search of the comparison chose for MRE
TEXT_CHANGES: Changes = {
    "as in the comparison": ({}, {}),
    "plain start": ({"entry_scale": 1.0, "input_init_std": 0.0}, {}),
    "sharp entry, plain gates": ({"input_init_std": 0.0}, {}),
    "plain entry, sharp gates": ({"entry_scale": 1.0}, {}),
    "output offset 0": ({"output_logit_offset": 0.0}, {}),
    "output offset 3": ({"output_logit_offset": 3.0}, {}),
    "clipped at 0.1": ({}, {"clip": 0.1}),
    "gates as fast as the rest": ({}, {"lr_routing": TEXT_RATE}),
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
    "rates compared within a layer, share 0.5": ({"model": "gpt-within-layer"}, {}),
    "rates compared within a layer, share 0.2": ({"model": "gpt-within-layer", "share": 0.2}, {}),
    "gates for the last layer": ({"model": "gpt-last-layer-gates"}, {}),
    "sigmoid gates, moving thresholds": ({"model": "gpt-moving-thresholds"}, {}),
    "every second block by the token before": ({"path_tokens": 2}, {}),
    "random table": ({"model": "gpt-hash"}, {}),
    "random table, every second block by the token before": ({"model": "gpt-hash", "path_tokens": 2}, {}),
    "`stop` 0.05": ({"stop": 0.05}, {}),
    "`stop` 1": ({"stop": 1.0}, {}),
}

# Half sharp, as sharp as the decoder's start, and the decoder's with its longer sequences.
SHARP = {"entry_scale": 4.0, "input_init_std": 1.0}
DECODER_START = {"entry_scale": 16.0, "input_init_std": 3.0, "input_rank": 16, "output_logit_offset": 8.0}
RELATIVE = {"weighting": "relative"}
ALL_BUDGETS = {"stop_range": [0.05, 20.0]}
SLOW = {"lr_routing": 5e-4}
IMAGE_CHANGES: Changes = {
    "as it is": ({}, {}),
    "weights that sum to the count": ({"weighting": "rates"}, {}),
    "relative weights": (RELATIVE, {}),
    "relative weights × 2": (RELATIVE | {"weight_scale": 2.0}, {}),
    "sharp start": (SHARP, {}),
    "relative, sharp start": (RELATIVE | SHARP, {}),
    "relative, the decoder's start": (RELATIVE | DECODER_START, {}),
    "relative, the decoder's start, slow gates": (RELATIVE | DECODER_START, SLOW),
    "relative, slow gates": (RELATIVE, SLOW),
    "relative, rank 16": (RELATIVE | {"input_rank": 16}, {}),
    "relative, output offset 10": (RELATIVE | {"output_logit_offset": 10.0}, {}),
    "relative, `stop` 0.2": (RELATIVE | {"stop": 0.2}, {}),
    "relative, all budgets": (RELATIVE | ALL_BUDGETS, {}),
    "relative, sharp start, all budgets": (RELATIVE | SHARP | ALL_BUDGETS, {}),
    "relative, target 6": (RELATIVE, {"target_experts": 6.0}),
    "relative, half of the loss on exits": (RELATIVE, {"exit_loss": 0.5}),
    "relative, all budgets, half of the loss on exits": (RELATIVE | ALL_BUDGETS, {"exit_loss": 0.5}),
}

TEXT_STUDY = Study(
    "depth",
    "The recipe of `gpt-mre`. Every run has 750 steps of 1,024 bytes of enwik8, and there is one seed: differences below some "
    "hundredths of a bit say nothing.",
    TEXT,
    next(one for one in text_variants() if one.label == "mre"),
    {"enwik8": (3, TEXT_RATE)},
    (SEARCH_SEED,),
    TEXT_CHANGES,
)
IMAGE_STUDY = Study(
    "image-recipe",
    "The recipe for images without a loss on exits and without a target. Validation images, 15 epochs at a learning rate of "
    "0.005, two seeds: the standard error of a row is some 0.15 points. *On average*: by the dial, with the mean number of "
    "experts that test images run; – where the dial does not reach.",
    FULL,
    MRE_FINAL,
    {"mnist": (15, 5e-3), "fashion-mnist": (15, 5e-3)},
    (SEARCH_SEED, SEARCH_SEED + 1),
    IMAGE_CHANGES,
)
BUDGETS = (1, 2, 4)  # experts
STUDIES = {"text": TEXT_STUDY, "images": IMAGE_STUDY}


def text_table(study: Study) -> Table:
    """A row for every change: bits, and experts per block."""
    rows, records = [], study.records()
    for (_, name), found in records.items():
        bits = spread(one.validation["bits_per_byte"] for one in found)
        by_block = zip(*(one.test["expert_load"] for one in found), strict=True)
        shares = [spread(sum(load) for load in block).mean for block in by_block]
        dead = spread(dead_experts(one) for one in found).mean
        spread_out = " + ".join(f"{share:.1f}" for share in shares)
        rows.append([name, f"{bits.mean:.3f}", spread_out, f"{dead:.1f}"])
    header = ["change", "validation bits", "experts per block", "dead of 64"]
    return Table("One change at a time", header, rows)


def image_table(study: Study) -> Table:
    """A row for every change: accuracy and experts to the end, and accuracy with few experts, per data set."""
    records = study.records()
    header = ["change"]
    for data in study.trained:
        header += [
            f"{DATA_NAMES[data]} %",
            "experts",
            *(f"at most {most}" for most in BUDGETS),
            *(f"{num} on average" for num in BUDGETS),
        ]
    rows = []
    for name in study.changes:
        if all((data, name) in records for data in study.trained):
            cells = (cell for data in study.trained for cell in image_cells(records[data, name]))
            rows.append([name, *cells])
    return Table("One change at a time", header, rows)


def image_cells(found: list[Record]) -> list[str]:
    """Validation accuracy and experts of one model, and its accuracy with at most so many experts, or so many on average."""
    experts = spread(one.validation["mean_experts"] for one in found).mean
    cells = [percent_of(one.validation["accuracy"] for one in found), f"{experts:.1f}"]
    for most in BUDGETS:
        rows = (one.budgets[min(most, len(one.budgets) - 1)] for one in found)
        cells.append(percent_of(row["validation_accuracy"] for row in rows))
    for num in BUDGETS:
        reached = all(one.dial and min(row["experts"] for row in one.dial) <= num for one in found)
        cells.append(percent_of(dial_accuracy(one, num) for one in found) if reached else "–")
    return cells


def dial_accuracy(record: Record, experts: float) -> float:
    """Validation accuracy of a model at a mean number of experts (of test images), linearly between settings of its dial."""
    rows = sorted((row["experts"], row["validation_accuracy"]) for row in record.dial)
    return float(np.interp(experts, *zip(*rows, strict=True)))


def percent_of(shares: Iterable[float]) -> str:
    """The mean of shares, in percent."""
    return f"{100 * spread(shares).mean:.2f}"


def write_page(name: str) -> Path:
    """Write the page of a study from its records."""
    study = STUDIES[name]
    table = image_table(study) if name == "images" else text_table(study)
    page = BENCHMARKS / f"{study.name}.md"
    write_file(
        page, f"# One change at a time: {name}\n\n{__doc__}\n{study.about}\n\n" + "\n".join(table.lines()) + "\n"
    )
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", nargs="?", choices=tuple(STUDIES), default="text")
    parser.add_argument("--redraw", action="store_true", help="train nothing")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="runs at the same time")
    options = parser.parse_args()
    study = STUDIES[options.study]
    if not options.redraw:
        from experiments.reproduce.run import run_all

        known = Store(study.folder)
        missing = [run for run in study.runs() if known.find(run) is None]
        run_all(missing, Path("runs") / study.name, study.folder, options.workers)
    print(write_page(options.study))


if __name__ == "__main__":
    main()
