"""Which reading of the paper's text comes nearest to its own tables? Train each reading, record it, write the table.

    python -m experiments.readings               # every reading that has no record yet, on three data sets
    python -m experiments.readings --table       # write benchmarks/readings.md from the records

THE CRITERION, written before the first run and not changed after (it and the first results have the same time stamp in the
version history, so this order cannot be shown). A run (25 epochs of 256 images unless the reading says
otherwise, seed 100, which no other run has; the epoch with the best validation accuracy is kept) is evaluated on validation
images, drawn and greedily. The accuracy that it would have on test images is estimated as its validation accuracy less the
mean difference between the two over the 100 recorded runs of other models on that data set: 0.08, 0.83 and -0.30 points.
For each data set the distance to the paper's accuracy is counted in max(0.3 points, two of the paper's deviations), that to
its number of experts in quarters of the paper's number; a distance above 3 counts as 3. The distance of a reading is the
mean of its six. First every reading differs from BASE in one point; then points that came nearer are joined. The nearest
becomes `mre-paper`, is trained with five seeds, and its test images are used once.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from experiments import BENCHMARKS
from experiments.reproduce.tables import Table
from raytraced import kernels, load, sequence
from raytraced.models.classifier import InputBlock
from raytraced.tasks.registry import find_task
from raytraced.training.config import TrainConfig, preset_values
from raytraced.training.evaluation import Diverged
from raytraced.training.loop import train

RECORDS = BENCHMARKS / "readings.jsonl"
# accuracy, its deviation, experts: the paper's Tables 1 and 2; and what validation accuracy is above that of test images
PAPER = {"mnist": (96.3, 0.1, 7.5, 0.08), "fashion-mnist": (87.1, 0.1, 9.4, 0.83), "cifar10": (60.4, 1.2, 11.4, -0.30)}
BASE: dict[str, Any] = {
    "stream": "residual",
    "gate_init": "normal",
    "lr": 5e-3,
    "batch_size": 256,
    "epochs": 25,
}
EPSILON = 1.1920929e-07  # what torch.distributions keeps probabilities above

# name → what differs from BASE: options of the layer, of the training run, or a patch of the code below
READINGS: dict[str, dict[str, Any]] = {
    "base: residual, 5e-3": {},
    "routing 5e-5": {"lr_routing": 5e-5},
    "1e-3": {"lr": 1e-3},
    "routing 5e-6": {"lr_routing": 5e-6},
    "gates start as nn.Linear's, scaled": {"gate_init": "uniform"},
    # joined: what came nearer alone
    "nn.Linear's start, 1e-3": {"gate_init": "uniform", "lr": 1e-3},
    "nn.Linear's start, routing 5e-5": {"gate_init": "uniform", "lr_routing": 5e-5},
    "nn.Linear's start, 1e-3, skip-sum": {"gate_init": "uniform", "lr": 1e-3, "stream": "skip-sum"},
    "nn.Linear's start, 1e-3, masks of active experts only": {
        "gate_init": "uniform",
        "lr": 1e-3,
        "mask_gradient": "active",
    },
    "gates not scaled": {"scale_init": False},
    "pixels in 0 … 1": {"patch": "pixels"},
    "skip-sum": {"stream": "skip-sum"},
    "routing 5e-4": {"lr_routing": 5e-4},
    "2e-3": {"lr": 2e-3},
    "masks of active experts only": {"mask_gradient": "active"},
    "ReLU after the input block": {"patch": "relu"},
    "footnote's stop": {"stop": "dominant"},
    "temperature 1": {"temperature": 1.0},
    "temperature 50": {"temperature": 50.0},
    "decayed rate": {"schedule": "cosine"},
    "last": {"stream": "last"},
    "60 epochs": {"epochs": 60},
    "batch 64": {"batch_size": 64},
    # Only the plain path has these, at a tenth of the speed: three epochs, to compare with three epochs of BASE.
    "3 epochs": {"epochs": 3},
    "3 epochs, stop draw without a gradient": {"patch": "stop", "epochs": 3},
    "3 epochs, probabilities clamped": {"patch": "clamped", "epochs": 3},
    "3 epochs, temperature of the draws, too": {"patch": "tempered", "epochs": 3},
}


def clamped(grad_BK: Tensor, probs_BK: Tensor, draw_BK: Tensor, noise_BK: Tensor, *rest: Any) -> Tensor:
    """Gumbel-softmax of probabilities clamped as in torch.distributions: at τ = 20 every node has some soft mass."""
    temperature = rest[-1]
    kept_BK = probs_BK.clamp_min(EPSILON)
    soft_BK = ((kept_BK.log() - noise_BK.log()) / temperature).softmax(-1)
    centred_BK = grad_BK - (soft_BK * grad_BK).sum(-1, keepdim=True)
    return (soft_BK * centred_BK / (temperature * kept_BK)).masked_fill(probs_BK <= EPSILON, 0)


def without_stop(grad_BK: Tensor, probs_BK: Tensor, draw_BK: Tensor, *rest: Any) -> Tensor:
    """The estimator's gradient, without that of the draw that stops."""
    return GRADIENT(grad_BK, probs_BK, draw_BK, *rest).masked_fill(draw_BK[:, -1:] > 0, 0)


def tempered(probs_BK: Tensor, stop: str) -> Tensor:
    """Probabilities at a temperature of 20: almost even over all candidates."""
    return sequence_apply_stop(probs_BK, stop).pow(1 / 20)


def rectified(block: InputBlock, images: Tensor) -> Tensor:
    """The input block, then a ReLU."""
    return block_forward(block, images).relu()


def not_normalised(block: InputBlock, shape: Any, dim: int, mean: Any = None, std: Any = None) -> None:
    """An input block that takes pixels in 0 … 1 as they are."""
    block_init(block, shape, dim, mean and [0.0] * len(mean), std and [1.0] * len(std))


GRADIENT, sequence_apply_stop = sequence._gradient, sequence.apply_stop
block_forward, block_init = InputBlock.forward, InputBlock.__init__
PATCHES: dict[
    str, tuple[Any, str, Callable[..., Any], bool]
] = {  # where, what, by what, whether only the plain path knows it
    "relu": (InputBlock, "forward", rectified, False),
    "pixels": (InputBlock, "__init__", not_normalised, False),
    "stop": (sequence, "_gradient", without_stop, True),
    "clamped": (sequence, "_gradient", clamped, True),
    "tempered": (sequence, "apply_stop", tempered, True),
}


def measure(model: Any, task: Any, data: Any, **options: Any) -> tuple[float, float]:
    """Validation accuracy in percent, and experts."""
    loader = task.loader(data, "validation", 1000, {}, shuffle=False, rank=0, world_size=1, device=torch.device("cpu"))
    right = number = experts = 0
    with torch.no_grad():
        for batch in loader.epoch(0):
            draws = {"generator": torch.Generator().manual_seed(number), "rows": batch.rows}
            output = model(batch.inputs, **draws, **options)
            right += int((output.logits.argmax(-1) == batch.targets).sum())
            experts += int(output.num_experts.sum())
            number += len(batch.targets)
    return 100 * right / number, experts / number


def try_reading(name: str, data: str) -> dict[str, Any]:
    """Train a reading on a data set and measure it."""
    values = BASE | READINGS[name]
    layer = {
        key: values.pop(key)
        for key in ("stream", "gate_init", "stop", "mask_gradient", "temperature", "scale_init")
        if key in values
    }
    patched = PATCHES.get(values.pop("patch", ""))
    values = preset_values("paper", data, "mre-paper") | values | {"patience": values["epochs"], "seed": 100}
    with TemporaryDirectory() as folder, ExitStack() as stack:
        if patched:
            where, what, by, plain = patched
            stack.enter_context(patch.object(where, what, by))
            if plain:
                stack.enter_context(kernels.use("plain"))
        values |= {"device": "cpu", "threads": 1, "quiet": True, "output": folder, "model_options": layer}
        config = TrainConfig(data=data, model="mre-paper", preset="paper", **values)
        start = time.perf_counter()
        with open(os.devnull, "w") as quiet, patch.object(sys, "stdout", quiet):
            run = train(config, callbacks=())
        seconds = time.perf_counter() - start
        model, task = load(run.path), find_task(data)
        images = task.load_for(model, data, None)
        found = {select: measure(model, task, images, select=select) for select in ("sample", "greedy")}
    return {"reading": name, "data": data, "seconds": round(seconds, 1)} | found


def distance(record: dict[str, Any], select: str) -> float:
    """The distance by the criterion on one data set: the mean of those of accuracy and experts."""
    accuracy, deviation, experts, above = PAPER[record["data"]]
    found, number = record[select]
    far = abs(found - above - accuracy) / max(0.3, 2 * deviation), abs(number - experts) / (experts / 4)
    return sum(min(3.0, one) for one in far) / 2


def read_records() -> list[dict[str, Any]]:
    """All records so far."""
    return [json.loads(line) for line in RECORDS.read_text("utf-8").splitlines()] if RECORDS.exists() else []


def write_table() -> None:
    """The readings with their distances, the nearest first."""
    by_reading: dict[str, dict[str, Any]] = {}
    for record in read_records():
        by_reading.setdefault(record["reading"], {})[record["data"]] = record
    rows = []
    for name, records in by_reading.items():
        for select, word in (("sample", "drawn"), ("greedy", "greedy")):
            found = {data: record for data, record in records.items() if select in record}
            far = (
                sum(distance(record, select) for record in found.values()) / 3
                if found.keys() == PAPER.keys()
                else math.inf
            )
            cells = [
                f"{found[data][select][0] - PAPER[data][3]:.1f} ({found[data][select][1]:.1f})"
                if data in found
                else records.get(data, {}).get("error", "–")
                for data in PAPER
            ]
            rows.append((far, [name, word, *cells, "–" if math.isinf(far) else f"{far:.2f}"]))
    rows.append((0.0, ["*the paper*", "", *(f"{a:.1f} ± {d:.1f} ({e:.1f})" for a, d, e, _ in PAPER.values()), ""]))
    head = ["reading", "evaluated", "MNIST", "Fashion-MNIST", "CIFAR-10", "distance"]
    table = "\n".join(Table("", head, [cells for _, cells in sorted(rows, key=lambda row: row[0])]).lines())
    doc = (__doc__ or "").split("THE CRITERION")[1]
    text = f"""# Which reading of the text comes nearest to the paper's tables?

Written by `python -m experiments.readings` from the lines of `readings.jsonl`. Accuracy in percent (experts).
The criterion{doc}
{table}
"""
    (BENCHMARKS / "readings.md").write_text(text, "utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--data", choices=list(PAPER), nargs="*", default=list(PAPER))
    arguments = parser.parse_args()
    for name in () if arguments.table else READINGS:
        for data in arguments.data:
            if not any((one["reading"], one["data"]) == (name, data) for one in read_records()):
                try:
                    record = try_reading(name, data)
                except Diverged:
                    record = {"reading": name, "data": data, "error": "diverged"}
                with RECORDS.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
                print(record, flush=True)
    write_table()
