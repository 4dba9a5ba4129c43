"""Do hard images run more experts? Rank correlations between the experts per image and another model's loss on it.

    python -m experiments.difficulty WORK                   # trains what is missing in WORK, measures it, writes the page
    python -m experiments.difficulty WORK --only LABEL      # measures this model alone, and keeps what is known of the others
    python -m experiments.difficulty WORK --table           # writes the page from benchmarks/difficulty.npz alone

The other model is of another kind and another seed: four dense blocks, seed 200, trained as those in results/ are. Test
images; thresholds from validation images, the cheapest that loses at most 0.1 points. The aims are in benchmarks/aims.md.
They and the criterion of the readings have the same time stamp as their results in the version history: for these two the
order cannot be shown.

Axes: n images, S exits.
"""

import argparse
from collections.abc import Iterator
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
from experiments.reproduce.reading_aims import BEHIND, difference
from experiments.reproduce.records import Spread, Store, spread
from experiments.reproduce.tables import Table, count_seeds
from experiments.reproduce.variants import DATA_NAMES, DENSE_VARIANTS, EXIT_BASELINES, MRE, MRE_BUDGETS_EXITS, Variant
from raytraced import load
from raytraced.early_exit import ExitPolicy, answers
from raytraced.tasks.registry import find_task
from raytraced.training.calibration import calibrate, evaluate_exits, first_confident_exit
from raytraced.training.loop import train

# The models, and the number of their seeds.
MODELS = {"mre": 5, "threshold-exits": 5, "mre-budgets-exits": 5}
OTHER_SEED = 200
NUM_SHOWN = 12
DENSE = next(one for one in DENSE_VARIANTS if one.label == "dense-4")
THRESHOLD = next(one for one in EXIT_BASELINES if one.label == "threshold-exits")
VARIANTS: dict[str, Variant] = {one.label: one for one in (MRE, THRESHOLD, MRE_BUDGETS_EXITS)}
FILE = BENCHMARKS / "difficulty.npz"
UNION_PARTS = ("mnist", "fashion-mnist", "cifar10")  # ten classes each, in this order
COLUMNS = ("early exit", "no early exit", "gain, early exit", "gain, no early exit")


Arrays = dict[str, np.ndarray]
"""`data/hard`: losses of the other model (n,); `data/label/seed/name`: early, end (experts), first, last (losses) (n,)."""


def trained(run: Run, work: Path) -> Path:
    """The folder of a run; it is trained if it is missing."""
    folder = work / run.folder
    if not (folder / "model.safetensors").exists():
        values = {"runs_dir": str(work), "name": folder.name}
        train(type(run.config)(**vars(run.config) | values), callbacks=())
    return folder


def losses_of_another(planner: Planner, data: str, work: Path) -> torch.Tensor:
    """The loss of the other model on every test image (n,)."""
    (run,) = planner.runs("main", [DENSE], [data], [OTHER_SEED])
    model, task = load(trained(run, work)), find_task(data)
    losses = []
    for batch in test_batches(task, task.load_for(model, data, None)):
        with torch.no_grad():
            losses.append(task.target_losses(model(batch.inputs).logits, batch))
    return torch.cat(losses)


def test_batches(task: Any, data: Any) -> Any:
    """All test images in their order."""
    place = {"rank": 0, "world_size": 1, "device": torch.device("cpu")}
    return task.loader(data, "test", 1000, {}, shuffle=False, **place).epoch(0)


def study(run: Run, work: Path) -> Arrays:
    """What each test image ran with early exit and to the end, and its losses at the first exit and at the end."""
    model, task = load(trained(run, work)), find_task(run.data)
    data = task.load_for(model, run.data, None)
    confidence = calibrate(evaluate_exits(model, task, data, "validation", "layer"), 0.1)
    exits = evaluate_exits(model, task, data, "test", "layer")
    exit_n1 = first_confident_exit(exits.confidence, confidence)[:, None]
    first, last = (torch.cat(losses) for losses in zip(*ends(model, task, data), strict=True))
    early, end = exits.experts.gather(1, exit_n1)[:, 0], exits.experts[:, -1]
    report_accuracy(run, float(exits.whole[:, 0].mean()))
    return {
        "early": early.numpy().astype(np.uint8),
        "end": end.numpy().astype(np.uint8),
        "first": first.numpy().astype(np.float16),
        "last": last.numpy().astype(np.float16),
    }


@torch.no_grad()
def ends(model: Any, task: Any, data: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The losses at the first exit and at the end, batch by batch (n,)."""
    for batch in test_batches(task, data):
        outputs = list(answers(lambda: model.exits(batch.inputs, "layer"), ExitPolicy()))  # noqa: B023
        yield tuple(task.target_losses(outputs[at].logits, batch) for at in (0, -1))  # type: ignore[misc]


def report_accuracy(run: Run, accuracy: float) -> None:
    """Print the accuracy beside that of the record: a run that was trained again need not be the same."""
    known = Store(RESULTS / "records").records.get(run.key)
    print(
        f"{run.key}: {accuracy:.2%}, record {known.accuracy:.2%}" if known else f"{run.key}: {accuracy:.2%}", flush=True
    )


def correlations(hard_n: np.ndarray, run: Arrays) -> list[float]:
    """Rank correlations of experts with the other model's loss, and with the gain from running on.

    Args:
        hard_n: The loss of the other model.
        run: The arrays of one model.

    Returns:
        With early exit and without it: of experts and `hard_n`; then of experts and the loss at the first exit less that at
        the end.
    """
    gain_n = run["first"].astype(np.float32) - run["last"].astype(np.float32)
    return [float(spearmanr(run[name], other)[0]) for other in (hard_n, gain_n) for name in ("early", "end")]


def runs_in(arrays: Arrays, data: str) -> dict[str, list[Arrays]]:
    """Label → the arrays of every seed."""
    found: dict[tuple[str, str], Arrays] = {}
    for key, values in arrays.items():
        name, *rest = key.split("/")
        if name == data and len(rest) == 3:
            found.setdefault((rest[0], rest[1]), {})[rest[2]] = values
    runs: dict[str, list[Arrays]] = {}
    for (label, _), run in found.items():
        runs.setdefault(label, []).append(run)
    return runs


def make_rows(arrays: Arrays, data: str) -> Iterator[list[str]]:
    """The rows of one data set: every model, on the union also within each part."""
    hard_n = arrays[f"{data}/hard"]
    parts: dict[str, np.ndarray] = {DATA_NAMES[data]: np.full(len(hard_n), True)}
    if f"{data}/part" in arrays:
        parts |= {
            f"Union, {DATA_NAMES[name]} alone": arrays[f"{data}/part"] == at for at, name in enumerate(UNION_PARTS)
        }
    for label, runs in runs_in(arrays, data).items():
        for name, inside_n in parts.items():
            found = [
                correlations(hard_n[inside_n], {key: value[inside_n] for key, value in run.items()}) for run in runs
            ]
            columns = [spread(column) for column in zip(*found, strict=True)]
            errors = [f" ± {one.error:.2f}" if one.num > 1 else "" for one in columns]
            cells = [f"{one.mean:.2f}{error}" for one, error in zip(columns, errors, strict=True)]
            yield [name if label == MRE.label else f"{name}, {label}", *cells, count_seeds([len(runs)])]


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


def measure(work: Path, models: dict[str, int], arrays: Arrays) -> Arrays:
    """Measure some models on all data sets, beside what is known of others; draw the gallery if ours is among them.

    Args:
        work: Folder of the runs.
        models: Label → number of seeds.
        arrays: What is known.
    """
    planner, images, arrays = find_plan(FULL, RESULTS), {}, dict(arrays)
    for label, num in models.items():
        for data in [name for name, plan in FULL.data.items() if plan.compared]:
            if f"{data}/hard" not in arrays:
                arrays[f"{data}/hard"] = losses_of_another(planner, data, work).numpy().astype(np.float16)
            for run in planner.runs("main", [VARIANTS[label]], [data], range(num)):
                found = study(run, work)
                arrays |= {f"{data}/{run.label}/{run.seed}/{name}": values for name, values in found.items()}
                if label == MRE.label and run.seed == 0:
                    dataset = find_task(data).load(data, None)
                    if FULL.data[data].wide:
                        arrays[f"{data}/part"] = (dataset.test.labels.numpy() // 10).astype(np.uint8)
                    else:
                        order = found["early"].argsort(kind="stable")
                        images[data] = dataset.test.images.numpy(), order[:NUM_SHOWN], order[-NUM_SHOWN:]
    if images:
        gallery(images).savefig(BENCHMARKS / "hard.png", dpi=150, metadata={"Software": None})
    return arrays


def spreads(arrays: Arrays, data: str, label: str) -> list[Spread]:
    """The correlations of a model over its seeds, in the order of COLUMNS."""
    found = [correlations(arrays[f"{data}/hard"], run) for run in runs_in(arrays, data)[label]]
    return [spread(column) for column in zip(*found, strict=True)]


def second_recipe(arrays: Arrays) -> str:
    """Rule 4 of benchmarks/aims-images.md: the correlations of the second recipe against those of ours, in a sentence."""
    ours, known = MRE_BUDGETS_EXITS.label, [name for name, plan in FULL.data.items() if plan.compared]
    if any(len(runs_in(arrays, data).get(label, ())) < MODELS[label] for data in known for label in (ours, MRE.label)):
        return f"Rule 4 of aims-images.md is not decided yet: `{ours}` was not measured."
    lower = []
    for data in known:
        pairs = zip(spreads(arrays, data, ours), spreads(arrays, data, MRE.label), COLUMNS[:2], strict=False)
        lower += [
            f"{DATA_NAMES[data]}, {name}" for one, other, name in pairs if difference(one, other).verdict == BEHIND
        ]
    found = f"fails: lower on {'; '.join(lower)}" if lower else "holds"
    return f"Rule 4 of aims-images.md, correlations of `{ours}` at least those of `{MRE.label}`, {found}."


def page(arrays: Arrays) -> str:
    """The page, from the arrays alone."""
    names = [data for data in FULL.data if f"{data}/hard" in arrays]
    rows = [row for data in names for row in make_rows(arrays, data)]
    table = "\n".join(Table("", ["", *COLUMNS, "models"], rows).lines())
    doc = (__doc__ or "").partition("\n\nThe other")[2].partition("\n\nAxes")[0]
    return f"""# Do hard images run more experts?

Rank correlation (Spearman) over test images between the experts that an image runs and the loss of another model on it;
mean ± standard error over the seeds. The other{doc}

*Gain*: the same with the loss at the first exit less that at the end in place of the other model's loss, so whether images
that gain more by experts run more of them. Rows without a name of a model are of our recipe, those of `mre-budgets-exits` of
the second recipe, the others of a baseline that varies its number of experts too; all have the same loss on exits. On the
union a model may tell the data sets apart; the rows *alone* are within one of them.

{table}

{second_recipe(arrays)}

Experts and losses of every image are in difficulty.npz. Written by `python -m experiments.difficulty`.
"""


def main(work: Path, only: str | None, table: bool) -> None:
    """Measure, unless only the page is asked for; write the page."""
    if not table:
        known: Arrays = {}
        if only is not None:
            with np.load(FILE) as arrays:
                known = dict(arrays)
        np.savez_compressed(FILE, **measure(work, MODELS if only is None else {only: MODELS[only]}, known))
    with np.load(FILE) as arrays:
        text = page(dict(arrays))
    (BENCHMARKS / "difficulty.md").write_text(text, "utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("work", type=Path, help="folder of the runs")
    parser.add_argument("--only", choices=tuple(MODELS), help="measure this model alone")
    parser.add_argument("--table", action="store_true", help="train and measure nothing")
    torch.set_num_threads(1)
    main(**vars(parser.parse_args()))
