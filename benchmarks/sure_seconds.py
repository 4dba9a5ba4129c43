"""What stopping when sure takes in seconds: everyone trained for it, side by side in one process, one thread.

    raytraced reproduce --only sure                       # trains the models
    python benchmarks/sure_seconds.py results/runs        # writes sure-seconds.md beside it

MRE is the model that comes with the package, on the union seed 0 as all others are. Thresholds from validation images,
the cheapest that loses at most 0.1 points. Contenders take turns; a time for 1,000 is the median of them, that for one image
the mean. The first 10 × 1,000 test images, then the first 400 of them one by one: all models stopped, then all to the end,
since a model that follows itself finds its weights in the cache. `to the end` is the same model without a look. MRE stops
inside one call of the compiled library; rivals, and `mre, layer by layer`, in PyTorch's operators. Multiply-adds compare the
methods, times these implementations of them.
"""

import argparse
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from raytraced import load, operations
from raytraced.benchmark.timing import Contender, Settings, interleave
from raytraced.commands.reproduce import find_plan
from raytraced.reproduce.plan import FULL
from raytraced.reproduce.tables import Table
from raytraced.reproduce.variants import DATA_NAMES, SHIPPED, sure_variants
from raytraced.tasks.table import find_task
from raytraced.training.calibration import calibrate, look_at_all

HERE = Path(__file__).parent
SETTINGS = Settings(rounds=30, sample_seconds=0.05, seconds=60, least_rounds=7, latencies=2000, train_steps=0)


def stopper(name: str, model: Any, batches: list[torch.Tensor], sure: float | None) -> Contender:
    """Every call answers the next batch."""
    queue = cycle(batches)

    def answer() -> None:
        model(next(queue), sure=sure)

    def answer_in_steps() -> None:
        with operations.use(until_sure="steps"):
            answer()

    return Contender(name, torch.inference_mode()(answer_in_steps if name.endswith("layer by layer") else answer))


def study(data: str, work: Path) -> Table:
    """The table of one data set."""
    planner = find_plan(FULL, HERE.parent / "results")
    runs = {run.label: run for run in planner.runs("main", sure_variants(FULL.data[data].wide), [data], [0])}
    trained = {label: path for label, run in runs.items() if (path := work / run.folder / "model.safetensors").exists()}
    shipped = {"mre": f"mre-{data}"} if f"mre-{data}" in SHIPPED else {}
    found = {label: load(path) for label, path in (shipped | trained | shipped).items()}  # ours first
    task, many, single, told = find_task(data), [], [], {}
    loaded = task.load_for(next(iter(found.values())), data, None)
    place = {"rank": 0, "world_size": 1, "device": torch.device("cpu")}
    images = [batch.inputs for batch in task.loader(loaded, "test", 1000, {}, shuffle=False, **place).epoch(0)][:10]
    for label, model in found.items():
        seen, shown = (look_at_all(model, task, loaded, split, "layer") for split in ("validation", "test"))
        sure = calibrate(seen, 0.1)
        told |= {label: shown.stop(sure), f"{label}, to the end": shown.to_the_end}
        ways = {label: sure, f"{label}, to the end": None}
        if label == "mre":
            ways[f"{label}, layer by layer"], told[f"{label}, layer by layer"] = sure, told[label]
        many += [stopper(name, model, images, threshold) for name, threshold in ways.items()]
        single += [stopper(name, model, list(images[0][:400].split(1)), threshold) for name, threshold in ways.items()]
    apart = sorted(single, key=lambda one: one.name.partition(", ")[2])
    thousand, one = interleave(many, SETTINGS), interleave(apart, SETTINGS, single_calls=True)
    rows = []
    for wide, narrow in zip(many, single, strict=True):
        figures, label = told[wide.name], wide.name
        # a call of one image varies with the image: the mean is what a stream of them takes
        each = sum(one[label]) / len(one[label])
        cells = [f"{100 * figures['accuracy']:.2f}", f"{figures['experts']:.2f}", f"{figures['macs']:,.0f}"]
        ratio = thousand.median(wide) / thousand.median(many[0]), each * len(one["mre"]) / sum(one["mre"])
        times = [f"{1e3 * thousand.median(wide):.2f}", f"{ratio[0]:.2f}", f"{1e3 * each:.3f}", f"{ratio[1]:.2f}"]
        rows.append([narrow.name, *cells, *times])
    header = [
        "model",
        "accuracy %",
        "experts run",
        "multiply-adds",
        "ms for 1,000",
        "of mre's",
        "ms for one",
        "of mre's",
    ]
    return Table(DATA_NAMES[data], header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--data", default="mnist,fashion-mnist,cifar10,union")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    note = (__doc__ or "").partition("\n\n")[2].partition("\n\n")[2].strip()
    text = ["# Stopping when sure, in seconds", "", "Written by `benchmarks/sure_seconds.py`.", note, ""]
    for data in asked.data.split(","):
        text.append(study(data, asked.runs).markdown())
        (HERE / "sure-seconds.md").write_text("\n".join(text), encoding="utf-8")


if __name__ == "__main__":
    main()
