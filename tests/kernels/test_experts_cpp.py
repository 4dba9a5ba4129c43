"""The experts' kernel gives what dense, masked experts give: values, gradients, at any size, on any number of threads.

Axes: B batch, L layers, N experts per layer, D width.
"""

import ctypes
import os
import signal
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import forked
import raytraced as rt
from raytraced import kernels
from raytraced.experts import MLPExperts, Stream, run_dense
from raytraced.kernels import cpp_experts, cpp_gradients, cpp_library

pytestmark = pytest.mark.skipif(not kernels.available(), reason=f"compiled kernels {kernels.why_not()}")
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
STREAMS = tuple(Stream)


class Case(NamedTuple):
    """A grid of experts, hidden vectors, who is active and with which weight, and a gradient to send back."""

    experts: MLPExperts
    hidden: Tensor  # (B, D)
    active: Tensor  # (B, L, N)
    weights: Tensor  # (B, L, N)
    grad: Tensor  # (B, D)

    @property
    def leaves(self) -> list[Tensor]:
        return [self.hidden, self.weights, *self.experts.parameters()]


def make_case(B, L, N, D, hidden, num_hidden, *, share=0.4, dtype=torch.float64, seed=0) -> Case:
    g = torch.Generator().manual_seed(seed)
    experts = MLPExperts(L, N, D, hidden, num_hidden).to(dtype)
    active_BLN = (torch.rand(B, L, N, generator=g) < share).to(dtype)
    weights_BLN = active_BLN * (0.5 + torch.rand(B, L, N, generator=g, dtype=dtype))
    hidden_BD, grad_BD = torch.randn(2, B, D, generator=g, dtype=dtype)
    return Case(experts, hidden_BD.requires_grad_(), active_BLN, weights_BLN.requires_grad_(), grad_BD)


def compiled(case: Case, stream: Stream = Stream.RESIDUAL) -> Tensor:
    with kernels.use(experts="cpp"):
        return kernels.experts(case.experts, case.hidden, case.active, case.weights, stream)


def fused(case: Case, stream: Stream = Stream.RESIDUAL) -> list[Tensor]:
    out_BD = compiled(case, stream)
    return [out_BD.detach(), *torch.autograd.grad(out_BD, case.leaves, case.grad)]


def dense(case: Case, stream: Stream = Stream.RESIDUAL) -> list[Tensor]:
    out_BD = run_dense(case.experts, case.hidden, case.active, case.weights, stream)
    return [out_BD.detach(), *torch.autograd.grad(out_BD, case.leaves, case.grad)]


def assert_close(these, those, tolerance):
    for this, that in zip(these, those, strict=True):
        assert this.shape == that.shape
        scale = that.abs().max().clamp_min(1) if that.numel() else 1
        torch.testing.assert_close(this / scale, that / scale, rtol=0, atol=tolerance)


@pytest.mark.parametrize("stream", list(Stream))
@pytest.mark.parametrize("size", [(9, 4, 3, 5, 7, 1), (300, 3, 4, 16, 16, 2), (5, 1, 3, 4, 4, 1)])
def test_what_there_is_after_each_layer_agrees_with_the_plain_path(stream, size):
    case = make_case(*size)
    num_layers, weights = size[1], torch.randn(size[1] + 1, *case.hidden.shape, dtype=torch.float64)
    found = []
    for word in ("cpp", "sparse", "dense"):
        with kernels.use(experts=word):
            exits = kernels.experts(case.experts, case.hidden, case.active, case.weights, stream, True)
        assert exits.shape == (num_layers + 1, *case.hidden.shape)
        torch.testing.assert_close(exits[-1], compiled(case, stream))
        # one exit alone, then all of them
        for seen in (exits[1], exits * weights):
            found.append([exits.detach(), *torch.autograd.grad(seen.sum(), case.leaves, retain_graph=True)])
    for these in found[2:]:
        assert_close(these, found[0 if these is found[2] or these is found[4] else 1], 1e-12)


def assert_identical(these, those):
    for this, that in zip(these, those, strict=True):
        assert torch.equal(this, that)


@pytest.fixture
def set_threads():
    usual = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(usual)


@pytest.fixture(params=["rows shared out", "experts shared out"])
def sharing(request, monkeypatch):
    """Both ways of sharing the work out: by chunks of rows, as for small experts, and by experts, as for large ones."""
    monkeypatch.setattr(cpp_experts, "_LARGE_LAYER_BYTES", 2**20 if request.param == "rows shared out" else -1)


@given(
    st.integers(0, 70),
    st.integers(1, 4),
    st.integers(1, 9),
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(1, 3),
    st.sampled_from(STREAMS),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    st.sampled_from(list(TOLERANCE)),
    st.integers(0, 9),
)
def test_values_and_gradients_equal_dense_experts(B, L, N, D, hidden, num_hidden, stream, share, dtype, seed):
    case = make_case(B, L, N, D, hidden, num_hidden, share=share, dtype=dtype, seed=seed)
    assert_close(fused(case, stream), dense(case, stream), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "sizes", [(300, 4, 8, 16, 16, 2), (45, 2, 3, 130, 600, 1), (21, 1, 2, 530, 70, 2), (2500, 2, 2, 8, 8, 1)]
)
def test_sizes_beyond_one_block_equal_dense_experts(sharing, sizes, dtype):
    case = make_case(*sizes, dtype=dtype)
    assert_close(fused(case), dense(case), TOLERANCE[dtype])


@pytest.mark.parametrize("name", ["baseline", "avx2"])
def test_every_instruction_set_gives_the_same(name):
    set_instructions = cpp_library.cpu.raytraced_set_instructions
    cpp_library.cpu.raytraced_instructions.restype = ctypes.c_char_p
    usual = cpp_library.cpu.raytraced_instructions()
    try:
        if set_instructions(name.encode()):
            pytest.skip(f"this machine has no {name}")
        for dtype, tolerance in TOLERANCE.items():
            case = make_case(50, 3, 4, 21, 35, 2, dtype=dtype)
            assert_close(fused(case, Stream.SKIP_SUM), dense(case, Stream.SKIP_SUM), tolerance)
    finally:
        set_instructions(usual)


@pytest.mark.usefixtures("sharing")
@pytest.mark.parametrize("stream", STREAMS)
def test_threads_change_no_bit(set_threads, stream):
    case = make_case(400, 3, 5, 16, 24, 2, dtype=torch.float32)
    set_threads(1)
    alone = fused(case, stream)
    for num_threads in (2, 5):
        set_threads(num_threads)
        assert_identical(fused(case, stream), alone)


@pytest.mark.parametrize("stream", STREAMS)
def test_a_row_gives_the_same_bits_whatever_rows_surround_it(stream):
    case = make_case(333, 3, 4, 19, 33, 2, dtype=torch.float32)
    with torch.no_grad():
        whole_BD = compiled(case, stream)
        for rows in ([7], [3, 200, 90], list(range(50, 170))):
            part = case._replace(hidden=case.hidden[rows], active=case.active[rows], weights=case.weights[rows])
            assert torch.equal(compiled(part, stream), whole_BD[rows])


def test_inputs_need_not_be_contiguous():
    case = make_case(30, 2, 3, 8, 12, 1)
    expected = fused(case)
    strided = case._replace(
        hidden=case.hidden.detach().t().contiguous().t().requires_grad_(),
        active=case.active.permute(2, 1, 0).contiguous().permute(2, 1, 0),
        weights=case.weights.detach().permute(1, 2, 0).contiguous().permute(2, 0, 1).requires_grad_(),
        grad=case.grad.t().contiguous().t(),
    )
    with torch.no_grad():
        for parameter in case.experts.parameters():
            parameter.data = parameter.data.transpose(0, 1).contiguous().transpose(0, 1)
    assert not strided.hidden.is_contiguous()
    assert_identical(fused(strided), expected)


def test_an_expert_that_no_row_chose_gets_zeros():
    case = make_case(200, 2, 3, 6, 9, 1)
    case.active[:, 1, 2] = 0
    grads = dict(zip(["out", "hidden", "weights", *dict(case.experts.named_parameters())], fused(case), strict=True))
    assert grads["weights.0"][1, 2].eq(0).all()
    assert grads["biases.1"][1, 2].eq(0).all()
    assert grads["weights.0"][1, 1].ne(0).any()


def test_a_second_pass_back_gives_the_same():
    case = make_case(40, 2, 3, 8, 12, 2)
    out_BD = compiled(case)
    once = torch.autograd.grad(out_BD, case.leaves, case.grad, retain_graph=True)
    assert_identical(torch.autograd.grad(out_BD, case.leaves, case.grad), once)


def test_memory_of_a_large_gradient_is_used_again_only_when_free(monkeypatch):
    monkeypatch.setattr(cpp_gradients, "_HUGE_BYTES", 1)
    case = make_case(40, 2, 3, 8, 12, 1)
    weight = case.experts.weights[0]
    expected = dict(zip(["out", "hidden", "mix", *dict(case.experts.named_parameters())], fused(case), strict=True))

    def step():
        compiled(case).backward(case.grad)

    step()
    first = weight.grad.data_ptr()
    torch.testing.assert_close(weight.grad, expected["weights.0"])
    step()  # the gradient before is still there, and is added to
    torch.testing.assert_close(weight.grad, 2 * expected["weights.0"])
    part = weight.grad[0]
    case.experts.zero_grad()
    step()
    assert weight.grad.data_ptr() != part.data_ptr()  # a part of it is still in use
    torch.testing.assert_close(part, 2 * expected["weights.0"][0])
    used = weight.grad.data_ptr()
    case.experts.zero_grad()
    step()
    assert weight.grad.data_ptr() == used != first
    torch.testing.assert_close(weight.grad, expected["weights.0"])


def answers_of_a_forked_child():
    """0 where a process that has used its threads, and a child that it forks, have the same answers."""
    torch.set_num_threads(2)
    case = make_case(400, 2, 4, 16, 16, 2, dtype=torch.float32)
    expected = fused(case)
    child = os.fork()
    if not child:
        signal.alarm(50)  # it would outlive a test that has given up
        same = all(torch.equal(a, b) for a, b in zip(fused(case), expected, strict=True))
        os._exit(0 if same else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_runs_on_threads_too():
    # In a process of its own: threads of other libraries, which other tests have started, can make a fork wait without end.
    ended = forked.run(answers_of_a_forked_child, timeout=60)
    assert ended.returncode == 0, ended.stderr


def test_the_operator_passes_pytorchs_checks():
    case = make_case(9, 2, 3, 5, 7, 1)
    tensors = [case.hidden, case.weights, *case.experts.weights, *case.experts.biases]
    torch.library.opcheck(cpp_experts.call.operator, (tensors, [case.active], [1]))


def test_compiled_experts_equal_eager_ones():
    case = make_case(40, 2, 3, 8, 12, 2)
    run = torch.compile(kernels.experts, backend="aot_eager", fullgraph=True)
    out_BD = run(case.experts, case.hidden, case.active, case.weights, Stream.RESIDUAL)
    assert_identical([out_BD, *torch.autograd.grad(out_BD, case.leaves, case.grad)], fused(case))


@pytest.mark.parametrize(
    "name", ["top-k", "chain"]
)  # chain runs the experts of a layer twice: their gradients must add up
def test_gradients_of_large_parameters_are_the_same_in_one_place(name, monkeypatch):
    grads = []
    for huge in (2**40, 1):
        monkeypatch.setattr(cpp_gradients, "_HUGE_BYTES", huge)
        torch.manual_seed(0)
        model = rt.build(name, image_shape=(1, 4, 4), num_classes=3)
        images = torch.randn(40, 1, 4, 4)
        for _ in range(2):  # the second time in memory that was used before
            model.zero_grad()
            model(images).logits.square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for apart, together in zip(*grads, strict=True):
        assert torch.equal(apart, together)
    assert any(p.grad.abs().max() > 0 for n, p in model.named_parameters() if "experts.weights" in n)
