"""How experts are used, against plain loops."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experiments.reproduce.claims import correlation, grid_entropy, largest_fall, load_entropy, num_dead


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


def test_dead_experts_run_for_fewer_than_one_sample_in_a_thousand():
    assert num_dead(torch.tensor([[0.0, 0.0009], [0.0011, 0.5]])) == 2


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_largest_fall_is_over_all_pairs(values):
    pairs = [values[i] - values[j] for i in range(len(values)) for j in range(i, len(values))]
    assert largest_fall(values) == pytest.approx(max(pairs))


def test_correlation_is_pearsons():
    first, second = [1.0, 2.0, 4.0, 3.0], [0.5, 0.1, -0.3, 0.0]
    expected = torch.corrcoef(torch.tensor([first, second], dtype=torch.float64))[0, 1]
    assert correlation(first, second) == pytest.approx(float(expected))
    assert correlation([1.0, 1.0], second[:2]) == 0
