"""Inside torch.func's transforms, and where forward derivatives are wanted, the plain path runs: the results are right."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap

from kernels.both_paths import make_case
from raytraced import kernels
from raytraced.experts import MLPExperts, Stream

pytestmark = [
    pytest.mark.skipif(not kernels.available(), reason=f"compiled kernels {kernels.why_not()}"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script"),  # PyTorch's own, of forward derivatives
]

ROUTING, ENTRY, OPTIONS = make_case(3, 4, 6, select="greedy", dtype=torch.float64)
ENTRY, OPTIONS = ENTRY.detach(), {**OPTIONS, "rows_B": None}
ACTIVE = (torch.rand(6, 2, 3, generator=torch.Generator().manual_seed(0)) < 0.5).double()
EXPERTS, HIDDEN = MLPExperts(2, 3, 5, 7, 1).double(), torch.randn(6, 5, dtype=torch.float64)
FILTERS = [torch.randn(4, 3, 3, 3) / 5, torch.randn(2, 4, 3, 3) / 5]
IMAGES, BIASES = torch.randn(6, 3, 8, 8), [torch.randn(4), torch.randn(2)]


def sequence(entry_BN):
    return kernels.sequence(ROUTING, entry_BN, **OPTIONS).rates.nodes.sin().sum()


def experts(hidden_BD):
    return kernels.experts(EXPERTS, hidden_BD, ACTIVE, ACTIVE, Stream.RESIDUAL).sin().sum()


def experts_layer(hidden_BD):
    second = kernels.unstacked(EXPERTS, hidden_BD)[1]
    return kernels.experts(second, hidden_BD, ACTIVE[:, 1:], ACTIVE[:, 1:], Stream.LAST).sin().sum()


def raytrace(hidden_BD):
    hidden_BD, _ = kernels.raytrace(kernels.KernelArgs(ROUTING, MLP, GATE, "rates", Stream.LAST), hidden_BD, **OPTIONS)
    return hidden_BD.sin().sum()


MLP, GATE = MLPExperts(3, 4, 5).double(), (torch.randn(4, 5, dtype=torch.float64), torch.randn(4, dtype=torch.float64))


def convolution(images):
    return kernels.convolution(images, FILTERS, BIASES).sin().sum()


CASES = [(sequence, ENTRY), (experts, HIDDEN), (experts_layer, HIDDEN), (raytrace, HIDDEN), (convolution, IMAGES)]


def expected_gradient(function, x):
    x = x.clone().requires_grad_()
    with kernels.use("plain"):
        return torch.autograd.grad(function(x), x)[0]


@pytest.mark.parametrize(("function", "x"), CASES)
@pytest.mark.parametrize("enabled", [True, False])
def test_derivatives_by_transforms_are_those_of_the_plain_path(function, x, enabled):
    expected, tangent = expected_gradient(function, x), torch.randn_like(x)
    torch.testing.assert_close(grad(function)(x), expected)
    with torch.set_grad_enabled(enabled), forward_ad.dual_level():
        found = forward_ad.unpack_dual(function(forward_ad.make_dual(x, tangent))).tangent
        torch.testing.assert_close(found, (expected * tangent).sum(), rtol=1e-4, atol=1e-5)
    with torch.set_grad_enabled(enabled):
        found = jvp(function, (x,), (tangent,))[1]
        torch.testing.assert_close(found, (expected * tangent).sum(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("function", "x"), CASES)
def test_mapped_over_a_batch_the_values_are_those_of_each(function, x):
    batch = torch.stack((x, x * 2))
    torch.testing.assert_close(
        vmap(function)(batch), torch.stack([function(each) for each in batch]), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("enabled", [True, False])
def test_parameters_inside_a_transform_are_not_missed(enabled):
    names = [name for name, _ in EXPERTS.named_parameters()]

    def loss(parameters):
        return functional_call(Run(), {f"experts.{n}": p for n, p in zip(names, parameters, strict=True)}, ())

    class Run(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = EXPERTS

        def forward(self):
            return kernels.experts(self.experts, HIDDEN, ACTIVE, ACTIVE, Stream.RESIDUAL).sin().sum()

    with kernels.use("plain"):
        expected = torch.autograd.grad(Run()(), list(EXPERTS.parameters()))
    values = tuple(parameter.detach() for parameter in EXPERTS.parameters())
    with torch.set_grad_enabled(enabled):
        tangents = tuple(torch.randn_like(value) for value in values)
        along = sum((a * b).sum() for a, b in zip(expected, tangents, strict=True))
        torch.testing.assert_close(jvp(lambda *p: loss(p), values, tangents)[1], along)
    for found, wanted in zip(grad(loss)(values), expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_what_a_transform_does_not_concern_keeps_its_gradient():
    """The library runs inside vmap on tensors that are not mapped over; autograd outside still hears of it."""
    entry_BN = ENTRY.clone().requires_grad_()
    filters = FILTERS[0].clone().requires_grad_()
    hidden_BD = HIDDEN.clone().requires_grad_()

    def several(x):
        images = kernels.convolution(IMAGES, [filters, FILTERS[1]], BIASES).sin().sum()
        return x * (images + sequence(entry_BN) + experts(hidden_BD))

    found = torch.autograd.grad(vmap(several)(torch.tensor([1.0, 2.0])).sum(), [filters, entry_BN, hidden_BD])
    with kernels.use("plain"):
        outside = several(torch.tensor(3.0))
    wanted = torch.autograd.grad(outside, [filters, entry_BN, hidden_BD])
    for this, that in zip(found, wanted, strict=True):
        torch.testing.assert_close(this, that, rtol=1e-3, atol=1e-4)
