"""Do hard bytes run more experts? Rank correlations with another model's loss, and a coloured passage.

    python -m experiments.reproduce --only text                          # trains the models
    python -m experiments.difficulty_text results/text/runs   # writes difficulty-text.md and hard-text.png beside it

The other model has four dense blocks in each block of the decoder, and another seed. All test bytes of the evaluation. The
aims are in benchmarks/aims-text.md; two of them were added after other runs were known.
"""

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from scipy.stats import spearmanr

from experiments import BENCHMARKS, RESULTS
from experiments.reproduce.canvas import card
from experiments.reproduce.command import find_plan
from experiments.reproduce.plan import TEXT, Run, collect_runs
from experiments.reproduce.records import spread
from experiments.reproduce.tables import Table
from experiments.reproduce.variants import DATA_NAMES
from raytraced import load
from raytraced.colours import INK
from raytraced.tasks.registry import find_task

SHOWN = ("mre", "mre-range")
LINES, WIDTH = 12, 64


def study(run: Run, work: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bytes, experts and nats of every target (n, T) of the test split."""
    model, task = load(work / run.folder), find_task(run.data)
    data: Any = task.load_for(model, run.data, None)
    place = {"rank": 0, "world_size": 1, "device": torch.device("cpu")}
    parts = []
    with torch.no_grad():
        for batch in task.loader(data, "test", 64, {}, shuffle=False, **place).epoch(0):
            out = model(batch.inputs)
            parts.append((batch.targets, out.num_experts, task.target_losses(out.logits, batch)))
    targets, experts, nats = (torch.cat(column) for column in zip(*parts, strict=True))
    return targets, experts, nats


def passage(targets_nT: torch.Tensor, experts_nT: torch.Tensor) -> Figure:
    """The first windows; the colour behind a byte shows how many experts ran to predict it."""
    low, high = (float(experts_nT.float().quantile(q)) for q in (0.02, 0.98))
    scale = colormaps["cividis"]
    title = f"enwik8, test bytes: a darker byte ran fewer experts ({low:g} or less … {high:g} or more)"
    with card(title, 9.6, 0.3 * LINES + 0.6) as figure:
        axes = figure.subplots()
        axes.set(xlim=(0, WIDTH), ylim=(LINES, 0))
        axes.set_axis_off()
        for line in range(LINES):
            for column in range(WIDTH):
                share = (float(experts_nT[line, column]) - low) / max(high - low, 1)
                colour, byte = scale(min(1.0, max(0.0, share))), int(targets_nT[line, column])
                axes.add_patch(Rectangle((column, line), 1, 1, facecolor=colour, edgecolor="none"))
                shown = chr(byte) if 33 <= byte < 127 else {10: "↵", 32: " "}.get(byte, "·")
                ink = "white" if share < 0.6 else INK
                axes.text(
                    column + 0.5, line + 0.5, shown, ha="center", va="center", color=ink, family="monospace", fontsize=9
                )
        return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    work = parser.parse_args().runs
    torch.set_num_threads(1)
    runs = collect_runs(["text"], find_plan(TEXT, RESULTS / "text"), None)
    trained = {
        (run.data, run.label, run.seed): run for run in runs if (work / run.folder / "model.safetensors").exists()
    }
    rows = []
    for data in TEXT.data:
        others = sorted(seed for name, label, seed in trained if (name, label) == (data, "dense-4"))
        for label in SHOWN:
            found, quarters = [], []
            for seed in sorted(seed for name, other, seed in trained if (name, other) == (data, label)):
                other_seed = next((other for other in others if other != seed), None)
                if other_seed is None:
                    continue
                targets, experts, _ = study(trained[data, label, seed], work)
                _, _, nats = study(trained[data, "dense-4", other_seed], work)
                found.append(float(spearmanr(experts.flatten(), nats.flatten()).statistic))
                order = experts.flatten().argsort(stable=True).chunk(4)
                quarters.append([float(nats.flatten()[part].mean()) / math.log(2) for part in order])
                if (data, label) == ("enwik8", "mre") and seed == 0:
                    passage(targets, experts).savefig(
                        BENCHMARKS / "hard-text.png", dpi=150, metadata={"Software": None}
                    )
            if found:
                rank = spread(found)
                ends = [f"{spread(q[at] for q in quarters).mean:.2f}" for at in (0, 3)]
                rows.append(
                    [f"{DATA_NAMES[data]}, {label}", f"{rank.mean:.2f} ± {rank.error:.2f}", f"{rank.num}", *ends]
                )
    header = ["", "rank correlation", "seeds", "bits of the 25 % of bytes with the fewest experts", "with the most"]
    note = (__doc__ or "").partition("\n\n")[2].partition("\n\n")[2].strip() + (
        " Bits per byte are those of the other model. Rank correlation: mean ± standard error over the seeds."
    )
    table = Table("Experts and difficulty, byte by byte", header, rows, note)
    source = "Written by `python -m experiments.difficulty_text`."
    (BENCHMARKS / "difficulty-text.md").write_text(
        "\n".join([table.markdown().replace("###", "#", 1), source, ""]), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
