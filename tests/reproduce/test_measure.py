"""What is measured of a trained model, against one sample at a time."""

import pytest
import torch

from raytraced.data import load
from raytraced.models import build_model
from raytraced.reproduce.measure import choose_gallery, measure_run
from raytraced.saving import ModelCard


@pytest.fixture(scope="module")
def digits():
    return load("digits")


def make(name, digits, **options):
    torch.manual_seed(1)
    card = ModelCard(name, digits.image_shape, 10, options, "digits", digits.class_names, digits.mean, digits.std)
    return card.build().eval(), card


def test_budgets_and_lengths_are_those_of_single_samples(digits):
    model, card = make("mre", digits, num_layers=2, num_experts=3)
    figures = measure_run(model, card, digits)
    images = (digits.test.images.float() / 255 - digits.mean[0]) / digits.std[0]
    counts, answers = {}, []
    for image, label in zip(images, digits.test.labels, strict=True):
        own = []
        for budget in range(len(figures["budgets"])):
            out = model(image[None], max_experts=budget)
            own.append(int(out.logits.argmax()) == int(label))
        length = int(model(image[None]).sequence.num_active)
        counts[length] = counts.get(length, 0) + 1
        answers.append((length, own))
    for budget, row in enumerate(figures["budgets"]):
        assert row["accuracy"] == pytest.approx(sum(own[budget] for _, own in answers) / len(answers))
        assert row["experts"] == pytest.approx(sum(min(length, budget) for length, _ in answers) / len(answers))
    for length, num in counts.items():
        part = figures["lengths"][str(length)]
        assert part["num"] == num
        for budget, accuracy in enumerate(part["accuracy"]):
            assert accuracy == pytest.approx(
                sum(own[budget] for own_length, own in answers if own_length == length) / num
            )


def test_a_model_without_sequences_has_a_cost_alone(digits):
    model, card = make("dense", digits, num_blocks=2)
    figures = measure_run(model, card, digits)
    assert set(figures) == {"used_parameters", "macs"}
    # 64·16 in, two blocks of three 16·16 layers, 16·10 out
    assert figures["macs"] == {"total": 1024 + 1536 + 160, "input": 1024, "routing": 0, "experts": 1536, "head": 160}


def test_the_gallery_shows_the_first_correct_images_of_each_length():
    num_active_n = torch.tensor([1, 2, 1, 1, 3])
    correct_n = torch.tensor([True, True, False, True, False])
    assert choose_gallery(num_active_n, correct_n) == {"1": [0, 3], "2": [1]}


def test_a_model_of_every_kind_can_be_measured(digits):
    for name in ("mlp-total", "top-k", "threshold", "multi-exit", "ada-k"):
        model, card = make(name, digits)
        assert isinstance(model, type(build_model(name, digits.image_shape, 10)))
        assert measure_run(model, card, digits)["macs"]["total"] > 0
