"""The layer inside what PyTorch does to modules: compiled, exported, mapped, differentiated, checkpointed, without values."""

import itertools
import os

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint

from cases import pairs
from raytraced import PAPER, RaytracedExperts, kernels
from raytraced.kernels import cpp_gradients
from raytraced.layer import routed_layer
from raytraced.routers.chain import ChainOfExperts
from raytraced.routers.threshold import Threshold
from raytraced.routers.top_any import TopAny
from raytraced.routers.top_k import TopK

LIBRARY_IS_CHOSEN = kernels.available() and not os.environ.get("RAYTRACED_KERNELS")

# What PyTorch says of itself: torch.jit.trace is old, forward derivatives are made by torch.jit.script.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore{what}")
    for what in ("::DeprecationWarning", "::UserWarning", ":.*torch.jit", "::torch.jit.TracerWarning")
]


def own_expert():
    return nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6))


EXPERTS = {"mlp": None, "own": own_expert}
LAYERS = {
    "raytraced": lambda **options: RaytracedExperts(6, 3, 4, output_logit_offset=0.0, **options),
    "paper": lambda **options: RaytracedExperts(6, 3, 4, **PAPER, **options),
    "straight-through": lambda **o: RaytracedExperts(6, 3, 4, estimator="straight-through", stop="dominant", **o),
    "top-k": lambda **options: routed_layer(TopK, 6, 3, 4, **options),
    "threshold": lambda **options: routed_layer(Threshold, 6, 3, 4, **options),
    "top-any": lambda **options: routed_layer(TopAny, 6, 3, 4, **options),
    "chain": lambda **options: routed_layer(ChainOfExperts, 6, 3, 4, **options),
}  # fmt: skip
RAYTRACED = ("raytraced", "paper", "straight-through")
every_layer = pytest.mark.parametrize("name", LAYERS)
every_expert = pytest.mark.parametrize("experts", EXPERTS)
PATHS = ("", "plain")  # "": whatever is best
# To trace takes seconds. Both kinds of experts are traced in each test run, on both paths, in layers that plan and in layers
# that go step by step; the other combinations are slow.
QUICK = {("paper", "mlp", ""), ("top-k", "own", "plain")}
traced = pytest.mark.parametrize(
    ("name", "experts", "path"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in itertools.product(LAYERS, EXPERTS, PATHS)
    ],
)


def make(name, experts, training=False):
    torch.manual_seed(2)
    layer = LAYERS[name](expert=EXPERTS[experts]).double()
    return layer.train(training)


class Hidden(nn.Module):
    """Three experts a vector at most: every step of the plain path is traced anew, at a second each."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.options = layer, {"max_experts": 3} if layer.answers_along_the_way else {}

    def forward(self, x):
        return self.layer(x, **self.options).hidden


def vectors(num=7):
    return torch.randn(num, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(num))


def values_and_gradients(layer, run, hidden):
    """What a run gives, and the gradients of a loss of it."""
    torch.manual_seed(5)  # for what draws
    hidden = hidden.clone().requires_grad_()
    out = run(hidden)
    leaves = [hidden, *layer.parameters()]
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves, materialize_grads=True)]


def assert_alike(found, wanted, atol=1e-10):
    for this, that in zip(found, wanted, strict=True):
        torch.testing.assert_close(this, that, rtol=0, atol=atol)


@traced
def test_compiled_whole_it_gives_the_same_values_and_gradients(name, experts, path):
    layer = make(name, experts, training=name in RAYTRACED)
    torch._dynamo.reset()
    with kernels.use(path):
        block = Hidden(layer)
        whole = torch.compile(block, backend="aot_eager", fullgraph=True)
        found = values_and_gradients(layer, whole, vectors())
        wanted = values_and_gradients(layer, block, vectors())
    assert_alike(found, wanted)


@traced
def test_exported_it_gives_the_same_values(name, experts, path):
    block = Hidden(make(name, experts))
    fixed = name not in RAYTRACED  # routers that are asked step by step are exported for one size
    sizes = {"x": {} if fixed else {0: torch.export.Dim("batch", min=1)}}
    with kernels.use(path), torch.no_grad():
        exported = torch.export.export(block, (vectors(7),), dynamic_shapes=sizes).module()
        for num in (7,) if fixed else (1, 7, 90):
            torch.testing.assert_close(exported(vectors(num)), block(vectors(num)), rtol=0, atol=1e-10)


def test_compiled_experts_of_ones_own_all_run_and_the_table_says_why(monkeypatch):
    layer, x = make("raytraced", "own"), vectors()
    active = torch.ones(7, 3, 4, dtype=torch.float64)
    whole = (layer.experts, x, active, active, "residual")
    part = (layer.experts.unstacked()[1], x, active[:, 1:2], active[:, 1:2], "last")
    assert kernels.experts.explain(*whole).name == "sparse"
    assert kernels.experts.explain(*part).name == "sparse"
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for args in (whole, part):
        implementation, reason = kernels.experts.explain(*args)
        assert implementation == "dense"
        why = "not sparse: the mask has no readable values (compiled, exported, vmap, meta): all experts run, masked"
        assert why in reason.split("; ")


@every_expert
@pytest.mark.parametrize("name", [name for name in LAYERS if name != "top-any"])  # its router reads values
def test_mapped_over_vectors_each_gets_its_own_answer_and_gradient(name, experts):
    layer, x = make(name, experts), vectors()

    def one(vector_D):
        return layer(vector_D[None]).hidden[0]

    torch.testing.assert_close(vmap(one)(x), layer(x).hidden, rtol=0, atol=1e-10)
    found = vmap(grad(lambda vector_D: one(vector_D).square().sum()))(x)
    torch.testing.assert_close(found, values_and_gradients(layer, lambda x: layer(x).hidden, x)[1], rtol=0, atol=1e-10)


@every_expert
def test_mapped_over_parameters_an_ensemble_answers_at_once(experts):
    layers, x = [make("raytraced", experts) for _ in range(3)], vectors()
    for number, layer in enumerate(layers):
        nn.init.normal_(layer.router.gate.weight, generator=torch.Generator().manual_seed(number))
    parameters, buffers = torch.func.stack_module_state(layers)
    found = vmap(lambda p, b: functional_call(layers[0], (p, b), (x,)).hidden)(parameters, buffers)
    assert_alike(found, [layer(x).hidden for layer in layers])


@pytest.mark.parametrize(("name", "experts", "drawn"), pairs(LAYERS, EXPERTS, [False, True]))
def test_a_forward_derivative_is_the_gradient_along_the_tangent(name, experts, drawn):
    """Of a draw too: both ways apply the matrix of the estimator."""
    layer, x, tangent = make(name, experts), vectors(), vectors(7).cos()
    options = {"select": "sample"} if drawn and name in RAYTRACED else {}

    def loss(x):
        out = layer(x, generator=torch.Generator().manual_seed(1), **options)
        return out.hidden.square().sum() + (out.route.active * torch.arange(4)).sum()

    found = jvp(loss, (x,), (tangent,))[1]
    wanted = grad(loss)(x)
    assert wanted.abs().max() > 0.01
    torch.testing.assert_close(found, (wanted * tangent).sum(), rtol=1e-9, atol=1e-9)


@every_expert
@pytest.mark.parametrize("name", RAYTRACED)
def test_jacobians_of_vectors_hold_their_gradients(name, experts):
    layer, x = make(name, experts), vectors(3)
    jacobian = jacrev(lambda x: layer(x).hidden)(x)
    probe = vectors(3).sin()
    y = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad((layer(y).hidden * probe).sum(), y)
    torch.testing.assert_close(torch.einsum("bd,bdce->ce", probe, jacobian), wanted, rtol=0, atol=1e-10)


def second_derivative(layer, x):
    x = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(layer(x).hidden.square().sum(), x, create_graph=True)
    return first.detach(), torch.autograd.grad(first.sin().sum(), x)[0]


@every_expert
@pytest.mark.parametrize("name", ["raytraced", "top-k"])
def test_second_derivatives_come_from_the_plain_path(name, experts):
    layer, x = make(name, experts), vectors(3)
    with kernels.use("plain"):
        found = second_derivative(layer, x)[1]
    wanted = grad(lambda x: grad(lambda x: layer(x).hidden.square().sum())(x).sin().sum())(x)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


@pytest.mark.skipif(not LIBRARY_IS_CHOSEN, reason="the compiled kernels are not there, or turned off")
@pytest.mark.parametrize(("name", "experts"), [("raytraced", "mlp"), ("raytraced", "own"), ("top-k", "mlp")])
def test_compiled_operations_refuse_second_derivatives_rather_than_take_them_for_zero(name, experts):
    layer, x = make(name, experts), vectors(3)
    message = r"^second derivatives: the compiled kernels have none; run the layer inside `with raytraced.kernels.use"
    with pytest.raises(NotImplementedError, match=message):
        second_derivative(layer, x)
    y = x.clone().requires_grad_()
    loss = layer(y).hidden.square().sum()
    (kept,) = torch.autograd.grad(loss, y, create_graph=True)
    (first,) = torch.autograd.grad(layer(y).hidden.square().sum(), y)
    assert torch.equal(kept.detach(), first)


@pytest.mark.skipif(not LIBRARY_IS_CHOSEN, reason="the compiled kernels are not there, or turned off")
@pytest.mark.parametrize("name", ["raytraced", "top-k"])
def test_parameters_whose_gradients_have_a_place_of_their_own_refuse_second_derivatives_too(name, monkeypatch):
    monkeypatch.setattr(cpp_gradients, "_HUGE_BYTES", 0)
    layer, x = make(name, "mlp"), vectors(3)
    weights = list(layer.experts.weights)
    loss = layer(x).hidden.square().sum()
    wanted = torch.autograd.grad(loss, weights, retain_graph=True)
    found = torch.autograd.grad(loss, weights, create_graph=True)
    assert_alike([each.detach() for each in found], wanted, atol=0)
    with pytest.raises(NotImplementedError, match=r"^second derivatives: the compiled kernels have none"):
        torch.autograd.grad(sum(each.sin().sum() for each in found), weights)


@pytest.mark.parametrize(("name", "experts", "path", "use_reentrant"), pairs(LAYERS, EXPERTS, PATHS, [False, True]))
def test_activation_checkpointing_changes_nothing(name, experts, path, use_reentrant):
    """Draws come again as they came: PyTorch puts its generator's state back."""
    layer, x = make(name, experts, training=True), vectors()

    def run(x):
        return checkpoint(lambda x: layer(x).hidden, x, use_reentrant=use_reentrant)

    with kernels.use(path):
        wanted = values_and_gradients(layer, lambda x: layer(x).hidden, x)
        if use_reentrant:  # gives gradients by backward() alone
            torch.manual_seed(5)
            y = x.clone().requires_grad_()
            out = run(y)
            out.square().sum().backward()
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in layer.parameters()]
            found = [out.detach(), y.grad, *grads]
        else:
            found = values_and_gradients(layer, run, x)
    assert_alike(found, wanted, atol=1e-12)


@pytest.mark.parametrize(("name", "experts", "training"), pairs(LAYERS, EXPERTS, [True, False]))
def test_without_values_there_are_still_shapes(name, experts, training):
    layer, x = make(name, experts, training), vectors().view(7, 1, 6)
    with torch.set_grad_enabled(training):
        real, meta = layer(x), layer.to("meta")(x.to("meta"))
    assert meta.hidden.is_meta
    assert meta.hidden.shape == real.hidden.shape
    for field, value in real.route._asdict().items():
        if isinstance(value, torch.Tensor):
            assert getattr(meta.route, field).shape == value.shape, field


@every_expert
@every_layer
def test_a_trace_of_one_example_is_refused_in_one_sentence(name, experts):
    block = Hidden(make(name, experts))
    message = r"^torch.jit.trace: would keep its example's experts for every input; use torch.export$"
    with pytest.raises(NotImplementedError, match=message):
        torch.jit.trace(block, (vectors(),))


@every_expert
@every_layer
def test_in_half_precision_by_autocast_values_are_near(name, experts):
    layer, x = make(name, experts).float(), vectors().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = layer(x)
    wanted = layer(x)
    same = (found.route.active == wanted.route.active).flatten(1).all(1)  # a near tie may fall otherwise
    assert same.sum() >= 5
    torch.testing.assert_close(found.hidden.float()[same], wanted.hidden[same], rtol=0.05, atol=0.05)
