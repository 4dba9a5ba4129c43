"""Workloads on whole models. Each compares pairs of contenders."""

import copy
import ctypes
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import count, cycle, islice, pairwise, repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments import ROOT
from experiments.benchmark.results import Outcome
from experiments.benchmark.timing import Contender, Settings, Timings, interleave
from raytraced import kernels
from raytraced.io.saving import load
from raytraced.models.output import Model
from raytraced.models.registry import MODELS, build
from raytraced.tasks.registry import find_task
from raytraced.tasks.task import Batch
from raytraced.training.config import TrainConfig, preset_values
from raytraced.training.interrupt import Interrupted
from raytraced.training.loop import train
from raytraced.training.objective import Objective, step_seed
from raytraced.training.optim import build_optimizer, set_learning_rate, take_step
from raytraced.training.state import State

SEED, BATCH_SIZE = 0, 256
STATES = ("at initialisation", "trained")
KEEP_STEPS = 50  # buffers are restored after as many steps: doing it after each would take a part of the time
PLAIN_TRAIN_STEPS = 20  # without compiled kernels 422 take minutes; the number of experts changes most at first


def fixed_generator() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


def recipe(data: str, model: str, **options: Any) -> TrainConfig:
    """The configuration with which `raytraced train` trains a model."""
    return TrainConfig(data=data, model=model, **(preset_values("best", data, model) | options))


class TrainingStep:
    """The training step of `raytraced train`, on one batch after the other.

    At a learning rate of 0 the step costs the same and the weights stay. Buffers that routers update by themselves are
    restored as well: a penalty to which no weight reacts would grow without end.
    """

    def __init__(self, config: TrainConfig, model: Model, batches: Iterator[Batch], rate: float = 0.0) -> None:
        self.model, self.batches, self.parameters = model.train(), batches, list(model.parameters())
        task = find_task(config.data)
        self.objective, self.optimizer = Objective(model, config, task), build_optimizer(model, config)
        set_learning_rate(self.optimizer, rate)
        self.seeds = map(step_seed, repeat(config.seed), count())
        self.state = State()
        self.kept = {} if rate else {name: buffer.clone() for name, buffer in model.named_buffers()}

    def __call__(self) -> None:
        batch = next(self.batches)
        result = self.objective(batch, next(self.seeds), len(batch.targets))
        norm = take_step(self.optimizer, self.parameters, result.loss)
        assert norm is not None
        self.state.count(result, norm)
        if self.kept and self.state.sums["steps"] % KEEP_STEPS == 0:
            for name, buffer in self.model.named_buffers():
                buffer.copy_(self.kept[name])

    def contender(self, name: str, threads: int = 1) -> Contender:
        return Contender(name, self, threads, mean_experts(self.model, next(self.batches).inputs))


def mean_experts(model: Model, images: Tensor) -> float:
    """Mean number of experts per image, in the present mode of the model (training or evaluation)."""
    with torch.no_grad():
        return float(model(images, generator=fixed_generator()).num_experts.float().mean())


def answering(name: str, model: Callable[[Tensor], object], images: Tensor, size: int = 1000) -> Contender:
    """A contender that classifies the next `size` images in every call."""
    queue = cycle(images.split(size))
    run = torch.inference_mode()(lambda: model(next(queue)))
    return Contender(name, run, experts=mean_experts(model, images) if isinstance(model, Model) else None)


def forced(one: Contender, word: str, *names: str) -> Contender:
    """The same contender with a given implementation of all operations, or of those named."""

    def run() -> object:
        with kernels.use(**dict.fromkeys(names, word)) if names else kernels.use(word):
            return one.run()

    return one._replace(name=f"{one.name}, {word}", run=run)


class Bench:
    """The settings, the data and the trained models that the workloads share."""

    def __init__(self, settings: Settings, data: str) -> None:
        self.settings, self.data, self.task = settings, data, find_task(data)
        self.dataset: Any = self.task.load(data)
        self.tick: Callable[[float], None] = lambda share: None
        self.trained: dict[str, Model] = {}

    def compare(self, pairs: list[tuple[Contender, Contender]], single_calls: bool = False) -> Outcome:
        """Time all contenders in turns; return the ratio of the first to the second for each pair."""
        timings = self.time([one for pair in pairs for one in pair], single_calls)
        return Outcome([timings.row(*pair) for pair in pairs])

    def time(self, contenders: list[Contender], single_calls: bool = False) -> Timings:
        once = list({one.name: one for one in contenders}.values())
        return interleave(once, self.settings, single_calls=single_calls, tick=self.tick)

    def batches(self, size: int = BATCH_SIZE) -> Iterator[Batch]:
        """Batches of uint8 images from the loader, without end."""
        loader = self.task.loader(self.dataset, "train", size, {}, seed=SEED)
        return (batch for epoch in count() for batch in loader.epoch(epoch))

    def model(self, name: str, state: str) -> Model:
        """A model in one of the STATES. The number of experts depends on training, so `trained` is trained briefly."""
        torch.manual_seed(SEED)
        model = self.task.build(name, self.dataset, {}).eval()
        if state == "trained":
            if name not in self.trained:
                step = TrainingStep(recipe(self.data, name), self.model(name, STATES[0]), self.batches(), rate=1.0)
                for _ in range(self.settings.train_steps if kernels.available() else PLAIN_TRAIN_STEPS):
                    step()
                self.trained[name] = step.model
            model.load_state_dict(self.trained[name].state_dict())
        return model

    def step(self, name: str, state: str, threads: int = 1, batch_size: int = BATCH_SIZE) -> Contender:
        batches = cycle(list(islice(self.batches(batch_size), 8)))
        title = f"{name}, {state}" + (f", {threads} threads" if threads > 1 else "")
        return TrainingStep(recipe(self.data, name), self.model(name, state), batches).contender(title, threads)

    def mlp(self, images: Tensor, size: int = 1000) -> Contender:
        """The paper's MLP(36), written in plain PyTorch."""
        widths = [images[0].numel(), *[36] * 9]
        hidden = [module for pair in pairwise(widths) for module in (nn.Linear(*pair), nn.ReLU())]
        mlp = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(36, self.dataset.num_classes))
        return answering("MLP(36) in plain PyTorch", lambda images: mlp(images / 255), images, size)


def measure_step(bench: Bench) -> Outcome:
    cases = [(state, threads) for threads in (1, 2) for state in STATES]
    return bench.compare([(bench.step("mre", *case), bench.step("top-k", *case)) for case in cases])


def measure_epoch(bench: Bench) -> Outcome:
    timings, runs = Timings(), {}
    num_rounds = 3 * bench.settings.least_rounds  # an epoch takes about a second, and disturbances last as long
    for done in range(num_rounds):
        for name in ("mre", "top-k"):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    run = train(recipe(bench.data, name, epochs=2, runs_dir=folder), callbacks=())
                except Interrupted as stop:
                    raise KeyboardInterrupt from stop
                for line in run.read_metrics():
                    title = f"{name}, epoch {line['epoch']}"
                    runs[title] = Contender(title, list, experts=line["train_experts"])
                    timings.setdefault(title, []).append(line["seconds"])
        bench.tick((done + 1) / num_rounds)
    return Outcome([timings.row(runs[f"mre, epoch {number}"], runs[f"top-k, epoch {number}"]) for number in (1, 2)])


def measure_baselines(bench: Bench) -> Outcome:
    top2 = bench.step("top-k", "trained")
    return bench.compare([(bench.step(name, "trained"), top2) for name in MODELS if name != "top-k"])


def measure_inference(bench: Bench) -> Outcome:
    images, pairs = next(bench.batches(1000)).inputs, []
    for state in STATES:
        mre, top2 = (answering(f"{name}, {state}", bench.model(name, state), images) for name in ("mre", "top-k"))
        pairs += [(mre, top2), (mre, bench.mlp(images))]
    return bench.compare(pairs)


def measure_latency(bench: Bench) -> Outcome:
    images, shipped = next(bench.batches()).inputs, f"mre-{bench.data}"
    models = {f"mre, {state}": bench.model("mre", state) for state in STATES}
    models[f'raytraced.load("{shipped}")'] = load(shipped)
    mlp = bench.mlp(images, 1)
    return bench.compare([(answering(name, model, images, 1), mlp) for name, model in models.items()], True)


def noise(*image_shape: int) -> tuple[Model, Batch]:
    """A new MRE model for images of a shape, and a batch of noise."""
    images = torch.randint(256, (BATCH_SIZE, *image_shape), dtype=torch.uint8, generator=fixed_generator())
    batch = Batch(images, torch.arange(BATCH_SIZE) % 10, torch.arange(BATCH_SIZE))
    return build("mre", image_shape=image_shape, num_classes=10).eval(), batch


def measure_kernels(bench: Bench) -> Outcome:
    contenders = []
    for title, shape in (("grey 28×28", (1, 28, 28)), ("colour 32×32", (3, 32, 32))):
        model, batch = noise(*shape)
        contenders.append(answering(f"inference, {title}", copy.deepcopy(model), batch.inputs))
        contenders.append(TrainingStep(recipe(bench.data, "mre"), model, repeat(batch)).contender(f"step, {title}"))
    return bench.compare([(one, forced(one, "plain")) for one in contenders])


def measure_memory(bench: Bench) -> Outcome:
    row: dict[str, Any] = {"what": "a step at batch 256", "against": "a step at batch 256, plain", "ratio": None}
    code, peaks = "from experiments.benchmark.model_workloads import resident_mb; print(resident_mb())", []
    for switch in ({}, {"RAYTRACED_KERNELS": "plain"}):
        ended = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | switch, cwd=ROOT, capture_output=True, text=True
        )
        if ended.returncode:
            return Outcome([row | {"note": ended.stderr.strip().splitlines()[-1]}])
        peaks.append(float(ended.stdout))
    return Outcome([row | {"ratio": peaks[0] / peaks[1], "mb": peaks[0], "against_mb": peaks[1]}])


def resident_mb() -> float:
    """The peak of resident memory during a training step, less the memory before it, as Linux counts it."""
    torch.set_num_threads(1)
    model, batch = noise(1, 28, 28)
    small = Batch(*(field[:2] for field in batch[:3]))
    step = TrainingStep(recipe("mnist", "mre"), model, iter((small, batch)))
    step()  # loads code and optimizer state, with a batch too small to reserve the memory of a step
    ctypes.CDLL(None).malloc_trim(0)  # return free memory to the system, or the step would reuse it unseen
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = status_mb("VmRSS")
    step()
    return status_mb("VmHWM") - before


def status_mb(field: str) -> float:
    return int(re.findall(rf"{field}:\s*(\d+)", Path("/proc/self/status").read_text())[0]) / 1024


def measure_threads(bench: Bench) -> Outcome:
    return bench.compare([(bench.step("mre", state, 2, 1024), bench.step("mre", state, 1, 1024)) for state in STATES])


MEASUREMENTS: dict[str, Callable[[Bench], Outcome]] = {
    "step": measure_step,
    "epoch": measure_epoch,
    "baselines": measure_baselines,
    "inference": measure_inference,
    "latency": measure_latency,
    "kernels": measure_kernels,
    "memory": measure_memory,
    "threads": measure_threads,
}
