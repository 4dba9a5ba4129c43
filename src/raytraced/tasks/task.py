"""What a task is: the only one who knows what inputs and targets are, how answers are judged, and which model is better.

Training, evaluation, progress, tables and cost know tasks by this file alone. n samples of a split, B of a batch, T targets of
a sample (images have one, texts many), L layers, N experts a layer.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence, Sized
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from raytraced.models.output import Model
from raytraced.models.table import build, find_model, model_names
from raytraced.words import did_you_mean, fits, require, type_words

S = TypeVar("S", bound=Sized)


class Batch(NamedTuple):
    """Inputs and targets of one process's share of a global batch."""

    inputs: Tensor  # (B, …)
    targets: Tensor  # (B,) or (B, T)
    rows: Tensor  # (B,): positions in the global batch; what a sample draws follows from them
    mask: Tensor | None = None  # like targets, False where there is padding; None: nowhere
    sizes: Tensor | None = None  # like targets, where they stand for more than one: a token for its bytes

    @property
    def num_targets(self) -> Tensor | int:
        """How many targets there are, padding left out."""
        return self.targets.numel() if self.mask is None else self.mask.sum()


@dataclass(repr=False, eq=False)
class Loader(ABC, Generic[S]):
    """Batches of a split on one device, a pure function of the seed and the epoch; `batch_size` is that of all ranks together.

    Rank r of W takes its contiguous slice of every global batch, so that any W sees the same global batches; the last
    batch of an epoch may be smaller, and a rank's slice of it empty.
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
        """How many samples an epoch takes."""
        return len(self.split)

    def __len__(self) -> int:
        """How many batches an epoch has, the same on every rank."""
        return -(-self.num_samples // self.batch_size)

    def epoch(self, epoch: int, start_batch: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from `start_batch` on, exactly those that a whole epoch would have given."""
        require(epoch >= 0, "epoch", epoch, "must be at least 0")
        require(0 <= start_batch <= len(self), "start_batch", start_batch, f"an epoch has {len(self)} batches")
        return self.batches(epoch, range(start_batch, len(self)))

    @abstractmethod
    def batches(self, epoch: int, numbers: range) -> Iterator[Batch]:
        """This rank's slices of some batches of an epoch, by their numbers."""

    def rows(self, number: int) -> slice:
        """The rows of a global batch that are this rank's."""
        size = min(self.batch_size, self.num_samples - number * self.batch_size)
        return slice(*(size * rank // self.world_size for rank in (self.rank, self.rank + 1)))


@dataclass(frozen=True)
class Data(Generic[S]):
    """A data set: its name and its splits, each of which has a length."""

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
    """Answers to a whole split, sample by sample: sums over the targets of each."""

    columns: dict[str, Tensor]  # (n,) each: "loss", "experts", "targets", the costs, and the task's own
    load: Tensor | None = None  # (groups, L, N): how many targets of each group activated each expert


class Task(ABC, Generic[D]):
    """A kind of data, how a model for it is built, and how its answers are judged."""

    name: ClassVar[str]
    better: ClassVar[str]
    """the figure by which the best epoch is chosen"""
    higher: ClassVar[bool] = True
    """whether more of it is better"""
    family: ClassVar[str | None] = None
    """of its models (see models/table.py), where they are all of one"""
    measured: ClassVar[tuple[str, ...]] = ()
    """the entries of its spec that are figures of the data: more data of the same kind may change them"""
    options: ClassVar[dict[str, Any]] = {}
    """--data_options, and the type of each"""
    formats: ClassVar[dict[str, str]]
    """the figures that progress and tables show, and how each is written"""

    @abstractmethod
    def load(self, data: str, root: str | None = None, **options: Any) -> D:
        """A data set by its name or path, options are --data_options; refuses what nothing can be learnt from, in one line."""

    def check_options(self, given: dict[str, Any]) -> None:
        """Refuse --data_options that there are not, or of another type."""
        for name, value in given.items():
            if name not in self.options:
                known, plural = did_you_mean(name, self.options), f"{self.name.removesuffix('s')}s"
                raise ValueError(f"data option {name}: {plural} have no such option; {known}")
            kind = self.options[name]
            require(fits(value, kind), f"data option {name}", repr(value), f"must be {type_words(kind)}")

    @abstractmethod
    def loader(self, data: D, split: str, batch_size: int, options: dict[str, Any], **place: Any) -> Loader[Any]:
        """The batches of a split ("train", "validation", "test"); place: seed, shuffle, rank, world_size, device."""

    @abstractmethod
    def spec(self, data: D) -> dict[str, Any]:
        """What `build` must know of a data set to make a model for it; also what a saved model's card holds of it."""

    def build(self, model: str, data: D, options: dict[str, Any]) -> Model:
        """The named model for this data, with fresh weights."""
        self.check_model(model)
        spec = self.spec(data)
        if taken := [name for name in options if name in spec or name in self.options]:
            chosen = f"give --data_options.{taken[0]}" if taken[0] in self.options else "it cannot be chosen"
            raise ValueError(f"model option {taken[0]}: follows from the data; {chosen}")
        return build(model, **spec, **options)

    def check_model(self, model: str) -> None:
        """Refuse a model of another family than this task's, in one line."""
        family, _ = find_model(model)
        if self.family not in (None, family):
            layer = model.removeprefix(f"{family}-") if family else model
            own = f"{self.family}-{layer}" if self.family else layer
            meant = f"; did you mean {own}?" if own in model_names(own) else ""
            raise ValueError(f"model={model}: is not for data of the task {self.name}{meant}")

    def load_for(self, model: Model, data: str, root: str | None = None) -> D:
        """A data set in the form that a trained model takes; refuses one that it was not made for, in one line."""
        trained = model.card.training.get("data_options", {})
        loaded = self.load(data, root, **trained | self.form(model.card.spec))
        self.check_fits(model, loaded)
        return loaded

    def form(self, spec: dict[str, Any]) -> dict[str, Any]:
        """The options of data for a model with this spec, whatever it was trained with."""
        return {}

    @abstractmethod
    def check_fits(self, model: Model, data: D) -> None:
        """Refuse data that a trained model was not made for, in one line."""

    @abstractmethod
    def each(self, logits: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
        """The loss of each target, (B,) or (B, T), 0 for padding."""

    def each_of(self, answers: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
        """The same of several answers (K, ...) to one batch."""
        return torch.stack([self.each(logits, batch, smoothing) for logits in answers])

    def loss(self, logits: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
        """The loss summed over all targets of a batch."""
        return self.each(logits, batch, smoothing).sum()

    def losses(self, logits: Tensor, batch: Batch) -> Tensor:
        """The loss of each sample (B,), the mean over its targets."""
        each = self.each(logits, batch)
        if each.ndim == 1:
            return each
        return each.sum(-1) / (each.shape[1] if batch.mask is None else batch.mask.sum(-1))

    @abstractmethod
    def sums(self, logits: Tensor, batch: Batch) -> dict[str, Tensor]:
        """What is counted in training besides the loss, summed over the targets of a batch."""

    @abstractmethod
    def means(self, sums: dict[str, float], num_targets: float) -> dict[str, float]:
        """Figures from those sums, and from the sum of the loss ("loss")."""

    @abstractmethod
    def columns(self, logits: Tensor, batch: Batch) -> dict[str, Tensor]:
        """What evaluation notes of each sample besides loss and cost, (B,) each: sums over its targets."""

    def groups(self, batch: Batch) -> Tensor:
        """A number for each target, like targets: experts' loads are counted for each group; here one for all."""
        return torch.zeros_like(batch.targets, dtype=torch.int64)

    def num_groups(self, data: D) -> int:
        """How many groups there are."""
        return 1

    @abstractmethod
    def figures(self, data: D, split: str, tallies: Sequence[Tally]) -> dict[str, Any]:
        """All figures of a split; of models that answer along the way there is a tally for each number of experts, 0, 1, …"""

    def group_rows(self, data: D, result: Any) -> list[dict[str, Any]]:
        """A table of an evaluation's figures by group, a row each; none where there is one group only."""
        return []

    def draw(self, model: Model, data: D, folder: Path) -> None:
        """Pictures of how a trained model goes about some test data."""

    def predict(
        self, model: Model, paths: Sequence[str], top: int, asked: dict[str, Any], picture: Path | None
    ) -> list[dict[str, Any]]:
        """What a model says of files or folders: a row each of `top` answers, under the names that a table shows.

        `asked` are the model's options max_experts and sure. `picture` is a PNG file to draw the paths of the first into.
        """
        raise ValueError(f"{model.name}: cannot predict files")
