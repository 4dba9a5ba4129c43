"""Bars on the activation sequence alone: a (against the plain path), b (its share of a step), j (growth with the grid).

Axes: B batch, L layers, N experts a layer, T steps.
"""

import copy
import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from raytraced.benchmark.outcome import Check, Outcome
from raytraced.benchmark.timing import Contender
from raytraced.benchmark.workloads import SEED, STATES, Bench, TrainingStep
from raytraced.cost import raytraced_work
from raytraced.draws import new_seed
from raytraced.layer import RaytracedExperts
from raytraced.routing import RoutingNetwork
from raytraced.sequence import Select, Sequence, activation_sequence, unroll

BATCH_SIZE = 256
GRIDS = ((2, 4), (2, 8), (4, 8), (4, 16), (8, 16), (8, 32))
BUDGET = 8  # experts at most, where the active set is held while the grid grows


class SequenceRun:
    """Forward and backward of the sequence on fixed entry rates, with given gradients of the mask and the rates."""

    def __init__(self, routing: RoutingNetwork, entry_BN: Tensor, select: Select = "sample") -> None:
        self.routing, self.entry_BN, self.select = routing, entry_BN.detach(), select
        generator = torch.Generator().manual_seed(SEED)
        shape = (len(entry_BN), routing.num_layers, routing.num_experts)
        self.gradients = [torch.randn(shape, generator=generator).to(entry_BN) for _ in range(2)]
        self.generator = torch.Generator().manual_seed(SEED)

    def forward(self, entry_BN: Tensor) -> Sequence:
        return activation_sequence(self.routing, entry_BN, select=self.select, generator=self.generator)

    def __call__(self) -> tuple[Sequence, list[Tensor]]:
        """The sequence, and the gradients of the entry rates and the gates."""
        entry_BN = self.entry_BN.clone().requires_grad_()
        sequence = self.forward(entry_BN)
        torch.autograd.backward((sequence.active, sequence.rates.nodes), self.gradients)
        wanted = [entry_BN, *self.routing.parameters()]
        gradients = [tensor.grad for tensor in wanted if tensor.grad is not None]
        self.routing.zero_grad(set_to_none=True)
        return sequence, gradients


class PlainRun(SequenceRun):
    """The same by `sequence.unroll`, operation by operation."""

    def forward(self, entry_BN: Tensor) -> Sequence:
        return unroll(
            self.routing,
            entry_BN,
            stop="drawn",
            estimator="reinmax",
            temperature=20.0,
            num_steps=self.routing.num_nodes,
            seed=new_seed(self.generator, entry_BN.device),
            rows_B=torch.arange(len(entry_BN)),
        )


def entry_rates(bench: Bench, state: str) -> tuple[RoutingNetwork, Tensor]:
    """The routing network of a paper-mnist model, and its entry rates (B, N) of real images."""
    model: Any = bench.model("mre", state)
    with torch.no_grad():
        hidden_BD = model.input_block(bench.images.batch(BATCH_SIZE)[0])
        return model.layer.routing, model.layer.gate(hidden_BD).softmax(-1)


def compare(routing: RoutingNetwork, entry_BN: Tensor) -> dict[str, Any]:
    """Both paths on the same seed: draws in single precision, rates and gradients in double, as the definition."""
    with torch.random.fork_rng(devices=[]):
        fast, plain = SequenceRun(routing, entry_BN)()[0], PlainRun(routing, entry_BN)()[0]
        double = copy.deepcopy(routing).double()
        fast64, fast_gradients = SequenceRun(double, entry_BN.double())()
        plain64, plain_gradients = PlainRun(double, entry_BN.double())()
    gap = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(fast_gradients, plain_gradients, strict=True))
    return {
        "draws_equal": torch.equal(fast.nodes, plain.nodes) and torch.equal(fast64.nodes, plain64.nodes),
        "rates_largest_difference": float((fast.rates.nodes - plain.rates.nodes).detach().abs().max()),
        "gradients_largest_relative_difference": gap,
    }


def against_plain(bench: Bench) -> Outcome:
    """a: fused sequence, forward and backward, against the plain path; 4×8, batch 256."""
    contenders, equality, experts = {}, {}, {}
    for state in STATES:
        routing, entry_BN = entry_rates(bench, state)
        contenders[f"fused, {state}"] = Contender(SequenceRun(routing, entry_BN))
        contenders[f"plain, {state}"] = Contender(PlainRun(routing, entry_BN))
        equality[state] = compare(routing, entry_BN)
        experts[state] = float(SequenceRun(routing, entry_BN)()[0].num_active.float().mean())
    timings = bench.time(contenders)
    checks = []
    for state in STATES:
        ratio = timings.ratio(f"plain, {state}", f"fused, {state}")
        note = f"{experts[state]:.1f} experts"
        checks.append(Check(f"times faster, {state}", ratio.value, 25, "at least", (ratio.low, ratio.high), note))
    conditions = {
        "draws equal": all(entry["draws_equal"] for entry in equality.values()),
        "rates within 1e-6": all(entry["rates_largest_difference"] <= 1e-6 for entry in equality.values()),
        "gradients within 1e-5": all(
            entry["gradients_largest_relative_difference"] <= 1e-5 for entry in equality.values()
        ),
    }
    per_sample = {name: timings.median(name) / BATCH_SIZE * 1e6 for name in contenders}
    detail = bench.describe() | {"batch": BATCH_SIZE, "grid": "4×8", "equality": equality, "experts": experts}
    detail |= {"microseconds_a_sample": per_sample, "times": timings.summary()}
    return Outcome(checks, detail, timings.samples, conditions)


def share_of_step(bench: Bench) -> Outcome:
    """b: time of the sequence, forward and backward, ÷ time of a whole training step with Adam; paper-mnist, batch 256."""
    images, labels = bench.images.batch(BATCH_SIZE)
    contenders, experts = {}, {}
    for state in STATES:
        step = TrainingStep(bench.model("mre", state), images, labels)
        routing, entry_BN = entry_rates(bench, state)
        select = cast(RaytracedExperts, step.model.layer).train_select
        contenders[f"sequence, {state}"] = Contender(SequenceRun(routing, entry_BN, select))
        contenders[f"step, {state}"] = Contender(step)
        experts[state] = step.mean_experts()
    timings = bench.time(contenders)
    checks = []
    for state in STATES:
        ratio = timings.ratio(f"sequence, {state}", f"step, {state}")
        note = f"{experts[state]:.1f} experts"
        checks.append(Check(f"share, {state}", ratio.value, 0.20, "at most", (ratio.low, ratio.high), note))
    detail = bench.describe() | {"batch": BATCH_SIZE, "experts": experts, "times": timings.summary()}
    return Outcome(checks, detail, timings.samples)


def growth(bench: Bench) -> Outcome:
    """j: time of the sequence as the grid grows, 2×4 … 8×32, at initialisation, with T as it falls out."""
    contenders: dict[str, Contender] = {}
    table: list[dict[str, Any]] = []
    for L, N in GRIDS:
        routing, entry_BN = new_routing(L, N)
        with torch.no_grad():
            greedy = activation_sequence(routing, entry_BN, select="greedy")
            drawn = activation_sequence(routing, entry_BN, generator=torch.Generator().manual_seed(SEED))
        steps = float((greedy.num_active + 1).clamp_max(L * N).float().mean())
        row: dict[str, Any] = {"grid": f"{L}×{N}", "layers": L, "experts_a_layer": N, "steps": steps}
        row["active"] = float(greedy.num_active.float().mean())
        row["active_in_training"] = float(drawn.num_active.float().mean())
        row["whole_grid_work"] = steps * L * N**3
        row["whole_grid_work_in_training"] = (row["active_in_training"] + 1) * L * N**3
        row["active_work"] = float(raytraced_work(routing, greedy.nodes).multiply_adds.float().mean())  # type: ignore[union-attr]
        table.append(row)
        contenders[f"inference {L}×{N}"] = Contender(inference(routing, entry_BN))
        contenders[f"inference, {BUDGET} experts at most, {L}×{N}"] = Contender(inference(routing, entry_BN, BUDGET))
        contenders[f"training {L}×{N}"] = Contender(SequenceRun(routing, entry_BN))
    timings = bench.time(contenders)
    for row in table:
        for kind in ("inference", "training"):
            row[f"{kind}_us"] = timings.median(f"{kind} {row['grid']}") / BATCH_SIZE * 1e6
        held = timings.median(f"inference, {BUDGET} experts at most, {row['grid']}")
        row["inference_held_us"] = held / BATCH_SIZE * 1e6
    exponents = {
        "inference against T·L·N³": exponent(table, "whole_grid_work", "inference_us"),
        "inference against the multiply-adds of active nodes": exponent(table, "active_work", "inference_us"),
        "training against T·L·N³": exponent(table, "whole_grid_work_in_training", "training_us"),
    }
    checks = [
        Check("exponent against T·L·N³", exponents["inference against T·L·N³"], 0.8, "at most"),
        Check(
            "exponent against the multiply-adds of active nodes",
            exponents["inference against the multiply-adds of active nodes"],
            1.1,
            "at most",
        ),
    ]
    detail = {"batch": BATCH_SIZE, "exponents": exponents, "table": table, "times": timings.summary()}
    return Outcome(checks, detail, timings.samples)


def new_routing(num_layers: int, num_experts: int) -> tuple[RoutingNetwork, Tensor]:
    """A routing network at initialisation and entry rates (B, N) of a gate at initialisation."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return RoutingNetwork(num_layers, num_experts), torch.randn(BATCH_SIZE, num_experts).softmax(-1)


def inference(routing: RoutingNetwork, entry_BN: Tensor, max_experts: int | None = None) -> Callable[[], object]:
    def run() -> object:
        with torch.inference_mode():
            return activation_sequence(routing, entry_BN, select="greedy", max_experts=max_experts)

    return run


def exponent(table: list[dict[str, Any]], work: str, time: str) -> float:
    """p of the best fit time ∝ work^p, least squares on the logarithms."""
    x, y = ([math.log(row[key]) for row in table] for key in (work, time))
    return float(np.polyfit(x, y, 1)[0])
