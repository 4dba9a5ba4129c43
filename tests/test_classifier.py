import itertools

import pytest
import torch

import raytraced as rt
from raytraced.classifier import PRESETS, input_block


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_trains_a_step_and_answers(name):
    model = rt.preset(name)
    images = torch.randn(6, *PRESETS[name].image_shape)
    out = model(images)
    assert out.logits.shape == (6, PRESETS[name].num_classes)
    out.logits.logsumexp(-1).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert torch.equal(model.eval()(images).logits, model(images).logits)


def test_a_budget_and_a_seed_are_kept():
    model, images = rt.preset("digits"), torch.randn(20, 1, 8, 8)
    runs = [
        model(images, select="sample", generator=torch.Generator().manual_seed(s), max_experts=5) for s in (1, 1, 2)
    ]
    assert torch.equal(runs[0].logits, runs[1].logits)
    assert not torch.equal(runs[0].logits, runs[2].logits)
    assert runs[0].sequence.num_active.max() == 5


@pytest.mark.parametrize("select", ["greedy", "sample"])
@pytest.mark.parametrize("weighting", ["unit", "rates"])
@pytest.mark.parametrize("stream", ["residual", "last"])
def test_step_k_of_anytime_is_the_model_with_a_budget_of_k(select, weighting, stream):
    model = rt.preset("digits", weighting=weighting, stream=stream).eval()
    images = torch.randn(10, 1, 8, 8)

    def g():
        return torch.Generator().manual_seed(5)

    steps = list(rt.anytime(model, images, select=select, generator=g()))
    for step in steps:
        out = model(images, select=select, max_experts=step.budget, generator=g())
        assert torch.equal(step.logits, out.logits)
        assert torch.equal(step.num_active, out.sequence.num_active)
    whole = model(images, select=select, generator=g())
    assert torch.equal(steps[-1].logits, whole.logits)
    assert [s.budget for s in steps] == list(range(len(steps)))
    assert steps[-1].num_active.max() == whole.sequence.num_active.max() in (len(steps) - 2, len(steps) - 1)


def test_the_answer_with_no_expert_is_the_output_layer_on_the_input_block():
    model, images = rt.preset("digits").eval(), torch.randn(4, 1, 8, 8)
    first = next(iter(rt.anytime(model, images)))
    assert torch.equal(first.logits, model.head(model.input_block(images)))


def test_anytime_without_a_generator_follows_one_sequence_of_draws():
    model, images = rt.preset("digits").eval(), torch.randn(50, 1, 8, 8)
    counts = [step.num_active for step in rt.anytime(model, images, select="sample", max_experts=6)]
    for before, after in itertools.pairwise(counts):
        assert (after >= before).all()
    assert len(counts) == 7


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rt.preset("paper-imagenet"), "preset 'paper-imagenet': must be one of paper-mnist"),
        (lambda: rt.preset("tiny", stream="x"), "stream='x': must be one of"),
        (lambda: input_block((3, 7, 9), 4), r"image_shape=\(3, 7, 9\): colour images must be at least 8 by 8"),
        (lambda: rt.RaytracedClassifier(torch.nn.Identity(), rt.RaytracedExperts(4, 2, 2), 0), "num_classes=0: must be"),
        (lambda: next(iter(rt.anytime(rt.preset("tiny"), torch.full((1, 1, 8, 8), torch.nan)))), "images: 64 of 64 values are not finite"),
        (lambda: next(iter(rt.anytime(rt.preset("tiny"), torch.zeros(1, 1, 8, 8), max_experts=-1))), "max_experts=-1: must be"),
    ],
)  # fmt: skip
def test_bad_input_is_named_with_its_value_and_the_rule(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_public_names_are_all_there_and_nothing_else_is_listed():
    assert set(dir(rt)) == set(rt.__all__)
    for name in rt.__all__:
        assert getattr(rt, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = rt.nothing
