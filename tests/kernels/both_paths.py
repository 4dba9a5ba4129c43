"""Runs the plain and the fused sequence side by side, and finds the draws that rounding may decide either way.

Axes: B batch, L layers, N experts per layer, K candidates (the nodes, then the output node), T steps.
"""

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raytraced import kernels
from raytraced.rng import exponential, uniform
from raytraced.routing import RoutingNetwork
from raytraced.sequence import Route, apply_stop, unroll

# Two candidates closer than this, relative to the larger, are a tie: the order of a few additions decides.
TIE = {torch.float32: 2e-6, torch.float64: 1e-12}
VALUES = {torch.float32: 1e-6, torch.float64: 1e-12}
GRADIENTS = {torch.float32: 1e-5, torch.float64: 1e-9}


class Case(NamedTuple):
    """A routing network, entry rates, and the options of both paths."""

    routing: RoutingNetwork
    entry: Tensor  # (B, N)
    options: dict[str, Any]


def make_case(
    num_layers: int,
    num_experts: int,
    batch: int,
    *,
    estimator: str = "reinmax",
    select: str = "sample",
    stop: str | float | Tensor = "drawn",
    max_experts: int | None = None,
    dtype: torch.dtype = torch.float32,
    first_row: int = 0,
    scale: float = 1.0,
    input_conditioned: bool = False,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    routing = RoutingNetwork(num_layers, num_experts).to(dtype)
    with torch.no_grad():
        for weight in routing.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=dtype) * (num_experts + 1) ** 0.5 * scale)
    entry_BN = torch.randn(batch, num_experts, generator=generator, dtype=dtype).softmax(-1).requires_grad_()
    M = routing.num_nodes
    options = {
        "estimator": estimator,
        "stop": stop,
        "temperature": 3.0,
        "num_steps": M if max_experts is None else min(M, max_experts),
        "seed": torch.tensor(2**61 + 12345 + seed) if select == "sample" else None,
        "rows_B": first_row + torch.arange(batch),
    }
    if input_conditioned:
        shape = (batch, num_layers - 1, num_experts, num_experts + 1)
        options["input_logits_BLNO"] = torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()
    return Case(routing, entry_BN, options)


def compiled(*args: Any, **options: Any) -> Route:
    """The sequence in the compiled library."""
    with kernels.use(sequence="cpp"):
        return kernels.sequence(*args, **options)


class Outcome(NamedTuple):
    """What one path gave: a sequence, and the gradients of entry and gates."""

    sequence: Route
    gradients: list[Tensor]


def run(path: Any, case: Case, weights: list[Tensor | None]) -> Outcome:
    """Run one path forward and, from the loss Σ weights·(active, rates, output), backward."""
    routing, entry_BN, options = case
    sequence = path(routing, entry_BN, **options)
    outputs = (sequence.active, sequence.rates.nodes, sequence.rates.output)
    loss = sum((out * weight).sum() for out, weight in zip(outputs, weights, strict=True) if weight is not None)
    loss = loss + 0 * entry_BN.sum()  # with the estimator "none" a mask has no gradient
    input_logits = options.get("input_logits_BLNO")
    sources = [entry_BN, *routing.parameters(), *([] if input_logits is None else [input_logits])]
    grads = torch.autograd.grad(loss, sources, allow_unused=True, materialize_grads=True)
    return Outcome(sequence, list(grads))


def ties(case: Case, nodes_BT: Tensor, logit_size: float = 1.0) -> Tensor:
    """Where (B, T) a draw of this sequence was so close that rounding may decide it, with logits up to this size."""
    routing, entry_BN, options = case
    B, L, N = entry_BN.shape[0], routing.num_layers, routing.num_experts
    limit = TIE[entry_BN.dtype] * logit_size
    active_BM = torch.zeros(B, L * N, dtype=torch.float64)
    wide = RoutingNetwork(L, N).double()
    wide.load_state_dict(routing.state_dict())
    input_logits = _doubled(options).get("input_logits_BLNO")
    close_BT = torch.zeros(nodes_BT.shape, dtype=torch.bool)
    for step in range(nodes_BT.shape[1]):
        with torch.no_grad():
            rates = wide(entry_BN.double(), active_BM.view(B, L, N), input_logits)
        nodes_BM, output_B1 = rates.nodes.flatten(1) * (1 - active_BM), rates.output[:, None]
        probs_BK = torch.cat((nodes_BM, output_B1), -1)
        if isinstance(options["stop"], str) and options["stop"] == "dominant":
            most_B1 = nodes_BM.amax(-1, keepdim=True)
            close_BT[:, step] |= ((output_B1 - most_B1).abs() <= limit * most_B1)[:, 0]
            stops_B1 = output_B1 > most_B1
            probs_BK = torch.cat((nodes_BM * ~stops_B1, output_B1 * stops_B1), -1)
        else:
            probs_BK = apply_stop(probs_BK, options["stop"])
        if options["seed"] is not None and options["estimator"] != "gumbel":
            reached_BK = probs_BK.cumsum(-1)
            target_B1 = uniform(options["seed"], options["rows_B"], step)[:, None] * reached_BK[:, -1:]
            close_BT[:, step] |= ((reached_BK - target_B1).abs() <= limit * reached_BK[:, -1:]).any(-1)
        else:
            if options["seed"] is not None:
                probs_BK = probs_BK / exponential(options["seed"], options["rows_B"], step, L * N + 1)
            top_B2 = probs_BK.topk(2).values
            close_BT[:, step] |= top_B2[:, 0] - top_B2[:, 1] <= limit * top_B2[:, 0]
        drawn_B = nodes_BT[:, step]
        active_BM[torch.arange(B)[drawn_B >= 0], drawn_B[drawn_B >= 0]] = 1
    return close_BT


def _doubled(options: dict[str, Any]) -> dict[str, Any]:
    """The options in double precision."""
    input_logits = options.get("input_logits_BLNO")
    return (
        options
        if input_logits is None
        else options | {"input_logits_BLNO": input_logits.detach().double().requires_grad_()}
    )


def assert_agree(
    case: Case,
    *,
    with_gradients: tuple[bool, bool, bool] = (True, True, True),
    path: Any = compiled,
    logit_size: float = 1.0,
    num_terms: int = 1,
) -> Tensor:
    """Draws equal but for ties, values and gradients within the stated bounds; returns which samples (B,) met a tie.

    A logit of size s is rounded to s times the precision, and so is the logarithm of a rate: `logit_size` widens all bounds.
    `num_terms` is how many terms as large as the largest gradient may cancel in another one, each with its own rounding.
    """
    routing, entry_BN, _ = case
    B, L, N, dtype = entry_BN.shape[0], routing.num_layers, routing.num_experts, entry_BN.dtype
    with torch.no_grad():
        plain, fused = unroll(routing, entry_BN, **case.options), path(routing, entry_BN, **case.options)
    met_B = ties(case, plain.nodes, logit_size).any(-1)
    same_B = (plain.nodes == fused.nodes).all(-1)
    assert bool((same_B | met_B).all()), f"samples {(~same_B & ~met_B).nonzero().flatten().tolist()} drew differently"
    # A sample that a tie sent another way has no say in the gradients.
    generator = torch.Generator().manual_seed(B)
    shapes = ((B, L, N), (B, L, N), (B,))
    weights: list[Tensor | None] = [
        torch.randn(shape, generator=generator, dtype=dtype) * same_B.view(B, *[1] * (len(shape) - 1))
        if wanted
        else None
        for shape, wanted in zip(shapes, with_gradients, strict=True)
    ]
    plain, fused = run(unroll, case, weights), run(path, case, weights)  # type: ignore[assignment]
    wide_entry_BN = entry_BN.detach().double().requires_grad_()
    wide = Case(copy.deepcopy(routing).double(), wide_entry_BN, _doubled(case.options))
    wide_B = (unroll(*wide[:2], **wide.options).nodes == plain.sequence.nodes).all(-1)  # type: ignore[attr-defined]
    assert bool((wide_B | met_B).all())
    # The truth for the gradients is the plain path in double precision, unless a tie sent one of its samples another way.
    truth = run(unroll, wide, [w if w is None else w.double() for w in weights]) if bool(wide_B.all()) else plain
    assert_close(plain, fused, truth.gradients, same_B, dtype, logit_size, num_terms)  # type: ignore[arg-type, attr-defined]
    return met_B


def assert_close(
    plain: Outcome,
    fused: Outcome,
    truth: list[Tensor],
    same_B: Tensor,
    dtype: torch.dtype,
    logit_size: float,
    num_terms: int,
) -> None:
    """Values of two outcomes where the draws are the same, and gradients against the truth."""
    a, b = plain.sequence, fused.sequence
    assert b.active.dtype == b.rates.nodes.dtype == dtype
    assert torch.equal(a.active[same_B], b.active[same_B])
    assert torch.equal(a.num_active[same_B], b.num_active[same_B])
    values = VALUES[dtype] * logit_size
    torch.testing.assert_close(b.rates.nodes[same_B], a.rates.nodes[same_B], rtol=0, atol=values)
    torch.testing.assert_close(b.rates.output[same_B], a.rates.output[same_B], rtol=0, atol=values)
    # Where terms cancel, a gradient keeps the rounding of its terms: that of the largest gradient of all, or what the plain path
    # loses in the same precision.
    rounding = num_terms * torch.finfo(dtype).eps * max((float(t.abs().max()) for t in truth if t.numel()), default=0.0)
    for expected, got, exact in zip(plain.gradients, fused.gradients, truth, strict=True):
        largest, lost = (float(t.abs().max()) if t.numel() else 0.0 for t in (exact, expected - exact))
        bound = GRADIENTS[dtype] * logit_size * largest + max(lost, rounding)
        torch.testing.assert_close(got, exact.to(got), rtol=0, atol=bound)


def assert_end_at_once(case: Case, value: float, path: Any) -> None:
    """Rows whose entry rates are all `value`, or one of them, activate nothing; the rows between them are not changed."""
    routing, entry_BN, options = case
    with torch.no_grad():
        expected = path(routing, entry_BN, **options)
        spoilt_BN = entry_BN.clone()
        spoilt_BN[::3] = value
        if value != 0:
            spoilt_BN[1::3, -1] = value
        found = path(routing, spoilt_BN, **options)
    is_spoilt_B = torch.zeros(len(entry_BN), dtype=torch.bool)
    is_spoilt_B[::3] = True
    is_spoilt_B[1::3] = value != 0
    assert not bool(found.active[is_spoilt_B].any())
    assert bool((found.nodes[is_spoilt_B] == -1).all())
    assert not bool(found.num_active[is_spoilt_B].any())
    assert torch.equal(found.nodes[~is_spoilt_B], expected.nodes[~is_spoilt_B])
    assert torch.equal(found.rates.nodes[~is_spoilt_B], expected.rates.nodes[~is_spoilt_B])  # type: ignore[union-attr]
