"""Bars on whole models of the paper's MNIST sizes: c, d, e (against top-2 and the MLP), h (memory), i (threads)."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

from raytraced.benchmark.outcome import Check, Outcome
from raytraced.benchmark.timing import Contender, Ratio
from raytraced.benchmark.workloads import STATES, Bench, TrainingStep, plain_mlp


def check(what: str, ratio: Ratio, bar: float, note: str = "") -> Check:
    """A ratio that must not exceed its bar."""
    return Check(what, ratio.value, bar, "at most", (ratio.low, ratio.high), note)


def training_step(bench: Bench) -> Outcome:
    """c: training step against our top-2 step, same experts and stream, batch 256; 1 and 2 threads."""
    images, labels = bench.images.batch(256)
    contenders, experts = {}, {}
    for threads in (1, 2):
        for state in STATES:
            for name in ("mre", "top-k"):
                step = TrainingStep(bench.model(name, state), images, labels)
                contenders[f"{name}, {state}, threads {threads}"] = Contender(step, threads)
                experts[f"{name}, {state}"] = step.mean_experts()
    timings = bench.time(contenders)
    checks = []
    for threads in (1, 2):
        for state in STATES:
            case = f"{state}, threads {threads}"
            note = f"{experts[f'mre, {state}']:.1f} experts against {experts[f'top-k, {state}']:.0f}"
            checks.append(
                check(f"step ÷ top-2 step, {case}", timings.ratio(f"mre, {case}", f"top-k, {case}"), 1.1, note)
            )
    detail = bench.describe() | {"batch": 256, "experts": experts, "times": timings.summary()}
    return Outcome(checks, detail, timings.samples)


def answer(model: nn.Module, images: Tensor) -> Callable[[], object]:
    """A forward pass for inference."""
    model.eval()

    def run() -> object:
        with torch.inference_mode():
            return model(images)

    return run


def mean_experts(model: nn.Module, images: Tensor) -> float:
    """How many experts a sample runs at inference."""
    with torch.inference_mode():
        return float(model.eval()(images).active.sum((-1, -2)).mean())


def inference_batch(bench: Bench) -> Outcome:
    """d: inference at batch 1,000 against top-2 and against the MLP(36) in plain PyTorch."""
    images, _ = bench.images.batch(1000)
    contenders = {"mlp": Contender(answer(plain_mlp(), images))}
    experts = {}
    for state in STATES:
        for name in ("mre", "top-k"):
            model = bench.model(name, state)
            contenders[f"{name}, {state}"] = Contender(answer(model, images))
            experts[f"{name}, {state}"] = mean_experts(model, images)
    timings = bench.time(contenders)
    checks = []
    for state in STATES:
        note = f"{experts[f'mre, {state}']:.1f} experts against {experts[f'top-k, {state}']:.0f}"
        checks.append(check(f"time ÷ top-2, {state}", timings.ratio(f"mre, {state}", f"top-k, {state}"), 0.9, note))
        note = f"{experts[f'mre, {state}']:.1f} experts"
        checks.append(check(f"time ÷ MLP(36), {state}", timings.ratio(f"mre, {state}", "mlp"), 2.0, note))
    detail = bench.describe() | {"batch": 1000, "experts": experts, "times": timings.summary()}
    return Outcome(checks, detail, timings.samples)


def one_by_one(model: nn.Module, images: Tensor) -> Callable[[], object]:
    """Every call answers the next image, alone."""
    model.eval()
    queue = cycle(images.split(1))

    def run() -> object:
        with torch.inference_mode():
            return model(next(queue))

    return run


def latency(bench: Bench) -> Outcome:
    """e: median latency at batch 1 against the MLP(36) in plain PyTorch, image by image."""
    images, _ = bench.images.batch(256)
    contenders = {"mlp": Contender(one_by_one(plain_mlp(), images))}
    experts = {}
    for state in STATES:
        model = bench.model("mre", state)
        contenders[f"mre, {state}"] = Contender(one_by_one(model, images))
        experts[state] = mean_experts(model, images)
    timings = bench.time(contenders, single_calls=True)
    checks = [
        check(
            f"latency ÷ MLP(36), {state}", timings.ratio(f"mre, {state}", "mlp"), 1.0, f"{experts[state]:.1f} experts"
        )
        for state in STATES
    ]
    detail = bench.describe() | {"batch": 1, "experts": experts, "times": timings.summary()}
    return Outcome(checks, detail, timings.samples)


def peak_memory(bench: Bench) -> Outcome:
    """h: peak memory of a training step, batch 256, against the same step with the kernels turned off."""
    peaks: dict[str, Any] = {}
    for share, (name, switch) in enumerate((("fused", "on"), ("plain", "off")), 1):
        run = subprocess.run(
            [sys.executable, "-m", "raytraced.benchmark.memory"],
            env=os.environ | {"RAYTRACED_KERNELS": switch},
            capture_output=True,
            text=True,
        )
        if run.returncode:
            raise RuntimeError(f"the process that measures memory failed: {run.stderr.strip().splitlines()[-1]}")
        peaks[name] = json.loads(run.stdout)
        bench.tick(share / 2)
    ratio = peaks["fused"]["tensor_bytes"] / peaks["plain"]["tensor_bytes"]
    checks = [Check("peak of tensors ÷ plain path", ratio, 0.5, "at most")]
    resident = None
    if peaks["plain"]["resident_bytes"]:
        resident = peaks["fused"]["resident_bytes"] / peaks["plain"]["resident_bytes"]
    detail = {"batch": 256, "peaks": peaks, "resident_ratio": resident}
    samples = {name: [float(peak["tensor_bytes"])] for name, peak in peaks.items()}
    return Outcome(checks, detail, samples)


def threads(bench: Bench) -> Outcome:
    """i: training step at batch 1,024 with 2 threads against 1."""
    images, labels = bench.images.batch(1024)
    contenders, experts = {}, {}
    for count in (1, 2):
        for state in STATES:
            step = TrainingStep(bench.model("mre", state), images, labels)
            contenders[f"{state}, threads {count}"] = Contender(step, count)
            experts[state] = step.mean_experts()
    timings = bench.time(contenders)
    checks = []
    for state in STATES:
        ratio = timings.ratio(f"{state}, threads 1", f"{state}, threads 2")
        note = f"{experts[state]:.1f} experts"
        checks.append(Check(f"times faster, {state}", ratio.value, 1.6, "at least", (ratio.low, ratio.high), note))
    detail = bench.describe() | {"batch": 1024, "experts": experts, "times": timings.summary()}
    return Outcome(checks, detail, timings.samples)
