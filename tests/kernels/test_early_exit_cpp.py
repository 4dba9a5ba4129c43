"""Early exit in one library call gives the answers of the exits one by one, and leaves to them what it does not support."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import raytraced as rt
from raytraced import kernels
from raytraced.early_exit import ExitPolicy
from raytraced.experts import Stream
from raytraced.router import Call
from raytraced.sequence import WEIGHTINGS

pytestmark = pytest.mark.skipif(not kernels.available(), reason=f"compiled kernels {kernels.why_not()}")

SHAPE = (1, 4, 4)


@pytest.fixture(autouse=True)
def _no_gradient():
    with torch.no_grad():
        yield


def make(seed=3, dtype=torch.float64, num_classes=5, **options):
    torch.manual_seed(seed)
    options = {
        "output_logit_offset": 10.0,
        "num_layers": 3,
        "estimator": "reinmax",
    } | options  # sequences that reach every layer
    model = rt.build("mre", image_shape=SHAPE, num_classes=num_classes, **options).to(dtype).eval()
    model.head.weight.data.mul_(6)  # answers of every degree of sureness
    if model.layer.router.sight_in is not None:
        model.layer.router.sight_out.data.normal_()
    return model


def images(batch, dtype=torch.float64):
    return 4 * torch.rand(batch, *SHAPE, generator=torch.Generator().manual_seed(batch), dtype=dtype) - 2


def counted(model):
    """A word for each time that the exits are taken one by one."""
    asked = []
    steps = model.exits_of
    model.exits_of = lambda *args: asked.append("steps") or steps(*args)
    return asked


def assert_same(this, that, atol=1e-11):
    (route,), (expected,) = this.routes, that.routes
    torch.testing.assert_close(this.logits, that.logits, rtol=0, atol=atol)
    assert torch.equal(this.num_exits, that.num_exits)
    assert torch.equal(route.active, expected.active)
    assert torch.equal(route.num_active, expected.num_active)
    if expected.nodes is None:  # no row continued
        assert bool((route.nodes == -1).all())
    else:
        assert torch.equal(route.nodes, expected.nodes)


def compare(model, batch, **options):
    asked = counted(model)
    found = model(images(batch), **options)
    assert not asked, "the exits were taken one by one"
    with kernels.use(early_exit="steps"):
        expected = model(images(batch), **options)
    assert asked == ["steps"]
    assert_same(found, expected)
    return found


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("stream", list(Stream))
@pytest.mark.parametrize("confidence", [0.0, 0.6, [0.95, 0.4, 0.8], 1.0])
def test_one_call_answers_as_the_exits_do(weighting, stream, confidence):
    for batch in (1, 7, 300):
        compare(make(weighting=weighting, stream=stream), batch, confidence=confidence)


def test_rows_stop_at_every_exit():
    assert make()(images(300), confidence=0.6).num_exits.unique().tolist() == [1, 2, 3, 4]


@settings(max_examples=40, deadline=None)
@given(
    num_layers=st.integers(1, 5),
    num_experts=st.integers(1, 9),
    dim=st.integers(1, 20),
    num_hidden=st.integers(1, 3),
    num_classes=st.integers(1, 11),
    input_rank=st.integers(0, 3),
    budget=st.none() | st.integers(0, 6),
    batch=st.integers(0, 20),
    confidence=st.floats(0, 1),
)
def test_every_size_answers_as_its_exits_do(
    num_layers, num_experts, dim, num_hidden, num_classes, input_rank, budget, batch, confidence
):
    sizes = {"num_layers": num_layers, "num_experts": num_experts, "dim": dim, "num_hidden": num_hidden}
    with torch.no_grad():
        model = make(num_classes=num_classes, input_rank=input_rank if num_layers > 1 else 0, **sizes)
        compare(model, batch, confidence=confidence, max_experts=budget)


def test_rows_under_a_mask_have_their_first_answer():
    mask = torch.arange(300) % 3 > 0
    found = compare(make(), 300, confidence=0.9, mask=mask)
    assert torch.equal(found.num_exits > 0, mask)
    assert not found.num_experts[~mask].any()


def test_single_precision_answers_within_rounding():
    model = make(dtype=torch.float32)
    found = model(images(300, torch.float32), confidence=0.8)
    with kernels.use("plain"):
        expected = model(images(300, torch.float32), confidence=0.8)
    assert_same(found, expected, 1e-4)


def test_neither_threads_nor_other_rows_change_an_answer():
    model, before = make(), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = model(images(700), confidence=0.8)
        torch.set_num_threads(2)
        assert_same(model(images(700), confidence=0.8), alone, 0)
    finally:
        torch.set_num_threads(before)
    hidden = model.input_block(images(700))  # a product of PyTorch's, which does depend on the other rows
    whole, some = (
        model.layer.fused_early_exit(rows, Call(), model.head, ExitPolicy(0.8), None)
        for rows in (hidden, hidden[13:290])
    )
    for one, other in zip((whole[0], *whole[1][:3], whole[2]), (some[0], *some[1][:3], some[2]), strict=True):
        assert torch.equal(one[13:290], other)


def test_a_changed_output_layer_is_seen():
    model = make()
    before = model(images(9), confidence=0.8).logits
    model.head.bias += torch.randn(5)
    compare(model, 9, confidence=0.8)
    assert not torch.equal(model(images(9), confidence=0.8).logits, before)


class Own(nn.Linear):
    """A custom output layer."""

    def forward(self, x):
        return 2 * super().forward(x)


def test_what_one_call_does_not_support_the_exits_do():
    def asks(model=None, **options):
        model = model or make()
        asked = counted(model)
        model(images(3), **{"confidence": 0.8} | options)
        return len(asked)

    assert asks() == 0
    assert asks(select="sample", generator=torch.Generator().manual_seed(0)) == 1
    assert asks(exit_every="expert") == asks(max_ms=1e6) == 1
    with torch.enable_grad():
        assert asks() == 1
    half = make(dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        asked = counted(half)
        half(images(3, torch.bfloat16), confidence=0.8)
        assert asked == ["steps"]
    own = make()
    own.head = Own(16, 5).double()
    assert asks(own) == 1
    no_bias = make()
    no_bias.head = nn.Linear(16, 5, bias=False).double()
    assert asks(no_bias) == 1
    turned = make()
    turned.head.weight.data = turned.head.weight.data.t().contiguous().t()
    assert asks(turned) == 1
    with kernels.use(experts="dense"):
        assert asks() == 1
    with kernels.use("plain"):
        assert asks() == 1
    assert asks(make(hidden=600)) == 1  # experts so large that calls cost little beside them


@pytest.mark.parametrize("mask", [(torch.arange(80) % 4 == 0)[::2], torch.tensor(False).expand(40)])
def test_a_mask_may_lie_in_memory_as_it_likes(mask):
    found = compare(make(), 40, confidence=0.6, mask=mask)
    assert torch.equal(found.num_exits > 0, mask)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(3, dtype=torch.bool), r"mask has shape \(3,\): must be \(40,\)"),
        (torch.ones(40, 1, dtype=torch.bool), r"mask has shape \(40, 1\)"),
        (torch.ones(40), "mask=torch.float32: must be torch.bool"),
    ],
)
def test_a_mask_that_fits_nothing_is_refused(mask, message):
    with pytest.raises(ValueError, match=message):
        make()(images(40), confidence=0.6, mask=mask)
    with pytest.raises(ValueError, match=message):
        list(rt.anytime(make(), images(40), confidence=0.6, mask=mask))


def test_an_output_layer_of_another_size_is_taken_as_it_is():
    model, asked = make(), []
    model.head.weight, model.head.bias = nn.Parameter(torch.zeros(3, 16).double()), nn.Parameter(torch.ones(3).double())
    assert torch.equal(model(images(9), confidence=0.6).logits, torch.ones(9, 3).double())
    model.head.bias = nn.Parameter(torch.ones(1).double())  # which PyTorch takes for all three
    asked = counted(model)
    assert torch.equal(model(images(9), confidence=0.6).logits, torch.ones(9, 3).double())
    assert asked == ["steps"]
    model.head = nn.Linear(9, 5).double()
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        model(images(9), confidence=0.6)


def test_hooks_of_the_output_layer_are_called_at_every_exit():
    model, called = make(), []
    hook = model.head.register_forward_hook(lambda *_: called.append("hook"))
    model(images(300), confidence=1.0)
    assert called == ["hook"] * 4
    hook.remove()
    everywhere = nn.modules.module.register_module_forward_pre_hook(lambda part, _: called.append(part))
    model(images(300), confidence=1.0)
    everywhere.remove()
    assert called.count(model.head) == 4
    assert not (asked := counted(model)) and model(images(300), confidence=1.0) and not asked  # noqa: PT018
    model.head.forward = lambda x_BD: torch.full((len(x_BD), 5), 7.0).double()
    assert bool((model(images(9), confidence=0.6).logits == 7).all())


class Tripled(rt.RaytracedExperts):
    def read_out(self, hidden):
        return 3 * hidden


class Same(rt.build("mre", image_shape=SHAPE, num_classes=2).__class__):
    def answer_of(self, out, sample_loss_fn=None):
        return super().answer_of(out, sample_loss_fn)._replace(logits=torch.zeros(len(out.hidden), 5))


def test_what_a_subclass_changes_is_heeded():
    model, x_BCHW = make(), images(20)
    model.layer = Tripled(16, 3, 8).double().eval()
    torch.testing.assert_close(model(x_BCHW, confidence=0.0).logits, model.head(3 * model.input_block(x_BCHW)))
    model = make()
    model.__class__ = Same
    assert not model(x_BCHW, confidence=0.6).logits.any()


@pytest.mark.parametrize("name", ["mre", "top-k", "multi-exit"])
def test_a_compiled_model_exits_early(name):
    torch.manual_seed(0)
    model = rt.build(name, image_shape=SHAPE, num_classes=5, dim=16).eval()
    x_BCHW = images(20).float()
    expected = model(x_BCHW, confidence=0.3)
    torch._dynamo.reset()
    found = torch.compile(model, backend="eager")(x_BCHW, confidence=0.3)
    assert torch.equal(found.num_exits, expected.num_exits)
    torch.testing.assert_close(found.logits, expected.logits)
