"""Entry gate, sequence, weights and experts in one call answer as the parts do, and step back for all that only these can do."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call

from raytraced import kernels
from raytraced.experts import MLPExperts, ModuleExperts, Stream
from raytraced.routing import RoutingNetwork
from raytraced.sequence import WEIGHTINGS

pytestmark = pytest.mark.skipif(not kernels.available(), reason=f"compiled kernels {kernels.why_not()}")


@pytest.fixture(autouse=True)
def _no_gradient():
    with torch.no_grad():
        yield


class Layer(nn.Module):
    """The parts of a raytraced layer, and the options of a call."""

    def __init__(self, L=4, N=8, D=16, hidden=16, num_hidden=2, dtype=torch.float64, **options):
        super().__init__()
        self.routing = RoutingNetwork(L, N).to(dtype)
        self.experts = MLPExperts(L, N, D, hidden, num_hidden).to(dtype)
        self.gate = nn.Linear(D, N, dtype=dtype)
        self.input_logits = []
        self.options = {"weighting": "rates", "stream": Stream.RESIDUAL, "stop": "drawn", "estimator": "reinmax"}
        self.options |= {"temperature": 3.0, "num_steps": L * N, "seed": None, "rows_B": None} | options

    def rows(self, batch, **changes):
        g = torch.Generator().manual_seed(batch)
        dtype = self.experts.weights[0].dtype
        return (4 * torch.randn(batch, self.gate.in_features, generator=g, dtype=dtype),)

    def forward(self, hidden_BD, **changes):
        layer, options = self.traced(changes)
        return kernels.raytrace(layer, hidden_BD, **options)

    def chosen(self, hidden_BD, **changes):
        layer, options = self.traced(changes)
        return kernels.raytrace.explain(layer, hidden_BD, **options).name

    def traced(self, changes):
        options = self.options | changes
        kinds = options.pop("weighting"), options.pop("stream")
        return kernels.KernelArgs(
            self.routing, self.experts, (self.gate.weight, self.gate.bias, *self.input_logits), *kinds
        ), options


def in_steps(layer, *rows, **changes):
    with kernels.use(raytrace="steps"):
        return layer(*rows, **changes)


def assert_same(this, that, tolerance=1e-12):
    (hidden, route), (expected, steps) = this, that
    for a, b in zip(route[:3], steps[:3], strict=True):
        assert torch.equal(a, b)
    for a, b in zip((hidden, *route.rates), (expected, *steps.rates), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("stream", list(Stream))
@pytest.mark.parametrize("options", [{}, {"seed": 5}, {"num_steps": 0}, {"num_steps": 3, "seed": 7}])
def test_one_call_answers_as_the_parts_do(weighting, stream, options):
    layer = Layer(weighting=weighting, stream=stream)
    options = {name: torch.tensor(value) if name == "seed" else value for name, value in options.items()}
    for batch in (1, 7, 40):
        rows = layer.rows(batch)
        numbers = {**options, "rows_B": torch.arange(5, 5 + batch, dtype=torch.int32)}
        assert layer.chosen(*rows, **numbers) == "cpp"
        assert_same(layer(*rows, **numbers), in_steps(layer, *rows, **numbers))


@pytest.mark.parametrize("sizes", [(1, 1), (1, 5), (2, 1), (3, 3)])
def test_every_grid_answers_as_its_parts_do(sizes):
    layer = Layer(*sizes, 5, 7, 1)
    rows = layer.rows(6)
    assert layer.chosen(*rows) == "cpp"
    assert_same(layer(*rows), in_steps(layer, *rows))


def test_single_precision_answers_within_rounding():
    layer = Layer(dtype=torch.float32)
    rows = layer.rows(30)
    assert_same(layer(*rows), in_steps(layer, *rows), 1e-5)


def test_rows_need_not_be_contiguous():
    layer = Layer()
    rows = layer.rows(9)
    assert_same(layer(*(x.t().contiguous().t() for x in rows)), layer(*rows), 0)


def test_new_parameters_are_seen():
    layer = Layer()
    rows = layer.rows(2)
    before, _ = layer(*rows)

    def assert_seen():
        nonlocal before
        now = layer(*rows)
        assert_same(now, in_steps(layer, *rows))
        assert not torch.equal(now[0], before)
        before = now[0]

    layer.experts.biases[2] += 1  # in place
    assert_seen()
    layer.experts.biases[2] = nn.Parameter(torch.randn(4, 8, 16, dtype=torch.float64))
    assert_seen()
    layer.experts.weights[1].data = torch.randn(4, 8, 16, 16, dtype=torch.float64)
    assert_seen()
    layer.experts.weights[1].data = layer.experts.weights[1].data.mT  # the same memory, read in another order
    assert_seen()
    layer.routing.gate_first.data = 9 * torch.randn(8, 9, dtype=torch.float64)
    assert_seen()
    layer.gate.bias += torch.randn(8, dtype=torch.float64)
    assert_seen()
    twin = copy.deepcopy(layer)
    twin.experts.weights[0].zero_()
    assert_same(layer(*rows), in_steps(layer, *rows))
    layer.float()
    assert layer(*(x.float() for x in rows))[0].dtype == torch.float32


def test_memory_is_not_taken_for_what_lay_there_before():
    for _ in range(20):  # where a new tensor lies is chance
        layer = Layer()
        rows = layer.rows(2)
        layer(*rows)
        weight = layer.experts.weights[1]
        weight.data = weight.data.half()
        weight.data = weight.data.float()
        with pytest.raises(RuntimeError, match="expected scalar type"):
            layer(*rows)


def test_parameters_given_for_one_call_are_seen():
    layer = Layer()
    rows = layer.rows(2)
    layer(*rows)
    given = {"experts.biases.2": torch.ones(4, 8, 16, dtype=torch.float64)}
    with kernels.use(raytrace="steps"):
        expected = functional_call(layer, given, rows)
    assert_same(functional_call(layer, given, rows), expected)


def test_a_weighting_of_ones_own_works_at_every_batch_size(monkeypatch):
    monkeypatch.setitem(WEIGHTINGS, "squared", lambda active, rates: active * rates**2)
    monkeypatch.setitem(WEIGHTINGS, "unit", lambda active, rates: active * 2)
    for weighting in ("squared", "unit"):
        layer = Layer(weighting=weighting)
        rows = layer.rows(65)
        few = [x[:8] for x in rows]
        assert layer.chosen(*few) == "steps"
        torch.testing.assert_close(layer(*few)[0], layer(*rows)[0][:8])
    assert not torch.equal(layer(*rows)[0], layer(*rows, weighting="squared")[0])


class Half(nn.Module):
    def forward(self, x):
        return x / 2


def test_what_one_call_cannot_do_the_parts_do():
    layer = Layer()
    rows = layer.rows(8)
    assert layer.chosen(*rows) == "cpp"
    assert layer.chosen(*layer.rows(65)) == layer.chosen(*layer.rows(0)) == "steps"
    assert Layer(hidden=600).chosen(*rows) == "steps"
    with torch.enable_grad():
        assert layer.chosen(*rows) == "cpp"
        assert layer(*rows)[0].requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.chosen(*rows) == "steps"
    own = Layer()
    own.experts = ModuleExperts(4, 8, Half)
    assert own.chosen(*rows) == "steps"
    assert_same(own(*rows), in_steps(own, *rows))
    with kernels.use(raytrace="cpp"), pytest.raises(ValueError, match="cpp: custom experts"):
        own(*rows)


def test_a_gate_of_another_width_is_not_read():
    layer = Layer()
    layer.gate = nn.Linear(15, 8, dtype=torch.float64)
    (rows,) = Layer().rows(2)
    assert layer.chosen(rows) == "steps"
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layer(rows)


@pytest.mark.parametrize(("L", "N", "rank", "dtype"), [
    (4, 8, 4, torch.float64), (4, 8, 4, torch.float32), (2, 3, 1, torch.float64), (3, 5, 70, torch.float64), (4, 16, 9, torch.float32),
])  # fmt: skip
@pytest.mark.parametrize("batch", [1, 7, 64])
def test_gates_that_see_the_input_do_so_in_the_one_call_too(L, N, rank, dtype, batch):
    layer = Layer(L, N, dtype=dtype)
    layer.input_logits = [torch.randn(rank, 16, dtype=dtype) / 8, torch.randn(L - 1, N, N + 1, rank, dtype=dtype) / 4]
    rows = layer.rows(batch)
    assert layer.chosen(*rows) == "cpp"
    found, expected = layer(*rows), in_steps(layer, *rows)
    layer.input_logits = []
    assert not torch.equal(layer(*rows)[1].rates.output, found[1].rates.output)
    if dtype == torch.float64:
        assert_same(found, expected)
    else:  # a tie may fall otherwise
        same = (found[1].nodes == expected[1].nodes).all(-1)
        assert same.double().mean() > 0.9
        torch.testing.assert_close(found[0][same], expected[0][same], rtol=0, atol=1e-4)


def test_gates_that_see_have_the_shapes_of_the_grid():
    layer = Layer()
    layer.input_logits = [torch.randn(4, 16, dtype=torch.float64), torch.randn(2, 8, 9, 4, dtype=torch.float64)]
    assert layer.chosen(*layer.rows(3)) == "steps"
