"""Dense and sparse experts are one function, and the layer says which it uses; prefixes are extended, not computed again."""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import raytraced as rt
from raytraced.experts import MLPExperts, ModuleExperts, run_stack, update_active
from raytraced.kernels import available, fused_experts

STREAMS = ("residual", "skip-sum", "last")


class Square(nn.Module):
    """A user's own expert."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return self.linear(x) ** 2


def make_experts(kind, L=3, N=4):
    return (MLPExperts(L, N, 6, 9, 2) if kind == "mlp" else ModuleExperts(L, N, Square)).double()


def outcome(experts, stream, execution, share=0.3, batch=25):
    g = torch.Generator().manual_seed(3)
    L, N = experts.num_layers, experts.num_experts
    hidden_BD = torch.randn(batch, 6, generator=g, dtype=torch.float64, requires_grad=True)
    active_BLN = (torch.rand(batch, L, N, generator=g) < share).double()
    weights_BLN = (active_BLN * torch.rand(batch, L, N, generator=g)).double().requires_grad_()
    out_BD = run_stack(experts, hidden_BD, active_BLN, weights_BLN, stream, execution=execution)
    leaves = [hidden_BD, weights_BLN, *experts.parameters()]
    return [out_BD, *torch.autograd.grad(out_BD, leaves, torch.ones_like(out_BD), allow_unused=True)]


def assert_close(these, those):
    for this, that in zip(these, those, strict=True):
        # A module that no row reached has no gradient at all; run on no row's behalf, it has one of zeros.
        this, that = (torch.zeros(()) if x is None else x for x in (this, that))
        torch.testing.assert_close(*torch.broadcast_tensors(this.double(), that.double()), rtol=0, atol=1e-10)


@pytest.fixture(params=["plain", "kernel"])
def path(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setattr(fused_experts, "can_run", lambda *_: False)
    elif not available():
        pytest.skip("no kernels")
    return request.param


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 1.0])
@pytest.mark.parametrize("kind", ["mlp", "own"])
@pytest.mark.parametrize("stream", STREAMS)
def test_sparse_equals_dense(stream, kind, share):
    experts = make_experts(kind)
    assert_close(outcome(experts, stream, "sparse", share), outcome(experts, stream, "dense", share))


@given(st.integers(0, 20), st.integers(1, 3), st.integers(1, 4), st.sampled_from([0.0, 0.3, 1.0]))
def test_the_plain_sparse_path_equals_dense_at_any_size(batch, L, N, share):
    experts = make_experts("mlp", L, N)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_experts, "can_run", lambda *_: False)
        sparse = outcome(experts, "residual", "sparse", share, batch)
    assert_close(sparse, outcome(experts, "residual", "dense", share, batch))


@pytest.mark.usefixtures("path")
def test_layer_by_layer_equals_the_whole_stack():
    experts = make_experts("mlp")
    hidden_BD, active_BLN = torch.randn(20, 6).double(), (torch.rand(20, 3, 4) < 0.4).double()
    expected_BD = run_stack(experts, hidden_BD, active_BLN, active_BLN * 0.7, "residual")
    for l in range(3):
        hidden_BD = hidden_BD + update_active(experts, l, hidden_BD, active_BLN[:, l] * 0.7, active_BLN[:, l])
    torch.testing.assert_close(hidden_BD, expected_BD, rtol=0, atol=1e-12)


def test_the_layer_says_how_it_runs(monkeypatch):
    few, many = torch.randn(2, 16), torch.randn(20_000, 16)
    layer = rt.RaytracedExperts(16, 4, 8)
    assert layer.explain_execution(few).way == ("kernel" if available() else "dense")
    monkeypatch.setattr(fused_experts, "can_run", lambda *_: False)
    assert layer.explain_execution(few).way == "dense"
    assert layer.explain_execution(many).way == "sparse"
    assert rt.RaytracedExperts(16, 4, 8, execution="dense").explain_execution(many).way == "dense"
    assert rt.RaytracedExperts(16, 4, 8, execution="sparse").explain_execution(few).way == "sparse"
    assert rt.RaytracedExperts(6, 4, 8, expert=Square).explain_execution(torch.randn(2, 6)).way == "sparse"
    learning = rt.RaytracedExperts(16, 4, 8, mask_gradient="all")
    assert learning.explain_execution(many).way == "dense"
    with torch.no_grad():
        assert learning.explain_execution(many).way == "sparse"


def test_hidden_and_num_hidden_shape_the_experts():
    assert rt.RaytracedExperts(4, 2, 3, hidden=10, num_hidden=1).experts.widths == (4, 10, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"execution": "fast"}, "execution='fast': must be one of auto, dense, sparse"),
        ({"execution": "sparse", "mask_gradient": "all"}, "inactive experts must run; use 'active'"),
        ({"expert": Square, "hidden": 3}, "hidden=3, num_hidden=2: are for the default MLP"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        rt.RaytracedExperts(6, 2, 3, **options)


@pytest.mark.parametrize("weighting", ["unit", "through", "rates", "rates-to-one"])
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("select", ["greedy", "sample"])
@pytest.mark.parametrize(("batch", "hidden"), [(3, 8), (70, 8), (20, 200)])
def test_an_extended_prefix_is_the_model_with_that_budget_bit_for_bit(weighting, stream, select, batch, hidden):
    layer = rt.RaytracedExperts(8, 3, 4, weighting=weighting, stream=stream, hidden=hidden)
    model = rt.RaytracedClassifier(rt.classifier.input_block((1, 4, 4), 8), layer, 5).eval()
    images, seed = torch.randn(batch, 1, 4, 4), lambda: torch.Generator().manual_seed(4)
    with torch.no_grad():
        for step in rt.anytime(model, images, select=select, generator=seed()):
            whole = model(images, select=select, max_experts=step.budget, generator=seed())
            assert torch.equal(step.logits, whole.logits)
            assert torch.equal(step.num_active, whole.sequence.num_active)


@pytest.mark.skipif(not available(), reason="no kernels")
def test_a_prefix_runs_only_what_its_last_node_changes(monkeypatch):
    """With one layer fewer than nodes in use, the rows that run below the newest node are all that run."""
    model, ran = rt.preset("digits", execution="sparse").eval(), []
    run = fused_experts.run

    def counted(hidden_nD, active_n1N, *rest):
        ran.append(len(hidden_nD))
        return run(hidden_nD, active_n1N, *rest)

    images = torch.randn(100, 1, 8, 8)
    with torch.no_grad():
        nodes_BT = model(images).sequence.nodes
        monkeypatch.setattr(fused_experts, "run", counted)
        steps = list(rt.anytime(model, images))
    newest_BT = nodes_BT // 8
    expected = [
        int(((nodes_BT[:, t] >= 0) & (newest_BT[:, t] <= l)).sum()) for t in range(len(steps) - 1) for l in range(4)
    ]
    assert ran == expected
    assert sum(ran) < 100 * len(ran)


def test_mixed_precision_runs_and_trains():
    """In a process of its own: a CPU may advertise instructions that end it."""
    program = """
import torch, raytraced as rt
torch.set_num_threads(1)
for execution in ("dense", "sparse"):
    layer = rt.RaytracedExperts(16, 3, 4, execution=execution)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(torch.randn(12, 16), generator=torch.Generator().manual_seed(0))
    out.hidden.float().sum().backward()
    assert out.hidden.isfinite().all() and layer.experts.weights[0].grad.isfinite().all()
    assert layer.experts.weights[0].grad.ne(0).any()
"""
    env = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
