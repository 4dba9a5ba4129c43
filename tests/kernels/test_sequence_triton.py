"""The sequence's Triton kernels against the plain path: on a GPU if there is one, else in Triton's interpreter on the CPU.

The interpreter is chosen before triton is imported, so these tests have a process of their own: `make test-triton` (and
`make test-gpu` on a machine with a GPU). Sizes are small, since an interpreted step takes milliseconds.
"""

import copy
import os
from importlib.util import find_spec
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.both_paths import Case, assert_agree, assert_end_at_once, make_case, run
from raytraced import activation_sequence, kernels
from raytraced.kernels import triton_sequence
from raytraced.rng import exponential, uniform
from raytraced.routing import Rates
from raytraced.sequence import Route

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
if find_spec("triton") is None:
    pytestmark = pytest.mark.skip(reason="triton is not installed: make test-triton")
elif not INTERPRETED and not torch.cuda.is_available():
    pytestmark = pytest.mark.skip(reason="no GPU, and TRITON_INTERPRET is not 1: make test-triton")

ESTIMATORS = ("reinmax", "gumbel", "straight-through", "none")
SELECTS, STOPS = ("sample", "greedy"), ("drawn", "dominant", 0.3)
PRECISIONS = (torch.float32, torch.float64)


def kernel(routing, entry_BN, **options):
    """The kernels on the device, for and with tensors on the CPU; gradients pass."""
    moved = copy.copy(routing)
    moved._parameters = {name: p if p is None else p.to(DEVICE) for name, p in routing._parameters.items()}
    options = {name: each.to(DEVICE) if isinstance(each, torch.Tensor) else each for name, each in options.items()}
    with kernels.use(sequence="triton"):
        route = kernels.sequence(moved, entry_BN.to(DEVICE), **options)
    rates = Rates(*(each.cpu() for each in route.rates))
    return Route(route.active.cpu(), route.nodes.cpu(), route.num_active.cpu(), rates)


def agree(*sizes, with_gradients=(True, True, True), **options):
    return assert_agree(make_case(*sizes, **options), with_gradients=with_gradients, path=kernel)


@pytest.mark.parametrize(("estimator", "select", "stop"), list(product(ESTIMATORS, SELECTS, STOPS)))
def test_every_option_agrees_with_the_plain_path(estimator, select, stop):
    options = {"estimator": estimator, "select": select, "stop": stop}
    agree(3, 4, 6, **options, dtype=torch.float64)
    agree(3, 3, 5, **options, max_experts=2, input_conditioned=True)


@pytest.mark.parametrize(("estimator", "select"), list(product(("reinmax", "none"), SELECTS)))
def test_a_stop_per_row_agrees_with_the_plain_path(estimator, select):
    options = {"estimator": estimator, "select": select, "stop": torch.tensor([0.05, 0.4, 1.0, 3.0, 0.1, 9.0])}
    agree(3, 4, 6, **options, dtype=torch.float64)
    agree(2, 3, 6, **options, input_conditioned=True)


@pytest.mark.parametrize("max_experts", [0, 1, 3, 12])
def test_steps_may_run_out_before_the_output_node_is_drawn(max_experts):
    agree(3, 4, 5, max_experts=max_experts, dtype=torch.float64)


@pytest.mark.parametrize(("num_layers", "num_experts"), [(1, 1), (1, 5), (2, 1), (2, 3), (5, 3), (3, 16), (3, 17)])
def test_every_shape_of_grid_agrees(num_layers, num_experts):
    agree(num_layers, num_experts, 3, max_experts=6)


@pytest.mark.parametrize(("num_layers", "num_experts"), [(4, 8), (8, 32), (8, 64)])
def test_large_grids_agree(num_layers, num_experts):
    agree(num_layers, num_experts, 2, max_experts=8, select="greedy")


@pytest.mark.parametrize(("num_layers", "num_experts"), [(4, 8), (8, 32), (8, 64)])
def test_todays_defaults_agree(num_layers, num_experts):
    agree(num_layers, num_experts, 2, max_experts=8, select="greedy", estimator="none", input_conditioned=True)


@pytest.mark.parametrize(("estimator", "select"), list(product(ESTIMATORS, SELECTS)))
def test_gates_that_see_the_input_agree_with_the_plain_path(estimator, select):
    agree(4, 8, 3, max_experts=5, estimator=estimator, select=select, input_conditioned=True)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    num_layers=st.integers(1, 4),
    num_experts=st.integers(1, 6),
    batch=st.integers(0, 9),
    estimator=st.sampled_from(ESTIMATORS),
    select=st.sampled_from(SELECTS),
    stop=st.sampled_from(STOPS),
    max_experts=st.one_of(st.none(), st.integers(0, 6)),
    dtype=st.sampled_from(PRECISIONS),
    first_row=st.sampled_from((0, 17, 2**32 - 3, 2**40)),
    input_conditioned=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_random_sizes_agree_with_the_plain_path(num_layers, num_experts, batch, **options):
    agree(num_layers, num_experts, batch, **options)


def test_many_blocks_share_few_programs(monkeypatch):
    monkeypatch.setattr(triton_sequence, "_MOST_PROGRAMS", 2)
    agree(3, 4, 37, max_experts=2, dtype=torch.float64)  # blocks of 16 rows, the last one of 5


def test_a_copy_of_the_gradient_is_made_only_as_memory_allows():
    size = triton_sequence.launch(8, 64)
    one = 64 * 65 * (1 + 6 * 64) * 4
    assert triton_sequence.num_programs(size, 10**6, 4) == 2**29 // one
    assert triton_sequence.num_programs(size, 3, 4) == 3
    assert triton_sequence.num_programs(size, 0, 4) == 1


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)])
def test_each_gradient_arrives_alone(wanted):
    agree(3, 3, 4, dtype=torch.float64, with_gradients=wanted)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_rates_below_the_floor_have_the_floors_derivative(estimator):
    routing, entry_BN, options = make_case(3, 4, 5, estimator=estimator, dtype=torch.float64)
    assert_agree(Case(routing, (1e-8 * entry_BN).detach().requires_grad_(), options), path=kernel)


@pytest.mark.parametrize("scale", [200.0, 1e30])
def test_extreme_weights_overflow_nowhere(scale):
    case = make_case(3, 4, 5, scale=scale)
    found = run(kernel, case, [torch.ones(5, 3, 4), torch.ones(5, 3, 4), None])
    for tensor in (*found.gradients, found.sequence.rates.nodes, found.sequence.rates.output):
        assert bool(tensor.isfinite().all())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter: NaN is given on purpose
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_entry_rates_that_are_no_distribution_end_the_sequence_at_once(value):
    for estimator, select, stop in product(("reinmax", "gumbel"), SELECTS, STOPS):
        assert_end_at_once(make_case(2, 3, 6, estimator=estimator, select=select, stop=stop), value, kernel)


def test_the_numbers_drawn_are_those_of_the_cpu():
    from kernels.triton_draws import draw

    seed = torch.tensor(2**62 + 2**33 + 5)
    rows = torch.tensor([0, 1, 2**31, 2**32 - 1, 2**32, 2**40 + 7, 2**62, 3])
    for step in (0, 3, 6, 511):
        found, noise = torch.empty(8, dtype=torch.float64), torch.empty(8, 16, dtype=torch.float64)
        on_device = [each.to(DEVICE) for each in (seed, rows, found, noise)]
        draw[(1,)](*on_device, step, 5, 4, 8, 3)
        assert torch.equal(on_device[2].cpu(), uniform(seed, rows, step))
        torch.testing.assert_close(on_device[3].cpu(), exponential(seed, rows, step, 16), rtol=1e-14, atol=0)


def test_the_kernel_is_chosen_on_a_gpu_alone():
    routing, entry_BN, options = make_case(3, 4, 6)
    assert triton_sequence.unsupported_reason(routing, entry_BN, **options) == (
        None if INTERPRETED else "a tensor is not on a GPU"
    )
    large = make_case(2, 65, 1)
    assert "more than 64 experts" in triton_sequence.unsupported_reason(
        large.routing.to(DEVICE), large.entry.to(DEVICE)
    )
    assert "half" in triton_sequence.unsupported_reason(routing.to(DEVICE), entry_BN.to(DEVICE).bfloat16())


def test_compiled_in_one_graph_it_gives_the_same_gradients():
    routing, entry_BN, _ = make_case(3, 4, 6, dtype=torch.float64)

    def loss(entry_BN):
        with kernels.use(sequence="triton"):
            route = activation_sequence(routing.to(DEVICE), entry_BN.to(DEVICE), select="greedy", max_experts=3)
        return (route.active * route.rates.nodes.cos()).sum() + route.rates.output.sum()

    expected = torch.autograd.grad(loss(entry_BN), entry_BN)
    found = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(entry_BN), entry_BN)
    torch.testing.assert_close(found, expected)
