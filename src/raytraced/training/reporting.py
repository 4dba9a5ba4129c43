"""Saved models put to use from the command line: evaluation and predictions."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from raytraced.data import Dataset, Loader
from raytraced.models import MODELS
from raytraced.saving import ModelCard, load_with_card
from raytraced.training.config import TrainConfig
from raytraced.training.evaluation import Evaluation, evaluate
from raytraced.training.objective import Objective
from raytraced.training.world import World, choose_device


class Prediction(NamedTuple):
    """What a model says about one image file."""

    image: str
    answer: str
    probability: float
    experts: int


def evaluate_saved(
    source: str,
    get_data: Callable[[str], Dataset],
    split: str,
    batch_size: int,
    device: str,
    seed: int,
    options: dict[str, Any],
) -> tuple[Evaluation, tuple[str, ...]]:
    """Evaluate a saved model on a split of the data that get_data gives for the name in the model's card."""
    model, card = load_with_card(source)
    dataset = get_data(card.data)
    if dataset.image_shape != card.image_shape or dataset.num_classes != card.num_classes:
        raise ValueError(
            f"data={dataset.name}: has {dataset.num_classes} classes of images {dataset.image_shape}; "
            f"{source} was trained for {card.num_classes} of {card.image_shape}"
        )
    if options and not MODELS[card.model].anytime:
        raise ValueError(f"{', '.join(options)}: only for models that answer along the way, {card.model} does not")
    world = World(0, 1, choose_device(device, 0))
    loader = Loader(
        getattr(dataset, split), batch_size, mean=card.mean, std=card.std, shuffle=False, device=world.device
    )
    predict = Objective(model.to(world.device), TrainConfig()).eval().predict
    by_prefix = MODELS[card.model].anytime and "max_experts" not in options
    result = evaluate(predict, loader, world, card.num_classes, seed=seed, by_prefix=by_prefix, **options)
    return result, card.class_names


def predict_files(source: str, paths: Sequence[str], device: str) -> list[Prediction]:
    """Classify image files."""
    model, card = load_with_card(source)
    target = choose_device(device, 0)
    images = torch.stack([read_image(path, card) for path in paths]).to(target)
    with torch.no_grad():
        out = model.to(target)(images)
    probability_B, answer_B = out.logits.float().softmax(-1).max(-1)
    experts_B = out.active.sum((-1, -2))
    return [
        Prediction(path, card.class_names[int(answer)], float(probability), int(experts))
        for path, answer, probability, experts in zip(paths, answer_B, probability_B, experts_B, strict=True)
    ]


def read_image(path: str, card: ModelCard) -> torch.Tensor:
    """An image file as the model wants it: grey or colour, cut to its middle, resized, normalised; (C, H, W)."""
    channels, height, width = card.image_shape
    try:
        with Image.open(path) as file:
            image = file.convert("L" if channels == 1 else "RGB")
    except UnidentifiedImageError:
        raise ValueError(f"{path}: is not an image that can be read") from None
    scale = min(image.width / width, image.height / height)
    cut_width, cut_height = scale * width, scale * height
    left, top = (image.width - cut_width) / 2, (image.height - cut_height) / 2
    box = (left, top, left + cut_width, top + cut_height)
    image = image.resize((width, height), Image.Resampling.BILINEAR, box=box)
    pixels = torch.from_numpy(np.array(image)).reshape(height, width, channels).permute(2, 0, 1).float() / 255
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (card.mean, card.std))
    return (pixels - mean) / std


def print_predictions(predictions: Sequence[Prediction]) -> None:
    """A table with a row an image."""
    table = Table("image", "answer", box=SIMPLE_HEAD)
    table.add_column("probability", justify="right")
    table.add_column("experts", justify="right")
    for row in predictions:
        table.add_row(escape(row.image), escape(row.answer), f"{row.probability:.1%}", str(row.experts))
    Console().print(table)


def print_evaluation(result: Evaluation, class_names: Sequence[str], title: str) -> None:
    """The figures, then a table of the classes, then the accuracy by prefix."""
    console = Console()
    console.print(title, markup=False, highlight=False)
    console.print(
        f"accuracy {result.accuracy:.2%} of {result.num_samples:,}   loss {result.loss:.4f}   "
        f"calibration error {result.calibration_error:.4f}   experts {result.mean_experts:.2f}",
        highlight=False,
    )
    table = Table("class", box=SIMPLE_HEAD)
    table.add_column("accuracy", justify="right")
    table.add_column("experts", justify="right")
    for name, accuracy, experts in zip(class_names, result.accuracy_per_class, result.experts_per_class, strict=True):
        known = accuracy is not None and experts is not None
        table.add_row(escape(name), f"{accuracy:.2%}" if known else "no images", f"{experts:.2f}" if known else "")
    console.print(table)
    if result.accuracy_by_prefix:
        prefixes = Table("at most so many experts", box=SIMPLE_HEAD)
        prefixes.add_column("accuracy", justify="right")
        for number, accuracy in enumerate(result.accuracy_by_prefix):
            prefixes.add_row(str(number), f"{accuracy:.2%}")
        console.print(prefixes)
