"""What a model says of image files of one's own: its likeliest answers, the experts they took, and the path it went.

Axes: B images, K answers.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raytraced.models.classifier import Classifier
from raytraced.models.output import Model
from raytraced.routers.raytraced import RaytracedExperts
from raytraced.tasks.images.reading import read_image
from raytraced.tasks.images.sequences import draw_traces, router_of, trace
from raytraced.words import require

MOST_DRAWN = 8


def predict(
    model: Model,
    names: Sequence[str],
    paths: Sequence[str],
    *,
    top: int = 1,
    max_experts: int | None = None,
    picture: Path | None = None,
) -> list[dict[str, Any]]:
    """A row for each image, with its `top` answers; `picture` is a PNG file to draw the first images' paths into."""
    assert model.card is not None
    channels, height, width = model.card.spec["image_shape"]
    require(1 <= top <= len(names), "top", top, f"must lie in 1 … {len(names)}, the number of classes")
    if max_experts is not None and not model.answers_along_the_way:
        raise ValueError(f"max_experts={max_experts}: only for models that answer along the way, {model.name} does not")
    files = image_files(paths)
    images = torch.stack(
        [torch.from_numpy(read_image(path, height=height, width=width, colour=channels > 1)) for path in files]
    )
    with torch.no_grad():
        out = model(images.to(next(model.parameters()).device), max_experts=max_experts)
    probs_BK, answers_BK = out.logits.float().softmax(-1).topk(top)
    if picture is not None:
        draw_paths(model, images, names, [path.name for path in files], picture)
    if (mean := model.card.spec.get("mean")) and channels == 1:
        tell_inverted(files, images, mean[0])
    rows = []
    for path, probs, answers, experts in zip(files, probs_BK, answers_BK, out.num_experts, strict=True):
        row: dict[str, Any] = {"image": str(path), "answer": names[int(answers[0])], "probability": float(probs[0])}
        for rank in range(1, top):
            row |= {
                f"{rank + 1}.": names[int(answers[rank])],
                f"{rank + 1}. probability": float(probs[rank]),
            }
        rows.append(row | {"experts": int(experts)})
    return rows


def image_files(paths: Sequence[str]) -> list[Path]:
    """Files as they are, folders as the files below them."""
    found: list[Path] = []
    for path in map(Path, paths):
        below = sorted(one for one in path.rglob("*") if one.is_file() and not one.name.startswith("."))
        if path.is_dir() and not below:
            raise ValueError(f"{path}: the folder holds no files")
        found += below if path.is_dir() else [path]
    return found


def tell_inverted(files: Sequence[Path], images: Tensor, mean: float) -> None:
    """Say on stderr which grey images look like negatives of the training images."""
    for path, image in zip(files, images, strict=True):
        brightness = float(image.float().mean()) / 255
        if abs(brightness - mean) > abs(1 - brightness - mean) + 0.25:
            told = f"mean brightness {brightness:.2f}, training images {mean:.2f}"
            print(f"raytraced: {path}: looks inverted ({told}); try its negative", file=sys.stderr)


def draw_paths(model: Model, images: Tensor, names: Sequence[str], titles: Sequence[str], picture: Path) -> None:
    """Draw the activation sequence of each image."""
    if not isinstance(model, Classifier) or not isinstance(model.layer, RaytracedExperts):
        raise ValueError(f"sequence={picture}: {model.name} has no activation sequence to draw")
    model = model.cpu()
    shown = zip(images[:MOST_DRAWN], titles[:MOST_DRAWN], strict=True)
    traces = [trace(model, image, None, names, title) for image, title in shown]
    draw_traces(traces, router_of(model).routing, picture)
