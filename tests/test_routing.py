"""The routing network: the law of conservation, a loop over nodes, shapes and initialisation."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raytraced import RoutingNetwork, activation_sequence, build, rays
from raytraced.routing import entry_rates, input_logits
from reference import rates_of_one


def random_active(batch, num_layers, num_experts):
    """Random active sets, also those that no sequence can reach: the law of conservation holds for all."""
    return (torch.rand(batch, num_layers, num_experts) < torch.rand(batch, 1, 1)).double()


sizes = st.tuples(st.integers(1, 5), st.integers(1, 9), st.integers(0, 2**31))


@given(sizes)
def test_rates_and_output_sum_to_one_and_are_never_negative(size):
    num_layers, num_experts, seed = size
    torch.manual_seed(seed)
    routing = RoutingNetwork(num_layers, num_experts).double()
    entry = torch.randn(7, num_experts, dtype=torch.float64).softmax(-1)
    active = random_active(7, num_layers, num_experts)
    rates = routing(entry, active)
    absorbed = (rates.nodes * (1 - active)).sum((1, 2)) + rates.output
    assert torch.allclose(absorbed, torch.ones(7, dtype=torch.float64), atol=1e-12)
    assert (rates.nodes >= 0).all()
    assert (rates.output >= 0).all()


@given(sizes, st.booleans())
def test_rates_equal_the_loop_over_nodes_with_gradients(size, conditioned):
    num_layers, num_experts, seed = size
    torch.manual_seed(seed)
    routing = RoutingNetwork(num_layers, num_experts).double()
    entry = torch.randn(3, num_experts, dtype=torch.float64).softmax(-1).requires_grad_()
    active = random_active(3, num_layers, num_experts).requires_grad_()
    factors = torch.randn(3, num_layers, num_experts, dtype=torch.float64)
    input_logits = (
        torch.randn(3, num_layers - 1, num_experts, num_experts + 1, dtype=torch.float64) if conditioned else None
    )
    inputs = [
        entry,
        active,
        *routing.parameters(),
        *([input_logits.requires_grad_()] if conditioned and num_layers > 1 else []),
    ]

    rates = routing(entry, active, input_logits)
    fast = torch.autograd.grad((rates.nodes * factors).sum() + rates.output.square().sum(), inputs)
    loss = torch.zeros((), dtype=torch.float64)
    for b in range(3):
        nodes, output = rates_of_one(routing, entry[b], active[b], input_logits[b] if conditioned else None)
        stacked = torch.stack([torch.stack(layer) for layer in nodes])
        assert torch.allclose(rates.nodes[b], stacked, atol=1e-12)
        assert torch.allclose(rates.output[b], output, atol=1e-12)
        loss = loss + (stacked * factors[b]).sum() + output.square()
    slow = torch.autograd.grad(loss, inputs, materialize_grads=True)
    for a, b in zip(fast, slow, strict=True):
        assert torch.allclose(a, b, atol=1e-10)


def test_input_logits_apply_both_maps_to_the_hidden_vector():
    """The term of outlet o of node n in layer l is Σ_r up[l, n, o, r] Σ_d down[r, d] hidden[d]."""
    torch.manual_seed(0)
    hidden, down, up = torch.randn(5, 7), torch.randn(2, 7), torch.randn(3, 4, 5, 2)
    expected = torch.einsum("lnor,rd,bd->blno", up, down, hidden)
    torch.testing.assert_close(input_logits(hidden, down, up), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_entry_rates_are_at_least_single_precision(dtype):
    rates = entry_rates(torch.randn(3, 4).to(dtype), torch.randn(5, 4).to(dtype), torch.randn(5).to(dtype))
    assert rates.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tolerance = 1e-6  # a softmax in half precision has an error of some thousandths
    torch.testing.assert_close(rates.sum(-1), torch.ones(3, dtype=rates.dtype), atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("num_layers", "shapes"), [(1, []), (2, [(8, 9)]), (3, [(8, 9), (1, 8, 9, 8)]), (4, [(8, 9), (2, 8, 9, 8)])]
)
def test_gates_have_the_shapes_of_the_paper(num_layers, shapes):
    assert [tuple(p.shape) for p in RoutingNetwork(num_layers, 8).parameters()] == shapes


@pytest.mark.parametrize(
    ("image_shape", "total", "input_block"), [((1, 28, 28), 40_202, 12_560), ((3, 32, 32), 33_330, 5_688)]
)
@pytest.mark.parametrize("name", ["mre", "mre-paper"])
def test_parameter_counts_are_those_of_table_2(name, image_shape, total, input_block):
    def count(module):
        return sum(p.numel() for p in module.parameters())

    model = build(name, image_shape=image_shape, num_classes=10, input_rank=0)
    assert count(model) == total
    assert count(model.input_block) == input_block
    assert count(model.layer.router.gate) == 136
    assert count(model.layer.router.routing) == 8 * 9 * 1 + 2 * 8 * 9 * 8 == 1_224
    assert count(model.layer.experts) == 32 * 816
    assert count(model.head) == 170


def test_uniform_gates_are_initialised_as_linear_layers_times_the_scale():
    """nn.Linear is uniform within ±1/√inputs: 1 input in the first layer, N in the others."""
    for scaled, scale in ((True, 17), (False, 1)):
        routing = RoutingNetwork(40, 16, gate_init="uniform", scale_init=scaled)
        for weight, inputs in ((routing.gate_first, 1), (routing.gate_inner, 16)):
            bound = (scale / inputs) ** 0.5
            assert 0.98 * bound < weight.abs().max().item() <= bound
            assert weight.var().item() == pytest.approx(bound**2 / 3, rel=0.25 if inputs == 1 else 0.018)
    with pytest.raises(ValueError, match="gate_init='x': must be one of normal, uniform"):
        RoutingNetwork(2, 2, gate_init="x")


def test_initial_weights_have_variance_n_plus_one_and_unit_without_scaling():
    scaled = RoutingNetwork(40, 16).gate_inner
    plain = RoutingNetwork(40, 16, scale_init=False).gate_inner
    # 38·16·17·16 = 165,376 weights: the relative error of a variance is √(2/n) = 0.35 %; five times that is allowed.
    assert scaled.var().item() == pytest.approx(17, rel=0.018)
    assert plain.var().item() == pytest.approx(1, rel=0.018)


def test_scaling_makes_the_routing_more_heterogeneous():
    def entropy(scale_init):
        torch.manual_seed(0)
        routing = RoutingNetwork(4, 8, scale_init=scale_init)
        rates = routing(torch.randn(500, 8).softmax(-1), torch.ones(500, 4, 8)).nodes[:, -1]
        share = rates / rates.sum(-1, keepdim=True)
        return -(share * share.log()).sum(-1).mean()

    assert entropy(True) < entropy(False)


def test_output_logit_offset_lowers_only_the_weights_towards_the_output_node():
    def make(output_logit_offset):
        torch.manual_seed(0)
        return RoutingNetwork(4, 8, output_logit_offset=output_logit_offset)

    without, lowered = make(0.0), make(10.0)
    for layer in range(3):
        assert torch.equal(lowered.gate_weight(layer)[:, :-1], without.gate_weight(layer)[:, :-1])
        assert torch.allclose(lowered.gate_weight(layer)[:, -1], without.gate_weight(layer)[:, -1] - 10)


def test_fresh_greedy_sequences_reach_deep_layers_only_with_output_logit_offset():
    def used_by_layer(output_logit_offset):
        torch.manual_seed(0)
        routing = RoutingNetwork(4, 8, output_logit_offset=output_logit_offset)
        active = activation_sequence(routing, torch.randn(500, 8).softmax(-1), select="greedy").active
        return active.mean(0).sum(-1)

    without, lowered = used_by_layer(0.0), used_by_layer(10.0)
    assert without[2:].sum() < 0.5
    assert lowered[2] > 3
    assert lowered.sum() > without.sum()


def test_rates_stay_in_float32_for_entries_of_half_precision():
    routing = RoutingNetwork(3, 4).bfloat16()
    rates = routing(torch.randn(5, 4).softmax(-1).bfloat16(), torch.ones(5, 3, 4).bfloat16())
    assert rates.nodes.dtype == rates.output.dtype == torch.float32
    assert torch.allclose(rates.output, torch.ones(5), atol=1e-2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: RoutingNetwork(0, 8), "num_layers=0: must be at least 1"),
        (lambda: RoutingNetwork(4, -2), "num_experts=-2: must be at least 1"),
        (lambda: RoutingNetwork(4, 2, output_logit_offset=float("nan")), "output_logit_offset=nan: must be finite"),
        (lambda: RoutingNetwork(2, 3)(torch.ones(5, 4), torch.ones(5, 2, 4)), r"entry has shape \(5, 4\): must be \(batch, 3\)"),
        (lambda: RoutingNetwork(2, 3)(torch.ones(5, 3), torch.ones(5, 3, 2)), r"active has shape \(5, 3, 2\): must be \(5, 2, 3\)"),
        (lambda: rays.simulate(RoutingNetwork(2, 3), torch.ones(5, 3), torch.ones(5, 2, 3), 0), "num_rays=0: must be at least 1"),
    ],
)  # fmt: skip
def test_invalid_input_is_refused_with_its_name_value_and_rule(call, message):
    with pytest.raises(ValueError, match=message):
        call()
