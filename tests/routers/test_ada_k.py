"""ada-k: the draws of the allocators, the policy loss, and that the allocators learn."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from raytraced import build
from raytraced.layer import routed_layer
from raytraced.routers.ada_k import AdaK


def make_layer(**options):
    return routed_layer(AdaK, 5, 3, 4, **options).double()


def test_the_policy_loss_equals_a_loop_over_samples_and_layers():
    layer = make_layer(clip=0.1, entropy=0.3, expert_cost=0.05)
    layer.router.old_weight.normal_()
    layer.router.critic_weight.data.normal_()
    layer.router.num_calls += 1  # so that π_old stays different from π
    hidden = torch.randn(6, 5, dtype=torch.float64)
    states = []
    original = layer.router.draw
    layer.router.draw = lambda step, h, draws: states.append(h) or original(step, h, draws)
    out = layer(hidden, generator=torch.Generator().manual_seed(0))
    task_losses = torch.rand(6, dtype=torch.float64) * 3
    ks = out.route.active.sum(-1).long()

    terms, ratios = [], []
    for b in range(6):
        reward = -task_losses[b] - 0.05 * ks[b].sum()
        for l in range(3):
            state = states[l][b]
            new = torch.log_softmax(layer.router.allocator_weight[l] @ state + layer.router.allocator_bias[l], 0)
            old = torch.log_softmax(layer.router.old_weight[l] @ state + layer.router.old_bias[l], 0)
            ratio = (new[ks[b, l] - 1] - old[ks[b, l] - 1]).exp()
            value = layer.router.critic_weight[l] @ state + layer.router.critic_bias[l]
            advantage = float((reward - value).detach())
            # Clipping can only reduce a gain: above the range for a positive advantage, below it for a negative one.
            clipped = float(ratio.detach()) > 1.1 if advantage > 0 else float(ratio.detach()) < 0.9
            gain = (1.1 if advantage > 0 else 0.9) * advantage if clipped else ratio * advantage
            entropy = -(new.exp() * new).sum()
            terms.append((value - reward) ** 2 / 2 - gain - 0.3 * entropy)
            ratios.append(float(ratio.detach()))
    assert min(ratios) < 0.9
    assert max(ratios) > 1.1
    expected, loss = sum(terms) / 18, out.policy_loss_fn(task_losses)
    torch.testing.assert_close(loss, expected)
    parameters = [
        layer.router.allocator_weight,
        layer.router.allocator_bias,
        layer.router.critic_weight,
        layer.router.critic_bias,
    ]
    for ours, theirs in zip(
        torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_the_policy_loss_has_no_gradient_for_experts_gates_and_hidden_vectors():
    layer = make_layer()
    hidden = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    layer(hidden).policy_loss_fn(torch.rand(6, dtype=torch.float64)).backward()
    assert hidden.grad is None
    reached = {name for name, parameter in layer.named_parameters() if parameter.grad is not None}
    assert reached == {
        f"router.{name}" for name in ("allocator_weight", "allocator_bias", "critic_weight", "critic_bias")
    }


def test_the_drawing_policy_is_copied_every_policy_steps_calls():
    layer = make_layer(policy_steps=3)
    copies = []
    for call in range(7):
        layer.router.allocator_bias.data.fill_(float(call))
        layer(torch.randn(2, 5, dtype=torch.float64))
        copies.append(float(layer.router.old_bias[0, 0]))
    assert copies == [0, 0, 0, 3, 3, 3, 6]


def test_evaluation_uses_the_most_probable_number_and_changes_no_state():
    layer = make_layer().eval()
    layer.router.allocator_weight.data.zero_()
    layer.router.allocator_bias.data[:] = torch.tensor([0.0, 0.1, 0.5, 0.2])
    out = layer(torch.randn(6, 5, dtype=torch.float64))
    assert out.route.active.sum(-1).eq(3).all()
    assert int(layer.router.num_calls) == 0
    assert out.policy_loss_fn is None


def test_draws_follow_the_policy():
    layer = make_layer()
    layer.router.allocator_weight.data.zero_()
    layer.router.allocator_bias.data[:] = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    active = layer(torch.randn(4000, 5, dtype=torch.float64), generator=torch.Generator().manual_seed(0)).route.active
    counts = torch.bincount(active.sum(-1).long().flatten(), minlength=5)[1:] / active.shape[0] / 3
    # 12,000 draws: five standard deviations of a share p are 5·√(p(1−p)/12000) ≤ 0.023
    assert (counts - torch.tensor([0.1, 0.2, 0.3, 0.4])).abs().max() < 5 * math.sqrt(0.25 / 12000)


def test_a_draw_depends_on_the_row_number_not_on_the_position_in_the_batch():
    layer = make_layer()
    hidden, rows = torch.randn(8, 5, dtype=torch.float64), torch.arange(8)
    order = torch.tensor([3, 1, 7, 0])
    whole = layer(hidden, generator=torch.Generator().manual_seed(1), rows=rows).route.active
    part = layer(hidden[order], generator=torch.Generator().manual_seed(1), rows=rows[order]).route.active
    assert torch.equal(whole[order], part)


@pytest.mark.parametrize(("best", "expert_cost"), [(1, 0.0), (4, 0.0), (1, 0.3)])
def test_the_allocators_learn_the_number_of_experts_with_the_highest_reward(best, expert_cost):
    layer = routed_layer(AdaK, 5, 2, 4, entropy=0.0, expert_cost=expert_cost)
    optimizer = torch.optim.Adam(
        [p for n, p in layer.named_parameters() if n.startswith(("router.alloc", "router.critic"))], lr=0.1
    )
    hidden = torch.randn(32, 5)
    for step in range(80):
        out = layer(hidden, generator=torch.Generator().manual_seed(step))
        task_losses = (out.route.num_active - 2 * best).abs() if not expert_cost else torch.zeros(32)
        optimizer.zero_grad()
        out.policy_loss_fn(task_losses).backward()
        optimizer.step()
    assert layer.eval()(hidden).route.active.sum(-1).mean() == pytest.approx(best, abs=0.2)


def test_the_entropy_bonus_makes_the_allocator_less_decided():
    layer = routed_layer(AdaK, 5, 1, 4, entropy=1.0)
    layer.router.allocator_bias.data[:] = torch.tensor([2.0, 0.0, 0.0, 0.0])
    layer(torch.randn(64, 5)).policy_loss_fn(torch.zeros(64)).backward()
    assert layer.router.allocator_bias.grad[0, 0] > 0  # the most probable choice becomes less probable
    assert (layer.router.allocator_bias.grad[0, 1:] < 0).all()


def test_the_classifier_rewards_with_the_loss_of_its_answers():
    model = build("ada-k", image_shape=(1, 2, 2), num_classes=3, dim=5, num_layers=2, num_experts=4, policy_steps=100)
    images, labels = torch.randn(6, 1, 2, 2), torch.tensor([0, 1, 2, 0, 1, 2])

    def seeded():
        return torch.Generator().manual_seed(0)

    out = model(
        images, sample_loss_fn=lambda logits: cross_entropy(logits, labels, reduction="none"), generator=seeded()
    )
    losses = torch.stack([-out.logits[b].log_softmax(-1)[labels[b]] for b in range(6)])
    torch.testing.assert_close(
        out.loss, model.layer(model.input_block(images), generator=seeded()).policy_loss_fn(losses)
    )
    assert model(images).loss is None  # without task losses there is no policy loss
