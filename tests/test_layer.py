import copy
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from cases import pairs
from raytraced import HiddenOnly, RaytracedExperts
from raytraced.experts import Stream
from raytraced.layer import routed_layer
from raytraced.router import Call
from raytraced.routers.top_k import TopK
from reference import rates_of_one, sequence_of_one, stack_of_one, weights_of_one

STREAMS = tuple(Stream)
WEIGHTINGS = ("unit", "rates", "rates-to-one")


def orders(nodes):
    return [tuple(k for k in row if k >= 0) for row in nodes.tolist()]


def make(**options):
    torch.manual_seed(14)  # its greedy sequences reach the last layer, and leave experts of every layer out
    return RaytracedExperts(
        5, 3, 3, **{"estimator": "reinmax", "output_logit_offset": 10.0, "input_rank": 0} | options
    ).double()


@pytest.mark.parametrize(
    ("stream", "weighting", "mask_gradient", "estimator"),
    pairs(STREAMS, WEIGHTINGS, ("all", "active"), ("reinmax", "gumbel", "straight-through")),
)
def test_values_and_gradients_equal_the_loop_over_samples(stream, weighting, mask_gradient, estimator):
    layer = make(
        stream=stream, weighting=weighting, mask_gradient=mask_gradient, estimator=estimator, train_select="greedy"
    )
    hidden = torch.randn(5, 5, dtype=torch.float64, requires_grad=True)
    out = layer(hidden)
    assert 0 < out.route.active[:, -1].sum() < 15
    seen = torch.randn(5, 5, dtype=torch.float64)
    inputs = [hidden, *layer.parameters()]
    fast = torch.autograd.grad((out.hidden * seen).sum(), inputs, materialize_grads=True)

    loss = torch.zeros((), dtype=torch.float64)
    entry = torch.softmax(hidden @ layer.router.gate.weight.T + layer.router.gate.bias, -1)
    for b, nodes in enumerate(orders(out.route.nodes)):
        active = sequence_of_one(layer.router.routing, entry[b], nodes, stopped=len(nodes) < 9, estimator=estimator)
        rates, _ = rates_of_one(layer.router.routing, entry[b], active)
        weights = weights_of_one(weighting, active, rates)
        if mask_gradient == "active":  # an inactive expert's weight is the constant 0
            weights = [
                [w if a.detach() > 0.5 else torch.zeros_like(w) for w, a in zip(ws, actives, strict=True)]
                for ws, actives in zip(weights, active, strict=True)
            ]
        result = stack_of_one(layer.experts, hidden[b], weights, stream)
        assert torch.allclose(out.hidden[b], result, atol=1e-12)
        loss = loss + (result * seen[b]).sum()
    slow = torch.autograd.grad(loss, inputs, materialize_grads=True)
    for a, b in zip(fast, slow, strict=True):
        assert torch.allclose(a, b, rtol=1e-8, atol=1e-10)


def test_any_leading_shape_comes_back():
    layer = RaytracedExperts(16, 4, 8)
    for shape in ((16,), (32, 16), (32, 7, 16), (2, 0, 16)):
        out = layer(torch.randn(shape))
        lead = shape[:-1]
        assert out.hidden.shape == shape
        assert out.route.active.shape == out.route.rates.nodes.shape == (*lead, 4, 8)
        assert out.route.nodes.shape == (*lead, 32)
        assert out.route.num_active.shape == out.route.rates.output.shape == lead


def test_the_path_depends_on_the_input_alone():
    layer = make()
    hidden = torch.randn(40, 5, dtype=torch.float64)
    before = layer(hidden, select="greedy").route.nodes
    with torch.no_grad():
        for weight in layer.experts.parameters():
            weight.add_(torch.randn_like(weight))
    assert torch.equal(layer(hidden, select="greedy").route.nodes, before)


def test_training_selects_as_asked_and_evaluation_is_greedy():
    hidden = torch.randn(60, 5, dtype=torch.float64)
    drawing, greedy = make(train_select="sample"), make(train_select="greedy")
    assert not torch.equal(drawing(hidden).route.nodes, drawing(hidden).route.nodes)
    assert torch.equal(greedy(hidden).route.nodes, drawing.eval()(hidden).route.nodes)
    assert torch.equal(drawing(hidden).hidden, drawing(hidden).hidden)


def test_weights_of_a_layer_sum_to_one_or_to_the_number_active():
    """Measured with experts that all return one vector: the update is then that vector times the sum of the weights."""

    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.value = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))

        def forward(self, x):
            return self.value.expand_as(x)

    hidden = torch.randn(20, 3)
    for weighting, factor in (("unit", "count"), ("rates", "count"), ("rates-to-one", "layers")):
        torch.manual_seed(0)
        layer = RaytracedExperts(3, 3, 4, expert=Constant, weighting=weighting, estimator="reinmax").eval()
        out = layer(hidden)
        count = out.route.active.sum((1, 2)) if factor == "count" else (out.route.active.sum(-1) > 0).sum(-1)
        expected = hidden + count[:, None] * torch.tensor([1.0, -2.0, 3.0])
        assert torch.allclose(out.hidden, expected, atol=1e-5)


def test_inactive_experts_never_run_with_gradients_for_active_masks_only():
    class Counting(nn.Module):
        rows = 0

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            Counting.rows += len(x)
            return self.linear(x)

    layer = RaytracedExperts(4, 3, 4, expert=Counting, mask_gradient="active")
    out = layer(torch.randn(30, 4))
    assert Counting.rows == int(out.route.num_active.sum())
    out.hidden.sum().backward()
    used = out.route.active.sum(0).flatten() > 0
    assert [e.linear.weight.grad is not None for e in layer.experts.nodes] == used.tolist()


def test_an_expert_without_rows_gets_a_zero_gradient_and_breaks_nothing():
    layer = make(mask_gradient="active")
    with torch.no_grad():
        layer.router.gate.weight.zero_()
        layer.router.gate.bias.copy_(torch.tensor([1000.0, 0, 0]))  # every ray enters at the first expert
    out = layer(torch.randn(9, 5, dtype=torch.float64), max_experts=1)
    out.hidden.sum().backward()
    grad = layer.experts.weights[0].grad
    assert grad[0, 0].abs().sum() > 0
    assert grad.abs().sum() == grad[0, 0].abs().sum()


def test_a_batch_of_one_equals_its_row_and_a_permuted_batch_its_permutation():
    layer, hidden = make().eval(), torch.randn(33, 5, dtype=torch.float64)
    whole, order = layer(hidden), torch.randperm(33)
    assert torch.allclose(layer(hidden[order]).hidden, whole.hidden[order], atol=1e-14)
    assert torch.equal(layer(hidden[order]).route.nodes, whole.route.nodes[order])
    for row in (0, 7, 32):
        assert torch.allclose(layer(hidden[row : row + 1]).hidden[0], whole.hidden[row], atol=1e-14)
    parts = torch.cat([layer(hidden[:5]).hidden, layer(hidden[5:]).hidden])
    assert torch.allclose(parts, whole.hidden, atol=1e-14)


def test_deepcopy_state_dict_and_functional_call_give_the_same_output():
    layer, hidden = make().eval(), torch.randn(6, 5, dtype=torch.float64)
    expected = layer(hidden).hidden
    other = RaytracedExperts(5, 3, 3, input_rank=0).double().eval()
    assert not torch.equal(other(hidden).hidden, expected)
    called = torch.func.functional_call(other, dict(layer.state_dict()), (hidden,))
    assert torch.equal(called.hidden, expected)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(hidden).hidden, expected)
    assert torch.equal(copy.deepcopy(layer)(hidden).hidden, expected)


def test_a_sequential_takes_the_layer_through_the_adapter():
    layer = make().eval()
    block = nn.Sequential(nn.Linear(4, 5), HiddenOnly(layer), nn.Linear(5, 2)).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    assert torch.equal(block(x), block[2](layer(block[0](x)).hidden))


def test_a_layer_of_half_precision_keeps_its_rates_in_float32():
    layer = RaytracedExperts(16, 3, 4).bfloat16()
    out = layer(torch.randn(20, 16).bfloat16())
    assert out.hidden.dtype == torch.bfloat16
    assert out.route.rates.nodes.dtype == torch.float32
    # Conserved to float32's precision, not to that of the entry gate's output: bfloat16 rounds to 4e-3.
    absorbed = (out.route.rates.nodes * (1 - out.route.active)).sum((1, 2)) + out.route.rates.output
    assert torch.allclose(absorbed, torch.ones(20), atol=1e-5)
    out.hidden.float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


# In a process of its own: on a CPU that advertises AMX it cannot use, a bf16 matmul ends the process unless it is set early.
AUTOCAST = """
import torch, raytraced
layer = raytraced.RaytracedExperts(16, 3, 4, weighting="rates")
with torch.autocast("cpu", torch.bfloat16):
    out = layer(torch.randn(64, 16))
    loss = out.hidden.square().mean()
assert out.route.rates.nodes.dtype == torch.float32, out.route.rates.nodes.dtype
loss.backward()
assert all(p.grad.isfinite().all() for p in layer.parameters())
print("finite in", out.hidden.dtype)
"""


def test_autocast_trains_with_rates_in_float32():
    env = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    done = subprocess.run([sys.executable, "-c", AUTOCAST], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "finite in" in done.stdout


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_compiled_layer_gives_the_same_values_and_gradients():
    layer, hidden = RaytracedExperts(5, 2, 2).double(), torch.randn(8, 5, dtype=torch.float64)
    compiled = torch.compile(layer, backend="aot_eager")  # traced as ever; to write machine code would take a minute
    results = []
    for run in (layer, compiled):
        out = run(hidden, select="greedy")
        results.append((out.hidden, *torch.autograd.grad(out.hidden.square().sum(), list(layer.parameters()))))
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, atol=1e-10)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: RaytracedExperts(0, 2, 2), "dim=0: must be at least 1"),
        (lambda: RaytracedExperts(4, 0, 2), "num_layers=0: must be at least 1"),
        (lambda: RaytracedExperts(4, 2, 0), "num_experts=0: must be at least 1"),
        (lambda: RaytracedExperts(4, True, 2), "num_layers=True: must be a whole number"),
        (lambda: RaytracedExperts(4, 2, 2, routing_dim=0), "routing_dim=0: must be a whole number, at least 1, or None for dim=4"),
        (lambda: routed_layer(TopK, 4, 2, 2, routing_dim=0), "routing_dim=0: must be a whole number, at least 1, or None for dim=4"),
        (lambda: RaytracedExperts(4, 2, 2, scale_init="no"), "scale_init='no': must be True or False"),
        (lambda: RaytracedExperts(4, 2, 2, output_logit_offset="a"), "output_logit_offset='a': must be finite, a number"),
        (lambda: RaytracedExperts(4, 2, 2, temperature="x"), "temperature='x': must be positive and finite"),
        (lambda: RaytracedExperts(4, 2, 2, stop=1e39), r"stop=1e\+39: must be at most 3.4e\+38, float32's largest number"),
        (lambda: RaytracedExperts(4, 2, 2, stop=10**400), "stop=10*: must be at most 3.4"),
        (lambda: RaytracedExperts(4, 2, 2)(torch.ones(3, 4), stop=3.5e38), r"stop=3.5e\+38: must be at most 3.4e\+38"),
        (lambda: RaytracedExperts(4, 2, 2)(torch.ones(3, 4), max_experts=True), "max_experts=True: must be a whole number, at least 0"),
        (lambda: RaytracedExperts(4, 2, 2, stream="none"), "stream='none': must be one of residual, skip-sum, last"),
        (lambda: RaytracedExperts(4, 2, 2, weighting="x"), "weighting='x': must be one of auto, unit, rates-to-one"),
        (lambda: RaytracedExperts(4, 2, 2, mask_gradient="x"), "mask_gradient='x': must be one of all, active"),
        (lambda: RaytracedExperts(4, 2, 2, train_select="x"), "train_select='x': must be one of sample, greedy"),
        (lambda: RaytracedExperts(4, 2, 2, estimator="x"), "estimator='x': must be one of"),
        (lambda: RaytracedExperts(4, 2, 2, temperature=-3), "temperature=-3: must be positive"),
        (lambda: RaytracedExperts(4, 2, 2)(torch.ones(3, 5)), r"hidden has shape \(3, 5\): the last axis must be dim=4"),
        (lambda: RaytracedExperts(4, 2, 2)(torch.ones(3, 4).double()), "hidden is torch.float64: must be torch.float32"),
        (lambda: RaytracedExperts(4, 2, 2)(torch.ones(3, 4), max_experts=-1), "max_experts=-1: must be a whole number, at least 0"),
        (torch.no_grad()(lambda: RaytracedExperts(4, 2, 2)(torch.ones(3, 4), max_experts=-1)), "max_experts=-1: must be"),
        (torch.no_grad()(lambda: RaytracedExperts(4, 2, 2)(torch.ones(3, 4), select="best")), "select='best': must be one"),
        (lambda: RaytracedExperts(4, 2, 2, expert=lambda: nn.Linear(4, 3))(torch.ones(3, 4)), r"must keep the shape"),
    ],
)  # fmt: skip
def test_bad_input_is_named_with_its_value_and_the_rule(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def layer_and_rows(planned, stream, output_logit_offset, num_rows):
    """Three layers of three experts, whose path is known beforehand or not, and rows for them."""
    torch.manual_seed(0)
    made = (
        RaytracedExperts(4, 3, 3, output_logit_offset=output_logit_offset, stream=stream)
        if planned
        else routed_layer(TopK, 4, 3, 3, stream=stream)
    )
    return made.double(), torch.randn(num_rows, 4, dtype=torch.float64)


@pytest.mark.parametrize("stream", ["residual", "skip-sum"])
@pytest.mark.parametrize("planned", [True, False])
def test_exits_are_the_vectors_after_each_layer(stream, planned):
    layer, hidden = layer_and_rows(planned, stream, output_logit_offset=8.0, num_rows=6)
    out = layer(hidden, exits=True)
    assert layer(hidden).exits is None
    assert out.exits.shape == (4, 6, 4)
    start = hidden if stream == "residual" else torch.zeros_like(hidden)
    torch.testing.assert_close(out.exits[-1], layer(hidden).hidden)
    after = out.exits
    assert torch.equal(after[0], start)
    for step in range(3):  # one layer runs between two exits
        runs = out.route.active[:, step].sum(-1) > 0
        assert torch.equal((after[step + 1] != after[step]).any(-1), runs)
    tokens = layer(hidden.view(2, 3, 4), exits=True)
    torch.testing.assert_close(tokens.exits, out.exits.view(4, 2, 3, 4))
    kept = torch.tensor([[True, False, True], [True, True, False]])
    padded = layer(hidden.view(2, 3, 4), mask=kept, exits=True).exits
    torch.testing.assert_close(padded[:, kept], out.exits[:, kept.flatten()])
    torch.testing.assert_close(padded[:, ~kept], start[~kept.flatten()].expand(4, 2, 4))


@pytest.mark.parametrize("stream", list(Stream))
@pytest.mark.parametrize("planned", [True, False])
def test_one_exit_after_the_other_gives_the_same_vectors_and_which_rows_have_ended(stream, planned):
    layer, hidden = layer_and_rows(planned, stream, output_logit_offset=1.0, num_rows=60)
    whole = layer(hidden, exits=True)
    exits = layer.exits(hidden, Call())
    shown = [exits.current]
    for _ in range(3):
        exits.advance()
        shown.append(exits.current)
    with pytest.raises(ValueError, match="there is no further step"):
        exits.advance()
    assert not planned or whole.route.active.sum((-1, -2)).unique().numel() > 1
    for step, (found, expected) in enumerate(zip(shown, whole.exits, strict=True)):
        torch.testing.assert_close(found.output.hidden, expected)
        ended = torch.full((60,), step == 3)
        if planned and step and stream != "last":  # nothing of its path is left
            ended = whole.route.active[:, step:].sum((1, 2)) == 0
        assert torch.equal(found.ended, ended)
    half = hidden[:, :2]
    with pytest.raises(ValueError, match="hidden"):
        layer.exits(half, Call())
    with pytest.raises(ValueError, match="generator=5"):
        layer.exits(hidden, Call(generator=5))


def test_exits_of_an_empty_batch_have_its_shape():
    out = RaytracedExperts(8, 2, 3)(torch.zeros(2, 0, 8), exits=True)
    assert out.exits.shape == (3, 2, 0, 8)
