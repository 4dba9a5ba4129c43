"""Write benchmarks/export.md: compare exported graphs with their model, in answers and in time.

Answers are compared on the whole test set of Fashion-MNIST. Times are taken in turns in one process, so that other load on
the machine slows all contenders alike.
"""

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnxruntime
import torch
from torch import Tensor

import raytraced as rt
from experiments import BENCHMARKS
from experiments.benchmark.timing import LONG, Contender, interleave
from raytraced.io.export import OUTPUTS, export
from raytraced.models.output import Model
from raytraced.tasks.images.loading import load

MODEL, DATA, SIZES = "mre-fashion-mnist", "fashion-mnist", (1, 7, 1000)
NO_LIMIT = 10_000  # experts: more than any grid has
Answer = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]  # images (B, C, H, W) -> logits, num_experts, active


class Parity(NamedTuple):
    """How the answers of a graph differ from the model's over a whole data set."""

    other_labels: int
    other_counts: int
    other_sets: int
    largest_difference: float


class Graph(NamedTuple):
    """An exported graph, and the time and size of the export."""

    answer: Answer
    seconds: float
    num_bytes: int


def make_onnx(model: Model, folder: Path) -> Graph:
    """The model in ONNX Runtime, on one thread."""
    path, started = folder / "model.onnx", time.perf_counter()
    export(model, path, "onnx")
    seconds = time.perf_counter() - started
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    limit = np.array(NO_LIMIT)

    def answer(images: Tensor) -> tuple[Tensor, ...]:
        found = session.run(list(OUTPUTS), {"images": images.numpy(), "max_experts": limit})
        return tuple(map(torch.from_numpy, found))

    return Graph(answer, seconds, path.stat().st_size)


def make_torch(model: Model, folder: Path) -> Graph:
    """The model as torch.export.load gives it back."""
    path, started = folder / "model.pt2", time.perf_counter()
    export(model, path, "torch")
    seconds = time.perf_counter() - started
    module, limit = torch.export.load(path).module(), torch.tensor(NO_LIMIT)

    def answer(images: Tensor) -> tuple[Tensor, ...]:
        found = module(images, limit)
        return tuple(found[name] for name in OUTPUTS)

    return Graph(answer, seconds, path.stat().st_size)


def ask(model: Model) -> Answer:
    """The model in PyTorch."""

    def answer(images: Tensor) -> tuple[Tensor, ...]:
        out = model(images)
        return out.logits, out.num_experts, out.routes[0].active

    return answer


def compare(answer: Answer, wanted: Answer, images: Tensor, size: int) -> Parity:
    """Count differing answers over all images, in batches of this size."""
    labels = counts = sets = 0
    largest = 0.0
    for batch in images.split(size):
        (logits, count, active), (logits0, count0, active0) = answer(batch), wanted(batch)
        labels += int((logits.argmax(-1) != logits0.argmax(-1)).sum())
        counts += int((count != count0).sum())
        sets += int((active != active0).flatten(1).any(-1).sum())
        largest = max(largest, float((logits - logits0).abs().max()))
    return Parity(labels, counts, sets, largest)


def measure_latency(contenders: dict[str, Answer], images: Tensor, size: int) -> dict[str, float]:
    """Contender → median milliseconds per batch, on one thread."""
    batch = images[:size]
    calls = [Contender(name, lambda answer=answer: answer(batch)) for name, answer in contenders.items()]
    timings = interleave(calls, LONG)
    return {one.name: 1000 * timings.median(one) for one in calls}


def in_plain(answer: Answer) -> Answer:
    """The same contender without the compiled kernels."""

    def run(images: Tensor) -> tuple[Tensor, ...]:
        with rt.kernels.use("plain"):
            return answer(images)

    return run


def write_page(
    num_images: int,
    graphs: dict[str, Graph],
    parities: dict[tuple[str, int], Parity],
    times: dict[int, dict[str, float]],
) -> str:
    """The text of the page."""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, onnxruntime {onnxruntime.__version__}"
    names = list(next(iter(times.values())))
    lines = [
        "# Exported graphs beside the model",
        "",
        "Written by `python -m experiments.export`. The model is the shipped",
        f"`{MODEL}`, a grid of 4 × 8 experts; the images are the {num_images:,} of the data set's test part.",
        "",
        f"{versions}, raytraced {rt.__version__}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores.",
        "",
        "## The same answers",
        "",
        "How many images have another label, another number of experts or another set of them than the",
        "model has, and the largest difference of a logit.",
        "",
        "| graph | batch | other labels | other counts | other sets | largest difference |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for (name, size), one in parities.items():
        counted = " | ".join(map(str, one[:3]))
        lines.append(f"| {name} | {size:,} | {counted} | {one.largest_difference:.1e} |")
    lines += ["", "## Export", "", "| graph | seconds to write | KiB |", "|---|---:|---:|"]
    lines += [f"| {name} | {one.seconds:.1f} | {one.num_bytes / 1024:.0f} |" for name, one in graphs.items()]
    lines += [
        "",
        "## Latency",
        "",
        "Milliseconds per batch, and the ratio to the compiled kernels. One thread each; the median over",
        "samples that took turns in one process. Read the ratios: other work may have slowed all alike.",
        "",
        "| batch | " + " | ".join(names) + " |",
        "|---:|" + "---:|" * len(names),
    ]
    for size, row in times.items():
        cells = [f"{row[name]:.3g} ({row[name] / row[names[0]]:.2g})" for name in names]
        lines.append(f"| {size:,} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", default=str(BENCHMARKS / "export.md"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    model = rt.load(MODEL).requires_grad_(False)
    images = load(DATA).test.images
    with tempfile.TemporaryDirectory() as folder:
        graphs = {
            "ONNX Runtime": make_onnx(model, Path(folder)),
            "torch.export": make_torch(model, Path(folder)),
        }
        model_answer = ask(model)
        contenders = {"PyTorch, compiled kernels": model_answer}
        contenders |= {name: graph.answer for name, graph in graphs.items()}
        contenders["PyTorch, plain"] = in_plain(model_answer)
        with torch.no_grad():
            times = {size: measure_latency(contenders, images, size) for size in SIZES}
            parities = {}
            for name, graph in graphs.items():
                for size in SIZES:
                    parities[name, size] = compare(graph.answer, model_answer, images, size)
                    print(name, size, parities[name, size], flush=True)
    Path(asked.output).write_text(write_page(len(images), graphs, parities, times), encoding="utf-8")


if __name__ == "__main__":
    main()
