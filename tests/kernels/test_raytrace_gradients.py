"""Entry gate, sequence, weights and experts as one function with gradients: what the parts give, forward and back."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from cases import pairs
from raytraced import kernels
from raytraced.experts import Stream
from raytraced.routers.raytraced import RaytracedExperts
from raytraced.sequence import WEIGHTINGS, unit_weights

pytestmark = pytest.mark.skipif(not kernels.available(), reason=f"compiled kernels {kernels.why_not()}")

ESTIMATORS = ("none", "reinmax", "gumbel", "straight-through")
GRIDS = [(1, 1), (1, 5), (2, 3), (3, 8), (4, 9)]


def make(L=3, N=8, D=6, *, rank=4, dtype=torch.float64, **options):
    torch.manual_seed(L * N)
    layer = RaytracedExperts(D, L, N, input_rank=rank, hidden=5, **options).to(dtype)
    if layer.router.sight_in is not None:
        nn.init.normal_(layer.router.sight_out)
    return layer


def vectors(batch, layer):
    given = torch.randn(batch, layer.dim, generator=torch.Generator().manual_seed(batch), dtype=torch.float64)
    return given.to(layer.router.gate["weight"].dtype).requires_grad_()


def chosen(layer, hidden, weighting=None, **changes):
    parts = replace(layer.kernel_args(layer.router), **{"weighting": weighting} if weighting else {})
    options = {"stop": layer.router.config.stop, "estimator": layer.router.config.estimator, "temperature": 1.0}
    options |= {"num_steps": 3, "seed": None, "rows_B": None}
    return kernels.raytrace.explain(parts, hidden, **options | changes)


def answers_and_gradients(layer, hidden, kernel=None, exits=True, **call):
    """What a layer gives, and the gradients of a sum of all that has one."""
    with kernels.use(kernel or ""):
        out = layer(hidden, exits=exits, generator=torch.Generator().manual_seed(3), **call)
        parts = [out.exits if exits else out.hidden, *out.route.rates]
        parts += [out.route.active] if out.route.active.requires_grad else []
        g = torch.Generator().manual_seed(4)
        seen = [torch.randn(part.shape, generator=g, dtype=torch.float64).to(part.dtype) for part in parts]
        loss = sum((part * weight).sum() for part, weight in zip(parts, seen, strict=True))
        wanted = [hidden, *layer.parameters()]
        gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
    zeros = [torch.zeros_like(t) if grad is None else grad for t, grad in zip(wanted, gradients, strict=True)]
    return [part.detach() for part in parts], [out.route.nodes, out.route.num_active], zeros


def assert_same(this, that, tolerance=1e-11):
    for a, b in zip(this[1], that[1], strict=True):
        assert torch.equal(a, b)
    for a, b in zip(this[0] + this[2], that[0] + that[2], strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("stream", "how", "select", "exits"),
    pairs(
        list(Stream),
        [(one, other) for one in ESTIMATORS for other in WEIGHTINGS if (one, other) != ("none", "unit")],
        ["greedy", "sample"],
        [False, True],
    ),
)
def test_outputs_and_gradients_are_those_of_the_plain_path(stream, how, select, exits):
    estimator, weighting = how
    layer = make(weighting=weighting, stream=stream, estimator=estimator, train_select=select)
    hidden = vectors(70, layer)
    name = "steps" if exits and stream == "skip-sum" else "cpp"
    assert chosen(layer, hidden, exits=exits).name == name
    found = answers_and_gradients(layer, hidden, exits=exits)
    assert_same(found, answers_and_gradients(layer, hidden, "plain", exits=exits))


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("rank", [0, 1, 4, 70])
def test_every_grid_and_batch(grid, rank):
    layer = make(*grid, 7, rank=rank)
    for batch in (0, 1, 5, 300):
        hidden = vectors(batch, layer)
        assert_same(answers_and_gradients(layer, hidden), answers_and_gradients(layer, hidden, "plain"))
    budget = answers_and_gradients(layer, hidden, max_experts=2)
    assert_same(budget, answers_and_gradients(layer, hidden, "plain", max_experts=2))


def test_in_single_precision_it_is_as_near_as_rounding_lets_it():
    layer = make(4, 8, 16, dtype=torch.float32)
    hidden = vectors(256, layer)
    assert_same(answers_and_gradients(layer, hidden), answers_and_gradients(layer, hidden, "plain"), 2e-3)


def test_rates_below_the_floor_are_not_divided_by_themselves():
    layer = make(2, 3, rank=0, estimator="reinmax")
    with torch.no_grad():
        layer.router.routing.gate_first.fill_(0)
        layer.router.routing.gate_first[:, -1] = 60.0  # nearly nothing reaches the second layer
        layer.router.gate["weight"].zero_()
    hidden = vectors(40, layer)
    found = answers_and_gradients(layer, hidden)
    assert 0 < float(found[0][1][:, 1].max()) < 1e-6
    assert_same(found, answers_and_gradients(layer, hidden, "plain"))


def test_neither_threads_nor_the_other_rows_change_a_bit():
    layer = make(4, 8, 16, dtype=torch.float32)
    hidden, threads = vectors(700, layer), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = answers_and_gradients(layer, hidden)
        torch.set_num_threads(2)
        together = answers_and_gradients(layer, hidden)
    finally:
        torch.set_num_threads(threads)
    for one, two in zip(alone, together, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    few = layer(hidden[:9], exits=True)
    assert torch.equal(few.exits, layer(hidden, exits=True).exits[:, :9])


def test_what_it_cannot_do_the_parts_do():
    layer = make()
    hidden = vectors(8, layer)
    assert chosen(layer, hidden) == ("cpp", "the first choice")
    with torch.no_grad():
        assert chosen(layer, vectors(80, layer)).name == "steps"
    for force in ({"experts": "dense"}, {"sequence": "plain"}):  # a forced part is the one that runs
        with kernels.use(**force):
            assert chosen(layer, hidden).name == "steps"
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast is on" in chosen(layer, hidden).reason
    large = make(2, 2, 128)
    large.experts = RaytracedExperts(128, 2, 2).double().experts
    assert "more than 16,384 weights" in chosen(large, vectors(3, large)).reason
    deep = make(num_hidden=20)
    assert "experts of many layers" in chosen(deep, hidden).reason
    assert layer(hidden).hidden.shape == deep(hidden).hidden.shape
    own = RaytracedExperts(6, 3, 8, expert=lambda: nn.Linear(6, 6))
    assert "custom experts" in chosen(own, torch.randn(3, 6)).reason
    WEIGHTINGS["own"] = lambda active, rates: 2 * unit_weights(active, rates)
    try:
        assert chosen(layer, hidden, weighting="own").name == "steps"
    finally:
        del WEIGHTINGS["own"]


def test_inside_a_transform_the_parts_run():
    layer = make(2, 3)
    hidden = vectors(4, layer).detach()
    expected = torch.autograd.grad(layer(hidden.requires_grad_()).hidden.sum(), hidden)[0]
    found = torch.func.grad(lambda h: layer(h).hidden.sum())(hidden.detach())
    torch.testing.assert_close(found, expected)


def test_second_derivatives_are_refused_not_zero():
    layer = make(2, 3)
    hidden = vectors(4, layer)
    (first,) = torch.autograd.grad(layer(hidden).hidden.sum(), hidden, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        first.square().sum().backward()


def test_a_parameter_that_moved_before_the_backward_pass_is_read_where_it_is():
    layer = make()
    hidden = vectors(20, layer)
    expected = torch.autograd.grad(layer(hidden).hidden.sum(), hidden)[0]
    out = layer(hidden).hidden.sum()
    for parameter in layer.parameters():
        parameter.data = parameter.data.clone()
    assert torch.equal(torch.autograd.grad(out, hidden)[0], expected)


def test_a_weight_that_changed_before_the_backward_pass_is_told():
    layer = make()
    out = layer(vectors(20, layer)).hidden.sum()
    with torch.no_grad():
        layer.experts.weights[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()
