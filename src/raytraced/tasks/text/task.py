"""Texts and their next tokens: what a batch is, how a model for it is built, how its answers are evaluated.

Axes: B windows of a batch, T tokens per window, V vocabulary size, n windows of a split, G kinds of bytes.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from raytraced.errors import require
from raytraced.models.output import Model
from raytraced.tasks.task import Batch, Tally, Task
from raytraced.tasks.text.dataset import Dataset, Loader
from raytraced.tasks.text.loading import load

BATCH_SIZE = 16  # windows per step, as in the presets of language models
KINDS = ("letter", "digit", "space", "punctuation", "other")
"""kinds of bytes; other: control characters, and all that are not ASCII"""


def kind_of(byte: int) -> int:
    """The number of a byte's kind."""
    character = chr(byte)
    if byte >= 128 or (byte < 32 and not character.isspace()) or byte == 127:
        return 4
    return 0 if character.isalpha() else 1 if character.isdigit() else 2 if character.isspace() else 3


KIND_OF_BYTE = torch.tensor([kind_of(byte) for byte in range(256)])


class TextTask(Task[Dataset]):
    """Predict the next token; the fewer bits per byte, the better."""

    name = "text"
    family = "gpt"
    sample_name = "windows"
    better = "bits_per_byte"
    higher = False
    options = {"context": int, "steps": int, "eval_tokens": int | None, "tokenizer": str}  # noqa: RUF012
    formats = {"bits_per_byte": ".3f"}  # noqa: RUF012

    def load(self, data: str, root: str | None = None, **options: Any) -> Dataset:
        self.check_options(options)
        return load(data, root, **options)

    def choose_batch_size(self, data: Dataset) -> int:
        """The same for every text: an epoch has a fixed number of steps."""
        return BATCH_SIZE

    def loader(self, data: Dataset, split: str, batch_size: int, options: dict[str, Any], **place: Any) -> Loader:
        return Loader(data.splits[split], batch_size, data.steps, lengths=data.lengths, **place)

    def spec(self, data: Dataset) -> dict[str, Any]:
        tokens = {} if data.tokenizer is None else {"tokenizer": data.tokenizer}
        return {"context": data.context, "vocab_size": data.vocab_size, **tokens}

    def fingerprint(self, data: Dataset) -> dict[str, Any]:
        sizes = {name: sum(map(len, split.domains)) for name, split in data.splits.items()}
        return {"number of tokens": sum(sizes.values()), "content": data.sha256()}

    def form(self, spec: dict[str, Any]) -> dict[str, Any]:
        return {name: spec[name] for name in ("context", "tokenizer") if name in spec}

    def check_fits(self, model: Model, data: Dataset) -> None:
        """Refuse a text with another number of tokens than the model has."""
        known = model.card.spec.get("vocab_size", 256)
        rule = f"has {data.vocab_size} different tokens; {model.name} has {known}"
        require(data.vocab_size == known, "data", data.name, rule)

    def target_losses(self, logits: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
        """The loss of each token (B, T), 0 for padding."""
        flat = cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none", label_smoothing=smoothing)
        loss_BT = flat.view(batch.targets.shape)
        return loss_BT if batch.mask is None else loss_BT * batch.mask

    def num_bytes(self, batch: Batch) -> Tensor:
        """Number of bytes of each target (B, T), 0 for padding."""
        sizes = torch.ones_like(batch.targets) if batch.sizes is None else batch.sizes
        return sizes if batch.mask is None else sizes * batch.mask

    def sums(self, logits: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {"bytes": self.num_bytes(batch).sum()}

    def means(self, sums: dict[str, float], num_targets: float) -> dict[str, float]:
        return {"bits_per_byte": sums["loss"] / max(1.0, sums["bytes"]) / math.log(2)}

    def columns(self, logits: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Nats and bytes of each window, of all its tokens, by position and by kind of byte; figures are their quotients."""
        nats_BT, bytes_BT = self.target_losses(logits, batch).double(), self.num_bytes(batch)
        columns = {"nats": nats_BT.sum(-1), "bytes": bytes_BT.sum(-1)}
        for first, last in stretches(batch.targets.shape[1]):
            columns[f"nats from {first}"] = nats_BT[:, first - 1 : last].sum(-1)
            columns[f"bytes from {first}"] = bytes_BT[:, first - 1 : last].sum(-1)
        if batch.sizes is None:
            kinds_BT = self.groups(batch)
            for number, kind in enumerate(KINDS):
                columns[f"nats {kind}"] = (nats_BT * (kinds_BT == number)).sum(-1)
                columns[f"bytes {kind}"] = (bytes_BT * (kinds_BT == number)).sum(-1)
        return columns

    def groups(self, batch: Batch) -> Tensor:
        """The kind of each byte (B, T); one kind for all tokens of more than one byte."""
        if batch.sizes is not None:
            return super().groups(batch)
        return KIND_OF_BYTE.to(batch.targets.device)[batch.targets]

    def num_groups(self, data: Dataset) -> int:
        return len(KINDS) if data.lengths is None else 1

    def figures(self, data: Dataset, split: str, tallies: Sequence[Tally]) -> dict[str, Any]:
        """Bits per byte of all, by position, by kind of byte and by domain, and the experts that ran for each."""
        columns, load = tallies[-1].columns, tallies[-1].load
        positions = stretches(data.context)
        figures: dict[str, Any] = {
            "bits_per_byte": bits(columns, ""),
            "bits_by_position": {f"{first}-{last}": bits(columns, f" from {first}") for first, last in positions},
        }
        if data.lengths is None:
            figures["bits_by_kind"] = {kind: bits(columns, f" {kind}") for kind in KINDS}
            if load is not None:
                num_G = [float(columns[f"bytes {kind}"].sum()) for kind in KINDS]
                ran_G = load.flatten(1).sum(1).tolist()
                figures["experts_by_kind"] = {
                    kind: ran / num if num else None for kind, ran, num in zip(KINDS, ran_G, num_G, strict=True)
                }
        if len(data.domain_names) > 1:
            number_n = torch.from_numpy(data.splits[split].windows[:, 0]).to(columns["bytes"].device)
            parts = {
                name: {key: column[number_n == number] for key, column in columns.items()}
                for number, name in enumerate(data.domain_names)
            }
            figures["bits_by_domain"] = {name: bits(part, "") for name, part in parts.items()}
            figures["experts_by_domain"] = {
                name: float(part["experts"].sum() / part["targets"].sum()) for name, part in parts.items()
            }
        return figures

    def group_rows(self, data: Dataset, result: Any) -> list[dict[str, Any]]:
        """By domain, by kind of byte and by position in the window."""
        figures, rows = result, []
        for part in ("domain", "kind", "position"):
            for name, value in figures.get(f"bits_by_{part}", {}).items():
                experts = figures.get(f"experts_by_{part}", {}).get(name)
                title = f"{part} {name}" if part == "position" else name
                rows.append({"part": title, "bits_per_byte": value, "experts": experts})
        return rows


def stretches(context: int) -> list[tuple[int, int]]:
    """Ranges of positions in a window: 1-3, 4-15, 16-63, … up to the context."""
    firsts = [1, *(4**power for power in range(1, context.bit_length()) if 4**power < context)]
    return list(zip(firsts, [first - 1 for first in firsts[1:]] + [context], strict=True))


def bits(columns: dict[str, Tensor], which: str) -> float | None:
    """Bits per byte, from sums of nats and of bytes; None where there is no byte."""
    num = float(columns[f"bytes{which}"].sum())
    return float(columns[f"nats{which}"].sum()) / num / math.log(2) if num else None
