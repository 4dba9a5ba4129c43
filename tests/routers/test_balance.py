"""Losses and biases that balance the load of the experts."""

import copy

import pytest
import torch

from raytraced.layer import routed_layer
from raytraced.routers.aux_free import AuxFree
from raytraced.routers.chain import ChainOfExperts
from raytraced.routers.choosing import balance_loss
from raytraced.routers.null_experts import NullExperts
from raytraced.routers.relu import ReLURouting
from raytraced.routers.threshold import Threshold
from raytraced.routers.top_any import TopAny, diversity_loss
from raytraced.routers.top_k import TopK


def test_the_balance_loss_is_1_if_uniform_and_the_number_of_experts_if_all_go_to_one():
    uniform, all_experts = torch.full((6, 4), 0.25), torch.ones(6, 4)
    assert balance_loss(uniform, all_experts) == 1
    one = torch.nn.functional.one_hot(torch.zeros(6, dtype=torch.int64), 4).float()
    assert balance_loss(one, one) == 4


def test_the_balance_loss_equals_a_loop_over_experts():
    probs = torch.rand(7, 4, dtype=torch.float64).softmax(-1).requires_grad_()
    active = (torch.rand(7, 4) > 0.5).double()
    total = sum(active[:, e].sum() / active.sum() * sum(probs[b, e] for b in range(7)) / 7 for e in range(4))
    loss = balance_loss(probs, active)
    torch.testing.assert_close(loss, 4 * total)
    for ours, theirs in zip(torch.autograd.grad(loss, probs), torch.autograd.grad(4 * total, probs), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_each_null_expert_counts_with_their_mean_load():
    probs = torch.rand(7, 5, dtype=torch.float64).softmax(-1)
    chosen = torch.tensor([[1, 0, 1, 0, 0]] * 4 + [[0, 1, 0, 1, 0]] * 3).double()
    # 14 choices: 4 and 3 for the two experts, 4 + 3 + 0 for the three null experts, a mean of 7/3.
    share = torch.tensor([4, 3, 7 / 3, 7 / 3, 7 / 3], dtype=torch.float64) / 14
    torch.testing.assert_close(balance_loss(probs, chosen, num_null=3), 5 * (share * probs.mean(0)).sum())


def test_orthogonal_directions_cost_only_their_length():
    assert diversity_loss(3 * torch.eye(4)) == 3
    assert diversity_loss(torch.ones(2, 1)) == pytest.approx(2**0.5 + 1)  # two equal directions: ‖J − I‖ = √2


@pytest.mark.parametrize(
    ("cls", "option", "weight"),
    [
        (TopK, "balance", 0.5),
        (Threshold, "balance", 0.5),
        (Threshold, "entropy", 0.5),
        (TopAny, "diversity", 0.5),
        (NullExperts, "balance", 0.5),
        (ChainOfExperts, "balance", 0.5),
    ],
)
def test_the_routers_loss_is_proportional_to_its_weight_and_only_for_training(cls, option, weight):
    layer = routed_layer(cls, 5, 3, 4, **{option: weight}).double()
    hidden = torch.randn(20, 5, dtype=torch.float64)
    once = layer(hidden).loss
    once.backward()
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in layer.parameters())
    setattr(layer.router, option, 2 * weight)
    torch.testing.assert_close(layer(hidden).loss, 2 * once)
    setattr(layer.router, option, 0.0)
    assert layer(hidden).loss is None
    setattr(layer.router, option, weight)
    assert layer.eval()(hidden).loss is None


def test_the_entropy_loss_of_a_uniform_gate_is_the_logarithm_of_the_number_of_experts():
    layer = routed_layer(Threshold, 5, 3, 4, entropy=0.5).double()
    with torch.no_grad():
        for gate in layer.router.gates:
            gate.weight.zero_()
            gate.bias.zero_()
    loss = layer(torch.randn(6, 5, dtype=torch.float64)).loss
    torch.testing.assert_close(loss, 3 * 0.5 * torch.tensor(4.0, dtype=torch.float64).log())


def test_the_bias_rises_by_the_update_rate_below_the_mean_load_and_falls_above_it():
    layer = routed_layer(AuxFree, 5, 1, 4, k=1, update_rate=0.125)
    with torch.no_grad():
        layer.router.gates[0].weight.zero_()
        layer.router.gates[0].bias.copy_(torch.tensor([0.0, 3.0, 0.0, 0.0]))  # all 8 go to expert 1, the mean load is 2
    layer(torch.randn(8, 5))
    assert layer.router.bias.tolist() == [[0.125, -0.125, 0.125, 0.125]]
    layer.router.move_bias(0, torch.tensor([2.0, 2.0, 1.0, 3.0]))
    assert layer.router.bias.tolist() == [[0.125, -0.125, 0.25, 0.0]]


def test_the_bias_changes_in_training_only_and_has_no_gradient():
    layer = routed_layer(AuxFree, 5, 2, 4).eval()
    layer(torch.randn(8, 5))
    assert not layer.router.bias.any()
    assert "router.bias" in layer.state_dict()
    assert "router.bias" not in dict(layer.named_parameters())
    layer.train()(torch.randn(8, 5))
    assert layer.router.bias.any()


def test_the_penalty_rises_if_more_than_k_experts_run_and_weights_gates_by_load():
    layer = routed_layer(ReLURouting, 5, 1, 4, k=2.0, pace=1.5).double()
    with torch.no_grad():
        layer.router.gates[0].weight.zero_()
        layer.router.gates[0].bias.copy_(torch.tensor([0.5, 1.0, 2.0, -1.0]))  # three of four experts run for every row
    out = layer(torch.randn(8, 5, dtype=torch.float64))
    # per row: penalty · (N / k) · the sum of share times gate
    torch.testing.assert_close(out.loss, torch.tensor(1e-8 * 4 / 2 * 3.5, dtype=torch.float64), rtol=1e-6, atol=0)
    torch.testing.assert_close(layer.router.penalty, torch.tensor([1.5e-8]).double(), rtol=1e-6, atol=0)
    layer.router.move_penalty(0, torch.tensor(1.9))
    torch.testing.assert_close(layer.router.penalty, torch.tensor([1e-8]).double(), rtol=1e-6, atol=0)
    assert layer.eval()(torch.randn(8, 5, dtype=torch.float64)).loss is None


def test_the_penalty_brings_the_number_of_experts_to_k():
    torch.manual_seed(0)
    layer = routed_layer(ReLURouting, 5, 2, 8, k=2.0)
    optimizer, hidden = torch.optim.Adam(layer.parameters(), 1e-2), torch.randn(400, 5)
    for _ in range(300):
        out = layer(hidden)
        optimizer.zero_grad()
        ((out.update - hidden.sin()).square().mean() + out.loss).backward()
        optimizer.step()
    assert out.route.active.sum(-1).mean(0).tolist() == pytest.approx([2.0, 2.0], abs=0.5)


def test_biased_selection_spreads_the_load_of_a_fixed_gate():
    layer = routed_layer(AuxFree, 5, 1, 4, k=1, update_rate=0.004)
    layer.router.gates[0].bias.data = torch.tensor([2.0, 0.2, 0.0, -0.3])
    hidden = torch.randn(400, 5)
    before = copy.deepcopy(layer).eval()(hidden).route.active[:, 0].mean(0)
    for _ in range(150):
        layer(hidden)
    after = layer.eval()(hidden).route.active[:, 0].mean(0)
    assert before.max() > 0.9
    assert after.max() < 0.4
    assert after.min() > 0.1
