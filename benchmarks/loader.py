"""Samples a second of the loader, of torch's DataLoader over the same arrays, and of training: `python benchmarks/loader.py`.

Legend: B batch, C channels, H and W height and width.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from raytraced import data
from raytraced.classifier import preset

PRESETS = {
    "mnist": "paper-mnist",
    "fashion-mnist": "paper-fashion-mnist",
    "cifar10": "paper-cifar10",
    "digits": "digits",
}


class PlainDataset(TorchDataset):
    """What a user of DataLoader writes: one sample at a time, normalised in float."""

    def __init__(self, dataset: data.Dataset) -> None:
        self.images, self.labels = dataset.train.images, dataset.train.labels
        self.mean, self.std = (torch.tensor(value).view(-1, 1, 1) for value in (dataset.mean, dataset.std))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return (self.images[index].float() / 255 - self.mean) / self.std, self.labels[index]


class BatchedDataset(PlainDataset):
    """DataLoader at its best on an array: `__getitems__` gathers and normalises a whole batch at once."""

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        index_B = torch.tensor(indices)
        return (self.images[index_B].float() / 255 - self.mean) / self.std, self.labels[index_B]


def endless(make_epoch: Callable[[int], Iterator]) -> Iterator:
    """Yield the batches of epoch after epoch."""
    epoch = 0
    while True:
        yield from make_epoch(epoch)
        epoch += 1


def training_steps(dataset: data.Dataset, loader: data.Loader, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield the labels of each batch after one plain step of Adam on it."""
    model = preset(PRESETS[dataset.name])
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for batch in endless(loader.epoch):
        output = model(batch.images, generator=generator, rows=batch.rows)
        loss = cross_entropy(output.logits, batch.labels)
        if output.loss is not None:
            loss = loss + output.loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield batch.labels


def rate(batches: Iterator[Tensor], seconds: float) -> float:
    """Return the samples a second that come within about `seconds`."""
    num_samples, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < seconds:
        num_samples += len(next(batches))
    return num_samples / passed


def main() -> None:
    """Measure every contender in turn, round after round, and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="mnist", choices=PRESETS)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each contender in each round")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    dataset = data.load(options.data)
    make = {"batch_size": options.batch_size, "shuffle": True}
    plain, batched = PlainDataset(dataset), BatchedDataset(dataset)
    ours = data.Loader(dataset.train, options.batch_size, mean=dataset.mean, std=dataset.std)
    augmented = data.Loader(dataset.train, options.batch_size, mean=dataset.mean, std=dataset.std, augment=True)
    contenders: dict[str, Iterator[Tensor]] = {
        "raytraced.data.Loader": (batch.labels for batch in endless(ours.epoch)),
        "the same, augment=True": (batch.labels for batch in endless(augmented.epoch)),
        "DataLoader, a sample at a time": (y for _, y in endless(lambda _: iter(DataLoader(plain, **make)))),
        "DataLoader, 2 workers": (y for _, y in endless(lambda _: iter(DataLoader(plain, num_workers=2, **make)))),
        "DataLoader, a batch at a time": (
            y for _, y in endless(lambda _: iter(DataLoader(batched, collate_fn=lambda batch: batch, **make)))
        ),
        f"training {PRESETS[options.data]}": training_steps(dataset, ours, torch.Generator().manual_seed(0)),
    }
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for round_number in range(options.rounds + 1):
        for name, batches in contenders.items():
            measured = rate(batches, options.seconds)
            if round_number > 0:  # the first round warms up
                rates[name].append(measured)

    print(f"{options.data}, batch {options.batch_size}, {options.threads} thread(s), {options.rounds} rounds in turn")
    print(
        f"{platform.machine()}, torch {torch.__version__}; samples a second: median (lowest … highest), ratio to training"
    )
    training = statistics.median(list(rates.values())[-1])
    for name, values in rates.items():
        median = statistics.median(values)
        spread = f"({min(values):,.0f} … {max(values):,.0f})"
        print(f"  {name:<32} {median:>12,.0f}  {spread:<26} {median / training:8.1f} x")


if __name__ == "__main__":
    main()
