"""Early exit in seconds: all models that were trained for it, side by side in one process, one thread.

    python -m experiments.reproduce --only early-exit                       # trains the models
    python -m experiments.early_exit_seconds results/runs        # writes early-exit-seconds.md beside it

MRE is the shipped model, the best of its seeds on validation images; on the union, and for all others, seed 0: accuracies
here are not comparable. Thresholds from validation images, the cheapest that loses at most 0.1 points. Models are timed in
turns; the time for 1,000 images is a median, that for one image a mean. The first 10 × 1,000 test images, then the first 400
of them one by one: all models with early exit, then all without, since a model that follows itself finds its weights in the
cache. `no early exit` is the same model without exits. MRE exits inside one call of the compiled library; the baselines, and
`mre, layer by layer`, use PyTorch's operators. MACs compare the methods, times compare these implementations of them.
"""

import argparse
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from experiments import BENCHMARKS, RESULTS
from experiments.benchmark.timing import Contender, Settings, interleave
from experiments.reproduce.command import find_plan
from experiments.reproduce.plan import FULL
from experiments.reproduce.tables import Table
from experiments.reproduce.variants import DATA_NAMES, SHIPPED_IMAGES, exit_variants
from raytraced import kernels, load
from raytraced.tasks.registry import find_task
from raytraced.training.calibration import calibrate, evaluate_exits

SETTINGS = Settings(rounds=30, sample_seconds=0.05, seconds=60, least_rounds=7, latencies=2000, train_steps=0)


def early_exit_contender(name: str, model: Any, batches: list[torch.Tensor], confidence: float | None) -> Contender:
    """A contender that classifies the next batch in every call."""
    queue = cycle(batches)

    def answer() -> None:
        model(next(queue), confidence=confidence)

    def answer_in_steps() -> None:
        with kernels.use(early_exit="steps"):
            answer()

    return Contender(name, torch.inference_mode()(answer_in_steps if name.endswith("layer by layer") else answer))


def study(data: str, work: Path) -> Table:
    """The table of one data set."""
    planner = find_plan(FULL, RESULTS)
    runs = {run.label: run for run in planner.runs("main", exit_variants(FULL.data[data].wide), [data], [0])}
    trained = {label: path for label, run in runs.items() if (path := work / run.folder / "model.safetensors").exists()}
    shipped = {"mre": f"mre-{data}"} if f"mre-{data}" in SHIPPED_IMAGES else {}
    found = {label: load(path) for label, path in (shipped | trained | shipped).items()}  # ours first
    task, many, single, metrics = find_task(data), [], [], {}
    loaded = task.load_for(next(iter(found.values())), data, None)
    place = {"rank": 0, "world_size": 1, "device": torch.device("cpu")}
    images = [batch.inputs for batch in task.loader(loaded, "test", 1000, {}, shuffle=False, **place).epoch(0)][:10]
    for label, model in found.items():
        validation, test = (evaluate_exits(model, task, loaded, split, "layer") for split in ("validation", "test"))
        confidence = calibrate(validation, 0.1)
        metrics |= {label: test.stop(confidence), f"{label}, no early exit": test.to_the_end}
        ways = {label: confidence, f"{label}, no early exit": None}
        if label == "mre":
            ways[f"{label}, layer by layer"], metrics[f"{label}, layer by layer"] = confidence, metrics[label]
        many += [early_exit_contender(name, model, images, threshold) for name, threshold in ways.items()]
        single += [
            early_exit_contender(name, model, list(images[0][:400].split(1)), threshold)
            for name, threshold in ways.items()
        ]
    apart = sorted(single, key=lambda one: one.name.partition(", ")[2])
    thousand, one = interleave(many, SETTINGS), interleave(apart, SETTINGS, single_calls=True)
    rows = []
    for wide, narrow in zip(many, single, strict=True):
        figures, label = metrics[wide.name], wide.name
        # The time of one image varies with the image: the mean is that of a stream of images.
        each = sum(one[label]) / len(one[label])
        cells = [f"{100 * figures['accuracy']:.2f}", f"{figures['experts']:.2f}", f"{figures['macs']:,.0f}"]
        ratio = thousand.median(wide) / thousand.median(many[0]), each * len(one["mre"]) / sum(one["mre"])
        times = [f"{1e3 * thousand.median(wide):.2f}", f"{ratio[0]:.2f}", f"{1e3 * each:.3f}", f"{ratio[1]:.2f}"]
        rows.append([narrow.name, *cells, *times])
    header = [
        "model",
        "accuracy %",
        "experts run",
        "MACs",
        "ms for 1,000",
        "over mre's",
        "ms for one",
        "over mre's",
    ]
    return Table(DATA_NAMES[data], header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--data", default="mnist,fashion-mnist,cifar10,union")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    note = (__doc__ or "").partition("\n\n")[2].partition("\n\n")[2].strip()
    text = ["# Early exit, in seconds", "", "Written by `python -m experiments.early_exit_seconds`.", note, ""]
    for data in asked.data.split(","):
        text.append(study(data, asked.runs).markdown())
        (BENCHMARKS / "early-exit-seconds.md").write_text("\n".join(text), encoding="utf-8")


if __name__ == "__main__":
    main()
