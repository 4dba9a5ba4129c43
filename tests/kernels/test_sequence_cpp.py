"""The fused sequence against the plain one: draws exactly, values to 1e-6, gradients to 1e-5 of the largest."""

import ctypes
from itertools import product

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from cases import pairs
from kernels.both_paths import Case, assert_agree, assert_end_at_once, compiled, make_case, run
from raytraced import activation_sequence, kernels
from raytraced.kernels import cpp_library
from raytraced.sequence import unroll

pytestmark = pytest.mark.skipif(not kernels.available(), reason=f"compiled kernels {kernels.why_not()}")

ESTIMATORS = ("reinmax", "gumbel", "straight-through", "none")
SELECTS, STOPS = ("sample", "greedy"), ("drawn", "dominant", 0.3)
PRECISIONS = (torch.float32, torch.float64)


def every(number, cases):
    """Every so-many-th case, for a quick test; the slow one beside it has all. Each option is still met with each value."""
    return list(cases)[::number]


@pytest.fixture(params=["avx2", "baseline"])
def instructions(request):
    """Each copy of the kernel that this machine can run."""
    cpp_library.cpu.raytraced_instructions.restype = ctypes.c_char_p
    usual = cpp_library.cpu.raytraced_instructions()
    if cpp_library.cpu.raytraced_set_instructions(request.param.encode()):
        pytest.skip(f"this machine has no {request.param}")
    yield request.param
    cpp_library.cpu.raytraced_set_instructions(usual)


@pytest.mark.parametrize(
    ("estimator", "select", "stop", "dtype", "max_experts"), pairs(ESTIMATORS, SELECTS, STOPS, PRECISIONS, (None, 3, 0))
)
def test_every_option_agrees_with_the_plain_path(estimator, select, stop, dtype, max_experts):
    options = {"estimator": estimator, "select": select, "stop": stop, "max_experts": max_experts, "dtype": dtype}
    assert_agree(make_case(3, 8, 24, **options))


RANDOM_SIZES = {
    "num_layers": st.integers(1, 5),
    "num_experts": st.integers(1, 19),
    "batch": st.integers(0, 40),
    "estimator": st.sampled_from(ESTIMATORS),
    "select": st.sampled_from(SELECTS),
    "stop": st.sampled_from(STOPS),
    "max_experts": st.one_of(st.none(), st.integers(0, 20)),
    "dtype": st.sampled_from(PRECISIONS),
    "first_row": st.sampled_from((0, 17, 2**32 - 3, 2**40)),
    "input_conditioned": st.booleans(),
    "seed": st.integers(0, 1000),
}


@settings(max_examples=12, deadline=None, derandomize=True)
@given(**RANDOM_SIZES)
def test_random_sizes_agree_with_the_plain_path(num_layers, num_experts, batch, **options):
    assert_agree(make_case(num_layers, num_experts, batch, **options))


@pytest.mark.slow
@pytest.mark.parametrize("start", range(5))
def test_thousands_of_configurations_agree_with_the_plain_path(start, record_property):
    num = 0

    @seed(start)
    @settings(max_examples=320, deadline=None, derandomize=False, database=None)
    @given(**RANDOM_SIZES)
    def sizes(num_layers, num_experts, batch, **options):
        nonlocal num
        num += 1
        assert_agree(make_case(num_layers, num_experts, batch, **options), num_terms=4)

    @seed(start)
    @settings(max_examples=320, deadline=None, derandomize=False, database=None)
    @given(**LARGE_LOGITS)
    def large_logits(num_layers, num_experts, batch, centre, spread, **options):
        nonlocal num
        num += 1
        assert_agree_at_large_logits(num_layers, num_experts, batch, centre, spread, num_terms=4, **options)

    sizes()
    large_logits()
    assert num >= 620
    record_property("configurations", num)  # for experiments/attack.py


@pytest.mark.parametrize(
    ("instructions", "num_experts", "dtype", "estimator", "input_conditioned"),
    pairs(("avx2", "baseline"), (1, 3, 4, 7, 8, 16, 32), PRECISIONS, ("reinmax", "none"), (False, True)),
    indirect=["instructions"],
)
@pytest.mark.usefixtures("instructions")
def test_every_copy_and_every_fixed_size_agrees(num_experts, dtype, estimator, input_conditioned):
    assert_agree(
        make_case(
            3, num_experts, 10, dtype=dtype, max_experts=9, estimator=estimator, input_conditioned=input_conditioned
        )
    )


@pytest.mark.parametrize(("estimator", "select", "stop", "dtype"), pairs(ESTIMATORS, SELECTS, STOPS, PRECISIONS))
def test_gates_that_see_the_input_agree_with_the_plain_path(estimator, select, stop, dtype):
    assert_agree(
        make_case(3, 8, 24, estimator=estimator, select=select, stop=stop, dtype=dtype, input_conditioned=True)
    )


def test_without_an_estimator_masks_are_constants_on_both_paths():
    routing, entry_BN, options = make_case(3, 5, 9, estimator="none")
    for path in (unroll, compiled):
        route = path(routing, entry_BN, **options)
        assert not route.active.requires_grad
        assert route.rates.nodes.requires_grad


def test_a_thousand_samples_draw_as_the_plain_path_and_ties_are_rare():
    met_B = assert_agree(make_case(4, 8, 1000))
    # 10 draws of at most 33 boundaries, each within ±2e-6 of the target with chance 4e-6: 1.3 expected.
    assert int(met_B.sum()) <= 8


@pytest.mark.parametrize(
    ("wanted", "dtype", "stop"),
    pairs([(True, False, False), (False, True, False), (False, False, True)], PRECISIONS, STOPS),
)
def test_each_gradient_arrives_alone(wanted, dtype, stop):
    assert_agree(make_case(3, 5, 8, dtype=dtype, stop=stop), with_gradients=wanted)


@pytest.mark.parametrize("scale", [30.0, 1e4, 1e30])
def test_extreme_weights_overflow_nowhere(scale):
    for dtype, estimator in product(PRECISIONS, ESTIMATORS):
        case = make_case(4, 8, 32, scale=scale, dtype=dtype, estimator=estimator)
        weights = [torch.ones(32, 4, 8, dtype=dtype), torch.ones(32, 4, 8, dtype=dtype), None]
        fused = run(compiled, case, weights)
        for tensor in (*fused.gradients, fused.sequence.rates.nodes, fused.sequence.rates.output):
            assert bool(tensor.isfinite().all())


def test_large_weights_agree_with_the_plain_path():
    # Past the limit below which the softmax does without its maximum.
    for num_experts in (7, 8):
        assert_agree(make_case(4, num_experts, 32, scale=200.0, dtype=torch.float64))


@pytest.mark.parametrize(
    ("estimator", "large", "num_experts"), pairs(("reinmax", "none"), (50.0, 800.0, 2000.0), (7, 8))
)
def test_whatever_gates_see_the_plain_paths_softmax_is_theirs(estimator, large, num_experts):
    # One node's input logits are large, the others' are not: with and without its maximum, the softmax is the same.
    case = make_case(4, num_experts, 32, estimator=estimator, dtype=torch.float64, input_conditioned=True)
    with torch.no_grad():
        case.options["input_logits_BLNO"][:, :, 0, 2] += large
        case.options["input_logits_BLNO"][:, :, 1, -1] -= large
    assert_agree(case)


LARGE_LOGITS = {
    "num_layers": st.integers(2, 4),
    "num_experts": st.integers(1, 20),
    "batch": st.integers(1, 12),
    "estimator": st.sampled_from(ESTIMATORS),
    "select": st.sampled_from(SELECTS),
    "stop": st.sampled_from(STOPS),
    "dtype": st.sampled_from(PRECISIONS),
    "centre": st.floats(-1e4, 1e4),
    "spread": st.sampled_from((0.1, 10.0, 1000.0)),
    "seed": st.integers(0, 1000),
}


def assert_agree_at_large_logits(num_layers, num_experts, batch, centre, spread, num_terms=1, **options):
    case = make_case(num_layers, num_experts, batch, input_conditioned=True, **options)
    with torch.no_grad():
        input_logits_BLNO = case.options["input_logits_BLNO"]
        input_logits_BLNO.mul_(spread).add_(centre).clamp_(-1e4, 1e4)
    logit_size = 1 + float(input_logits_BLNO.detach().abs().max())
    assert_agree(case, logit_size=logit_size, num_terms=num_terms)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(**LARGE_LOGITS)
def test_large_logits_agree_with_the_plain_path(num_layers, num_experts, batch, centre, spread, **options):
    assert_agree_at_large_logits(num_layers, num_experts, batch, centre, spread, **options)


@pytest.mark.parametrize("number", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("logit", [-87.0, -104.0, -720.0, -1e4, 1e4])
def test_gates_whose_logits_are_all_low_or_all_high_agree(instructions, logit, number):
    for num_experts, estimator, dtype in every(number, product((1, 3, 5, 9), ESTIMATORS, PRECISIONS)):
        case = make_case(3, num_experts, 4, estimator=estimator, select="greedy", dtype=dtype, input_conditioned=True)
        with torch.no_grad():
            case.options["input_logits_BLNO"].fill_(logit)
        assert_agree(case, logit_size=abs(logit))


@pytest.mark.parametrize("select", SELECTS)
def test_the_gumbel_estimator_agrees_on_subnormal_rates(select):
    for dtype in PRECISIONS:
        case = make_case(3, 5, 12, estimator="gumbel", select=select, dtype=dtype)
        case.options["temperature"] = 50.0  # the paper's: so that small rates count
        with torch.no_grad():
            case.entry[:, :4] *= torch.finfo(dtype).tiny * torch.tensor([4.0, 1.0, 1e-3, 1e-5])
        assert_agree(case)


@pytest.mark.parametrize(
    ("estimator", "select"),
    [
        ("reinmax", "sample"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("reinmax", "greedy"), ("none", "sample"))),
        ("none", "greedy"),
    ],
)
def test_large_grids_of_which_few_nodes_are_active_agree(estimator, select):
    options = {"estimator": estimator, "select": select, "max_experts": 6, "input_conditioned": True}
    assert_agree(make_case(8, 32, 150, **options))  # the input logits have a gradient of 4 MB, and five ranges add up
    assert_agree(make_case(6, 9, 70, **options))


def test_gates_that_no_row_used_get_zeros():
    routing, entry_BN, options = make_case(5, 8, 40, estimator="none", select="greedy", max_experts=1)
    compiled(routing, entry_BN, **options).rates.nodes.sum().backward()
    assert bool(routing.gate_first.grad.any())
    assert torch.equal(routing.gate_inner.grad, torch.zeros_like(routing.gate_inner))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_rates_below_the_floor_have_the_floors_derivative(estimator):
    routing, entry_BN, options = make_case(3, 8, 24, estimator=estimator, dtype=torch.float64)
    assert_agree(Case(routing, (1e-8 * entry_BN).detach().requires_grad_(), options))


def test_inputs_need_not_be_contiguous():
    routing, entry_BN, options = make_case(3, 6, 20)
    expected = compiled(routing, entry_BN, **options)
    strided_BN = torch.stack((entry_BN, entry_BN), -1)[..., 0]
    assert not strided_BN.is_contiguous()
    rows_B = torch.stack((options["rows_B"], options["rows_B"]), -1)[:, 0]
    for gate in routing.parameters():
        gate.data = gate.data.transpose(0, 1).contiguous().transpose(0, 1)
    got = compiled(routing, strided_BN, **{**options, "rows_B": rows_B})
    assert torch.equal(got.nodes, expected.nodes)
    assert torch.equal(got.rates.nodes, expected.rates.nodes)

    def gradient(sequence):
        return torch.autograd.grad((sequence.rates.nodes.transpose(1, 2) ** 2).sum(), entry_BN)[0]

    assert torch.equal(gradient(got), gradient(expected))


def test_rows_may_be_any_integers():
    routing, entry_BN, options = make_case(3, 6, 20, first_row=5)
    expected = compiled(routing, entry_BN, **options)
    narrow = compiled(routing, entry_BN, **{**options, "rows_B": options["rows_B"].to(torch.int32)})
    assert torch.equal(narrow.nodes, expected.nodes)


def test_precision_is_the_plain_paths():
    routing, entry_BN, _ = make_case(3, 6, 20)
    wide = activation_sequence(routing, entry_BN.double(), select="greedy")
    half = activation_sequence(routing, entry_BN.bfloat16(), select="greedy")
    assert (wide.active.dtype, half.active.dtype) == (torch.float64, torch.float32)
    wide.rates.output.sum().backward()
    assert routing.gate_first.grad is not None
    assert routing.gate_first.grad.dtype == torch.float32


@pytest.mark.parametrize("number", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", [unroll, compiled], ids=["plain", "compiled"])
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_entry_rates_that_are_no_distribution_end_the_sequence_at_once(value, path, number):
    for estimator, select, stop in every(number, product(ESTIMATORS, SELECTS, STOPS)):
        assert_end_at_once(make_case(3, 5, 9, estimator=estimator, select=select, stop=stop), value, path)


@pytest.mark.parametrize("number", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_entry_rates_of_zero_have_the_plain_paths_gradient(number):
    for estimator, select, stop in every(number, product(ESTIMATORS, SELECTS, STOPS)):
        case = make_case(3, 5, 9, estimator=estimator, select=select, stop=stop, dtype=torch.float64)
        with torch.no_grad():
            case.entry[::2] = 0
        assert_agree(case)


@pytest.mark.parametrize("path", [unroll, compiled], ids=["plain", "compiled"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gate_without_a_softmax_ends_the_sequence(value, path):
    for select, dtype in product(SELECTS, PRECISIONS):
        routing, entry_BN, options = make_case(3, 5, 9, select=select, dtype=dtype, input_conditioned=True)
        with torch.no_grad():
            options["input_logits_BLNO"][:, 0] = value  # the first layer's gates: one node is active, and it sends NaN
            found = path(routing, entry_BN, **options)
        assert bool((found.num_active <= 1).all())
        assert not bool(found.active[:, 1:].any())


def test_a_wrong_shape_is_told():
    routing, _, options = make_case(3, 5, 9)
    with pytest.raises(ValueError, match=r"entry has shape \(9, 4\): must be \(batch, 5\)"):
        compiled(routing, torch.rand(9, 4), **options)


def test_the_library_is_chosen_and_gives_the_plain_paths_result():
    routing, entry_BN, _ = make_case(4, 8, 50)

    def draw():
        return activation_sequence(routing, entry_BN, estimator="reinmax", generator=torch.Generator().manual_seed(3))

    with kernels.use("plain"):
        plain = draw()
    assert "_Eager" not in type(plain.active.grad_fn).__name__
    assert "_Eager" in type(draw().active.grad_fn).__name__
    assert torch.equal(draw().nodes, plain.nodes)


def test_other_tensors_take_the_plain_path():
    routing, entry_BN, options = make_case(3, 4, 6, select="greedy")

    def chosen(entry_BN):
        return kernels.sequence.explain(routing, entry_BN, **options).name

    assert chosen(entry_BN) == "cpp"
    assert chosen(entry_BN.bfloat16()) == chosen(entry_BN.to("meta")) == "plain"


@pytest.mark.parametrize(
    ("sizes", "estimator", "select", "dtype"),
    pairs([(1, 5), (2, 3), (4, 8), (3, 17)], ("reinmax", "gumbel", "none"), SELECTS, PRECISIONS),
)
def test_a_stop_per_row_agrees_with_the_plain_path(sizes, estimator, select, dtype):
    stop = torch.tensor([0.01, 0.3, 1.0, 5.0, 1e-30, 1e30], dtype=torch.float64).repeat(7)
    case = make_case(*sizes, 42, estimator=estimator, select=select, stop=stop, dtype=dtype)
    assert_agree(case)
    counts = case.options["stop"], unroll(case.routing, case.entry, **case.options).num_active
    if select == "greedy":  # a stop of 1e30 ends a sequence at the first rate that reaches the output node
        assert bool((counts[1][counts[0] < 1e-20] >= counts[1][counts[0] > 1e20]).all())
