"""Do hard images run more experts? Rank correlations between the experts per image and another model's loss on it.

    python -m experiments.reproduce --only early-exit                     # trains the models
    python -m experiments.difficulty results/runs        # writes difficulty.md and hard.png beside it

The other model is of another kind and another seed: four dense blocks, seed 200, trained here as those in results/ are.
Test images; thresholds from validation images, the cheapest that loses at most 0.1 points. The aims were written down
before the runs, in benchmarks/aims.md.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.stats import spearmanr

from experiments import BENCHMARKS, RESULTS
from experiments.reproduce.canvas import card
from experiments.reproduce.command import find_plan
from experiments.reproduce.plan import FULL, Planner, Run
from experiments.reproduce.records import spread
from experiments.reproduce.tables import Table
from experiments.reproduce.variants import DATA_NAMES, DENSE_VARIANTS, MRE
from raytraced import load
from raytraced.tasks.registry import find_task
from raytraced.training.calibration import calibrate, evaluate_exits, first_confident_exit
from raytraced.training.loop import train

SEEDS = range(5)
NUM_SHOWN = 12
DENSE = next(one for one in DENSE_VARIANTS if one.label == "dense-4")


def losses_of_another(planner: Planner, data: str, work: Path) -> torch.Tensor:
    """The loss of the other model on every test image (n,)."""
    (run,) = planner.runs("main", [DENSE], [data], [200])
    folder = work / f"difficulty-{data}"
    if not (folder / "model.safetensors").exists():
        values = {"output": str(work), "name": folder.name}
        train(type(run.config)(**vars(run.config) | values), callbacks=())
    model, task = load(folder), find_task(data)
    losses = []
    for batch in test_batches(task, task.load_for(model, data, None)):
        with torch.no_grad():
            losses.append(task.target_losses(model(batch.inputs).logits, batch))
    return torch.cat(losses)


def test_batches(task: Any, data: Any) -> Any:
    """All test images in their order."""
    place = {"rank": 0, "world_size": 1, "device": torch.device("cpu")}
    return task.loader(data, "test", 1000, {}, shuffle=False, **place).epoch(0)


def study(run: Run, work: Path) -> dict[str, torch.Tensor]:
    """Experts that each test image runs with early exit, and to the end of its own sequence."""
    model, task = load(work / run.folder), find_task(run.data)
    data = task.load_for(model, run.data, None)
    confidence = calibrate(evaluate_exits(model, task, data, "validation", "layer"), 0.1)
    exits = evaluate_exits(model, task, data, "test", "layer")
    exit_n1 = first_confident_exit(exits.confidence, confidence)[:, None]
    return {"early exit": exits.experts.gather(1, exit_n1)[:, 0], "own": exits.experts[:, -1]}


def gallery(images: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]) -> Figure:
    """For each data set the test images that ran the fewest and the most experts."""
    title = "Test images that ran the fewest experts (upper rows) and the most (lower rows)"
    with card(title, 7.6, 1.35 * len(images) + 0.5) as figure:
        grid = figure.subplots(2 * len(images), NUM_SHOWN, squeeze=False)
        for axes in grid.flat:
            axes.set_axis_off()
        for number, (data, (pixels, fewest, most)) in enumerate(images.items()):
            for row, chosen in zip(grid[2 * number : 2 * number + 2], (fewest, most), strict=True):
                for axes, index in zip(row, chosen, strict=False):
                    one = pixels[index]
                    axes.imshow(one[0] if len(one) == 1 else one.transpose(1, 2, 0), cmap="gray_r")
            grid[2 * number, 0].set_title(DATA_NAMES[data], fontsize=8, loc="left")
        return figure


def main(work: Path) -> None:
    """Measure all data sets, and write the page and the figure."""
    planner, rows, images = find_plan(FULL, RESULTS), [], {}
    for data in [name for name, plan in FULL.data.items() if plan.compared]:
        hard = losses_of_another(planner, data, work)
        found: dict[str, list[float]] = {"early exit": [], "own": []}
        for run in planner.runs("main", [MRE], [data], SEEDS):
            lengths = study(run, work)
            for name, values in lengths.items():
                found[name].append(float(spearmanr(values.numpy(), hard.numpy())[0]))
            if run.seed == 0 and not FULL.data[data].wide:
                dataset = find_task(data).load(data, None)
                order = lengths["early exit"].argsort(stable=True).numpy()
                images[data] = dataset.test.images.numpy(), order[:NUM_SHOWN], order[-NUM_SHOWN:]
        cells = [f"{one.mean:.2f} ± {one.std:.2f}" for one in map(spread, found.values())]
        rows.append([DATA_NAMES[data], *cells, str(len(SEEDS))])
        print(rows[-1], flush=True)
    header = ["", "early exit", "no early exit", "seeds"]
    table = "\n".join(Table("", header, rows).lines())
    doc = (__doc__ or "").partition("\n\nThe other")[2]
    text = f"""# Do hard images run more experts?

Rank correlation (Spearman) over test images between the experts that an image runs and the loss of another model on it;
mean ± standard deviation over the seeds. The other{doc}
{table}
"""
    (BENCHMARKS / "difficulty.md").write_text(text, "utf-8")
    gallery(images).savefig(BENCHMARKS / "hard.png", dpi=150, metadata={"Software": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("work", type=Path, help="where `python -m experiments.reproduce` trained")
    torch.set_num_threads(1)
    main(parser.parse_args().work)
