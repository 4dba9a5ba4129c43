"""Every option of RaytracedExperts has an effect on the right part, with gradients and without."""

import pytest
import torch

from raytraced import RaytracedExperts, RoutingNetwork, activation_sequence, build
from raytraced.experts import run_dense
from raytraced.router import Call
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
        5,
        3,
        4,
        train_select="sample",
        **{"estimator": "reinmax", "output_logit_offset": 0.0, "input_rank": 0} | options,
    ).double()


@pytest.mark.parametrize(
    "options", [{"scale_init": False, "output_logit_offset": 0.0}, {"scale_init": True, "output_logit_offset": 3.0}]
)
def test_options_of_the_gates_reach_the_routing_network(options):
    found = make(**options).router.routing
    torch.manual_seed(1)
    expected = RoutingNetwork(3, 4, **options).double()
    for ours, theirs in zip(found.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_options_of_the_experts_reach_the_experts():
    assert make(hidden=7, num_hidden=1).experts.widths == (5, 7, 5)


def test_models_with_raytraced_experts_have_exits_and_others_do_not():
    for name, expected in (("mre", True), ("top-k", False)):
        model = build(name, image_shape=(1, 4, 4), num_classes=3, dim=8, num_layers=2, num_experts=2)
        assert model.answers_along_the_way is expected


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("max_experts", [None, 2])
def test_options_of_the_sequence_reach_the_sequence(options, max_experts):
    router, rows = make(**options).router, torch.arange(100, 150)
    hidden = torch.randn(50, 5, dtype=torch.float64, requires_grad=True)
    factors, results = torch.randn(50, 3, 4, dtype=torch.float64), []
    for route in (
        router.sequence(hidden, Call("sample", max_experts, generator(), rows)),
        activation_sequence(
            router.routing, router.entry(hidden), max_experts=max_experts, generator=generator(), rows=rows, **options
        ),
    ):
        results.append((route.nodes, *torch.autograd.grad((route.active * factors).sum(), hidden)))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("asked", [{}, {"select": "greedy"}, {"max_experts": 2}, {"rows": torch.arange(100, 150)}])
def test_draws_and_outputs_are_the_same_without_gradients(options, asked):
    layer, hidden = make(**options), torch.randn(50, 5, dtype=torch.float64)
    learning = layer(hidden, generator=generator(), **asked)
    with torch.no_grad():
        using = layer(hidden, generator=generator(), **asked)
    assert torch.equal(learning.route.nodes, using.route.nodes)
    torch.testing.assert_close(learning.hidden, using.hidden)
    if "rows" in asked:
        assert not torch.equal(using.route.nodes, layer(hidden, generator=generator()).route.nodes)


def test_a_budget_of_0_costs_the_entry_gate_of_every_row():
    layer = make()
    with torch.no_grad():
        route = layer(torch.randn(6, 5, dtype=torch.float64), max_experts=0).route
    cost = layer.router.cost(route)
    assert cost.macs.tolist() == [5 * 4] * 6
    assert cost.parameters.tolist() == [5 * 4 + 4] * 6


def test_fresh_input_conditioned_gates_route_as_gates_without_the_input():
    torch.manual_seed(1)
    without = RaytracedExperts(5, 3, 4, input_rank=0).double()
    torch.manual_seed(1)
    conditioned = RaytracedExperts(5, 3, 4, input_rank=2).double()
    conditioned.load_state_dict(without.state_dict(), strict=False)
    hidden = torch.randn(20, 5, dtype=torch.float64)
    torch.testing.assert_close(without(hidden).hidden, conditioned(hidden).hidden)


@pytest.mark.parametrize("estimator", ["reinmax", "none"])
def test_input_conditioned_gates_learn_from_the_input(estimator):
    layer = RaytracedExperts(5, 3, 4, input_rank=2, estimator=estimator).double()
    hidden = torch.randn(60, 5, dtype=torch.float64)
    layer(hidden).hidden.square().sum().backward()
    assert layer.router.sight_out.grad.abs().sum() > 0
    with torch.no_grad():
        before = layer(hidden).route.nodes
        layer.router.sight_out.normal_(std=3)
        after = layer(hidden).route.nodes
    changed = (before != after).any(-1)
    assert bool(changed.any())
    # The path of a row depends on that row alone.
    alone = torch.cat([layer(row[None]).route.nodes for row in hidden])
    assert torch.equal(alone, after)


def test_options_without_any_gradient_for_the_routing_are_refused():
    with pytest.raises(ValueError, match="estimator=none: the routing learns from the weights"):
        RaytracedExperts(5, 3, 4, estimator="none", weighting="unit")
    with pytest.raises(ValueError, match="input_rank=-1: must be a whole number, at least 0"):
        RaytracedExperts(5, 3, 4, input_rank=-1)


def test_without_a_gradient_through_draws_only_the_rates_of_the_final_set_have_one():
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
            {"input_rank": 1.5},
            "input_rank=1.5: must be a whole number, at least 0; 0: gates depend on firing rates alone, as in the paper",
        ),
        ({"expert": lambda: None}, "expert: its factory gave None; must give an nn.Module, a new one for each node"),
    ],
)
def test_an_invalid_option_is_refused_in_one_line(options, message):
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


def test_gate_init_chooses_the_distribution_of_fresh_gates():
    """Uniform within ±√(N + 1) / √inputs, or normal, which exceeds these bounds."""
    torch.manual_seed(0)
    even, normal = (
        RaytracedExperts(4, 3, 16, gate_init=start, output_logit_offset=0.0) for start in ("uniform", "normal")
    )
    bound = (17 / 16) ** 0.5
    assert 0.9 * bound < even.router.routing.gate_inner.abs().max() <= bound
    assert normal.router.routing.gate_inner.abs().max() > 2 * bound


def test_input_rank_has_no_parameters_without_gates():
    assert RaytracedExperts(4, 1, 3, input_rank=2).router.sight_in is None
    assert RaytracedExperts(4, 3, 5, input_rank=2).router.sight_in.shape == (2, 4)
    assert RaytracedExperts(4, 3, 5, input_rank=2).router.sight_out.shape == (2, 5, 6, 2)
    assert RaytracedExperts(4, 2, 3, input_rank=0).router.sight_in is None


def gate_gradient(layer, seed):
    """The largest gradient of the router's parameters for a random batch."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(48, layer.dim, dtype=torch.float64, generator=generator)
    direction = torch.randn(48, layer.dim, dtype=torch.float64, generator=generator)
    layer.zero_grad()
    (layer(hidden, generator=generator).hidden * direction).sum().backward()
    return max(float(parameter.grad.abs().max()) for parameter in layer.router.parameters())


TO_ONE = {"weighting": "rates-to-one"}
UNTRAINABLE = [
    ((1, 8), TO_ONE),
    ((1, 2), {"weighting": "rates"}),
    ((1, 8), TO_ONE | {"stop": "dominant"}),
    ((1, 8), TO_ONE | {"stop": 1.0}),
    ((1, 8), TO_ONE | {"stop_range": (1.0, 2.0)}),
    ((4, 1), TO_ONE),
    ((2, 1), TO_ONE | {"train_select": "sample"}),
    ((3, 1), TO_ONE | {"estimator": "reinmax", "mask_gradient": "all"}),
    ((3, 1), {"stop": 0.05, "weighting": "rates"}),
]
TRAINABLE = [
    ((1, 8), {}),
    ((1, 2), {}),
    ((2, 1), {}),
    ((4, 1), {}),
    ((2, 8), {}),
    ((2, 2), {}),
    ((1, 8), TO_ONE | {"stop": 0.3}),
    ((1, 8), TO_ONE | {"stop_range": (0.1, 2.0)}),
    ((1, 8), TO_ONE | {"train_select": "sample"}),
    ((1, 8), TO_ONE | {"estimator": "reinmax"}),
    ((4, 1), {"weighting": "unit", "estimator": "reinmax"}),
    ((1, 8), {"weighting": "unit", "estimator": "gumbel", "mask_gradient": "all"}),
]


@pytest.mark.parametrize(("grid", "options"), UNTRAINABLE)
def test_a_grid_whose_gates_get_no_gradient_is_warned_about(grid, options):
    with pytest.warns(UserWarning, match=r"^RaytracedExperts\(6, .*\): its gates never learn to route: .*; set num_"):
        layer = RaytracedExperts(6, *grid, **options).double()
    assert all(gate_gradient(layer, seed) < 1e-12 for seed in range(5))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("grid", "options"), TRAINABLE)
def test_a_grid_whose_gates_get_a_gradient_is_not_warned_about(grid, options):
    layer = RaytracedExperts(6, *grid, **options).double()
    assert any(gate_gradient(layer, seed) > 1e-3 for seed in range(5))


@pytest.mark.filterwarnings("error")
def test_a_single_expert_has_nothing_to_route():
    RaytracedExperts(6, 1, 1)
