"""Trained models for the package: the best seed on validation images, with a card."""

import shutil
from dataclasses import replace
from pathlib import Path

from experiments.reproduce.records import SHOWN_WITHIN, Record, Results
from experiments.reproduce.report import render
from experiments.reproduce.variants import DATA_NAMES, NAMES, SHIPPED_RECIPES
from raytraced.files import write_file
from raytraced.io.saving import PRETRAINED, load, save
from raytraced.tasks.registry import find_task
from raytraced.training.calibration import calibration, has_dial, measure_dial

MOST_BYTES = 1_000_000
RECIPE_FIELDS = ("optimizer", "lr", "lr_routing", "lr_experts", "schedule", "batch_size", "warmup", "weight_decay",
                 "clip", "label_smoothing", "target_experts", "anytime_loss", "exit_loss", "data_options")  # fmt: skip


def ship_all(results: Results, work: Path, folder: Path = PRETRAINED, data_root: str | None = None) -> list[Path]:
    """Ship every model of the table that was trained; return the files of weights."""
    shipped = []
    for name, (data, variant) in SHIPPED_RECIPES.items():
        records = results.of(data, variant.label)
        if records:
            best = max(records, key=lambda one: one.validation["accuracy"])
            shipped.append(ship(name, best, work / best.folder, folder, data_root))
    return shipped


def ship(name: str, record: Record, run: Path, folder: Path, data_root: str | None = None) -> Path:
    """Copy a run's weights into the package, with a card: data, recipe, accuracy, cost, budgets, and how to use it."""
    source, target = run / "model.safetensors", folder / f"{name}.safetensors"
    if not source.exists():
        raise ValueError(
            f"{source}: only the run's record is there; `python -m experiments.reproduce --only ship` trains it"
        )
    size = source.stat().st_size
    if size >= MOST_BYTES:
        raise ValueError(f"{source}: has {size:,} bytes; a shipped model must stay under {MOST_BYTES:,}")
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    complete_card(name, record, target, data_root)
    return target


def complete_card(name: str, record: Record, target: Path, data_root: str | None = None) -> None:
    """Measure what users of a shipped model ask for, save it in the model's card, and write the card to read beside it."""
    model, task = load(target), find_task(record.data)
    data = task.load_for(model, record.data, data_root)
    # Budgets are measured with greedy sequences: a model that is evaluated with drawn ones gets no table.
    dial = measure_dial(model, task, data) if has_dial(model) and record.config.select != "sample" else {}
    # Only a model that was trained for early exit gets a threshold.
    found = calibration(model, task, data, SHOWN_WITHIN, "layer") if record.early_exit else {}
    model.card = replace(model.card, calibration=found, dial=dial)
    save(model, target)
    config = record.config
    recipe = config.model_options | {key: value for key in RECIPE_FIELDS if (value := getattr(config, key))}
    names = {"name": name, "title": NAMES[record.label], "data": DATA_NAMES[record.data], "size": target.stat().st_size}
    rows = dial.get("rows", [])
    content = render("card.md", record=record, recipe=recipe, dial=rows, **names)
    write_file(target.with_suffix(".md"), content + "\n")
