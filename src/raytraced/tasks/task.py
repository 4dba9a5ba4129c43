"""What a task is: the only one who knows what inputs and targets are, how answers are judged, and which model is better.

Training, evaluation, progress, tables and cost know tasks by this file alone. n samples of a split, B of a batch, T targets of
a sample (images have one, texts many), L layers, N experts a layer.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from raytraced.models.output import Model
from raytraced.models.table import build, find_model, model_names


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


class Loader(Protocol):
    """Batches of a split, a pure function of the seed and the epoch; its length is their number, in every process the same."""

    batch_size: int  # of all processes together

    def __len__(self) -> int: ...

    def epoch(self, epoch: int, start_batch: int = 0) -> Iterator[Batch]: ...


class Data(Protocol):
    """A data set: its name, and the splits train, validation and test, of which each has a length."""

    @property
    def name(self) -> str: ...


D = TypeVar("D", bound=Data)


class Table(NamedTuple):
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
    formats: ClassVar[dict[str, str]]
    """the figures that progress and tables show, and how each is written"""

    @abstractmethod
    def load(self, data: str, root: str | None = None, **options: Any) -> D:
        """A data set by its name or path; options are --data_options."""

    @abstractmethod
    def loader(self, data: D, split: str, batch_size: int, options: dict[str, Any], **place: Any) -> Loader:
        """The batches of a split ("train", "validation", "test"); place: seed, shuffle, rank, world_size, device."""

    @abstractmethod
    def spec(self, data: D) -> dict[str, Any]:
        """What `build` must know of a data set to make a model for it; also what a saved model's card holds of it."""

    def build(self, model: str, data: D, options: dict[str, Any]) -> Model:
        """The named model for this data, with fresh weights."""
        self.check_model(model)
        return build(model, **self.spec(data), **options)

    def check_model(self, model: str) -> None:
        """Refuse a model of another family than this task's, in one line."""
        family, _ = find_model(model)
        if self.family not in (None, family):
            layer = model.removeprefix(f"{family}-") if family else model
            own = f"{self.family}-{layer}" if self.family else layer
            meant = f"; did you mean {own}?" if own in model_names(own) else ""
            raise ValueError(f"model={model}: is not for data of the task {self.name}{meant}")

    @abstractmethod
    def check(self, data: D) -> None:
        """Refuse data that nothing can be learnt from, in one line."""

    def load_for(self, model: Model, data: str, root: str | None = None) -> D:
        """A data set in the form that a trained model takes; refuses one that it was not made for, in one line."""
        loaded = self.load(data, root, **model.card.training.get("data_options", {}))
        self.check_fits(model, loaded)
        return loaded

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
    def figures(self, data: D, split: str, tables: Sequence[Table]) -> dict[str, Any]:
        """All figures of a split; of models that answer along the way there is a table for each number of experts, 0, 1, …"""

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
