"""A whole classifier in one call answers as its parts do, and steps back where somebody watches or changes them."""

import copy

import pytest
import torch
from torch.func import functional_call

import raytraced as rt
from raytraced import kernels
from raytraced.kernels import fused_classifier

pytestmark = pytest.mark.skipif(not kernels.available(), reason=f"kernels {kernels.why_not()}")


@pytest.fixture(autouse=True)
def _no_gradient():
    with torch.no_grad():
        yield


def make_model(dtype=torch.float64, **options):
    return rt.preset("digits", **options).to(dtype).eval()


def in_parts(model, images, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_classifier, "MOST_ROWS", 0)
        return model(images, **options)


def assert_same(this, that, tolerance=1e-12):
    assert torch.equal(this.sequence.nodes, that.sequence.nodes)
    assert torch.equal(this.sequence.num_active, that.sequence.num_active)
    assert torch.equal(this.active, that.active)
    for a, b in (
        (this.logits, that.logits),
        (this.hidden, that.hidden),
        *zip(*(o.sequence.rates for o in (this, that)), strict=True),
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


@pytest.mark.parametrize("weighting", ["unit", "through", "rates", "rates-to-one"])
@pytest.mark.parametrize("stream", ["residual", "skip-sum", "last"])
@pytest.mark.parametrize(
    "options", [{}, {"select": "sample"}, {"max_experts": 0}, {"max_experts": 3, "select": "sample"}]
)
def test_one_call_answers_as_the_parts_do(weighting, stream, options):
    model = make_model(weighting=weighting, stream=stream)
    for batch in (1, 7, 40):
        images = torch.randn(batch, 1, 8, 8, dtype=torch.float64)
        rows = torch.arange(5, 5 + batch)
        assert fused_classifier.parts_of(model, images) is not None
        one = model(images, generator=torch.Generator().manual_seed(1), rows=rows, **options)
        assert_same(one, in_parts(model, images, generator=torch.Generator().manual_seed(1), rows=rows, **options))


@pytest.mark.parametrize("sizes", [(1, 1), (1, 5), (2, 1), (3, 3)])
def test_every_grid_answers_as_its_parts_do(sizes):
    layer = rt.RaytracedExperts(5, *sizes, hidden=7, num_hidden=1)
    model = rt.RaytracedClassifier(rt.classifier.input_block((1, 3, 3), 5), layer, 4).double().eval()
    images = torch.randn(6, 1, 3, 3, dtype=torch.float64)
    assert_same(model(images), in_parts(model, images))


def test_single_precision_answers_within_rounding():
    model, images = make_model(torch.float32), torch.randn(30, 1, 8, 8)
    torch.testing.assert_close(model(images).logits, in_parts(model, images).logits, rtol=0, atol=1e-5)


def test_new_parameters_are_seen():
    model, images = make_model(), torch.randn(2, 1, 8, 8, dtype=torch.float64)
    before = model(images).logits
    twin = copy.deepcopy(model)
    twin.head.bias += 1
    torch.testing.assert_close(twin(images).logits, before + 1)
    model.head = torch.nn.Linear(16, 10).double()
    assert_same(model(images), in_parts(model, images))
    model.head.bias = torch.nn.Parameter(torch.ones(10, dtype=torch.float64))
    assert_same(model(images), in_parts(model, images))
    swapped = {"head.bias": torch.full((10,), 3.0, dtype=torch.float64)}
    torch.testing.assert_close(functional_call(model, swapped, images).logits, model(images).logits + 2)
    model.float()
    assert model(images.float()).logits.dtype == torch.float32


def test_hooks_are_called():
    model, images, heard = make_model(), torch.randn(1, 1, 8, 8, dtype=torch.float64), []
    model(images)
    with model.layer.gate.register_forward_hook(lambda *_: heard.append("gate")):
        model(images)
    assert heard == ["gate"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"select": "best"}, "select='best': must be one of"),
        ({"max_experts": -1}, "max_experts=-1: must be"),
        ({"rows": torch.arange(3)}, "rows has shape"),
    ],
)
def test_mistakes_are_refused_as_by_the_parts(options, message):
    with pytest.raises(ValueError, match=message):
        make_model()(torch.randn(2, 1, 8, 8, dtype=torch.float64), **options)
