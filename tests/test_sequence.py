"""The activation sequence: laws over random grids, exact probabilities, gradients, stop rules and budgets."""

import itertools
import math
from collections import Counter
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raytraced import Rates, Route, RoutingNetwork, activation_sequence, kernels, rays, stop_losses
from raytraced.rng import exponential, new_seed
from raytraced.sequence import GRADIENTS, RATE_FLOOR, WEIGHTINGS, Estimator, Select, Stop, expert_weights
from reference import all_paths, greedy_of_one, rates_of_one, sequence_of_one

ESTIMATORS = ("reinmax", "gumbel", "straight-through")
SELECTS = ("sample", "greedy")
STOPS = ("drawn", "dominant", 0.3)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def entries(batch, num_experts, dtype=torch.float32):
    return torch.randn(batch, num_experts, dtype=dtype).softmax(-1)


def orders(nodes):
    return [tuple(k for k in row if k >= 0) for row in nodes.tolist()]


grids = st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(0, 2**31))


@given(grids, st.sampled_from(SELECTS), st.sampled_from(STOPS), st.sampled_from(ESTIMATORS))
def test_sequences_obey_the_laws_of_the_grid(grid, select, stop, estimator):
    num_layers, num_experts, seed = grid
    torch.manual_seed(seed)
    routing = RoutingNetwork(num_layers, num_experts)
    route = activation_sequence(routing, entries(20, num_experts), select=select, stop=stop, estimator=estimator)
    assert ((route.active == 0) | (route.active == 1)).all()
    for row, order in enumerate(orders(route.nodes)):
        assert len(set(order)) == len(order) == route.num_active[row] >= 1
        assert sorted(order) == route.active[row].flatten().nonzero()[:, 0].tolist()
        for place, node in enumerate(order):
            layer = node // num_experts
            above = [k for k in order[:place] if k // num_experts == layer - 1]
            assert layer == 0 or above, "a node was activated with no active node above it"
        layers = {node // num_experts for node in order}
        assert layers == set(range(len(layers))), "active layers have a gap"


@given(grids)
def test_rates_and_output_sum_to_one_at_every_step(grid):
    num_layers, num_experts, seed = grid
    torch.manual_seed(seed)
    routing, entry = RoutingNetwork(num_layers, num_experts).double(), entries(5, num_experts, torch.float64)
    for steps in range(num_layers * num_experts + 1):
        route = activation_sequence(routing, entry, max_experts=steps, generator=generator())
        absorbed = (route.rates.nodes * (1 - route.active)).sum((1, 2)) + route.rates.output
        assert torch.allclose(absorbed, torch.ones(5, dtype=torch.float64), atol=1e-12)


def check_frequencies(paths, counts, num_draws):
    """Every frequency within five standard errors of its probability: for 100 paths, it fails by chance once in 10,000."""
    assert sum(paths.values()) == pytest.approx(1)
    assert set(counts) <= set(paths)
    for path, p in paths.items():
        bound = 5 * (p * (1 - p) / num_draws) ** 0.5 + 1 / num_draws
        assert abs(counts[path] / num_draws - p) <= bound, (path, p, counts[path])


@pytest.mark.parametrize(("num_layers", "num_experts"), [(1, 3), (2, 2), (3, 1)])
@pytest.mark.parametrize("view", ["reinmax", "gumbel", "waiting times"])
def test_drawn_paths_match_exact_enumeration(num_layers, num_experts, view):
    routing = RoutingNetwork(num_layers, num_experts).double()
    entry, num_draws = entries(1, num_experts, torch.float64), 40_000
    batch = entry.expand(num_draws, -1)
    if view == "waiting times":
        nodes = rays.waiting_times(routing, batch, generator()).nodes
    else:
        nodes = activation_sequence(routing, batch, estimator=view, generator=generator()).nodes
    check_frequencies(all_paths(routing, entry[0]), Counter(orders(nodes)), num_draws)


def test_waiting_times_between_activations_are_exponential_with_rate_one():
    routing = RoutingNetwork(3, 4).double()
    waiting = rays.waiting_times(routing, entries(1, 4, torch.float64).expand(20_000, -1), generator())
    # The rates of the candidates sum to 1 at every step, so each wait is Exp(1): mean 1, standard error 1/√20,000 = 0.0071.
    assert waiting.times[:, 0].mean().item() == pytest.approx(1, abs=0.036)
    counts = (waiting.nodes >= 0).sum(-1)
    assert (waiting.stop_time / (counts + 1)).mean().item() == pytest.approx(1, abs=0.036)
    assert (waiting.times.diff()[waiting.nodes[:, 1:] >= 0] > 0).all()


@given(grids)
def test_rays_are_absorbed_in_proportion_to_the_rates(grid):
    num_layers, num_experts, seed = grid
    torch.manual_seed(seed)
    routing, entry, num_rays = RoutingNetwork(num_layers, num_experts), entries(2, num_experts), 4_000
    route = activation_sequence(routing, entry, generator=generator(seed))
    counts = rays.simulate(routing, entry, route.active, num_rays, generator(seed))
    probs = torch.cat(((route.rates.nodes * (1 - route.active)).flatten(1), route.rates.output[:, None]), 1).detach()
    assert (counts.sum(-1) == num_rays).all()
    bound = 5.5 * (probs * (1 - probs) / num_rays).clamp_min(0).sqrt() + 2 / num_rays
    assert ((counts / num_rays - probs).abs() <= bound).all()


@pytest.mark.parametrize(
    ("estimator", "select", "max_experts"), list(itertools.product(ESTIMATORS, SELECTS, (None, 0, 3)))
)
def test_active_set_and_gradients_equal_the_loop_over_samples(estimator, select, max_experts):
    torch.manual_seed(3)
    num_layers, num_experts, batch = 3, 3, 6
    routing = RoutingNetwork(num_layers, num_experts).double()
    entry = entries(batch, num_experts, torch.float64).requires_grad_()
    route = activation_sequence(
        routing,
        entry,
        select=select,
        estimator=estimator,
        temperature=7.0,
        max_experts=max_experts,
        generator=generator(),
    )
    factors = torch.randn(2, batch, num_layers, num_experts, dtype=torch.float64)
    inputs = [entry, *routing.parameters()]
    loss = (
        (route.active * factors[0]).sum() + (route.rates.nodes * factors[1]).sum() + route.rates.output.square().sum()
    )
    fast = torch.autograd.grad(loss, inputs)

    noise = [None] * batch
    if estimator == "gumbel" and select == "sample":
        seed, rows = new_seed(generator(), torch.device("cpu")), torch.arange(batch)
        noise = torch.stack([exponential(seed, rows, t, num_layers * num_experts + 1) for t in range(10)], 1)
    slow_loss = torch.zeros((), dtype=torch.float64)
    for b, nodes in enumerate(orders(route.nodes)):
        if select == "greedy":
            expected, stopped = greedy_of_one(routing, entry[b], max_experts)
            assert list(nodes) == expected
        else:
            stopped = len(nodes) < (9 if max_experts is None else max_experts)
        active = sequence_of_one(
            routing, entry[b], nodes, stopped=stopped, estimator=estimator, noise=noise[b], temperature=7.0
        )
        rates, output = rates_of_one(routing, entry[b], active)
        stacked = torch.stack([torch.stack(layer) for layer in active])
        assert torch.allclose(stacked, route.active[b], atol=1e-12)
        rates = torch.stack([torch.stack(layer) for layer in rates])
        slow_loss = slow_loss + (stacked * factors[0, b]).sum() + (rates * factors[1, b]).sum() + output.square()
    slow = torch.autograd.grad(slow_loss, inputs, materialize_grads=True)
    for a, b in zip(fast, slow, strict=True):
        assert torch.allclose(a, b, rtol=1e-8, atol=1e-10)
    assert max_experts == 0 or all(g.abs().max() > 0 for g in fast)


@given(grids, st.sampled_from(ESTIMATORS))
def test_greedy_by_drawing_equals_greedy_by_dominance(grid, estimator):
    num_layers, num_experts, seed = grid
    torch.manual_seed(seed)
    routing, entry = RoutingNetwork(num_layers, num_experts).double(), entries(9, num_experts, torch.float64)
    entry.requires_grad_()
    results = []
    for stop in STOPS[:2]:
        route = activation_sequence(routing, entry, select="greedy", stop=stop, estimator=estimator)
        (grad,) = torch.autograd.grad((route.active * torch.arange(num_experts)).sum(), entry)
        results.append((route.nodes, route.active, grad))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("weight", [0.1, 0.5, 1.0, 3.0])
def test_a_stop_weight_ends_a_greedy_sequence_when_the_weighted_output_rate_is_the_largest(weight):
    routing, entry = RoutingNetwork(3, 4).double(), entries(100, 4, torch.float64)
    route = activation_sequence(routing, entry, select="greedy", stop=weight)
    assert route.num_active.unique().numel() > 1
    for b, nodes in enumerate(orders(route.nodes)):
        for count in range(len(nodes) + 1):
            active = [[float(l * 4 + i in nodes[:count]) for i in range(4)] for l in range(3)]
            rates, output = rates_of_one(routing, entry[b], active)
            others = [r for l in range(3) for i, r in enumerate(rates[l]) if not active[l][i]]
            assert (weight * output > max(others, default=0)) == (count == len(nodes))


def test_a_stop_weight_scales_the_probability_of_the_output_node():
    # One layer: with one active node of rate 1/4, the output node has the rate 1/4, as each of the other three nodes.
    entry = torch.full((40_000, 4), 0.25)
    for weight in (0.2, 1.0, 5.0):
        route = activation_sequence(RoutingNetwork(1, 4), entry, stop=weight, max_experts=2, generator=generator())
        ended, expected = (route.num_active == 1).double().mean().item(), weight / (weight + 3)
        assert abs(ended - expected) < 4 * (expected * (1 - expected) / 40_000) ** 0.5


def test_a_small_stop_weight_continues_in_a_grid_of_one_layer():
    entry = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    lengths = [
        activation_sequence(RoutingNetwork(1, 4), entry, select="greedy", stop=stop).num_active.item()
        for stop in ("drawn", 1.0, 0.5, 0.25, 0.05)
    ]
    assert lengths == [1, 1, 2, 3, 4]


@pytest.mark.parametrize("stop", [0, -1.0, float("inf"), float("nan"), True, None])
def test_an_invalid_stop_weight_is_refused(stop):
    with pytest.raises(ValueError, match=r"stop=.*: must be drawn, dominant, or a number above 0"):
        activation_sequence(RoutingNetwork(1, 4), entries(2, 4), stop=stop)


def test_sampling_by_dominance_stops_when_the_output_node_exceeds_every_candidate():
    routing, entry = RoutingNetwork(3, 4).double(), entries(200, 4, torch.float64)
    route = activation_sequence(routing, entry, stop="dominant", generator=generator())
    for b, nodes in enumerate(orders(route.nodes)):
        for count in range(len(nodes) + 1):
            active = [[float(l * 4 + i in nodes[:count]) for i in range(4)] for l in range(3)]
            rates, output = rates_of_one(routing, entry[b], active)
            others = [r for l in range(3) for i, r in enumerate(rates[l]) if not active[l][i]]
            assert (output > max(others, default=0)) == (count == len(nodes))


@pytest.mark.parametrize("select", SELECTS)
def test_an_output_node_equal_to_a_candidate_does_not_dominate_it(select):
    # One of two equal nodes is active: its rate goes to the output node, which then equals the other node.
    route = activation_sequence(RoutingNetwork(1, 2), torch.tensor([[0.5, 0.5]]), select=select, stop="dominant")
    assert sorted(orders(route.nodes)[0]) == [0, 1]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_same_generator_state_gives_the_same_result_and_the_next_call_another(estimator):
    routing, entry, g = RoutingNetwork(4, 8), entries(64, 8), generator()
    first = activation_sequence(routing, entry, estimator=estimator, generator=g)
    second = activation_sequence(routing, entry, estimator=estimator, generator=g)
    again = activation_sequence(routing, entry, estimator=estimator, generator=generator())
    assert torch.equal(first.nodes, again.nodes)
    assert not torch.equal(first.nodes, second.nodes)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("select", SELECTS)
def test_the_order_and_size_of_a_batch_do_not_change_a_sequence(estimator, select):
    routing, entry = RoutingNetwork(4, 8).double(), entries(50, 8, torch.float64)
    rows = torch.arange(50)

    def run(part):
        return activation_sequence(
            routing, entry[part], select=select, estimator=estimator, generator=generator(), rows=rows[part]
        )

    whole, order = run(rows), torch.randperm(50)
    assert torch.equal(run(order).nodes, whole.nodes[order])
    assert torch.equal(torch.cat([run(rows[:17]).nodes, run(rows[17:18]).nodes, run(rows[18:]).nodes]), whole.nodes)
    assert torch.allclose(run(rows[17:18]).rates.nodes, whole.rates.nodes[17:18], atol=1e-14)


def test_a_budget_cuts_the_same_sequence_short():
    routing, entry = RoutingNetwork(4, 8), entries(64, 8)
    whole = activation_sequence(routing, entry, generator=generator())
    for budget in (0, 1, 5, 32, 99):
        cut = activation_sequence(routing, entry, max_experts=budget, generator=generator())
        assert torch.equal(cut.nodes, whole.nodes[:, :budget])
        assert cut.nodes.dtype == torch.int64
        assert torch.equal(cut.num_active, whole.num_active.clamp(max=budget))


@pytest.mark.parametrize("scale", [1e2, 1e4, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("select", SELECTS)
def test_values_and_gradients_are_finite_if_rates_underflow(scale, dtype, estimator, select):
    routing = RoutingNetwork(4, 5).to(dtype)
    with torch.no_grad():
        for weight in routing.parameters():
            weight.mul_(scale)
    entry = (torch.randn(40, 5, dtype=dtype) * 50).softmax(-1).requires_grad_()
    route = activation_sequence(routing, entry, select=select, estimator=estimator, generator=generator())
    loss = route.active.sum() + route.rates.nodes.square().sum() + route.rates.output.sum()
    for value in (
        route.active,
        route.rates.nodes,
        route.rates.output,
        *torch.autograd.grad(loss, [entry, *routing.parameters()]),
    ):
        assert value.isfinite().all()


@pytest.mark.parametrize(
    ("num_layers", "num_experts", "batch"), [(1, 1, 3), (1, 4, 3), (3, 1, 3), (2, 3, 0), (1, 1, 0)]
)
@pytest.mark.parametrize("select", SELECTS)
def test_the_smallest_grids_and_an_empty_batch_work(num_layers, num_experts, batch, select):
    routing, entry = RoutingNetwork(num_layers, num_experts), entries(batch, num_experts).requires_grad_()
    route = activation_sequence(routing, entry, select=select)
    assert route.nodes.shape == (batch, num_layers * num_experts)
    assert route.active.shape == route.rates.nodes.shape == (batch, num_layers, num_experts)
    (route.active.sum() + route.rates.nodes.sum()).backward()
    assert entry.grad.isfinite().all()


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_the_mask_of_an_empty_layer_gets_the_gradient_of_its_first_expert(weighting):
    active, rates = torch.zeros(2, 3, 4, requires_grad=True), torch.rand(2, 3, 4)
    weights = WEIGHTINGS[weighting](active, rates)
    assert (weights == 0).all()
    (grad,) = torch.autograd.grad(weights.sum(), active)
    assert (grad == 1).all()  # the only expert of a layer has weight 1 at any rate


def test_half_precision_entries_give_rates_in_float32():
    route = activation_sequence(RoutingNetwork(3, 4), entries(8, 4).half(), select="greedy")
    assert route.rates.nodes.dtype == route.active.dtype == torch.float32


def test_the_literal_types_list_the_accepted_values():
    assert get_args(Select) == SELECTS
    assert get_args(get_args(Stop)[0]) == STOPS[:2]
    assert set(get_args(Estimator)) == {*GRADIENTS, "none"}
    assert set(GRADIENTS) == set(ESTIMATORS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"select": "best"}, "select='best': must be one of sample, greedy"),
        ({"stop": "never"}, "stop='never': must be one of drawn, dominant"),
        ({"estimator": "reinforce"}, "estimator='reinforce': must be one of reinmax, gumbel, straight-through, none"),
        ({"temperature": -1.0}, "temperature=-1.0: must be positive and finite"),
        ({"temperature": 0.0}, "temperature=0.0: must be positive and finite"),
        ({"temperature": float("inf")}, "temperature=inf: must be positive and finite"),
        ({"temperature": float("nan")}, "temperature=nan: must be positive and finite"),
        ({"temperature": "x"}, "temperature='x': must be positive and finite"),
        ({"max_experts": True}, "max_experts=True: must be a whole number, at least 0, or None"),
        ({"stop": 4e38}, r"stop=4e\+38: must be at most 3.4e\+38"),
        ({"max_experts": -1}, "max_experts=-1: must be a whole number, at least 0, or None"),
        ({"rows": torch.arange(4)}, r"rows has shape \(4,\): must be \(3,\)"),
    ],
)
def test_invalid_options_are_refused_with_name_value_and_rule(options, message):
    with pytest.raises(ValueError, match=message):
        activation_sequence(RoutingNetwork(2, 3), entries(3, 3), **options)


def test_stop_losses_by_hand():
    """With a target of 4 the easiest sample has 1.6 and the hardest 6.4; within half an expert the loss is 0."""
    rates = [0.5, 0.25, 0.9, 0.2, 0.0, 1.0]
    lengths, easier = [4, 1, 6, 3, 3, 5], [0.0, 0.5, 1.0, 0.5, 0.0, 1.0]  # targets: 1.6, 4, 6.4, 4, 1.6, 6.4
    route = Route(
        torch.zeros(6, 1, 1), None, torch.tensor(lengths), Rates(torch.zeros(6, 1, 1), torch.tensor(rates).double())
    )
    losses = stop_losses(route, torch.tensor(easier).double(), 4.0).tolist()
    expected = [-math.log(0.5), -math.log(0.75), 0.0, -math.log(0.8), -math.log(1e-6), -math.log(1e-6)]
    assert losses == pytest.approx(expected, rel=1e-6)
    near = Route(torch.zeros(2, 1, 1), None, torch.tensor([2, 1]), Rates(torch.zeros(2, 1, 1), torch.full((2,), 0.5)))
    # half an expert above and below the target
    assert stop_losses(near, torch.tensor([0.5, 0.5]), 1.5).tolist() == [0.0, 0.0]


def test_input_logits_determine_the_next_node():
    routing, entry = RoutingNetwork(2, 3), torch.tensor([[0.8, 0.15, 0.05]] * 3)
    input_logits = torch.zeros(3, 1, 3, 4)
    input_logits[0, 0, 0, 3] = 90.0  # to the output node
    input_logits[1, 0, 0, 1] = 90.0  # to node 1 of the next layer
    input_logits[2, 0, 0, 2] = 90.0  # to node 2 of the next layer
    route = activation_sequence(routing, entry, select="greedy", input_logits=input_logits, max_experts=2)
    assert orders(route.nodes) == [(0,), (0, 4), (0, 5)]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_sequence_without_steps_has_a_zero_gradient(estimator):
    entry = entries(3, 4).requires_grad_()
    route = activation_sequence(RoutingNetwork(2, 4), entry, estimator=estimator, max_experts=0)
    (grad,) = torch.autograd.grad(route.active.sum(), entry)
    assert torch.equal(grad, torch.zeros_like(entry))
    assert torch.equal(route.active, torch.zeros_like(route.active))


@given(grids, st.floats(0.1, 5))
def test_relative_weights_do_not_change_when_smaller_rates_join(grid, scale):
    num_layers, num_experts, seed = grid
    torch.manual_seed(seed)
    rates = torch.rand(6, num_layers, num_experts, dtype=torch.float64)
    active = (torch.rand_like(rates) < 0.6).double()
    before = expert_weights("relative", active, rates, scale)
    assert bool((before[active == 0] == 0).all())
    largest = (active * rates).amax(-1)
    filled = active.sum(-1) > 0
    torch.testing.assert_close(before.amax(-1)[filled], torch.full_like(largest, scale)[filled])
    joins = (rates < largest[..., None]) & (active == 0)
    after = expert_weights("relative", active + joins, rates, scale)
    assert torch.equal(after[active == 1], before[active == 1])
    others = expert_weights("rates-to-one", active + joins, rates)  # the same law does not hold for these
    if bool((joins.any(-1) & filled).any()):
        assert not torch.equal(others[active == 1], expert_weights("rates-to-one", active, rates)[active == 1])


def test_the_only_expert_of_a_layer_has_a_gradient_by_relative_weights_alone():
    active = torch.tensor([[[0.0, 1.0, 0.0]]])
    for weighting, expected in (("relative", [0.0, 3 / 0.25, 0.0]), ("rates-to-one", [0.0, 0.0, 0.0])):
        rates = torch.tensor([[[0.5, 0.25, 0.1]]], requires_grad=True)
        weights = expert_weights(weighting, active, rates, 3.0)
        assert weights.flatten().tolist() == [0.0, 3.0, 0.0]
        (grad,) = torch.autograd.grad(weights.sum(), rates)
        torch.testing.assert_close(grad.flatten(), torch.tensor(expected))


@pytest.mark.parametrize("rate", [1e-30, 0.0])
def test_relative_weights_are_finite_if_rates_underflow(rate):
    rates = torch.tensor([[[rate, rate / 2]]], requires_grad=True)
    weights = expert_weights("relative", torch.ones(1, 1, 2), rates)
    (grad,) = torch.autograd.grad(weights.sum(), rates)
    assert bool(weights.isfinite().all())
    assert float(weights.detach().max()) <= 1
    assert float(grad.abs().max()) <= 1.001 / RATE_FLOOR


@pytest.mark.parametrize("select", SELECTS)
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("kernel", ["plain", ""])
def test_a_stop_per_row_gives_each_row_what_its_number_gives_alone(select, estimator, kernel):
    torch.manual_seed(0)
    routing, entry = RoutingNetwork(3, 5), entries(40, 5)
    values = [0.02, 0.3, 1.0, 4.0]
    options = {"select": select, "estimator": estimator}
    stop = torch.tensor(values * 10, dtype=torch.float64)
    with kernels.use(kernel):
        together = activation_sequence(routing, entry, stop=stop, generator=generator(), **options)
        for value in values:
            alone = activation_sequence(routing, entry, stop=value, generator=generator(), **options)
            rows = stop == value
            assert torch.equal(together.nodes[rows], alone.nodes[rows])
            assert torch.equal(together.rates.output[rows], alone.rates.output[rows])
    lengths = [float(together.num_active[stop == value].double().mean()) for value in values]
    assert lengths[0] > lengths[1] > lengths[-1]


BAD_STOPS = [
    (torch.tensor([1.0, -0.5, 2.0]), "stop=-0.5 in a tensor: must be above 0 and finite"),
    (torch.tensor([1.0, 0.0, 2.0]), "stop=0 in a tensor: must be above 0 and finite"),
    (torch.tensor([1.0, float("nan"), 2.0]), "stop=nan in a tensor: must be above 0 and finite"),
    (torch.tensor([float("inf"), 1.0, 2.0]), "stop=inf in a tensor: must be above 0 and finite"),
    (
        torch.tensor([1e39, 1.0, 2.0], dtype=torch.float64),
        r"stop=1e\+39 in a tensor: must be above 0 and finite in float32",
    ),
    (torch.ones(4), r"stop has shape \(4,\): must be \(3,\), one number for each vector"),
    (torch.ones(()), r"stop has shape \(\): must be \(3,\), one number for each vector"),
    (torch.ones(3, dtype=torch.bool), r"stop=torch.bool: must hold real numbers"),
]


@pytest.mark.parametrize(("stop", "message"), BAD_STOPS)
def test_bad_stops_per_row_are_refused_in_one_line(stop, message):
    with pytest.raises(ValueError, match=message) as error:
        activation_sequence(RoutingNetwork(2, 3), entries(3, 3), stop=stop)
    assert "\n" not in str(error.value)
