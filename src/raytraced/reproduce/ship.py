"""Trained models for the package: the seed that did best on validation images, with a card that says what it is."""

import shutil
from pathlib import Path

import jinja2

from raytraced.files import write_file
from raytraced.reproduce.records import Record, Results
from raytraced.reproduce.variants import DATA_NAMES, NAMES
from raytraced.saving import PRETRAINED

MOST_BYTES = 1_000_000

# Shipped name → data set and label.
SHIPPED = {
    "mre-mnist": ("mnist", "mre"),
    "mre-fashion-mnist": ("fashion-mnist", "mre"),
    "mre-cifar10": ("cifar10", "mre"),
    "mre-digits": ("digits", "mre"),
    "mre-paper-fashion-mnist": ("fashion-mnist", "mre-paper"),
}
RECIPE_FIELDS = ("optimizer", "lr", "lr_routing", "lr_experts", "schedule", "batch_size", "warmup", "weight_decay",
                 "clip", "label_smoothing", "expert_cost", "anytime_loss", "data_options")  # fmt: skip


def ship_all(results: Results, work: Path, folder: Path = PRETRAINED) -> list[Path]:
    """Ship every model of the table that was trained; returns the files of weights."""
    shipped = []
    for name, (data, label) in SHIPPED.items():
        records = results.of(data, label)
        if records:
            best = max(records, key=lambda one: one.validation["accuracy"])
            shipped.append(ship(name, best, work / best.folder, folder))
    return shipped


def ship(name: str, record: Record, run: Path, folder: Path) -> Path:
    """Copy the weights of a run into the package and write the card beside them."""
    source, target = run / "model.safetensors", folder / f"{name}.safetensors"
    if not source.exists():
        raise ValueError(
            f"{source}: is not there, only the run's record is; `raytraced reproduce --only ship` trains it"
        )
    size = source.stat().st_size
    if size >= MOST_BYTES:
        raise ValueError(f"{source}: has {size:,} bytes; a shipped model must stay under {MOST_BYTES:,}")
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    write_file(folder / f"{name}.md", card_text(name, record, size))
    return target


def card_text(name: str, record: Record, size: int) -> str:
    """The model card: data, recipe, accuracy, cost, and the commands that use it and make it again."""
    config = record.config
    template = Path(__file__).with_name("card.md").read_text(encoding="utf-8")
    return (
        jinja2.Environment(trim_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined)
        .from_string(template)
        .render(
            name=name,
            record=record,
            size=size,
            title=NAMES[record.label],
            data=DATA_NAMES[record.data],
            num_experts=sum(map(len, record.test["expert_load"])),
            steps=[row["accuracy"] for row in record.budgets],
            recipe=config.model_options | {key: value for key in RECIPE_FIELDS if (value := getattr(config, key))},
        )
    )
