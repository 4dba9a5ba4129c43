"""Trained models for the package: the seed that did best on validation images, with a card that says what it is."""

import shutil
from pathlib import Path

from raytraced.reproduce.paper import DATA_NAMES, NAMES
from raytraced.reproduce.records import Record, Results
from raytraced.saving import PRETRAINED
from raytraced.training.files import write_file

MOST_BYTES = 1_000_000

# Shipped name → data set and label.
SHIPPED = {
    "mre-mnist": ("mnist", "mre"),
    "mre-fashion-mnist": ("fashion-mnist", "mre"),
    "mre-cifar10": ("cifar10", "mre"),
    "mre-digits": ("digits", "mre"),
    "mre-paper-fashion-mnist": ("fashion-mnist", "mre-paper"),
}


def ship_all(results: Results, work: Path, folder: Path = PRETRAINED) -> list[Path]:
    """Ship every model of the table that was trained; returns the files of weights."""
    shipped = []
    for name, (data, label) in SHIPPED.items():
        records = results.of(data, label)
        if records:
            best = max(records, key=lambda one: one.validation["accuracy"])
            shipped.append(ship(name, best, work / f"{best.key}-{best.digest}", folder))
    return shipped


def ship(name: str, record: Record, run: Path, folder: Path) -> Path:
    """Copy the weights of a run into the package and write the card beside them."""
    source = run / "model.safetensors"
    if not source.exists():
        raise ValueError(
            f"{source}: is not there, only the run's record is; `raytraced reproduce --only ship` trains it"
        )
    size = source.stat().st_size
    if size >= MOST_BYTES:
        raise ValueError(f"{source}: has {size:,} bytes; a shipped model must stay under {MOST_BYTES:,}")
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{name}.safetensors"
    shutil.copyfile(source, target)
    write_file(folder / f"{name}.md", card_text(name, record, size))
    return target


def card_text(name: str, record: Record, size: int) -> str:
    """The model card: data, recipe, accuracy, cost, and the commands that use it and make it again."""
    config = record.config
    options = {**config["model_options"], **{key: config[key] for key in RECIPE_FIELDS if config.get(key)}}
    recipe = [f"- {key}: {value}" for key, value in options.items()]
    prefixes = record.test.get("accuracy_by_prefix") or []
    steps = ", ".join(f"{100 * accuracy:.1f}" for accuracy in prefixes[:9])
    return "\n".join(
        [
            f"# {name}",
            "",
            f"{NAMES[record.label]}, trained on {DATA_NAMES.get(record.data, record.data)}; {size / 1000:.0f} KB, "
            f"{record.parameters:,} parameters.",
            "",
            "```python",
            "import raytraced",
            "",
            f'model = raytraced.load("{name}")',
            "```",
            "",
            f"    raytraced evaluate {name}",
            "",
            "## Accuracy and cost, on the test images",
            "",
            f"- accuracy: {100 * record.accuracy:.2f} % (validation: {100 * record.validation['accuracy']:.2f} %)",
            f"- experts an image: {record.experts:.2f} of {len(record.class_load[0]) * len(record.class_load[0][0])}",
            f"- multiply-adds an image: {record.macs['total']:,.0f}, of which experts {record.macs['experts']:,.0f} "
            f"and routing {record.macs['routing']:,.0f}",
            f"- accuracy in percent with at most 0, 1, 2, … experts: {steps}{' …' if len(prefixes) > 9 else ''}",
            "",
            "Images are normalised by the mean and deviation of the training images, which the file holds.",
            "",
            "## How it came about",
            "",
            f"- data: {record.data}, 90 % of its training images; the rest chose the epoch ({record.best_epoch} of "
            f"{record.epochs}) and, among the seeds, this one (seed {record.seed})",
            *recipe,
            f"- training took {record.seconds:.0f} s on one core",
            "",
            "    raytraced reproduce --only ship",
            "",
        ]
    )


RECIPE_FIELDS = ("optimizer", "lr", "lr_routing", "lr_experts", "schedule", "batch_size", "warmup", "weight_decay", "clip",
                 "label_smoothing", "expert_cost", "anytime_loss", "augment")  # fmt: skip
