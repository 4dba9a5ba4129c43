"""Every option of the layer reaches the part that it is for, with gradients and without."""

import pytest
import torch

from raytraced import RaytracedExperts, RoutingNetwork, activation_sequence
from raytraced.layer import Call

OPTIONS = [{"stop": "dominant"}, {"estimator": "gumbel", "temperature": 7.0}, {"estimator": "straight-through"}]


def generator():
    return torch.Generator().manual_seed(3)


def make(**options):
    torch.manual_seed(1)
    return RaytracedExperts(5, 3, 4, train_select="sample", **{"reach": 0.0} | options).double()


@pytest.mark.parametrize("options", [{"scale_init": False, "reach": 0.0}, {"scale_init": True, "reach": 3.0}])
def test_options_of_the_gates_reach_the_routing_network(options):
    found = make(**options).router.routing
    torch.manual_seed(1)
    expected = RoutingNetwork(3, 4, **options).double()
    for ours, theirs in zip(found.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("max_experts", [None, 2])
def test_options_of_the_sequence_reach_it(options, max_experts):
    router, rows = make(**options).router, torch.arange(100, 150)
    entry = torch.randn(50, 4, dtype=torch.float64).softmax(-1).requires_grad_()
    seen, found = torch.randn(50, 3, 4, dtype=torch.float64), []
    for route in (
        router.sequence(entry, Call("sample", max_experts, generator(), rows)),
        activation_sequence(
            router.routing, entry, max_experts=max_experts, generator=generator(), rows=rows, **options
        ),
    ):
        found.append((route.nodes, *torch.autograd.grad((route.active * seen).sum(), entry)))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("asked", [{}, {"select": "greedy"}, {"max_experts": 2}, {"rows": torch.arange(100, 150)}])
def test_without_gradients_the_same_is_drawn_and_answered(options, asked):
    layer, hidden = make(**options), torch.randn(50, 5, dtype=torch.float64)
    learning = layer(hidden, generator=generator(), **asked)
    with torch.no_grad():
        using = layer(hidden, generator=generator(), **asked)
    assert torch.equal(learning.route.nodes, using.route.nodes)
    torch.testing.assert_close(learning.hidden, using.hidden)
    if "rows" in asked:
        assert not torch.equal(using.route.nodes, layer(hidden, generator=generator()).route.nodes)


def test_where_no_expert_may_run_deciding_still_costs_the_entry_gate_of_every_row():
    layer = make()
    with torch.no_grad():
        route = layer(torch.randn(6, 5, dtype=torch.float64), max_experts=0).route
    work = layer.router.work(route)
    assert work.multiply_adds.tolist() == [5 * 4] * 6
    assert work.parameters.tolist() == [5 * 4 + 4] * 6
