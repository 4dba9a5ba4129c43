"""A row's answer and gradient are its own: neighbours, order and size of its batch have no say, nor have the threads.

Bit for bit in the compiled kernels. Where PyTorch multiplies matrices (gates, input block, head, and all of the plain path),
it sums in an order that depends on how many rows there are: there up to rounding, 1e-5 of values of about 1 in float32.
"""

import pytest
import torch

from cases import pairs
from raytraced import RaytracedExperts, build, kernels
from raytraced.experts import Stream
from raytraced.models.registry import MODELS
from raytraced.rng import new_seed

BATCHES = (1, 7, 64, 65, 130)
NUM = 200
PATHS = ("cpp", "plain")


@pytest.fixture(params=PATHS)
def path(request):
    """The path, and how much a row may differ on it."""
    if request.param == "cpp" and not kernels.available():
        pytest.skip(f"no compiled kernels: {kernels.why_not()}")
    with kernels.use(request.param):
        yield 0.0 if request.param == "cpp" else 1e-5


@pytest.fixture(params=["one", pytest.param("twenty", marks=pytest.mark.slow)])
def parts(request):
    """The rows 0 … 199 in batches of several sizes, in and out of order: one batch of each size, or twenty."""
    found = []
    for size in BATCHES:
        in_order, shuffled = torch.arange(NUM).split(size), torch.randperm(NUM).split(size)
        found += [*in_order[:20], *shuffled[:20]] if request.param == "twenty" else [in_order[1], shuffled[0]]
    return found


def assert_rows(found, whole, rows, bound):
    for value, expected in zip(found, whole, strict=True):
        if value.is_floating_point() and bound:
            torch.testing.assert_close(value, expected[rows], rtol=0, atol=bound)
        else:
            assert torch.equal(value, expected[rows])


@torch.no_grad()
@pytest.mark.parametrize("estimator", ["reinmax", "gumbel"])
@pytest.mark.parametrize("drawn", [True, False])
def test_a_rows_sequence_is_its_own(estimator, drawn, path, parts):
    routing = RaytracedExperts(6, 3, 4, output_logit_offset=0.0).router.routing
    entry, seed = torch.randn(NUM, 4).softmax(-1), new_seed(None, torch.device("cpu")) if drawn else None
    options = {"stop": "drawn", "estimator": estimator, "temperature": 5.0, "num_steps": 12, "seed": seed}

    def run(rows):
        route = kernels.sequence(routing, entry[rows], rows_B=rows, **options)
        return route.nodes, route.active, route.num_active, *route.rates

    whole = run(torch.arange(NUM))
    for rows in parts:
        assert_rows(run(rows), whole, rows, path)
    assert len(whole[2].unique()) > 2


@torch.no_grad()
@pytest.mark.parametrize("stream", list(Stream))
@pytest.mark.parametrize("hidden_width", [5, 64])
def test_what_experts_make_of_a_row_is_its_own(stream, hidden_width, path, parts):
    grid = RaytracedExperts(6, 3, 4, hidden=hidden_width).experts
    hidden, active = torch.randn(NUM, 6), (torch.rand(NUM, 3, 4) < 0.4).float()
    weights = active * torch.rand(NUM, 3, 4)

    def run(rows):
        second = kernels.unstacked(grid, hidden[rows])[1]
        layer = kernels.experts(second, hidden[rows], active[rows, 1:2], weights[rows, 1:2], Stream.LAST)
        return kernels.experts(grid, hidden[rows], active[rows], weights[rows], stream), layer

    whole = run(torch.arange(NUM))
    for rows in parts:
        assert_rows(run(rows), whole, rows, path)


@torch.no_grad()
@pytest.mark.parametrize(
    ("stream", "weighting", "path"), pairs(list(Stream), ["unit", "rates-to-one", "rates"], PATHS), indirect=["path"]
)
@pytest.mark.usefixtures("path")
def test_one_call_for_few_rows_gives_what_steps_give_for_many(stream, weighting, parts):
    layer, hidden = RaytracedExperts(6, 3, 4, output_logit_offset=0.0), torch.randn(NUM, 6)
    gate = layer.router.gate["weight"], layer.router.gate["bias"]
    parts_of = kernels.KernelArgs(layer.router.routing, layer.experts, gate, weighting, stream)
    options = {"stop": "drawn", "estimator": "reinmax", "temperature": 1.0, "num_steps": 12}
    seed = new_seed(None, torch.device("cpu"))

    def run(rows):
        out, route = kernels.raytrace(parts_of, hidden[rows], seed=seed, rows_B=rows, **options)
        return out, route.nodes, route.active, route.num_active, *route.rates

    whole = run(torch.arange(NUM))
    for rows in parts:
        assert_rows(run(rows), whole, rows, 1e-5)  # the entry gate is in the call for few, and PyTorch's for many


# In training these choose among all rows of a batch; see tests/routers/test_routers.py.
TOGETHER = ("mixture-of-depths", "seq-top-k")
CASES = [(name, mode) for name in MODELS for mode in (True, False) if not (mode and name in TOGETHER)]


@torch.no_grad()
@pytest.mark.parametrize(("name", "training"), CASES)
@pytest.mark.usefixtures("path")
def test_a_models_answer_to_a_row_is_its_own_up_to_the_rounding_of_matrix_products(name, training, parts):
    options = {"train_select": "sample"} if name.startswith("mre") else {}
    model = build(name, image_shape=(1, 4, 4), num_classes=3, **options).train(training)
    images = torch.rand(NUM, 1, 4, 4)

    def run(rows):
        for buffer in model.layer.router.buffers():
            buffer.zero_()  # what aux-free and ada-k keep from call to call
        out = model(images[rows], generator=torch.Generator().manual_seed(3), rows=rows)
        return out.num_experts, out.routes[0].active, out.logits

    whole = run(torch.arange(NUM))
    for rows in parts[1::2]:
        assert_rows(run(rows), whole, rows, 1e-5)


# Gradients: of a loss that is a sum over rows, what a row's own vectors get, and what parameters get from one row alone.
# Sums over rows are made in an order of their own: only where the other rows add nothing but zeros is one row's share known.


def gradients_of(run, rows, vectors, parameters):
    """The gradients of each row's own vectors, each (B, …), and those that parameters get from the first row alone."""
    own = [vector[rows].clone().requires_grad_() for vector in vectors]
    losses_B = run(rows, *own)
    shares = torch.autograd.grad(losses_B[0], parameters, retain_graph=True, materialize_grads=True)
    return torch.autograd.grad(losses_B.sum(), own, materialize_grads=True), shares


def assert_gradients_are_a_rows_own(run, vectors, parameters, bound, parts):
    whole, _ = gradients_of(run, torch.arange(NUM), vectors, parameters)
    assert all(gradient.any() for gradient in whole)
    for rows in parts:
        found, shares = gradients_of(run, rows, vectors, parameters)
        assert_rows(found, whole, rows, bound)
        _, alone = gradients_of(run, rows[:1], vectors, parameters)
        for share, expected in zip(shares, alone, strict=True):
            torch.testing.assert_close(share, expected, rtol=0, atol=bound)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        again, _ = gradients_of(run, torch.arange(NUM), vectors, parameters)
    finally:
        torch.set_num_threads(threads)
    assert_rows(again, whole, slice(None), bound)


@pytest.mark.parametrize(
    ("estimator", "drawn", "path"),
    pairs(["reinmax", "gumbel", "straight-through"], [True, False], PATHS),
    indirect=["path"],
)
def test_a_rows_gradient_through_its_sequence_is_its_own(estimator, drawn, path, parts):
    routing = RaytracedExperts(6, 3, 4, output_logit_offset=0.0).router.routing
    entry, probe = torch.randn(NUM, 4).softmax(-1), torch.randn(NUM, 3, 4)
    seed = new_seed(None, torch.device("cpu")) if drawn else None
    options = {"stop": "drawn", "estimator": estimator, "temperature": 5.0, "num_steps": 12, "seed": seed}

    def run(rows, entry):
        route = kernels.sequence(routing, entry, rows_B=rows, **options)
        return ((route.active + route.rates.nodes) * probe[rows]).sum((-1, -2)) + route.rates.output

    assert_gradients_are_a_rows_own(run, [entry], list(routing.parameters()), path, parts)


@pytest.mark.parametrize(("stream", "hidden_width", "path"), pairs(list(Stream), [5, 64], PATHS), indirect=["path"])
def test_a_rows_gradient_through_experts_is_its_own(stream, hidden_width, path, parts):
    grid = RaytracedExperts(6, 3, 4, hidden=hidden_width).experts
    hidden, active = torch.randn(NUM, 6), (torch.rand(NUM, 3, 4) < 0.4).float()
    weights = active * torch.rand(NUM, 3, 4)

    def run(rows, hidden, weights):
        return kernels.experts(grid, hidden, active[rows], weights, stream).square().sum(-1)

    def run_layer(rows, hidden, weights):
        second = kernels.unstacked(grid, hidden)[1]
        return kernels.experts(second, hidden, active[rows, 1:2], weights[:, 1:2], Stream.LAST).square().sum(-1)

    for each in (run, run_layer):
        assert_gradients_are_a_rows_own(each, [hidden, weights], list(grid.parameters()), path, parts)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.usefixtures("path")
def test_a_rows_gradient_through_a_layer_is_its_own_up_to_the_rounding_of_matrix_products(own, parts):
    expert = (lambda: torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh())) if own else None
    layer, hidden = (
        RaytracedExperts(6, 3, 4, output_logit_offset=0.0, train_select="sample", expert=expert),
        torch.randn(NUM, 6),
    )

    def run(rows, hidden):
        return layer(hidden, generator=torch.Generator().manual_seed(3), rows=rows).hidden.square().sum(-1)

    with kernels.use(experts="sparse") if own else kernels.use():
        assert_gradients_are_a_rows_own(run, [hidden], list(layer.router.parameters()), 1e-5, parts)
