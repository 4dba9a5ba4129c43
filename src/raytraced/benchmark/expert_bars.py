"""Bars on costly experts and on other libraries: f, l (sparse against dense), g (peers), k (distance to the limit).

A step is forward and backward of the layer here; the optimizer, which reads and writes every weight whoever was active,
is timed apart. Axes: B batch, D width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from raytraced.benchmark.outcome import Check, Outcome
from raytraced.benchmark.peers import PEERS, Peer, open_peer
from raytraced.benchmark.timing import Contender
from raytraced.benchmark.workloads import (
    COSTLY_EXPERT,
    NUM_EXPERTS,
    NUM_LAYERS,
    PAPER_EXPERT,
    SEED,
    Bench,
    ExpertSize,
    LayerStep,
    raytraced_layer,
    top2_layer,
)
from raytraced.cost import raytraced_work
from raytraced.experts import run_stream, update_dense
from raytraced.layer import RaytracedExperts
from raytraced.sequence import Select

BATCH_SIZE = 256
GEMM_SIZES = (512, 1024, 2048)
LIMIT_DIMS = (16, 128, 512)
SELECTS: tuple[Select, ...] = ("sample", "greedy")


def dense_forward(layer: RaytracedExperts, hidden_BD: Tensor) -> Callable[[], object]:
    """Every expert on every row, masked afterwards."""
    with torch.no_grad():
        weights_BLN = layer(hidden_BD, select="greedy").active

    def run() -> object:
        with torch.no_grad():
            return run_stream(
                layer.stream,
                NUM_LAYERS,
                hidden_BD,
                lambda l, h_BD: update_dense(layer.experts, l, h_BD, weights_BLN[:, l]),
            )

    return run


def sparse_inference(bench: Bench) -> Outcome:
    """f: inference with costly experts: time ÷ (time of all experts on all rows × share that is active)."""
    layer = raytraced_layer(COSTLY_EXPERT).eval()
    hidden_BD = torch.randn(BATCH_SIZE, COSTLY_EXPERT.dim, generator=torch.Generator().manual_seed(SEED))
    contenders = {"dense": Contender(dense_forward(layer, hidden_BD))}
    shares = {}
    for select in SELECTS:

        def run(select: Select = select) -> Tensor:
            with torch.no_grad():
                active: Tensor = layer(hidden_BD, select=select, generator=torch.Generator().manual_seed(SEED)).active
                return active

        shares[select] = float(run().mean())
        contenders[select] = Contender(run)
    timings = bench.time(contenders)
    checks = []
    for select, share in shares.items():
        value, low, high = (number / share for number in timings.ratio(select, "dense"))
        note = f"{share * NUM_LAYERS * NUM_EXPERTS:.1f} of {NUM_LAYERS * NUM_EXPERTS} experts"
        checks.append(Check(f"time ÷ (dense × active share), {select}", value, 1.15, "at most", (low, high), note))
    detail = {"batch": BATCH_SIZE, "expert": str(COSTLY_EXPERT), "grid": "4×8", "active_share": shares}
    return Outcome(checks, detail | {"times": timings.summary()}, timings.samples)


def peer_contenders(name: str, size: ExpertSize) -> dict[str, Contender] | str:
    """Forward and backward of each variant of a peer, or why there is none."""
    peer = open_peer(name, size)
    if not isinstance(peer, Peer):
        return peer
    steps = {
        f"{name}, {variant}, {size}": Contender(LayerStep(peer.stack, size.dim, BATCH_SIZE, run))
        for variant, run in peer.variants.items()
    }
    return dict(steps)


def against_peers(bench: Bench) -> Outcome:
    """g: our top-2 against other libraries' top-2, four layers of 8 experts, batch 256; each in its fastest variant."""
    checks: list[Check] = []
    samples: dict[str, list[float]] = {}
    times: dict[str, dict[str, Any]] = {}
    refused: dict[str, str] = {}
    for size in (PAPER_EXPERT, COSTLY_EXPERT):
        ours = f"ours, {size}"
        contenders = {ours: Contender(LayerStep(top2_layer(size), size.dim, BATCH_SIZE))}
        variants: dict[str, list[str]] = {}
        for name in PEERS:
            found = peer_contenders(name, size)
            if isinstance(found, str):
                refused[f"{name}, {size}"] = found
            else:
                variants[name] = list(found)
                contenders |= found
        timings = bench.time(contenders)
        samples |= timings.samples
        times |= timings.summary()
        for name in PEERS:
            what = f"ours ÷ {name}, {size}"
            if name in variants:
                fastest = timings.fastest(variants[name])
                value, low, high = timings.ratio(ours, fastest)
                note = fastest.split(", ")[1]
                checks.append(Check(what, value, 1.0, "below", (low, high), note))
            else:
                checks.append(Check(what, None, 1.0, "below", note=refused[f"{name}, {size}"]))
    detail = {
        "batch": BATCH_SIZE,
        "layers": NUM_LAYERS,
        "experts": NUM_EXPERTS,
        "not_measured": refused,
        "times": times,
    }
    return Outcome(checks, detail, samples)


def sparse_training(bench: Bench) -> Outcome:
    """l: step with costly experts, gradients for active masks only: ÷ (dense step × active share), and ÷ a peer's top-2."""
    size, peer = COSTLY_EXPERT, "mixture-of-experts"
    layer = raytraced_layer(size)
    generator = torch.Generator().manual_seed(SEED)

    def forward(mask_gradient: str, select: Select, max_experts: int | None) -> Callable[[Tensor], Tensor]:
        def run(hidden_BD: Tensor) -> Tensor:
            layer.mask_gradient = mask_gradient  # type: ignore[assignment]  # one layer: 270 MB of weights, not 540
            out = layer(hidden_BD, select=select, max_experts=max_experts, generator=generator)
            hidden: Tensor = out.hidden
            return hidden

        return run

    cases: dict[str, tuple[Select, int | None]] = {
        "sample": ("sample", None),
        "greedy": ("greedy", None),
        "sample, 8 experts at most": ("sample", 8),
    }
    steps = {
        f"active, {name}": LayerStep(layer, size.dim, BATCH_SIZE, forward("active", *case))
        for name, case in cases.items()
    }
    dense = LayerStep(layer, size.dim, BATCH_SIZE, forward("all", "sample", None))
    contenders = {name: Contender(step) for name, step in steps.items()} | {"dense": Contender(dense)}
    found = peer_contenders(peer, size)
    if not isinstance(found, str):
        contenders |= found
    experts = {}
    for name, (select, max_experts) in cases.items():
        with torch.no_grad():
            drawn = [
                layer(dense.hidden_BD, select=select, max_experts=max_experts, generator=generator) for _ in range(4)
            ]
        experts[name] = float(torch.stack([out.active for out in drawn]).sum((-1, -2)).mean())
    timings = bench.time(contenders)
    checks = []
    for name in cases:
        share = experts[name] / (NUM_LAYERS * NUM_EXPERTS)
        value, low, high = (number / share for number in timings.ratio(f"active, {name}", "dense"))
        note = f"{experts[name]:.1f} of {NUM_LAYERS * NUM_EXPERTS} experts"
        if name != "sample, 8 experts at most":
            checks.append(Check(f"step ÷ (dense × active share), {name}", value, 1.3, "at most", (low, high), note))
        what = f"step ÷ {peer}, {name}"
        if isinstance(found, str):
            checks.append(Check(what, None, 1.0, "below", note=found))
        else:
            value, low, high = timings.ratio(f"active, {name}", timings.fastest(list(found)))
            checks.append(Check(what, value, 1.0, "below", (low, high), note))
    detail = {"batch": BATCH_SIZE, "expert": str(size), "grid": "4×8", "experts": experts, "times": timings.summary()}
    return Outcome(checks, detail, timings.samples)


def matrix_product(size: int) -> Callable[[], object]:
    """A square product in single precision."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    out = torch.empty(size, size)
    return lambda: torch.mm(a, b, out=out)


def step_multiply_adds(layer: RaytracedExperts, step: LayerStep, size: ExpertSize) -> tuple[float, float]:
    """Multiply-adds of a step and mean experts: what is multiplied forward is multiplied twice more backward."""
    with torch.no_grad():
        outs = [layer(step.hidden_BD, generator=step.generator) for _ in range(4)]
    experts = float(torch.stack([out.active for out in outs]).sum((-1, -2)).mean())
    routing = raytraced_work(layer.routing, outs[0].sequence.nodes).multiply_adds
    assert isinstance(routing, Tensor)
    forward = experts * size.multiply_adds + layer.gate.weight.numel() + float(routing.float().mean())
    return 3 * BATCH_SIZE * forward, experts


def distance_to_limit(bench: Bench) -> Outcome:
    """k: time of a step ÷ (its multiply-adds ÷ the rate of a large matrix product on the same core)."""
    contenders = {f"product {size}": Contender(matrix_product(size)) for size in GEMM_SIZES}
    work, experts = {}, {}
    for dim in LIMIT_DIMS:
        size = ExpertSize(dim, 4 * dim, 1)
        layer = raytraced_layer(size)
        step = LayerStep(layer, dim, BATCH_SIZE)
        work[dim], experts[dim] = step_multiply_adds(layer, step, size)
        contenders[f"step, width {dim}"] = Contender(step)
    optimizer_step = adam(raytraced_layer(ExpertSize(512, 2048, 1)))
    contenders["Adam alone, width 512"] = Contender(optimizer_step)
    timings = bench.time(contenders)
    peak = max(size**3 / timings.median(f"product {size}") for size in GEMM_SIZES)
    ratios = {dim: timings.median(f"step, width {dim}") * peak / work[dim] for dim in LIMIT_DIMS}
    checks = [Check("time ÷ limit, width 512", ratios[512], 1.3, "at most", note=f"{experts[512]:.1f} experts")]
    detail = {
        "batch": BATCH_SIZE,
        "peak_gemm_gflops": peak * 2 / 1e9,
        "ratio": {str(dim): ratio for dim, ratio in ratios.items()},
        "multiply_adds": {str(dim): count for dim, count in work.items()},
        "experts": {str(dim): count for dim, count in experts.items()},
        "ratio_with_adam_512": (timings.median("step, width 512") + timings.median("Adam alone, width 512"))
        * peak
        / work[512],
        "times": timings.summary(),
    }
    return Outcome(checks, detail, timings.samples)


def adam(layer: RaytracedExperts) -> Callable[[], object]:
    """An optimizer's step on gradients that are there."""
    for parameter in layer.parameters():
        parameter.grad = torch.randn_like(parameter)
    return torch.optim.Adam(layer.parameters(), lr=0.0, fused=True).step
