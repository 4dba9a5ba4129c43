"""A new task and its model family, as they would stand in raytraced/tasks: the next byte of a text, window by window.

Axes: n windows of a split, B of a batch, T bytes of a window, D width, Y = 256 bytes.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from raytraced.data.hashing import SHUFFLE, permutation
from raytraced.layer import RoutedLayer
from raytraced.models.output import Model, Output, SampleLossFn, gathered, linear_cost
from raytraced.router import Call, Cost
from raytraced.tasks import task
from raytraced.tasks.task import Batch, Tally, Task

NAMES = ("pangrams",)
TEXTS = {
    "train": b"the quick brown fox jumps over the lazy dog. pack my box with five dozen liquor jugs. " * 3,
    "validation": b"the five quick boxing wizards jump over the dozen lazy dogs with my brown liquor jugs",
    "test": b"how quickly daft jumping zebras vex my lazy brown fox",
}


def takes_path(path: Path) -> bool:
    """Whether a path is a text."""
    return path.suffix == ".txt"


class ByteModel(Model):
    """An embedding of each byte and of its place, a routed layer of any kind, and a linear output layer."""

    def __init__(self, make_layer: Callable[[], RoutedLayer], dim: int, window: int) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(256, dim), nn.Parameter(torch.randn(window, dim))
        self.layer, self.head = make_layer(), nn.Linear(dim, 256)
        self.answers_along_the_way = self.layer.answers_along_the_way

    def encode(self, inputs: Tensor) -> Tensor:
        return self.embedding(inputs) + self.places

    def answer(
        self, encoded: Tensor, call: Call, mask: Tensor | None = None, sample_loss_fn: SampleLossFn | None = None
    ) -> Output:
        windows, num_bytes = encoded.shape[:2]
        rows = torch.arange(windows) if call.rows is None else call.rows
        call = call._replace(rows=rows[:, None] * num_bytes + torch.arange(num_bytes))  # a number for each byte (B, T)
        out = self.layer(encoded, mask=mask, **call._asdict())
        return gathered(self.head(out.hidden), [out], sample_loss_fn)

    def cost(self, inputs: Tensor, out: Output) -> dict[str, Cost]:
        looked_up = Cost(0, 2 * self.embedding.embedding_dim)
        return {"input": looked_up, **self.layer.cost(out.routes[0]), "head": linear_cost(self.head)}


class Windows(NamedTuple):
    """Bytes, the bytes after them, and which are not padding, (n, T) each."""

    inputs: Tensor
    targets: Tensor
    mask: Tensor

    def __len__(self) -> int:
        return len(self.inputs)


Text = task.Data[Windows]


def cut(text: bytes, window: int) -> Windows:
    """A text in windows, the last filled up with zeros."""
    num = len(text) - 1
    padded = torch.zeros(math.ceil(num / window) * window + 1, dtype=torch.int64)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    mask = torch.arange(len(padded) - 1) < num
    inputs, targets = padded[:-1] * mask, padded[1:] * mask
    return Windows(*(each.view(-1, window) for each in (inputs, targets, mask)))


class Loader(task.Loader[Windows]):
    def batches(self, epoch: int, numbers: range) -> Iterator[Batch]:
        num = len(self.split)
        order = permutation(num, SHUFFLE, self.seed, epoch) if self.shuffle else torch.arange(num).numpy()
        for number in numbers:
            rows = self.rows(number)
            index = order[number * self.batch_size :][rows]
            inputs, targets, mask = (each[index].to(self.device) for each in self.split)
            yield Batch(inputs, targets, torch.arange(rows.start, rows.stop, device=self.device), mask)


class NextByte(Task[Text]):
    """The fewer bits per byte, the better."""

    name = "next-byte"
    better = "bits"
    higher = False
    formats = {"bits": ".3f"}  # noqa: RUF012
    # of a plugin, which no table of the package names
    family, model_class, data_names = "bytes", ByteModel, NAMES

    @classmethod
    def takes_path(cls, path: Path) -> bool:
        return takes_path(path)

    def load(self, data: str, root: str | None = None, *, window: int = 8) -> Text:
        if data in NAMES:
            return Text(data, *(cut(TEXTS[split], window) for split in ("train", "validation", "test")))
        text = Path(data).read_bytes()
        ends = [0, len(text) // 2, 3 * len(text) // 4, len(text)]
        return Text(Path(data).stem, *(cut(text[a:b], window) for a, b in pairwise(ends)))

    def loader(self, data: Text, split: str, batch_size: int, options: dict[str, Any], **place: Any) -> Loader:
        return Loader(getattr(data, split), batch_size, **place)

    def spec(self, data: Text) -> dict[str, Any]:
        return {"window": data.train.inputs.shape[-1]}

    def check_fits(self, model: Model, data: Text) -> None:
        if model.card.spec != self.spec(data):
            raise ValueError(f"data={data.name}: its windows are not those of {model.name}")

    def target_losses(self, logits: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
        """The loss of each byte (B, T), 0 for padding."""
        loss = cross_entropy(logits.mT, batch.targets, reduction="none", label_smoothing=smoothing)
        return loss * batch.mask

    def sums(self, logits: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {}

    def means(self, sums: dict[str, float], num_targets: float) -> dict[str, float]:
        return {"bits": sums["loss"] / num_targets / math.log(2)}

    def columns(self, logits: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {}

    def figures(self, data: Text, split: str, tallies: Sequence[Tally]) -> dict[str, Any]:
        columns = tallies[-1].columns
        return {"bits": float(columns["loss"].sum() / columns["targets"].sum()) / math.log(2)}


TASKS = {"next-byte": NextByte}
