"""Exits: where samples leave, what training asks of each exit, and that leaving early changes no answer."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from raytraced import build


def make_model(**options):
    return build("multi-exit", image_shape=(1, 4, 4), num_classes=5, dim=6, num_layers=3, **options).double()


def all_answers(model, images):
    """The logits of every exit for one image at a time, [image][exit]."""
    answers = []
    for image in images:
        hidden = model.input_block(image[None])[0]
        row = [model.heads[0](hidden.clamp(min=0))]
        for layer in range(3):
            linear = model.layer.experts.nodes[layer][1]
            update = linear.weight @ hidden.clamp(min=0) + linear.bias
            hidden = hidden + update if model.layer.stream == "residual" else update
            row.append(model.heads[layer + 1](hidden.clamp(min=0)))
        answers.append(row)
    return answers


@pytest.mark.parametrize("stream", ["last", "residual"])
def test_a_sample_leaves_at_the_first_exit_that_is_confident(stream):
    model = make_model(stream=stream, confidence=0.45).eval()
    for head in model.heads:
        head.weight.data *= 3
    images = torch.randn(40, 1, 4, 4, dtype=torch.float64)
    out = model(images)
    exits = set()
    for b, row in enumerate(all_answers(model, images)):
        confidence = [e for e, logits in enumerate(row) if logits.softmax(-1).max() >= 0.45 or e == 3]
        torch.testing.assert_close(out.logits[b], row[confidence[0]])
        assert out.routes[0].active[b, :, 0].tolist() == [1.0] * confidence[0] + [0.0] * (3 - confidence[0])
        exits.add(confidence[0])
    assert len(exits) > 2


def test_training_runs_to_the_end_and_asks_every_exit():
    model = make_model()
    images, labels = torch.randn(7, 1, 4, 4, dtype=torch.float64), torch.arange(7) % 5
    out = model(images, sample_loss_fn=lambda logits: cross_entropy(logits, labels, reduction="none"))
    assert out.routes[0].active.all()
    rows = all_answers(model, images)
    torch.testing.assert_close(out.logits, torch.stack([row[-1] for row in rows]))
    expected = sum(-row[e].log_softmax(-1)[labels[b]] for b, row in enumerate(rows) for e in range(3)) / 7
    torch.testing.assert_close(out.loss, expected)
    (out.loss + out.logits.sum()).backward()
    assert all(parameter.grad.any() for parameter in model.heads.parameters())


def test_without_a_loss_function_there_is_no_own_loss():
    images = torch.randn(2, 1, 4, 4, dtype=torch.float64)
    assert make_model()(images).loss is None
    assert make_model().eval()(images, sample_loss_fn=lambda logits: logits.sum(-1)).loss is None
    assert (
        make_model()(images, sample_loss_fn=lambda logits: logits.sum(-1), max_experts=0).loss is None
    )  # no earlier answer


@pytest.mark.parametrize("training", [True, False])
def test_padding_runs_no_layer_and_has_no_loss(training):
    model = make_model(confidence=0.5).train(training)
    images, mask = torch.randn(6, 1, 4, 4, dtype=torch.float64), torch.tensor([1, 0, 1, 1, 0, 1]).bool()
    seen = torch.randn(6, dtype=torch.float64)
    out = model(
        images, mask=mask, sample_loss_fn=lambda logits: logits[:, 0] * (seen if len(logits) == 6 else seen[mask])
    )
    real = model(images[mask], sample_loss_fn=lambda logits: logits[:, 0] * seen[mask])
    torch.testing.assert_close(out.logits[mask], real.logits)
    assert torch.equal(out.routes[0].active[mask], real.routes[0].active)
    assert not out.routes[0].active[~mask].any()
    assert not out.num_experts[~mask].any()
    assert (out.loss is None) == (not training)
    if training:
        torch.testing.assert_close(out.loss, real.loss)
    else:
        *_, last = model.prefixes(images, mask=mask)
        assert torch.equal(last.num_experts, out.num_experts)


@pytest.mark.parametrize("training", [True, False])
def test_a_budget_of_k_layers_gives_the_answer_of_exit_k(training):
    model = make_model(confidence=1.0).train(training)
    images = torch.randn(4, 1, 4, 4, dtype=torch.float64)
    rows = all_answers(model, images)
    for budget in range(5):
        out = model(images, max_experts=budget)
        torch.testing.assert_close(out.logits, torch.stack([row[min(budget, 3)] for row in rows]))
        assert out.routes[0].active.sum((1, 2)).tolist() == [min(budget, 3)] * 4


@pytest.mark.parametrize(("confidence", "num_layers"), [(0.0, 0), (1.0, 3)])
def test_a_confidence_of_0_leaves_at_once_and_of_1_never(confidence, num_layers):
    out = make_model(confidence=confidence).eval()(torch.randn(4, 1, 4, 4, dtype=torch.float64))
    assert out.routes[0].active.sum((1, 2)).eq(num_layers).all()


def test_an_exit_that_just_reaches_the_confidence_is_taken():
    model = make_model(confidence=1.0).eval()
    model.heads[1].bias.data[0] = 1000.0  # a probability of exactly 1 in floating point
    out = model(torch.randn(4, 1, 4, 4, dtype=torch.float64))
    assert out.routes[0].active[:, :, 0].tolist() == [[1.0, 0.0, 0.0]] * 4


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match=r"confidence=1\.5: must lie in 0 … 1"):
        make_model(confidence=1.5)
    with pytest.raises(ValueError, match="stream='skip-sum': must be last or residual"):
        make_model(stream="skip-sum")
    model = make_model()
    with pytest.raises(ValueError, match="max_experts=-1: must be a whole number, at least 0"):
        model(torch.zeros(1, 1, 4, 4, dtype=torch.float64), max_experts=-1)
    with pytest.raises(ValueError, match="select='sample': must be greedy"):
        model(torch.zeros(1, 1, 4, 4, dtype=torch.float64), select="sample")
