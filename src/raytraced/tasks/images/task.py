"""Images and their classes: what a batch is, how a model for it is built, how its answers are judged.

Axes: B batch, Y classes, n samples of a split, K numbers of experts or answers.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from raytraced.models.output import Model
from raytraced.tasks.images.dataset import Dataset, Loader
from raytraced.tasks.images.loading import load, read_image
from raytraced.tasks.paths import visible
from raytraced.tasks.task import Batch, Tally, Task
from raytraced.words import require

NUM_BINS = 15  # of the calibration error
NUM_IN_GALLERY = 12  # images of each number of experts in the gallery
MOST_DRAWN = 8  # images of one's own in a picture


class ImageTask(Task[Dataset]):
    """One class for each image; the larger the share of right answers, the better."""

    name = "images"
    family = ""
    better = "accuracy"
    measured = ("mean", "std")
    options = {"size": int, "colour": bool, "skip_bad": bool, "augment": bool}  # noqa: RUF012
    formats = {"accuracy": ".2%"}  # noqa: RUF012

    def load(self, data: str, root: str | None = None, **options: Any) -> Dataset:
        self.check_options(options)
        return load(data, root, **{name: value for name, value in options.items() if name != "augment"})

    def loader(self, data: Dataset, split: str, batch_size: int, options: dict[str, Any], **place: Any) -> Loader:
        return Loader(data.splits[split], batch_size, augment=options.get("augment", False), **place)

    def spec(self, data: Dataset) -> dict[str, Any]:
        return {name: list(getattr(data, name)) for name in ("image_shape", "class_names", "mean", "std")}

    def load_for(self, model: Model, data: str, root: str | None = None) -> Dataset:
        """With its classes by the numbers that the model knows them by."""
        return renumber(super().load_for(model, data, root), known_classes(model))

    def form(self, spec: dict[str, Any]) -> dict[str, Any]:
        channels, height, _ = spec["image_shape"]
        return {"size": height, "colour": channels > 1}

    def check_fits(self, model: Model, data: Dataset) -> None:
        """Refuse images of another shape, and a class that the model does not know."""
        shape, names = tuple(model.card.spec["image_shape"]), known_classes(model)
        rule = f"has images of shape {data.image_shape}; {model.name} was trained on {shape}"
        require(data.image_shape == shape, "data", data.name, rule)
        for name in data.class_names:
            if name not in names:
                told = f"{', '.join(names[:10])}{', …' if len(names) > 10 else ''}"
                raise ValueError(f"data={data.name}: {model.name} knows no class {name!r}; it knows {told}")

    def each(self, logits: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
        return self.each_of(logits[None], batch, smoothing)[0]

    def each_of(self, answers: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
        targets_KB = batch.targets.expand(len(answers), -1)
        # classes before samples: along a last axis of ten, PyTorch's softmax takes ten times as long
        return cross_entropy(answers.mT, targets_KB, reduction="none", label_smoothing=smoothing)

    def sums(self, logits: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {"correct": (logits.argmax(-1) == batch.targets).sum()}

    def means(self, sums: dict[str, float], num_targets: float) -> dict[str, float]:
        return {"accuracy": sums["correct"] / num_targets}

    def columns(self, logits: Tensor, batch: Batch) -> dict[str, Tensor]:
        confidence_B, answer_B = logits.softmax(-1).max(-1)
        return {"correct": answer_B == batch.targets, "confidence": confidence_B}

    def groups(self, batch: Batch) -> Tensor:
        return batch.targets

    def num_groups(self, data: Dataset) -> int:
        return data.num_classes

    def figures(self, data: Dataset, split: str, tallies: Sequence[Tally]) -> dict[str, Any]:
        last, labels_n = tallies[-1], data.splits[split].labels.to(tallies[-1].columns["loss"].device)
        correct_n, experts_n = last.columns["correct"], last.columns["experts"]
        figures: dict[str, Any] = {
            "accuracy": float(correct_n.mean()),
            "calibration_error": calibration_error(last.columns["confidence"], correct_n),
            "accuracy_per_class": mean_per_class(correct_n, labels_n, data.num_classes),
            "experts_per_class": mean_per_class(experts_n, labels_n, data.num_classes),
            "accuracy_by_prefix": None,
        }
        if len(tallies) > 1 and last.load is not None:
            correct_nK = torch.stack([tally.columns["correct"] for tally in tallies], 1)
            counts_Y = torch.bincount(labels_n, minlength=data.num_classes).clamp_min(1)
            figures |= {
                "accuracy_by_prefix": correct_nK.mean(0).tolist(),
                "lengths": accuracy_by_length(correct_nK, experts_n.long()),
                "class_load": (last.load / counts_Y[:, None, None]).tolist(),
                "gallery": choose_gallery(experts_n.long(), correct_n > 0),
            }
        return figures

    def group_rows(self, data: Dataset, result: Any) -> list[dict[str, Any]]:
        per_class = zip(data.class_names, result["accuracy_per_class"], result["experts_per_class"], strict=True)
        return [
            {"class": name, "accuracy": "no images" if accuracy is None else accuracy, "experts": experts}
            for name, accuracy, experts in per_class
        ]

    def draw(self, model: Model, data: Dataset, folder: Path) -> None:
        from raytraced.tasks.images.sequences import draw_sequences, has_sequences

        if has_sequences(model):
            draw_sequences(model, data.test, folder / "sequences.png")

    def predict(
        self, model: Model, paths: Sequence[str], top: int, asked: dict[str, Any], picture: Path | None
    ) -> list[dict[str, Any]]:
        (channels, height, width), names = model.card.spec["image_shape"], known_classes(model)
        require(1 <= top <= len(names), "top", top, f"must lie in 1 … {len(names)}, the number of classes")
        if not model.answers_along_the_way:
            rule = f"only for models that answer along the way, {model.name} does not"
            require(asked["max_experts"] is None, "max_experts", asked["max_experts"], rule)
        files = image_files(paths)
        read = [read_image(path, height=height, width=width, colour=channels > 1) for path in files]
        images = torch.stack([torch.from_numpy(image) for image in read])
        with torch.no_grad():
            out = model(images.to(next(model.parameters()).device), **asked)
        if not bool(out.logits.isfinite().all()):
            raise ValueError(f"{model.name}: its answers are not finite: the weights diverged, or are damaged")
        probs_BK, answers_BK = out.logits.float().softmax(-1).topk(top)
        if picture is not None:
            from raytraced.tasks.images.sequences import draw_traces, has_sequences, trace_image

            if not has_sequences(model):
                raise ValueError(f"sequence={picture}: {model.name} has no activation sequence to draw")
            shown = zip(images[:MOST_DRAWN], files, strict=False)
            draw_traces([trace_image(model.cpu(), image, None, names, path.name) for image, path in shown], picture)
        if (mean := model.card.spec.get("mean")) and channels == 1:
            tell_inverted(files, images, mean[0])
        rows = []
        for path, probs, answers, experts in zip(files, probs_BK, answers_BK, out.num_experts, strict=True):
            row: dict[str, Any] = {"image": str(path), "answer": names[answers[0]], "probability": float(probs[0])}
            for rank in range(1, top):
                row |= {f"{rank + 1}.": names[answers[rank]], f"{rank + 1}. probability": float(probs[rank])}
            rows.append(row | {"experts": int(experts)})
        return rows


def image_files(paths: Sequence[str]) -> list[Path]:
    """Files as they are, folders as the files below them."""
    found: list[Path] = []
    for path in map(Path, paths):
        below = [one for one in visible(path, below=True) if one.is_file()] if path.is_dir() else [path]
        if not below:
            raise ValueError(f"{path}: the folder holds no files")
        found += below
    return found


def tell_inverted(files: Sequence[Path], images: Tensor, mean: float) -> None:
    """Say on stderr which grey images look like negatives of the training images."""
    for path, image in zip(files, images, strict=True):
        brightness = float(image.float().mean()) / 255
        if abs(brightness - mean) > abs(1 - brightness - mean) + 0.25:
            told = f"mean brightness {brightness:.2f}, training images {mean:.2f}"
            print(f"raytraced: {path}: looks inverted ({told}); try its negative", file=sys.stderr)


def known_classes(model: Model) -> tuple[str, ...]:
    """The names of a model's classes; where it was given none, their numbers."""
    return tuple(model.card.spec.get("class_names") or map(str, range(model.card.spec["num_classes"])))


def renumber(data: Dataset, class_names: tuple[str, ...]) -> Dataset:
    """The same images, their classes numbered as in another list, which has all of them."""
    number_Y = torch.tensor([class_names.index(name) for name in data.class_names])
    splits: Any = {name: replace(part, labels=number_Y[part.labels]) for name, part in data.splits.items()}
    return replace(data, class_names=class_names, **splits)


def mean_per_class(values_n: Tensor, labels_n: Tensor, num_classes: int) -> list[float | None]:
    """The mean value of each class's samples; None for a class without any."""
    counts = torch.bincount(labels_n, minlength=num_classes)
    sums = torch.zeros(num_classes, dtype=torch.float64, device=values_n.device).index_add_(0, labels_n, values_n)
    return [float(total / count) if count else None for total, count in zip(sums, counts, strict=True)]


def calibration_error(confidence_n: Tensor, correct_n: Tensor) -> float:
    """The expected calibration error: |accuracy − confidence|, averaged over samples in 15 equal bins of confidence."""
    bin_n = (confidence_n * NUM_BINS).long().clamp(max=NUM_BINS - 1)
    gaps = torch.zeros(NUM_BINS, dtype=torch.float64, device=confidence_n.device)
    gaps.index_add_(0, bin_n, correct_n - confidence_n)
    return float(gaps.abs().sum() / len(confidence_n))


def accuracy_by_length(correct_nK: Tensor, length_n: Tensor) -> dict[str, Any]:
    """By the number of experts that images use in the end: how many do, and their accuracy after 0, 1, … experts."""
    rows = {length: correct_nK[length_n == length] for length in sorted(set(length_n.tolist()))}
    return {
        str(length): {"num": len(rows_nK), "accuracy": rows_nK.mean(0)[: length + 1].tolist()}
        for length, rows_nK in rows.items()
    }


def choose_gallery(length_n: Tensor, correct_n: Tensor) -> dict[str, list[int]]:
    """The first correctly classified images of each number of experts: no picking by looks."""
    found = {length: ((length_n == length) & correct_n).nonzero()[:, 0] for length in sorted(set(length_n.tolist()))}
    return {str(length): rows[:NUM_IN_GALLERY].tolist() for length, rows in found.items() if len(rows)}
