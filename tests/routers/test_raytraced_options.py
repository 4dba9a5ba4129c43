"""Every option of the layer reaches the part that it is for, with gradients and without."""

import pytest
import torch

from raytraced import RaytracedExperts, RoutingNetwork, activation_sequence, build
from raytraced.grid import run_dense
from raytraced.layer import Call
from raytraced.sequence import WEIGHTINGS

OPTIONS = [
    {"stop": "dominant", "estimator": "reinmax"},
    {"estimator": "gumbel", "temperature": 7.0},
    {"estimator": "straight-through"},
]


def generator():
    return torch.Generator().manual_seed(3)


def make(**options):
    torch.manual_seed(1)
    return RaytracedExperts(
        5, 3, 4, train_select="sample", **{"estimator": "reinmax", "reach": 0.0, "sight_rank": 0} | options
    ).double()


@pytest.mark.parametrize("options", [{"scale_init": False, "reach": 0.0}, {"scale_init": True, "reach": 3.0}])
def test_options_of_the_gates_reach_the_routing_network(options):
    found = make(**options).router.routing
    torch.manual_seed(1)
    expected = RoutingNetwork(3, 4, **options).double()
    for ours, theirs in zip(found.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_options_of_the_experts_reach_them():
    assert make(hidden=7, num_hidden=1).experts.widths == (5, 7, 5)


def test_a_model_of_the_layer_answers_along_the_way_and_one_of_another_does_not():
    for name, expected in (("mre", True), ("top-k", False)):
        model = build(name, image_shape=(1, 4, 4), num_classes=3, dim=8, num_layers=2, num_experts=2)
        assert model.answers_along_the_way is expected


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("max_experts", [None, 2])
def test_options_of_the_sequence_reach_it(options, max_experts):
    router, rows = make(**options).router, torch.arange(100, 150)
    hidden = torch.randn(50, 5, dtype=torch.float64, requires_grad=True)
    seen, found = torch.randn(50, 3, 4, dtype=torch.float64), []
    for route in (
        router.sequence(hidden, Call("sample", max_experts, generator(), rows)),
        activation_sequence(
            router.routing, router.entry(hidden), max_experts=max_experts, generator=generator(), rows=rows, **options
        ),
    ):
        found.append((route.nodes, *torch.autograd.grad((route.active * seen).sum(), hidden)))
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


def test_gates_that_see_nothing_yet_route_as_the_papers():
    torch.manual_seed(1)
    blind = RaytracedExperts(5, 3, 4, sight_rank=0).double()
    torch.manual_seed(1)
    seeing = RaytracedExperts(5, 3, 4, sight_rank=2).double()
    seeing.load_state_dict(blind.state_dict(), strict=False)
    hidden = torch.randn(20, 5, dtype=torch.float64)
    torch.testing.assert_close(blind(hidden).hidden, seeing(hidden).hidden)


@pytest.mark.parametrize("estimator", ["reinmax", "none"])
def test_gates_that_see_learn_from_the_input(estimator):
    layer = RaytracedExperts(5, 3, 4, sight_rank=2, estimator=estimator).double()
    hidden = torch.randn(60, 5, dtype=torch.float64)
    layer(hidden).hidden.square().sum().backward()
    assert layer.router.sight_out.grad.abs().sum() > 0
    with torch.no_grad():
        before = layer(hidden).route.nodes
        layer.router.sight_out.normal_(std=3)
        after = layer(hidden).route.nodes
    changed = (before != after).any(-1)
    assert bool(changed.any())
    # Only what a row itself holds changes its path.
    alone = torch.cat([layer(row[None]).route.nodes for row in hidden])
    assert torch.equal(alone, after)


def test_nothing_would_teach_the_routing_is_refused():
    with pytest.raises(ValueError, match="estimator=none: only rates then teach the routing"):
        RaytracedExperts(5, 3, 4, estimator="none", weighting="unit")
    with pytest.raises(ValueError, match="sight_rank=-1: must be a whole number, at least 0"):
        RaytracedExperts(5, 3, 4, sight_rank=-1)


def test_without_draws_gradient_only_the_final_sets_rates_teach():
    layer, hidden = make(estimator="none", weighting="rates"), torch.randn(30, 5, dtype=torch.float64)
    out = layer(hidden, select="greedy")
    got = torch.autograd.grad(out.hidden.sum(), layer.router.routing.gate_first)[0]
    with torch.no_grad():
        active = layer(hidden, select="greedy").route.active
    rates = layer.router.routing(layer.router.entry(hidden), active).nodes
    weights = WEIGHTINGS["rates"](active, rates)
    expected_out = run_dense(layer.experts, hidden, active, weights, layer.stream)
    torch.testing.assert_close(out.hidden, expected_out)
    expected = torch.autograd.grad(expected_out.sum(), layer.router.routing.gate_first)[0]
    torch.testing.assert_close(got, expected)
    assert expected.abs().sum() > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": "16"}, "dim='16': must be a whole number"),
        ({"num_layers": 2.0}, "num_layers=2.0: must be a whole number"),
        (
            {"sight_rank": 1.5},
            "sight_rank=1.5: must be a whole number, at least 0; 0: gates see rates alone, as the paper's",
        ),
        ({"expert": lambda: None}, "expert: its factory gave None; must give an nn.Module, a new one for each node"),
    ],
)
def test_what_no_layer_can_be_made_of_is_refused_in_a_line(options, message):
    with pytest.raises(ValueError) as error:
        RaytracedExperts(**{"dim": 5, "num_layers": 2, "num_experts": 3} | options)
    assert str(error.value) == message


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("budget", [1.5, "2", -1])
def test_a_budget_is_a_whole_number(budget, training):
    layer = RaytracedExperts(5, 2, 3)
    with (
        torch.set_grad_enabled(training),
        pytest.raises(ValueError, match=r"max_experts=.*: must be a whole number, at least 0"),
    ):
        layer(torch.randn(4, 5), max_experts=budget)


def test_gates_of_a_layer_start_as_it_was_asked():
    """Evenly within ±√(N + 1) / √inputs, as nn.Linear scaled; or normally, which goes beyond."""
    torch.manual_seed(0)
    even, normal = (RaytracedExperts(4, 3, 16, gate_init=start, reach=0.0) for start in ("uniform", "normal"))
    bound = (17 / 16) ** 0.5
    assert 0.9 * bound < even.router.routing.gate_inner.abs().max() <= bound
    assert normal.router.routing.gate_inner.abs().max() > 2 * bound


def test_gates_see_where_there_are_gates():
    assert RaytracedExperts(4, 1, 3, sight_rank=2).router.sight_in is None
    assert RaytracedExperts(4, 3, 5, sight_rank=2).router.sight_in.shape == (2, 4)
    assert RaytracedExperts(4, 3, 5, sight_rank=2).router.sight_out.shape == (2, 5, 6, 2)
    assert RaytracedExperts(4, 2, 3, sight_rank=0).router.sight_in is None
