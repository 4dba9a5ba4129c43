"""Train the language model of the package and write it there, with its card and its dial: `python -m experiments.ship_text`.

A run that was stopped continues; a run that has ended is shipped as it is, and with --as-it-is also one that has not, with
its best weights so far. The text is the package's own: ten plays.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.reproduce.report import render
from raytraced.files import write_file
from raytraced.io.saving import PRETRAINED, load, save
from raytraced.models.output import num_parameters
from raytraced.tasks.registry import find_task
from raytraced.training.calibration import measure_dial, measure_means
from raytraced.training.config import TrainConfig, preset_values
from raytraced.training.loop import train
from raytraced.training.run_folder import RunFolder

NAME, DATA = "mre-text", "shakespeare"
MOST_BYTES = 3_000_000
# One checkpoint for all budgets: `stop` is drawn from a range in training. Slow gates, as docs/lab/paths.md has them.
TRAINING: dict[str, Any] = {
    "epochs": 30, "batch_size": 8, "lr": 6e-3, "lr_routing": 6e-4, "warmup": 0.2, "seed": 0,
    "data_options": {"context": 128, "steps": 500},
    "model_options": {"dim": 64, "hidden": 128, "depth": 4, "num_experts": 8, "stop_range": [0.02, 1]},
}  # fmt: skip


def make_config(runs_dir: Path) -> TrainConfig:
    """The recipe of the shipped model."""
    values = preset_values("best", DATA, "gpt-mre") | TRAINING
    return TrainConfig(data=DATA, model="gpt-mre", runs_dir=str(runs_dir), name=NAME, **values)


def ship(run: RunFolder, folder: Path = PRETRAINED) -> Path:
    """Write the weights of a run, or its best so far, with the table of its dial, and a card; return the file of weights."""
    whole = run.path / "model.safetensors"
    source, target = whole if whole.exists() else run.best, folder / f"{NAME}.safetensors"
    if not source.exists():
        raise ValueError(f"{run.path}: no epoch is complete; `python -m experiments.ship_text` continues it")
    model, task = load(source).eval(), find_task(DATA)
    data = task.load_for(model, DATA, None)
    test, validation = (measure_means(model, task, data, split) for split in ("test", "validation"))
    model.card = replace(model.card, dial=measure_dial(model, task, data))
    save(model, target)
    size = target.stat().st_size
    if size >= MOST_BYTES:
        target.unlink()
        raise ValueError(f"{target}: would have {size:,} bytes; the shipped text model must stay under {MOST_BYTES:,}")
    config = run.config
    steps = len(run.read_metrics()) * config.data_options["steps"]
    planned = TRAINING["epochs"] * config.data_options["steps"]
    figures = {
        "size": size,
        "parameters": num_parameters(model),
        "config": config,
        "test": test,
        "validation": validation,
    }
    figures |= {"name": NAME, "dial": model.card.dial["rows"], "steps": steps, "planned": planned}
    write_file(folder / f"{NAME}.md", render("text_card.md", **figures) + "\n")
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), help="folder of the run")
    parser.add_argument("--as-it-is", action="store_true", help="do not train: ship what there is")
    options = parser.parse_args()
    config = make_config(options.runs_dir)
    run = RunFolder(Path(config.runs_dir) / NAME)
    if run.read_summary() is None and not options.as_it_is:
        train(config, run if (run.path / "config.yaml").exists() else None)
    print(ship(run))


if __name__ == "__main__":
    main()
