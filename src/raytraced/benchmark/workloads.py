"""What is timed: real images, models at initialisation and briefly trained, whole training steps, costly layers.

Axes: B batch, L layers, N experts a layer, D width.
"""

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raytraced import kernels
from raytraced.baselines.top_k import TopKExperts
from raytraced.benchmark.timing import Contender, Settings, Timings, interleave
from raytraced.data import Loader, load
from raytraced.experts import MLPExperts
from raytraced.layer import RaytracedExperts
from raytraced.models import build_model

SEED = 0
IMAGE_SHAPE, NUM_CLASSES = (1, 28, 28), 10  # paper-mnist
NUM_LAYERS, NUM_EXPERTS = 4, 8
# Without the kernels 422 steps take minutes; the number of experts moves most in the first.
PLAIN_TRAIN_STEPS = 20
STATES = ("at initialisation", "trained")


class ExpertSize(NamedTuple):
    """Widths of an expert: dim → hidden (num_hidden times) → dim."""

    dim: int
    hidden: int
    num_hidden: int

    @property
    def multiply_adds(self) -> int:
        widths = (self.dim, *[self.hidden] * self.num_hidden, self.dim)
        return sum(a * b for a, b in pairwise(widths))

    def __str__(self) -> str:
        return "→".join(map(str, (self.dim, *[self.hidden] * self.num_hidden, self.dim)))


PAPER_EXPERT = ExpertSize(16, 16, 2)
COSTLY_EXPERT = ExpertSize(512, 2048, 1)


class Images(NamedTuple):
    """A source of batches and its name."""

    name: str
    loader: Loader

    def batch(self, size: int, epoch: int = 0) -> tuple[Tensor, Tensor]:
        """Images (B, 1, 28, 28) and labels, the first of an epoch."""
        images, labels = [], []
        for batch in self.loader.epoch(epoch):
            images.append(enlarge(batch.images))
            labels.append(batch.labels)
            if sum(map(len, labels)) >= size:
                break
        return torch.cat(images)[:size], torch.cat(labels)[:size]


def enlarge(images: Tensor) -> Tensor:
    """28 by 28 pixels, whatever the images had."""
    return images if images.shape[-1] == IMAGE_SHAPE[-1] else F.interpolate(images, IMAGE_SHAPE[1:], mode="bilinear")


@lru_cache(maxsize=1)
def open_images() -> Images:
    """MNIST where it is cached (nothing is downloaded for a benchmark), else the packaged digits, enlarged."""
    from raytraced.data.cache import cache_root, entry_folder
    from raytraced.data.catalog import PUBLIC_SETS

    mnist = PUBLIC_SETS["mnist"]
    files = [entry_folder(cache_root(None), mnist) / f"{key}.npy" for key in mnist.arrays]
    name = "mnist" if all(file.is_file() for file in files) else "digits"
    data = load(name)
    return Images(name, Loader(data.train, 256, mean=data.mean, std=data.std, seed=SEED))


def new_model(name: str) -> nn.Module:
    """A model of the paper's MNIST sizes, with the same weights in every run."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return build_model(name, IMAGE_SHAPE, NUM_CLASSES)


def plain_mlp() -> nn.Sequential:
    """The paper's MLP(36) as anybody would write it in PyTorch: no routed interface around it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        inner = [module for _ in range(8) for module in (nn.Linear(36, 36), nn.ReLU())]
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 36), nn.ReLU(), *inner, nn.Linear(36, NUM_CLASSES))


class TrainingStep:
    """Forward, loss, backward and Adam on one batch, at a learning rate of 0: the same arithmetic, but the model stays."""

    def __init__(self, model: nn.Module, images: Tensor, labels: Tensor, lr: float = 0.0) -> None:
        self.model, self.images, self.labels = model.train(), images, labels
        self.optimizer = torch.optim.Adam(model.parameters(), lr=lr, fused=True)
        self.generator = torch.Generator().manual_seed(SEED)

    def __call__(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        out = self.model(self.images, generator=self.generator)
        loss = F.cross_entropy(out.logits, self.labels)
        if out.loss is not None:
            loss = loss + out.loss
        loss.backward()
        self.optimizer.step()

    def mean_experts(self) -> float:
        """How many experts a sample runs in training."""
        with torch.no_grad():
            actives = [self.model(self.images, generator=self.generator).active for _ in range(4)]
        return float(torch.stack(actives).sum((-1, -2)).mean())


class Bench:
    """The settings of a run, its progress, and the trained models, which several bars share."""

    def __init__(self, settings: Settings, tick: Callable[[float], None] = lambda share: None) -> None:
        self.settings, self.tick = settings, tick
        self.images = open_images()
        self._trained: dict[str, nn.Module] = {}

    def time(self, contenders: dict[str, Contender], *, single_calls: bool = False) -> Timings:
        return interleave(contenders, self.settings, single_calls=single_calls, tick=self.tick)

    @property
    def num_train_steps(self) -> int:
        steps = self.settings.train_steps
        return steps if kernels.available() else min(steps, PLAIN_TRAIN_STEPS)

    def model(self, name: str, state: str) -> nn.Module:
        """A copy of a model in one of the STATES."""
        model = new_model(name)
        if state == "trained":
            model.load_state_dict(self.trained(name).state_dict())
        return model

    def trained(self, name: str) -> nn.Module:
        """A model after two epochs of MNIST: how many experts run depends on training."""
        if name not in self._trained:
            model = new_model(name)
            images, labels = self.images.batch(256)
            step = TrainingStep(model, images, labels, lr=2e-3)
            done = 0
            while done < self.num_train_steps:
                for batch in self.images.loader.epoch(done):
                    step.images, step.labels = enlarge(batch.images), batch.labels
                    step()
                    done += 1
                    if done == self.num_train_steps:
                        break
            self._trained[name] = model
        return self._trained[name]

    def describe(self) -> dict[str, object]:
        """What the models of the paper's sizes saw."""
        return {"images": self.images.name, "train_steps_of_the_trained_models": self.num_train_steps}


def raytraced_layer(size: ExpertSize) -> RaytracedExperts:
    """A 4×8 grid of experts of a size."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        layer = RaytracedExperts(size.dim, NUM_LAYERS, NUM_EXPERTS, expert=nn.Identity)
        layer.experts = MLPExperts(NUM_LAYERS, NUM_EXPERTS, size.dim, size.hidden, size.num_hidden)
        return layer


def top2_layer(size: ExpertSize) -> TopKExperts:
    """Our top-2 with the same experts."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        layer = TopKExperts(size.dim, NUM_LAYERS, NUM_EXPERTS, k=2, expert=nn.Identity)
        layer.experts = MLPExperts(NUM_LAYERS, NUM_EXPERTS, size.dim, size.hidden, size.num_hidden)
        return layer


class LayerStep:
    """Forward and backward of a layer inside a network: its input wants a gradient too."""

    def __init__(
        self, layer: nn.Module, dim: int, batch_size: int, forward: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        generator = torch.Generator().manual_seed(SEED)
        self.layer, self.generator = layer.train(), generator
        self.forward = forward or (lambda hidden_BD: layer(hidden_BD, generator=generator).hidden)
        self.hidden_BD = torch.randn(batch_size, dim, generator=generator)
        self.gradient_BD = torch.randn(batch_size, dim, generator=generator)

    def __call__(self) -> None:
        hidden_BD = self.hidden_BD.requires_grad_()
        hidden_BD.grad = None
        self.forward(hidden_BD).backward(self.gradient_BD)
        self.layer.zero_grad(set_to_none=True)

    def mean_experts(self) -> float:
        """How many experts a sample runs."""
        with torch.no_grad():
            actives = [self.layer(self.hidden_BD, generator=self.generator).active for _ in range(4)]
        return float(torch.stack(actives).sum((-1, -2)).mean())
