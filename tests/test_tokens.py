"""Hidden vectors of any leading shape, numbers for their draws, and padding that changes nothing."""

import pytest
import torch
from torch import nn

from raytraced import HiddenOnly, RaytracedExperts, activation_sequence, build
from raytraced.experts import Stream
from raytraced.layer import routed_layer
from raytraced.routers.ada_k import AdaK
from raytraced.routers.aux_free import AuxFree
from raytraced.routers.chain import ChainOfExperts
from raytraced.routers.dense import DenseBlocks
from raytraced.routers.null_experts import NullExperts
from raytraced.routers.planned import PlannedTopK
from raytraced.routers.relu import ReLURouting
from raytraced.routers.threshold import Threshold
from raytraced.routers.top_any import TopAny
from raytraced.routers.top_k import TopK

STREAMS = tuple(Stream)
LAYERS = {
    "raytraced": lambda **options: RaytracedExperts(6, 3, 4, train_select="sample", output_logit_offset=0.0, **options),
    "raytraced-gumbel": lambda **o: RaytracedExperts(6, 3, 4, train_select="sample", estimator="gumbel", output_logit_offset=0.0, **o),
    "raytraced-all": lambda **options: RaytracedExperts(6, 3, 4, mask_gradient="all", **options),
    "dense": lambda **options: DenseBlocks(6, 3, **options),
    "top-k": lambda **options: routed_layer(TopK, 6, 3, 4, balance=0.5, **options),
    "threshold": lambda **options: routed_layer(Threshold, 6, 3, 4, balance=0.5, entropy=0.1, **options),
    "relu": lambda **options: routed_layer(ReLURouting, 6, 3, 4, **options),
    "planned": lambda **options: routed_layer(PlannedTopK, 6, 3, 4, balance=0.5, **options),
    "aux-free": lambda **options: routed_layer(AuxFree, 6, 3, 4, **options),
    "null-experts": lambda **options: routed_layer(NullExperts, 6, 3, 4, **options),
    "top-any": lambda **options: routed_layer(TopAny, 6, 3, 4, **options),
    "chain": lambda **options: routed_layer(ChainOfExperts, 6, 3, 4, balance=0.5, **options),
    "ada-k": lambda **options: routed_layer(AdaK, 6, 3, 4, **options),
}  # fmt: skip


def make(name, **options):
    torch.manual_seed(2)
    return LAYERS[name](**options).double()


def seeded():
    return torch.Generator().manual_seed(7)


def fields(out):
    """Everything that a layer returns, by name."""
    fields = out.route._asdict()
    rates = fields.pop("rates")
    fields |= {} if rates is None else {"rates of nodes": rates.nodes, "rate of output": rates.output}
    return {"hidden": out.hidden} | {name: value for name, value in fields.items() if value is not None}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_tokens_of_texts_are_routed_as_a_batch_of_vectors(name, training):
    hidden = torch.randn(4, 5, 6, dtype=torch.float64)
    layer = make(name).train(training)
    out = layer(hidden, generator=seeded())
    flat = make(name).train(training)(hidden.flatten(0, 1), generator=seeded())
    assert fields(out).keys() == fields(flat).keys()
    for field, value in fields(out).items():
        assert value.shape == (4, 5, *fields(flat)[field].shape[1:]), field
        assert torch.equal(value.flatten(0, 1), fields(flat)[field]), field
    assert (out.loss is None) == (flat.loss is None)
    assert out.loss is None or torch.equal(out.loss, flat.loss)


@pytest.mark.parametrize("name", ["raytraced", "raytraced-gumbel", "ada-k"])
def test_numbers_of_tokens_decide_what_they_draw(name):
    hidden, rows = torch.randn(4, 5, 6, dtype=torch.float64), torch.randint(0, 10**12, (4, 5))

    def active(hidden, rows):
        return make(name)(hidden, generator=seeded(), rows=rows).route.active

    whole = active(hidden, rows)
    assert torch.equal(whole.flatten(0, 1), active(hidden.flatten(0, 1), rows.flatten()))
    assert torch.equal(whole, active(hidden, rows.flatten()))
    assert torch.equal(whole[2:, 1:3], active(hidden[2:, 1:3], rows[2:, 1:3]))
    assert torch.equal(active(hidden, None), active(hidden, torch.arange(20).view(4, 5)))
    assert not torch.equal(whole, active(hidden, None))


class Padded:
    """Tokens of which some are padding through a layer, and those that are none through another like it, alone."""

    def __init__(self, name, training, stream):
        self.mask, self.hidden = torch.rand(4, 5) < 0.6, torch.randn(4, 5, 6, dtype=torch.float64)
        self.hidden[~self.mask] *= 1e3  # were it to count anywhere, it would show
        self.hidden.requires_grad_()
        rows = torch.arange(100, 120).view(4, 5)
        self.layer, self.other = (make(name, stream=stream).train(training) for _ in range(2))
        self.out = self.layer(self.hidden, generator=seeded(), rows=rows, mask=self.mask)
        self.real = self.other(self.hidden[self.mask], generator=seeded(), rows=rows[self.mask])


def each_padded(test):
    for argument, values in (("stream", STREAMS), ("training", (True, False)), ("name", LAYERS)):
        test = pytest.mark.parametrize(argument, values)(test)
    return test


@each_padded
def test_padding_is_not_routed_and_passes_by(name, training, stream):
    case = Padded(name, training, stream)
    padding = ~case.mask
    for field, value in fields(case.out).items():
        assert torch.equal(value[case.mask], fields(case.real)[field]), field
        if field == "hidden" and stream == "residual":
            assert torch.equal(value[padding], case.hidden[padding])
        else:
            assert (value[padding] == (-1 if field == "nodes" else 0)).all(), field
    assert not case.out.update[padding].any()


@each_padded
def test_padding_has_no_say_in_losses_biases_and_gradients(name, training, stream):
    case = Padded(name, training, stream)
    out, real, mask = case.out, case.real, case.mask
    for buffer, other in zip(
        case.layer.buffers(), case.other.buffers(), strict=True
    ):  # aux-free's bias, ada-k's counter
        assert torch.equal(buffer, other)
    assert (out.loss is None, out.policy_loss_fn is None) == (real.loss is None, real.policy_loss_fn is None)
    probe, losses = torch.randn(4, 5, 6, dtype=torch.float64), torch.rand(4, 5, dtype=torch.float64)
    ours, theirs = (out.hidden * probe).sum(), (real.hidden * probe[mask]).sum()
    if out.loss is not None:
        assert torch.equal(out.loss, real.loss)
        ours, theirs = ours + out.loss, theirs + real.loss
    if out.policy_loss_fn is not None:
        assert torch.equal(out.policy_loss_fn(losses.flatten()), real.policy_loss_fn(losses[mask]))
        ours, theirs = ours + out.policy_loss_fn(losses.flatten()), theirs + real.policy_loss_fn(losses[mask])
    ours = torch.autograd.grad(ours, [case.hidden, *case.layer.parameters()], materialize_grads=True)
    theirs = torch.autograd.grad(theirs, [case.hidden, *case.other.parameters()], materialize_grads=True)
    assert torch.equal(ours[0][~mask], probe[~mask] if stream == "residual" else 0 * probe[~mask])
    assert torch.allclose(ours[0][mask], theirs[0][mask], rtol=0, atol=1e-12)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(ours[1:], theirs[1:], strict=True))


@pytest.mark.parametrize("name", LAYERS)
def test_a_vector_draws_the_same_with_and_without_padding_around_it(name):
    hidden, mask = torch.randn(4, 5, 6, dtype=torch.float64), torch.rand(4, 5) < 0.5
    padded, whole = (make(name)(hidden, generator=seeded(), mask=m).route for m in (mask, None))
    assert torch.equal(padded.active[mask], whole.active[mask])
    assert 0 < mask.sum() < 20


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_nothing_but_padding_and_no_padding_at_all(name, training):
    hidden = torch.randn(4, 5, 6, dtype=torch.float64, requires_grad=True)
    out = make(name).train(training)(hidden, mask=torch.zeros(4, 5, dtype=torch.bool))
    assert torch.equal(out.hidden, hidden)
    assert not out.route.active.any()
    assert out.route.num_active.shape == (4, 5)
    assert out.loss is None or out.loss.isfinite()
    out.hidden.sum().backward()
    assert torch.equal(hidden.grad, torch.ones_like(hidden))
    masks = (torch.ones(4, 5, dtype=torch.bool), None)
    every, none = (make(name).train(training)(hidden, generator=seeded(), mask=m) for m in masks)
    assert all(torch.equal(value, fields(none)[field]) for field, value in fields(every).items())


@pytest.mark.parametrize("name", ["mre", "mre-paper"])
def test_a_padded_image_costs_no_expert_along_the_way_either(name):
    from raytraced import anytime

    model = build(name, image_shape=(1, 4, 4), num_classes=3, dim=6).double().eval()
    images = torch.randn(100, 1, 4, 4, dtype=torch.float64)
    mask = torch.arange(100) % 4 != 1
    with torch.no_grad():
        steps = list(anytime(model, images, mask=mask))
        alone = list(anytime(model, images[mask]))
    for step, other in zip(steps, alone, strict=True):
        assert torch.equal(step.num_active[mask], other.num_active)
        assert not step.num_active[~mask].any()
        torch.testing.assert_close(step.logits[mask], other.logits)


REFUSED = {
    "rows of a text": ({"rows": torch.arange(5)}, r"rows has shape \(5,\): must be \(4, 5\), one value for each vector"),
    "rows too many": ({"rows": torch.arange(21)}, r"rows has shape \(21,\): must be \(4, 5\), one value for each vector"),
    "rows turned": ({"rows": torch.zeros(5, 4).long()}, r"rows has shape \(5, 4\): must be \(4, 5\)"),
    "fractions": ({"rows": torch.zeros(4, 5)}, r"rows are torch.float32: must be whole numbers"),
    "mask of texts": ({"mask": torch.ones(4).bool()}, r"mask has shape \(4,\): must be \(4, 5\), one value for each vector"),
    "mask of numbers": ({"mask": torch.ones(4, 5)}, r"mask=torch.float32: must be torch.bool, False where there is padding"),
    "a seed": ({"generator": 5}, r"generator=5: must be a torch.Generator, or None for PyTorch's global one"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("name", LAYERS)
def test_what_does_not_fit_the_vectors_is_refused_in_one_line(name, case):
    options, message = REFUSED[case]
    for training in (True, False):
        with pytest.raises(ValueError, match=message) as error:
            make(name).train(training)(torch.zeros(4, 5, 6, dtype=torch.float64), **options)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", LAYERS)
def test_a_plain_batch_takes_a_mask_and_numbers_as_any_other_shape(name):
    hidden, mask, rows = torch.randn(5, 6).double(), torch.tensor([1, 0, 1, 1, 0]).bool(), torch.arange(40, 45)
    out = make(name)(hidden, generator=seeded(), rows=rows, mask=mask)
    text = make(name)(hidden[None], generator=seeded(), rows=rows[None], mask=mask[None])
    assert torch.equal(out.update, text.update[0])
    for field, value in fields(out).items():
        assert torch.equal(value, fields(text)[field][0]), field
    with pytest.raises(ValueError, match=r"rows has shape \(4,\): must be \(5,\)"):
        make(name)(hidden, rows=rows[:4])


@pytest.mark.parametrize("name", ["mre", "top-k", "ada-k", "dense"])
def test_a_seed_for_a_generator_is_refused_by_models_and_functions_too(name):
    model = build(name, image_shape=(1, 4, 4), num_classes=3)
    for options in ({}, {"budgets": (1,)}):
        with pytest.raises(ValueError, match=r"generator=5: must be a torch\.Generator"):
            model(torch.zeros(2, 1, 4, 4), generator=5, **options)
    with pytest.raises(ValueError, match=r"generator=5: must be a torch\.Generator"):
        activation_sequence(RaytracedExperts(4, 2, 3).router.routing, torch.ones(2, 3) / 3, generator=5)


@pytest.mark.parametrize(
    "make_layer",
    [
        lambda **options: RaytracedExperts(32, 2, 2, **options),
        lambda **options: routed_layer(TopK, 32, 2, 2, **options),
        lambda **options: DenseBlocks(32, 2, **options),
        lambda **options: build("mre", image_shape=(1, 4, 4), num_classes=3, dim=32, **options),
    ],
)
def test_a_module_where_a_factory_is_needed_is_refused_with_the_remedy(make_layer):
    message = r"^expert=Linear\(…\): must be a factory, called once per node; give lambda: Linear\(…\)$"
    with pytest.raises(ValueError, match=message):
        make_layer(expert=nn.Linear(32, 32))
    assert make_layer(expert=lambda: nn.Linear(32, 32))


@pytest.mark.parametrize("shape", [(4, 5, 6), (20, 6)])
@pytest.mark.parametrize("name", LAYERS)
def test_a_block_that_returns_the_update_alone_stands_where_an_mlp_stood(name, shape):
    layer, x = make(name).eval(), torch.randn(shape, dtype=torch.float64)
    block = HiddenOnly(layer, update=True)
    torch.testing.assert_close(x + block(x), layer(x).hidden, rtol=0, atol=1e-14)
    assert torch.equal(block(x), layer(x).update)
    assert torch.equal(HiddenOnly(layer)(x), layer(x).hidden)
    norm = nn.LayerNorm(6).double()
    torch.testing.assert_close(x + block(norm(x)), x - norm(x) + layer(norm(x)).hidden, rtol=0, atol=1e-14)


@pytest.mark.parametrize("shape", [(4, 5, 6), (20, 6)])
@pytest.mark.parametrize("stream", ["skip-sum", "last"])
def test_streams_without_a_residual_are_their_own_update(stream, shape):
    out = make("raytraced", stream=stream)(torch.randn(shape, dtype=torch.float64))
    assert torch.equal(out.update, out.hidden)


def test_the_adapter_passes_keyword_arguments_on():
    layer, x = make("raytraced"), torch.randn(4, 5, 6, dtype=torch.float64)
    for block in (HiddenOnly(layer), HiddenOnly(layer, update=True)):
        assert torch.equal(block(x, max_experts=0), 0 * x if block.update else x)
        mask, rows = torch.rand(4, 5) < 0.5, torch.arange(50, 70).view(4, 5)
        options = {"select": "sample", "max_experts": 4, "rows": rows, "mask": mask}
        out = layer(x, generator=seeded(), **options)
        assert torch.equal(block(x, generator=seeded(), **options), out.update if block.update else out.hidden)
