"""What a task is: what inputs and targets are, how answers are evaluated, and which model is better.

Training, evaluation, progress, tables and cost use tasks through this file alone. Axes: n samples of a split, B samples of a
batch, T targets of a sample (images have one, texts many), L layers, N experts per layer.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence, Sized
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from raytraced.errors import did_you_mean, fits, require, type_words
from raytraced.models.output import Model
from raytraced.models.registry import build, find_model, model_names

S = TypeVar("S", bound=Sized)
SMALLEST_BATCH, LARGEST_BATCH, LEAST_STEPS = 8, 256, 16  # where the batch size follows from the number of samples


class Batch(NamedTuple):
    """Inputs and targets of one process's part of a global batch."""

    inputs: Tensor  # (B, …)
    targets: Tensor  # (B,) or (B, T)
    rows: Tensor  # (B,): positions in the global batch, which decide what a sample draws
    mask: Tensor | None = None  # like targets, False for padding; None: no padding
    sizes: Tensor | None = None  # like targets: the size of each, such as the bytes of a token; None: 1

    @property
    def num_targets(self) -> Tensor | int:
        """Number of targets without padding."""
        return self.targets.numel() if self.mask is None else self.mask.sum()


@dataclass(repr=False, eq=False)
class Loader(ABC, Generic[S]):
    """Batches of a split on one device, a pure function of the seed and the epoch.

    Rank r of W takes its contiguous slice of every global batch, so that the global batches do not depend on W. The last
    batch of an epoch may be smaller, and a rank's slice of it may be empty.

    Args:
        split: The samples.
        batch_size: Samples per global batch, over all ranks together.
        seed: Of the order.
        shuffle: Whether epochs differ in their order; otherwise samples come in the order of the split.
        rank: Number of this process.
        world_size: Number of processes.
        device: Where batches are made.
    """

    split: S
    batch_size: int
    _: KW_ONLY
    seed: int = 0
    shuffle: bool = True
    rank: int = 0
    world_size: int = 1
    device: str | torch.device = "cpu"

    def __post_init__(self) -> None:
        size = f"world_size={self.world_size}"
        require(self.batch_size >= self.world_size, "batch_size", self.batch_size, f"must be at least {size}")
        require(0 <= self.rank < self.world_size, "rank", self.rank, f"must be 0 … {self.world_size - 1}, {size}")
        if self.num_samples == 0:
            raise ValueError("split: has no samples")

    @property
    def num_samples(self) -> int:
        """Number of samples per epoch."""
        return len(self.split)

    def __len__(self) -> int:
        """Number of batches per epoch, the same on every rank."""
        return -(-self.num_samples // self.batch_size)

    def epoch(self, epoch: int, start_batch: int = 0) -> Iterator[Batch]:
        """Iterate over the batches of an epoch.

        Args:
            epoch: Number of the epoch, from 0.
            start_batch: Number of the first batch; the batches are those of the whole epoch from there.

        Returns:
            This rank's slice of each batch.
        """
        require(epoch >= 0, "epoch", epoch, "must be at least 0")
        require(0 <= start_batch <= len(self), "start_batch", start_batch, f"an epoch has {len(self)} batches")
        return self.batches(epoch, range(start_batch, len(self)))

    @abstractmethod
    def batches(self, epoch: int, numbers: range) -> Iterator[Batch]:
        """This rank's slices of some batches of an epoch.

        Args:
            epoch: Number of the epoch, from 0.
            numbers: Numbers of the batches.

        Yields:
            Batches, in this order.
        """

    def rows(self, number: int) -> slice:
        """This rank's rows of a global batch.

        Args:
            number: Number of the batch in the epoch.

        Returns:
            The slice of the global batch.
        """
        size = min(self.batch_size, self.num_samples - number * self.batch_size)
        return slice(*(size * rank // self.world_size for rank in (self.rank, self.rank + 1)))


@dataclass(frozen=True)
class Data(Generic[S]):
    """A data set.

    Args:
        name: Its name.
        train: Samples to train on; a split has a length.
        validation: Samples to choose the best epoch by.
        test: Samples for the final figures.
    """

    name: str
    train: S
    validation: S
    test: S

    @property
    def splits(self) -> dict[str, S]:
        """Each split by its name."""
        return {"train": self.train, "validation": self.validation, "test": self.test}


D = TypeVar("D", bound=Data[Any])


class Tally(NamedTuple):
    """The answers to a whole split: sums over the targets of each sample."""

    columns: dict[str, Tensor]  # (n,) each: "loss", "experts", "targets", the costs, and those of the task
    load: Tensor | None = None  # (groups, L, N): how many targets of each group activated each expert


class Task(ABC, Generic[D]):
    """A kind of data: how it is loaded, how a model for it is built, and how answers are evaluated."""

    name: ClassVar[str]
    """by which it is asked for; a plural, such as "images" """
    better: ClassVar[str]
    """name of the figure by which the best epoch is chosen"""
    higher: ClassVar[bool] = True
    """whether a higher figure is better"""
    family: ClassVar[str | None] = None
    """family of its models (see models/registry.py); None: any"""
    model_class: ClassVar[type[Model] | None] = None
    """of a plugin with a new family: the class of its models, whose first arguments are `make_layer` and `dim`"""
    data_names: ClassVar[Collection[str]] = ()
    """of a plugin: names of the data sets that `load` knows"""
    measured: ClassVar[tuple[str, ...]] = ()
    """names in its spec that are measured from the data: more data of the same kind may change them"""
    options: ClassVar[dict[str, Any]] = {}
    """names of --data_options and their types"""
    sample_name: ClassVar[str] = "samples"
    """what the samples of a split are called in tables"""
    formats: ClassVar[dict[str, str]]
    """names of the figures that progress and tables show, and their formats"""

    @classmethod
    def takes_path(cls, path: Path) -> bool:
        """Whether a path holds data of this task; asked of plugins only.

        Args:
            path: A file or a folder.

        Returns:
            Whether the task can load it.
        """
        return False

    @abstractmethod
    def load(self, data: str, root: str | None = None, **options: Any) -> D:
        """Load a data set; refuses in one line what cannot be learnt from.

        Args:
            data: Name or path.
            root: The cache folder.
            options: --data_options.

        Returns:
            The data set.
        """

    def check_options(self, options: dict[str, Any]) -> None:
        """Refuse --data_options with an unknown name or of the wrong type.

        Args:
            options: Values by name.
        """
        for name, value in options.items():
            if name not in self.options:
                known, plural = did_you_mean(name, self.options), f"{self.name.removesuffix('s')}s"
                raise ValueError(f"data option {name}: {plural} have no such option; {known}")
            kind = self.options[name]
            require(fits(value, kind), f"data option {name}", repr(value), f"must be {type_words(kind)}")

    @abstractmethod
    def loader(self, data: D, split: str, batch_size: int, options: dict[str, Any], **place: Any) -> Loader[Any]:
        """Make the batches of a split.

        Args:
            data: The data set.
            split: "train", "validation" or "test".
            batch_size: Samples per global batch.
            options: --data_options.
            place: seed, shuffle, rank, world_size and device of `Loader`.

        Returns:
            The loader.
        """

    def choose_batch_size(self, data: D) -> int:
        """Choose the batch size of training on custom data where the user did not.

        Args:
            data: The loaded data set.

        Returns:
            The largest power of two from 8 to 256 with which an epoch has at least 16 steps.
        """
        size = LARGEST_BATCH
        while size > SMALLEST_BATCH and len(data.train) < LEAST_STEPS * size:
            size //= 2
        return size

    @abstractmethod
    def spec(self, data: D) -> dict[str, Any]:
        """Describe a data set for `build`; a saved model's card holds the description.

        Args:
            data: A loaded data set.

        Returns:
            Arguments of models, as plain JSON values.
        """

    def fingerprint(self, data: D) -> dict[str, Any]:
        """Figures that differ when the data set differs, beyond its spec; a resumed run compares them.

        Args:
            data: A loaded data set.

        Returns:
            Names and plain JSON values; empty where the spec is enough.
        """
        return {}

    def build(self, model: str, data: D, options: dict[str, Any]) -> Model:
        """Build a model for a data set.

        Args:
            model: Name of the model.
            data: The data set.
            options: Options of the model.

        Returns:
            The model with fresh weights.
        """
        self.check_model(model)
        spec = self.spec(data)
        if taken := [name for name in options if name in spec or name in self.options]:
            chosen = f"give --data_options.{taken[0]}" if taken[0] in self.options else "it cannot be chosen"
            raise ValueError(f"model option {taken[0]}: follows from the data; {chosen}")
        return build(model, **spec, **options)

    def check_model(self, model: str) -> None:
        """Refuse a model of another family than this task's, in one line.

        Args:
            model: Name of the model.
        """
        family, _ = find_model(model)
        if self.family not in (None, family):
            layer = model.removeprefix(f"{family}-") if family else model
            own = f"{self.family}-{layer}" if self.family else layer
            meant = f"; did you mean {own}?" if own in model_names(own) else ""
            raise ValueError(f"model={model}: is not for data of the task {self.name}{meant}")

    def load_for(self, model: Model, data: str, root: str | None = None, **options: Any) -> D:
        """Load a data set in the form that a trained model takes; refuses one that does not fit the model.

        Args:
            model: The trained model, whose card holds the options of its data.
            data: Name or path of a data set.
            root: The cache folder.
            options: --data_options that differ from those of training, such as skip_bad.

        Returns:
            The data set.
        """
        trained = model.card.training.get("data_options", {})
        self.check_options(trained)
        loaded = self.load(data, root, **trained | self.form(model.card.spec) | options)
        self.check_fits(model, loaded)
        return loaded

    def form(self, spec: dict[str, Any]) -> dict[str, Any]:
        """The --data_options that a model needs, in place of those of its training.

        Args:
            spec: The spec in the model's card.

        Returns:
            Values by name; none unless a task overrides this.
        """
        return {}

    @abstractmethod
    def check_fits(self, model: Model, data: D) -> None:
        """Refuse data that does not fit a trained model, in one line.

        Args:
            model: The trained model.
            data: The loaded data set.
        """

    @abstractmethod
    def target_losses(self, logits: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
        """Compute the loss of each target.

        Args:
            logits: (B, Y) or (B, T, Y).
            batch: The targets.
            smoothing: Label smoothing.

        Returns:
            (B,) or (B, T), 0 for padding.
        """

    def exit_target_losses(self, answers: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
        """The loss of each target for several answers to one batch.

        Args:
            answers: Logits of K answers (K, B, Y) or (K, B, T, Y).
            batch: The targets.
            smoothing: Label smoothing.

        Returns:
            (K, B) or (K, B, T), 0 for padding.
        """
        return torch.stack([self.target_losses(logits, batch, smoothing) for logits in answers])

    def sample_losses(self, logits: Tensor, batch: Batch) -> Tensor:
        """The loss of each sample, the mean over its targets.

        Args:
            logits: (B, Y) or (B, T, Y).
            batch: The targets.

        Returns:
            (B,).
        """
        losses = self.target_losses(logits, batch)
        if losses.ndim == 1:
            return losses
        return losses.sum(-1) / (losses.shape[1] if batch.mask is None else batch.mask.sum(-1))

    @abstractmethod
    def sums(self, logits: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Sums over the targets of a batch that training counts besides the loss.

        Args:
            logits: (B, Y) or (B, T, Y).
            batch: The targets.

        Returns:
            Scalars by name.
        """

    @abstractmethod
    def means(self, sums: dict[str, float], num_targets: float) -> dict[str, float]:
        """The task's figures from those sums.

        Args:
            sums: What `sums` returned, added up over batches, and the sum of the loss ("loss").
            num_targets: Number of targets, or the sum of their sizes.

        Returns:
            Figures by name.
        """

    @abstractmethod
    def columns(self, logits: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Sums over the targets of each sample that evaluation needs besides loss and cost.

        Args:
            logits: (B, Y) or (B, T, Y).
            batch: The targets.

        Returns:
            Columns (B,) by name.
        """

    def groups(self, batch: Batch) -> Tensor:
        """The group of each target; the load of experts is counted per group.

        Args:
            batch: The targets.

        Returns:
            Numbers of groups, (B,) or (B, T); here all are 0.
        """
        return torch.zeros_like(batch.targets, dtype=torch.int64)

    def num_groups(self, data: D) -> int:
        """Number of groups.

        Args:
            data: The loaded data set.

        Returns:
            The number; here 1.
        """
        return 1

    @abstractmethod
    def figures(self, data: D, split: str, tallies: Sequence[Tally]) -> dict[str, Any]:
        """Compute all figures of a split.

        Args:
            data: The data set.
            split: The split that was evaluated.
            tallies: One, or for models that answer along the way one per number of experts, 0, 1, …

        Returns:
            Names and figures, as plain JSON values.
        """

    def group_rows(self, data: D, result: Any) -> list[dict[str, Any]]:
        """The figures of an evaluation by group.

        Args:
            data: The data set.
            result: What the evaluation returned.

        Returns:
            One row per group; none where there is one group only.
        """
        return []

    def draw(self, model: Model, data: D, folder: Path) -> None:
        """Draw pictures of what a trained model does with some test data.

        Args:
            model: The trained model, on the CPU.
            data: The data set.
            folder: The folder to write PNG files into.
        """

    def predict(
        self,
        model: Model,
        paths: Sequence[str],
        top: int,
        options: dict[str, Any],
        picture: Path | None,
        skip_bad: bool = False,
    ) -> list[dict[str, Any]]:
        """Answer for files.

        Args:
            model: A trained model.
            paths: Files, or folders of files.
            top: Number of answers per file, the most likely first.
            options: The model's options max_experts and confidence.
            picture: A PNG file to draw the activation sequences of the first files into; None draws nothing.
            skip_bad: Leave out files that cannot be read, instead of refusing all.

        Returns:
            One row per file, in the order of the paths, under the titles that a table shows.
        """
        raise ValueError(f"{model.name}: cannot predict files")
