"""Evaluation against slow loops, and against itself in other batches."""

from dataclasses import asdict, replace

import pytest
import torch

from raytraced import data, preset
from raytraced.prefixes import anytime
from raytraced.training.config import TrainConfig
from raytraced.training.evaluation import calibration_error, evaluate
from raytraced.training.objective import Objective
from raytraced.training.world import World

ALONE = World(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def digits():
    dataset = data.load("digits")
    return replace(dataset, test=data.Split(dataset.test.images[:80], dataset.test.labels[:80]))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return preset("tiny").eval()


def evaluate_tiny(model, digits, batch_size: int, **options):
    loader = data.Loader(digits.test, batch_size, mean=digits.mean, std=digits.std, shuffle=False)
    return evaluate(Objective(model, TrainConfig()).eval().predict, loader, ALONE, digits.num_classes, **options)


@pytest.mark.parametrize("select", ["greedy", "sample"])
def test_evaluation_does_not_depend_on_the_batch_size(model, digits, select):
    whole = asdict(evaluate_tiny(model, digits, 1000, by_prefix=True, select=select))
    for batch_size in (1, 7, 100):
        parts = asdict(evaluate_tiny(model, digits, batch_size, by_prefix=True, select=select))
        for name, value in whole.items():
            # one row times a matrix is rounded otherwise than many: counts are equal, sums to the last digits
            assert torch.tensor(parts[name]).allclose(torch.tensor(value), rtol=0, atol=1e-6), name


def test_evaluation_is_deterministic(model, digits):
    assert evaluate_tiny(model, digits, 64) == evaluate_tiny(model, digits, 64)


def test_figures_equal_a_loop_over_samples(model, digits):
    result = evaluate_tiny(model, digits, 50, by_prefix=True)
    mean, std = torch.tensor(digits.mean), torch.tensor(digits.std)
    correct, losses, experts, labels, prefixes = [], [], [], [], []
    with torch.no_grad():
        for image, label in zip(digits.test.images, digits.test.labels, strict=True):
            pixels = ((image / 255 - mean) / std)[None].float()
            out = model(pixels)
            correct.append(float(out.logits.argmax() == label))
            losses.append(float(-out.logits.log_softmax(-1)[0, label]))
            experts.append(float(out.active.sum()))
            labels.append(int(label))
            steps = [float(step.logits.argmax() == label) for step in anytime(model, pixels)]
            prefixes.append(steps)
    longest = int(max(experts))
    assert result.accuracy == pytest.approx(sum(correct) / len(correct), abs=1e-9)
    assert result.loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert result.mean_experts == pytest.approx(sum(experts) / len(experts), abs=1e-9)
    for label in range(10):
        own = [value for value, of in zip(experts, labels, strict=True) if of == label]
        assert result.experts_per_class[label] == pytest.approx(sum(own) / len(own), abs=1e-9)
    # a sample whose sequence has ended keeps its last answer
    by_prefix = [sum(steps[min(k, len(steps) - 1)] for steps in prefixes) / len(prefixes) for k in range(longest + 1)]
    assert result.accuracy_by_prefix == pytest.approx(by_prefix, abs=1e-9)
    assert sum(map(sum, result.expert_load)) == pytest.approx(result.mean_experts, abs=1e-6)


def test_calibration_error_of_known_cases():
    sure = torch.full((10,), 0.9, dtype=torch.float64)
    right = torch.tensor([1.0] * 9 + [0.0], dtype=torch.float64)
    assert calibration_error(sure, right) == pytest.approx(0)  # nine of ten right, and 90 % sure
    assert calibration_error(sure, torch.zeros(10, dtype=torch.float64)) == pytest.approx(0.9)
    # two bins of five samples, one 0.2 too sure and one 0.3 too modest
    confidence = torch.tensor([1.0] * 5 + [0.7] * 5, dtype=torch.float64)
    correct = torch.tensor([1.0] * 4 + [0.0] + [1.0] * 5, dtype=torch.float64)
    assert calibration_error(confidence, correct) == pytest.approx((5 * 0.2 + 5 * 0.3) / 10)


def test_class_without_samples_has_no_figure(model, digits):
    few = data.Split(digits.test.images[digits.test.labels != 4], digits.test.labels[digits.test.labels != 4])
    loader = data.Loader(few, 64, mean=digits.mean, std=digits.std, shuffle=False)
    result = evaluate(Objective(model, TrainConfig()).eval().predict, loader, ALONE, 10)
    assert result.accuracy_per_class[4] is None
    assert all(value is not None for label, value in enumerate(result.experts_per_class) if label != 4)
