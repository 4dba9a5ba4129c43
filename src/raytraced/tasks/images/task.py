"""Images and their classes: what a batch is, how a model for it is built, how its answers are evaluated.

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

from raytraced.errors import DivergedError, printable, require
from raytraced.models.output import Model
from raytraced.tasks.images.dataset import Dataset, Loader
from raytraced.tasks.images.image_file import read_image
from raytraced.tasks.images.loading import load, report_bad_files
from raytraced.tasks.paths import visible
from raytraced.tasks.task import Batch, Tally, Task

NUM_BINS = 15  # of the calibration error
NUM_IN_GALLERY = 12  # images per number of experts in the gallery
MOST_DRAWN = 8  # files in a picture of activation sequences


class ImageTask(Task[Dataset]):
    """One class for each image; the larger the share of right answers, the better."""

    name = "images"
    family = ""
    sample_name = "images"
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

    def load_for(self, model: Model, data: str, root: str | None = None, **options: Any) -> Dataset:
        """Load data with its classes numbered as in the model."""
        return renumber(super().load_for(model, data, root, **options), known_classes(model))

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
                known = f"{', '.join(names[:10])}{', …' if len(names) > 10 else ''}"
                raise ValueError(f"data={data.name}: class {name!r} is not one of {model.name}'s, which are {known}")

    def target_losses(self, logits: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
        return self.exit_target_losses(logits[None], batch, smoothing)[0]

    def exit_target_losses(self, answers: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
        targets_KB = batch.targets.expand(len(answers), -1)
        # Classes before samples: PyTorch's softmax takes ten times as long along a last axis of ten.
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
        self,
        model: Model,
        paths: Sequence[str],
        top: int,
        options: dict[str, Any],
        picture: Path | None,
        skip_bad: bool = False,
    ) -> list[dict[str, Any]]:
        (channels, height, width), names = model.card.spec["image_shape"], known_classes(model)
        require(1 <= top <= len(names), "top", top, f"must lie in 1 … {len(names)}, the number of classes")
        if not model.answers_along_the_way:
            rule = f"only for models that answer along the way, {model.name} does not"
            require(options["max_experts"] is None, "max_experts", options["max_experts"], rule)
        if picture is not None:
            self.check_picture(model, picture)
        files, images = read_files(image_files(paths), height, width, channels > 1, skip_bad)
        with torch.no_grad():
            out = model(images.to(next(model.parameters()).device), **options)
        if not bool(out.logits.isfinite().all()):
            raise DivergedError("the model's answers are not finite: the weights diverged, or are damaged")
        if picture is not None:
            self.draw_files(model, files[:MOST_DRAWN], images, options, picture)
        if (mean := model.card.spec.get("mean")) and channels == 1:
            warn_inverted(files, images, mean[0])
        probs_BK, answers_BK = out.logits.float().softmax(-1).topk(top)
        rows = []
        for path, probs, answers, experts in zip(files, probs_BK, answers_BK, out.num_experts, strict=True):
            row: dict[str, Any] = {"image": str(path), "answer": names[answers[0]], "probability": float(probs[0])}
            for rank in range(1, top):
                row |= {f"{rank + 1}.": names[answers[rank]], f"{rank + 1}. probability": float(probs[rank])}
            rows.append(row | {"experts": int(experts)})
        return rows

    def check_picture(self, model: Model, picture: Path) -> None:
        """Refuse to draw a model that has no activation sequences."""
        from raytraced.tasks.images.sequences import has_sequences

        if not has_sequences(model):
            raise ValueError(f"sequence={picture}: {model.name} has no activation sequence to draw")

    def draw_files(
        self, model: Model, files: Sequence[Path], images: Tensor, options: dict[str, Any], picture: Path
    ) -> None:
        """Draw the activation sequences of some files, as they ran with the options."""
        from raytraced.tasks.images.sequences import draw_traces, has_sequences, trace_image

        model = model.cpu()
        assert has_sequences(model)
        names, shown = known_classes(model), zip(images, files, strict=False)
        draw_traces([trace_image(model, image, None, names, path.name, options) for image, path in shown], picture)


def image_files(paths: Sequence[str]) -> list[Path]:
    """Files in the order of the paths; a folder stands for the files below it, in the order of their names."""
    found: list[Path] = []
    for path in map(Path, paths):
        below = [one for one in visible(path, below=True) if one.is_file()] if path.is_dir() else [path]
        if not below:
            raise ValueError(f"{path}: the folder holds no files")
        found += below
    return found


def read_files(
    files: Sequence[Path], height: int, width: int, colour: bool, skip_bad: bool
) -> tuple[list[Path], Tensor]:
    """Read image files; returns those that can be read, and their pixels (n, C, H, W).

    One that cannot be read is an error; with `skip_bad` it is left out, and one line is printed.
    """
    good, images, bad = [], [], []
    for path in files:
        try:
            images.append(torch.from_numpy(read_image(path, height=height, width=width, colour=colour)))
            good.append(path)
        except ValueError as error:
            bad.append(str(error))
    report_bad_files(bad, len(files), skip_bad)
    if not good:
        raise ValueError(f"none of {len(files)} files can be read: {bad[0]}")
    return good, torch.stack(images)


def warn_inverted(files: Sequence[Path], images: Tensor, mean: float) -> None:
    """Warn on stderr of grey images that seem to be negatives of the training images."""
    for path, image in zip(files, images, strict=True):
        brightness = float(image.float().mean()) / 255
        if abs(brightness - mean) > abs(1 - brightness - mean) + 0.25:
            reason = f"mean brightness {brightness:.2f}, training images {mean:.2f}"
            print(f"raytraced: {printable(path)}: seems to be inverted ({reason}); try its negative", file=sys.stderr)


def known_classes(model: Model) -> tuple[str, ...]:
    """The names of a model's classes; their numbers where it has no names."""
    return tuple(model.card.spec.get("class_names") or map(str, range(model.card.spec["num_classes"])))


def renumber(data: Dataset, class_names: tuple[str, ...]) -> Dataset:
    """Number the classes of a data set as in another list of names, which holds all of them."""
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
    """For each number of experts that images use: how many images do, and their accuracy after 0, 1, … experts."""
    rows = {length: correct_nK[length_n == length] for length in sorted(set(length_n.tolist()))}
    return {
        str(length): {"num": len(rows_nK), "accuracy": rows_nK.mean(0)[: length + 1].tolist()}
        for length, rows_nK in rows.items()
    }


def choose_gallery(length_n: Tensor, correct_n: Tensor) -> dict[str, list[int]]:
    """The first correctly classified images of each number of experts; none is picked by hand."""
    found = {length: ((length_n == length) & correct_n).nonzero()[:, 0] for length in sorted(set(length_n.tolist()))}
    return {str(length): rows[:NUM_IN_GALLERY].tolist() for length, rows in found.items() if len(rows)}
