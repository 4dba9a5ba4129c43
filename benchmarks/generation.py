"""How fast language models write: bytes a second, one text at a time and 32 at once, side by side, one thread.

    raytraced reproduce --only text                      # trains the models
    python benchmarks/generation.py results/text/runs    # writes generation.md beside it

Seed 0 of each model on enwik8, with its cache of keys and values; 48 bytes after a prompt of 16 test bytes. Contenders take
turns; a time is the median of them.
"""

import argparse
from pathlib import Path
from typing import Any

import torch

from raytraced import load
from raytraced.benchmark.timing import Contender, Settings, interleave
from raytraced.commands.reproduce import find_plan
from raytraced.reproduce.plan import TEXT, collect_runs
from raytraced.reproduce.tables import Table
from raytraced.tasks.table import find_task

HERE = Path(__file__).parent
SETTINGS = Settings(rounds=15, sample_seconds=0.05, seconds=120, least_rounds=5, latencies=0, train_steps=0)
NUM_BYTES = 48


def writer(name: str, model: Any, prompts: torch.Tensor, experts: float) -> Contender:
    """Every call goes on with the same prompts; the likeliest byte each time."""

    def run() -> None:
        for _ in model.generate(prompts, NUM_BYTES, temperature=0.0):
            pass

    return Contender(name, run, experts=experts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    work = parser.parse_args().runs
    torch.set_num_threads(1)
    planner = find_plan(TEXT, HERE.parent / "results" / "text")
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
                experts = float(model(prompts).num_experts.float().mean()) / 2
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
    header = ["model", "experts a block", "bytes a second, one text", "time, of mre's", "32 texts", "time, of mre's"]
    note = (__doc__ or "").partition("\n\n")[2].partition("\n\n")[2].strip()
    table = Table("Language models: how fast they write", header, rows, note)
    told = "Written by `benchmarks/generation.py`."
    (HERE / "generation.md").write_text(
        "\n".join([table.markdown().replace("###", "#", 1), told, ""]), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
