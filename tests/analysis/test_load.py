"""How experts are used, against loops over samples."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raytraced.analysis.load import (
    accuracy_by_length,
    correlation,
    expert_load,
    grid_entropy,
    largest_fall,
    largest_over_mean,
    load_by_class,
    load_entropy,
    num_dead,
)


@pytest.fixture
def active():
    return (torch.rand(50, 3, 4) < 0.4).float()


def test_expert_load_is_the_share_of_samples_that_ran_an_expert(active):
    load = expert_load(active)
    for layer in range(3):
        for expert in range(4):
            used = sum(bool(sample[layer, expert]) for sample in active)
            assert load[layer, expert] == pytest.approx(used / 50)


def test_load_by_class_is_the_load_of_each_class_alone(active):
    labels_B = torch.arange(50) % 2
    labels_B[7] = 2  # the only one of its class; class 3 has no sample
    loads = load_by_class(active, labels_B, 4)
    for label in range(3):
        samples = [sample for sample, own in zip(active, labels_B, strict=True) if own == label]
        assert torch.allclose(loads[label], torch.stack(samples).double().mean(0))
    assert loads[3].abs().sum() == 0


def entropy_by_loop(load):
    total = sum(sum(row) for row in load)
    result = 0.0
    for row in load:
        weight = sum(row)
        entropy = -sum(x / weight * math.log(x / weight) for x in row if x > 0) if weight else 0.0
        result += weight / total * entropy / math.log(len(row))
    return result


@given(
    st.lists(st.lists(st.integers(0, 100), min_size=3, max_size=3), min_size=1, max_size=4).filter(
        lambda load: any(map(any, load))
    )
)
def test_entropy_is_the_weighted_mean_of_the_layers_entropies(load):
    assert load_entropy(torch.tensor(load, dtype=torch.float64)) == pytest.approx(entropy_by_loop(load), abs=1e-9)
    flat = [[value for row in load for value in row]]
    assert grid_entropy(torch.tensor(load, dtype=torch.float64)) == pytest.approx(entropy_by_loop(flat), abs=1e-9)


def test_even_load_has_entropy_one_and_a_single_expert_none():
    assert load_entropy(torch.full((2, 5), 0.3)) == pytest.approx(1)
    assert load_entropy(torch.eye(5)[:2]) == pytest.approx(0)
    # a layer that is hardly used hardly counts: (1·1 + 0.01·0) / 1.01
    uneven = torch.tensor([[0.5, 0.5], [0.01, 0.0]])
    assert load_entropy(uneven) == pytest.approx(1 / 1.01)
    assert grid_entropy(uneven) < 0.8


def test_dead_experts_are_those_hardly_anyone_runs():
    assert num_dead(torch.tensor([[0.0, 0.0009], [0.0011, 0.5]])) == 2


def test_largest_over_mean_is_the_worst_layer_that_is_used():
    load = torch.tensor([[0.2, 0.2], [0.3, 0.1], [0.0, 0.0]])
    assert largest_over_mean(load) == pytest.approx(0.3 / 0.2)


def test_accuracy_by_length_is_that_of_each_lengths_samples():
    correct_BK = torch.rand(60, 5) < 0.6
    num_active_B = torch.randint(0, 5, (60,))
    curves = accuracy_by_length(correct_BK, num_active_B)
    for length in range(5):
        rows = [sample for sample in range(60) if int(num_active_B[sample]) == length]
        expected = [sum(bool(correct_BK[row, k]) for row in rows) / len(rows) for k in range(length + 1)]
        assert curves[length] == pytest.approx(expected)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_largest_fall_is_over_all_pairs(values):
    pairs = [values[i] - values[j] for i in range(len(values)) for j in range(i, len(values))]
    assert largest_fall(values) == pytest.approx(max(pairs))


def test_correlation_is_pearsons():
    first, second = [1.0, 2.0, 4.0, 3.0], [0.5, 0.1, -0.3, 0.0]
    expected = torch.corrcoef(torch.tensor([first, second], dtype=torch.float64))[0, 1]
    assert correlation(first, second) == pytest.approx(float(expected))
    assert correlation([1.0, 1.0], second[:2]) == 0
