"""Every model on one data set at one seed, through the command line; what is done already is not done again.

    python benchmarks/compare_models.py                        all models on Fashion-MNIST, five epochs
    python benchmarks/compare_models.py --only mre,top-k       some of them

Writes results/models-DATA.json and .md: accuracy, experts and multiply-adds (on validation images) and seconds an epoch: as the
runs took them, with whatever else the machine was doing, and in CPU time of training steps, measured side by side afterwards.
A first look at one seed, a learning rate for all and few epochs: not a verdict.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

STEPS_A_ROUND, ROUNDS = 10, 7

# A row of the table: its name, the model, its options.
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "mre": ("mre", {}),
    "mre-paper": ("mre-paper", {}),
    "top-k": ("top-k", {}),
    "top-k, balance 0.01": ("top-k", {"balance": 0.01}),
    "threshold": ("threshold", {}),
    "mlp-total": ("mlp-total", {}),
    "mlp-avg": ("mlp-avg", {}),
    "ada-k": ("ada-k", {}),
    "dense, 1 block": ("dense", {"num_blocks": 1}),
    "dense, 2 blocks": ("dense", {"num_blocks": 2}),
    "dense, 4 blocks": ("dense", {"num_blocks": 4}),
    "dense, 8 blocks": ("dense", {"num_blocks": 8}),
    "aux-free": ("aux-free", {}),
    "top-any": ("top-any", {}),
    "null-experts": ("null-experts", {}),
    "chain": ("chain", {}),
    "multi-exit": ("multi-exit", {}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="fashion-mnist")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=None, help="rows, separated by commas")
    parser.add_argument("--runs", type=Path, default=Path("runs") / "compare-models")
    parser.add_argument("--results", type=Path, default=Path("results"))
    arguments = parser.parse_args()
    names = list(ROWS) if arguments.only is None else [name.strip() for name in arguments.only.split(",")]
    unknown = [name for name in names if name not in ROWS]
    if unknown:
        parser.error(f"--only {unknown[0]}: must be one of {'; '.join(ROWS)}")
    for name in names:
        train(name, arguments)
    write_tables(arguments)


def run_folder(name: str, arguments: argparse.Namespace) -> Path:
    """Where the run of a row lives: the same place each time, so that a second start finds it."""
    plain = name.replace(", ", "-").replace(" ", "-")
    return Path(arguments.runs) / f"{arguments.data}-{arguments.epochs}-epochs-seed-{arguments.seed}-{plain}"


def train(name: str, arguments: argparse.Namespace) -> None:
    """Train one row, go on with it, or leave it if it is done."""
    run = run_folder(name, arguments)
    if (run / "summary.json").exists():
        return
    model, options = ROWS[name]
    command = [sys.executable, "-m", "raytraced.cli"]
    if run.exists():
        command += ["resume", str(run)]
    else:
        command += ["train", "--data", arguments.data, "--model", model, "--epochs", str(arguments.epochs)]
        command += ["--seed", str(arguments.seed), "--threads", "1", "--output", str(run.parent), "--name", run.name]
        command += [f"--model_options.{key}={value}" for key, value in options.items()]
    print(name, flush=True)
    subprocess.run(command, check=True)


def row(name: str, arguments: argparse.Namespace) -> dict[str, Any] | None:
    """The figures of a run that is over."""
    import torch

    from raytraced import data
    from raytraced.cost import measure
    from raytraced.saving import load_with_card

    run = run_folder(name, arguments)
    if not (run / "summary.json").exists():
        return None
    torch.set_num_threads(1)
    summary = json.loads((run / "summary.json").read_text())
    model, card = load_with_card(run)
    split = data.load(arguments.data).validation
    mean, std = (torch.tensor(values)[:, None, None] for values in (card.mean, card.std))
    return {
        "model": ROWS[name][0],
        "options": ROWS[name][1],
        "validation_accuracy": summary["validation"]["accuracy"],
        "test_accuracy": summary["test"]["accuracy"],
        "seconds_an_epoch": summary["seconds"] / summary["epochs"],
        **asdict(measure(model, (split.images / 255 - mean) / std)),
    }


def cpu_seconds_an_epoch(names: list[str], arguments: argparse.Namespace) -> dict[str, float]:
    """CPU time of an epoch's training steps in one thread: the median of rounds in which every model has its turn."""
    import torch

    from raytraced import data
    from raytraced.models import build_model
    from raytraced.training.config import TrainConfig
    from raytraced.training.objective import Objective
    from raytraced.training.optim import build_optimizer

    torch.set_num_threads(1)
    dataset = data.load(arguments.data)
    config = TrainConfig(data=arguments.data)
    loader = data.Loader(dataset.train, config.batch_size, mean=dataset.mean, std=dataset.std, seed=arguments.seed)
    batches = [batch for batch, _ in zip(loader.epoch(0), range(STEPS_A_ROUND), strict=False)]
    steppers = {}
    for name in names:
        model, options = ROWS[name]
        torch.manual_seed(arguments.seed)
        built = build_model(model, dataset.image_shape, dataset.num_classes, **options)
        steppers[name] = (Objective(built, config), build_optimizer(built, config))
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for round_index in range(ROUNDS + 1):
        for name, (objective, optimizer) in steppers.items():
            start = time.process_time()
            for step, batch in enumerate(batches):
                optimizer.zero_grad()
                objective(batch.images, batch.labels, batch.rows, step, len(batch.labels)).loss.backward()
                optimizer.step()
            if round_index:  # the first round warms up
                seconds[name].append((time.process_time() - start) / len(batches) * len(loader))
    return {name: statistics.median(values) for name, values in seconds.items()}


def write_tables(arguments: argparse.Namespace) -> None:
    """results/models-DATA.json and .md of all rows that are over."""
    rows = {name: figures for name in ROWS if (figures := row(name, arguments)) is not None}
    for name, seconds in cpu_seconds_an_epoch(list(rows), arguments).items():
        rows[name]["cpu_seconds_an_epoch"] = seconds
    arguments.results.mkdir(exist_ok=True)
    path = arguments.results / f"models-{arguments.data}"
    settings = {"data": arguments.data, "epochs": arguments.epochs, "seed": arguments.seed, "threads": 1}
    path.with_suffix(".json").write_text(json.dumps({"settings": settings, "rows": rows}, indent=2) + "\n")
    lines = [
        f"# Every model on {arguments.data}: {arguments.epochs} epochs, seed {arguments.seed}, one thread",
        "",
        "One seed, one learning rate for all and few epochs: a first look, not a verdict. Experts, parameters used and",
        "multiply-adds are means over the validation images, routing included. CPU s: of the training steps of an epoch,",
        "measured side by side; the other seconds are those of the runs, whatever else the machine was doing.",
        "Written by `python benchmarks/compare_models.py`.",
        "",
        "| model | validation accuracy | experts | multiply-adds | of them routing | parameters | used | CPU s | s an epoch |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {100 * r['validation_accuracy']:.2f} % | {r['experts']:.2f} | {r['multiply_adds']:,.0f} "
        f"| {r['routing_multiply_adds']:,.0f} | {r['parameters']:,} | {r['used_parameters']:,.0f} "
        f"| {r['cpu_seconds_an_epoch']:.1f} | {r['seconds_an_epoch']:.1f} |"
        for name, r in rows.items()
    ]
    path.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{path}.json and .md: {len(rows)} of {len(ROWS)} models")


if __name__ == "__main__":
    main()
