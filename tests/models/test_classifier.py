"""The classifier around any layer: answers with budgets, answers along the way, images as they are."""

import itertools

import pytest
import torch

import raytraced as rt
from raytraced.models.classifier import InputBlock
from raytraced.models.registry import MODELS

DIGITS = {"image_shape": (1, 8, 8), "num_classes": 10}
TINY = DIGITS | {"dim": 4, "num_layers": 2, "num_experts": 2}


def seeded(seed=5):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("image_shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32)])
@pytest.mark.parametrize("name", ["mre", "mre-paper"])
def test_both_recipes_train_a_step_and_answer(name, image_shape):
    model = rt.build(name, image_shape=image_shape, num_classes=10)
    images = torch.randn(6, *image_shape)
    out = model(images)
    assert out.logits.shape == (6, 10)
    out.logits.logsumexp(-1).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert torch.equal(model.eval()(images).logits, model(images).logits)


def test_the_papers_recipe_differs_from_ours_in_the_options_that_it_names():
    ours, papers = (rt.build(name, **DIGITS).card.options for name in ("mre", "mre-paper"))
    assert {key for key in ours if ours[key] != papers[key]} == set(rt.PAPER) - {
        "temperature",
        "stream",
    }  # which both have
    assert {key: papers[key] for key in rt.PAPER} == rt.PAPER
    assert ours == rt.build("mre", **DIGITS, **{key: ours[key] for key in rt.PAPER}).card.options


def test_a_budget_and_a_seed_are_kept():
    model, images = rt.build("mre", **DIGITS), torch.randn(20, 1, 8, 8)
    runs = [model(images, select="sample", generator=seeded(s), max_experts=5) for s in (1, 1, 2)]
    assert torch.equal(runs[0].logits, runs[1].logits)
    assert not torch.equal(runs[0].logits, runs[2].logits)
    assert runs[0].num_experts.max() == 5


@pytest.mark.parametrize("select", ["greedy", "sample"])
@pytest.mark.parametrize("weighting", ["unit", "rates"])
@pytest.mark.parametrize("stream", ["residual", "last"])
def test_step_k_of_anytime_is_the_model_with_a_budget_of_k(select, weighting, stream):
    model = rt.build("mre", **DIGITS, weighting=weighting, stream=stream, estimator="reinmax").eval()
    images = torch.randn(10, 1, 8, 8)
    steps = list(rt.anytime(model, images, select=select, generator=seeded()))
    for step in steps:
        out = model(images, select=select, max_experts=step.budget, generator=seeded())
        assert torch.equal(step.logits, out.logits)
        assert torch.equal(step.num_active, out.num_experts)
    whole = model(images, select=select, generator=seeded())
    assert torch.equal(steps[-1].logits, whole.logits)
    assert [s.budget for s in steps] == list(range(len(steps)))
    assert steps[-1].num_active.max() == whole.num_experts.max() in (len(steps) - 2, len(steps) - 1)


@pytest.mark.parametrize("name", ["mre", "mre-paper", "multi-exit"])
@pytest.mark.parametrize("training", [True, False])
def test_answers_for_budgets_are_those_of_calls_of_their_own(name, training):
    options = {"stream": "residual", "train_select": "sample"} if name != "multi-exit" else {}
    model, images = rt.build(name, **DIGITS, **options).train(training), torch.randn(9, 1, 8, 8)
    out = model(images, budgets=(0, 2), generator=seeded())
    assert [answer.logits.shape for answer in out.answers] == [(9, 10)] * 2
    for budget, answer in zip((None, 0, 2), (out, *out.answers), strict=True):
        alone = model(images, max_experts=budget, generator=seeded())
        assert torch.equal(answer.logits, alone.logits)
        assert torch.equal(answer.num_experts, alone.num_experts)


def test_the_answer_with_no_expert_is_the_output_layer_on_the_input_block():
    model, images = rt.build("mre", **DIGITS).eval(), torch.randn(4, 1, 8, 8)
    first = next(iter(rt.anytime(model, images)))
    assert torch.equal(first.logits, model.head(model.input_block(images)))


def test_anytime_without_a_generator_follows_one_sequence_of_draws():
    model, images = rt.build("mre", **DIGITS, output_logit_offset=0.0).eval(), torch.randn(50, 1, 8, 8)
    counts = [step.num_active for step in rt.anytime(model, images, select="sample", max_experts=6)]
    for before, after in itertools.pairwise(counts):
        assert (after >= before).all()
    assert len(counts) == 7


def normalised():
    """A model that knows the mean and deviation of its pixels, and images for it."""
    model = rt.build("mre", image_shape=(2, 8, 8), class_names=list("abc"), mean=[0.2, 0.5], std=[0.25, 0.5])
    return model.eval(), torch.randint(0, 256, (20, 2, 8, 8), dtype=torch.uint8)


def test_bytes_and_fractions_give_the_same_answer_that_of_normalised_pixels():
    model, images = normalised()
    logits = model(images).logits
    assert torch.equal(model(images / 255).logits, logits)  # x / 255 · 255 is x for every byte, in float32 too
    plain = rt.build("mre", image_shape=(2, 8, 8), num_classes=3).eval()
    own = {name: buffer for name, buffer in plain.named_buffers() if name.endswith((".scale", ".shift"))}
    plain.load_state_dict(model.state_dict() | own)
    mean, std = torch.tensor([0.2, 0.5]).view(2, 1, 1), torch.tensor([0.25, 0.5]).view(2, 1, 1)
    torch.testing.assert_close(plain((images / 255 - mean) / std).logits, logits, rtol=1e-5, atol=1e-5)


REFUSED = {
    "above 1": (lambda x: x.float(), r"images have values 0 … 255: must be fractions in 0 … 1, or uint8"),
    "below 0": (lambda x: x / 255 - 0.5, r"images have values -0.5 … 0.5: must be fractions in 0 … 1, or uint8"),
    "NaN": (lambda x: torch.where(x == 0, torch.nan, x / 255), r"images have values nan … nan: must be fractions in 0 … 1"),
    "integers": (lambda x: x.long(), r"images are torch.int64: must be uint8, or floats in 0 … 1"),
    "one image": (lambda x: x[0], r"images have shape \(2, 8, 8\): must be \(batch, 2, 8, 8\)"),
    "another size": (lambda x: x[..., :4], r"images have shape \(20, 2, 8, 4\): must be \(batch, 2, 8, 8\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_images_of_another_kind_or_shape_are_refused_in_one_line(case):
    change, message = REFUSED[case]
    model, images = normalised()
    with pytest.raises(ValueError, match=message) as error:
        model(change(images))
    assert "\n" not in str(error.value)


def test_no_images_at_all_give_no_answers():
    model, images = normalised()
    assert model(images[:0] / 255).logits.shape == model(images[:0]).logits.shape == (0, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rt.build("mre", **DIGITS, stream="x"), "stream='x': must be one of"),
        (lambda: InputBlock((3, 7, 9), 4), r"image_shape=\(3, 7, 9\): colour images must be at least 8 by 8"),
        (lambda: InputBlock((1, 8, 8), 4, mean=[0.5]), r"mean, std=\(\[0.5\], None\): must be given both, or neither"),
        (lambda: InputBlock((1, 8, 8), 4, [0.5, 0.5], [1.0, 1.0]), "one value per channel is needed, the images have 1"),
        (lambda: InputBlock((1, 8, 8), 4, [0.5], [0.0]), r"std=\(0.0,\): must be above 0"),
        (lambda: rt.build("mre", image_shape=(1, 8, 8), num_classes=0), "num_classes=0: must be at least 1"),
        (lambda: rt.build("mre", image_shape=(1, 8, 8)), "mre: needs num_classes"),
        (lambda: rt.build("mre", num_classes=3), "mre: needs image_shape"),
        (lambda: rt.build("mre", num_classes=3, image_shape=(1, 8, 8), class_names=["a"]), r"num_classes=3: must be 1, as many as class_names"),
        (lambda: next(iter(rt.anytime(rt.build("mre", **TINY), torch.full((1, 1, 8, 8), torch.nan)))), "inputs: 64 of 64 values are not finite"),
        (lambda: next(iter(rt.anytime(rt.build("mre", **TINY), torch.zeros(1, 1, 8, 8), max_experts=-1))), "max_experts=-1: must be"),
        (lambda: next(iter(rt.anytime(rt.build("top-k", **TINY), torch.zeros(1, 1, 8, 8)))), "top-k: has one answer only"),
        (lambda: rt.build("top-k", **TINY)(torch.zeros(1, 1, 8, 8), max_experts=1), "select, max_experts and stop: this router supports none of them"),
        (lambda: rt.build("dense", **DIGITS)(torch.zeros(1, 1, 8, 8), select="sample"), "select, max_experts and stop: this router supports none of them"),
    ],
)  # fmt: skip
def test_bad_input_is_named_with_its_value_and_the_rule(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_says_whether_it_answers_along_the_way(name):
    model, images = rt.build(name, **DIGITS).eval(), torch.rand(2, 1, 8, 8)
    assert model.answers_along_the_way == MODELS[name].anytime
    if model.answers_along_the_way:
        *_, last = rt.anytime(model, images)
        assert torch.equal(last.logits, model(images).logits)


def test_the_public_names_are_all_there_and_nothing_else_is_listed():
    assert set(dir(rt)) == set(rt.__all__)
    for name in rt.__all__:
        assert getattr(rt, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = rt.nothing
