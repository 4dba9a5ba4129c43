"""How fast language models generate text: bytes per second, one text at a time and 32 at once, on one thread.

    python -m experiments.reproduce --only text                      # trains the models
    python -m experiments.generation results/text/runs    # writes generation.md beside it

Seed 0 of each model on enwik8, with a cache of keys and values; 48 bytes after a prompt of 16 test bytes. Models are timed
in turns; a time is the median.
"""

import argparse
from pathlib import Path
from typing import Any

import torch

from experiments import BENCHMARKS, RESULTS
from experiments.benchmark.timing import Contender, Settings, interleave
from experiments.reproduce.command import find_plan
from experiments.reproduce.plan import TEXT, collect_runs
from experiments.reproduce.tables import Table
from raytraced import load
from raytraced.tasks.registry import find_task

SETTINGS = Settings(rounds=15, sample_seconds=0.05, seconds=120, least_rounds=5, latencies=0, train_steps=0)
NUM_BYTES = 48


def writer(name: str, model: Any, prompts: torch.Tensor, experts: float) -> Contender:
    """Every call continues the same prompts, with the most probable byte each time."""

    def run() -> None:
        for _ in model.generate(prompts, NUM_BYTES, temperature=0.0):
            pass

    return Contender(name, run, experts=experts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    work = parser.parse_args().runs
    torch.set_num_threads(1)
    planner = find_plan(TEXT, RESULTS / "text")
    runs = [run for run in collect_runs(["text"], planner, ("enwik8",)) if run.seed == 0]
    models = {run.label: load(work / run.folder) for run in runs if (work / run.folder / "model.safetensors").exists()}
    task = find_task("enwik8")
    data: Any = task.load_for(next(iter(models.values())), "enwik8", None)
    place = {"rank": 0, "world_size": 1, "device": torch.device("cpu")}
    prompts = next(iter(task.loader(data, "test", 32, {}, shuffle=False, **place).epoch(0))).inputs[:, :16]
    times = {}
    for size in (1, 32):
        contenders = []
        for label, model in models.items():
            with torch.no_grad():
                experts = float(model(prompts).num_experts.float().mean())
            contenders.append(writer(label, model, prompts[:size], experts))
        times[size] = interleave(contenders, SETTINGS)
    rows = []
    for one in contenders:
        speeds = [size * NUM_BYTES / times[size].median(one) for size in times]
        against = [times[size].median(one) / times[size].median(contenders[0]) for size in times]
        rows.append(
            [
                one.name,
                f"{one.experts:.2f}",
                f"{speeds[0]:.0f}",
                f"{against[0]:.2f}",
                f"{speeds[1]:.0f}",
                f"{against[1]:.2f}",
            ]
        )
    header = [
        "model",
        "experts per block",
        "bytes per second, one text",
        "time over mre's",
        "32 texts",
        "time over mre's",
    ]
    note = (__doc__ or "").partition("\n\n")[2].partition("\n\n")[2].strip()
    table = Table("Language models: speed of generation", header, rows, note)
    source = "Written by `python -m experiments.generation`."
    (BENCHMARKS / "generation.md").write_text(
        "\n".join([table.markdown().replace("###", "#", 1), source, ""]), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
