"""Dense and sparse experts are one function, and the operation says which it uses; prefixes are not computed again."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed, nn

import raytraced as rt
from raytraced import kernels
from raytraced.experts import MLPExperts, ModuleExperts, Stream, run_dense, run_sparse

STREAMS = tuple(Stream)


class Square(nn.Module):
    """A user's own expert."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return self.linear(x) ** 2


def make_experts(kind, L=3, N=4):
    return (MLPExperts(L, N, 6, 9, 2) if kind == "mlp" else ModuleExperts(L, N, Square)).double()


def outcome(experts, stream, way, share=0.3, batch=25):
    g = torch.Generator().manual_seed(3)
    L, N = experts.num_layers, experts.num_experts
    hidden_BD = torch.randn(batch, 6, generator=g, dtype=torch.float64, requires_grad=True)
    active_BLN = (torch.rand(batch, L, N, generator=g) < share).double()
    weights_BLN = (active_BLN * torch.rand(batch, L, N, generator=g)).double().requires_grad_()
    with kernels.use(experts=way):
        out_BD = kernels.experts(experts, hidden_BD, active_BLN, weights_BLN, stream)
    leaves = [hidden_BD, weights_BLN, *experts.parameters()]
    return [out_BD, *torch.autograd.grad(out_BD, leaves, torch.ones_like(out_BD), allow_unused=True)]


def assert_close(these, those):
    for this, that in zip(these, those, strict=True):
        # A module that no row reached has no gradient at all; run on no row's behalf, it has one of zeros.
        this, that = (torch.zeros(()) if x is None else x for x in (this, that))
        torch.testing.assert_close(*torch.broadcast_tensors(this.double(), that.double()), rtol=0, atol=1e-10)


needs_library = pytest.mark.skipif(not kernels.available(), reason="no library")
LIBRARY_IS_CHOSEN = kernels.available() and not os.environ.get("RAYTRACED_KERNELS")


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 1.0])
@pytest.mark.parametrize(
    ("kind", "way"), [("mlp", "sparse"), pytest.param("mlp", "cpp", marks=needs_library), ("own", "sparse")]
)
@pytest.mark.parametrize("stream", STREAMS)
def test_sparse_equals_dense(stream, kind, way, share):
    experts = make_experts(kind)
    assert_close(outcome(experts, stream, way, share), outcome(experts, stream, "dense", share))


@given(st.integers(0, 20), st.integers(1, 3), st.integers(1, 4), st.sampled_from([0.0, 0.3, 1.0]))
def test_the_plain_sparse_path_equals_dense_at_any_size(batch, L, N, share):
    experts = make_experts("mlp", L, N)
    sparse = outcome(experts, Stream.RESIDUAL, "sparse", share, batch)
    assert_close(sparse, outcome(experts, Stream.RESIDUAL, "dense", share, batch))


@pytest.mark.parametrize("share", [0.0, 0.03])
@pytest.mark.parametrize("kind", ["mlp", "own"])
def test_among_processes_an_expert_without_rows_has_a_gradient_of_zeros(kind, share):
    experts = make_experts(kind)
    alone = outcome(experts, Stream.RESIDUAL, "sparse", share)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        among = outcome(experts, Stream.RESIDUAL, "sparse", share)
    finally:
        distributed.destroy_process_group()
    # One process leaves out the gradient of a custom expert without rows, unless no expert ran at all. A stack has one for all.
    assert any(gradient is None for gradient in alone[3:]) == (kind == "own" and share > 0)
    assert all(gradient is not None for gradient in among[3:])
    assert_close(among, alone)


@pytest.mark.parametrize(
    ("kind", "way"), [("mlp", "sparse"), pytest.param("mlp", "cpp", marks=needs_library), ("own", "sparse")]
)
def test_layer_by_layer_equals_the_whole_grid(kind, way):
    experts = make_experts(kind)
    hidden_BD, active_BLN = torch.randn(20, 6).double(), (torch.rand(20, 3, 4) < 0.4).double()
    with kernels.use(experts=way):
        expected_BD = kernels.experts(experts, hidden_BD, active_BLN, active_BLN * 0.7, Stream.RESIDUAL)
        layers = kernels.unstacked(experts, hidden_BD)
        for l in range(3):
            active_B1N = active_BLN[:, l : l + 1]
            hidden_BD = hidden_BD + kernels.experts(layers[l], hidden_BD, active_B1N, active_B1N * 0.7, Stream.LAST)
    torch.testing.assert_close(hidden_BD, expected_BD, rtol=0, atol=1e-12)


def chosen(experts, batch, dim=16):
    active_BLN = torch.ones(batch, experts.num_layers, experts.num_experts)
    return kernels.experts.explain(experts, torch.randn(batch, dim), active_BLN, active_BLN, "residual").name


def test_the_operation_says_how_it_runs():
    experts, own = MLPExperts(4, 8, 16), ModuleExperts(4, 8, Square)
    if LIBRARY_IS_CHOSEN:
        assert chosen(experts, 2) == "cpp"
    assert chosen(own, 2, 6) == "sparse"
    with kernels.use("plain"):
        assert chosen(experts, 2) == "dense"
        assert chosen(experts, 20_000) == "sparse"
        assert chosen(own, 2, 6) == "sparse"
    with kernels.use(experts="dense"):
        assert chosen(experts, 20_000) == "dense"


def test_a_grid_says_what_an_expert_takes():
    experts, own = MLPExperts(2, 3, 4, 10, 2), ModuleExperts(2, 3, Square)
    assert kernels.expert_macs(experts, 4) == 4 * 10 + 10 * 10 + 10 * 4
    assert experts.num_parameters == sum(p.numel() for p in experts.parameters()) // 6
    assert kernels.expert_macs(own, 6) == 36
    assert own.num_parameters == 42


def test_hidden_and_num_hidden_shape_the_experts():
    assert rt.RaytracedExperts(4, 2, 3, hidden=10, num_hidden=1).experts.widths == (4, 10, 4)
    assert MLPExperts(2, 3, 4).widths == (4, 4, 4, 4)


def test_an_experts_parameters_are_drawn_as_those_of_a_linear_layer():
    experts = MLPExperts(4, 8, 16, 64, 2)
    for weight, bias in zip(experts.weights, experts.biases, strict=True):
        bound = weight.shape[-1] ** -0.5
        for values in (weight, bias):  # 512 or more: none within 5 % of a bound has the probability 0.975^512 = 2e-6
            assert -bound <= values.min() < -0.95 * bound
            assert 0.95 * bound < values.max() <= bound


def test_linear_layers_of_an_expert_may_share_their_parameters():
    experts, hidden_BD = MLPExperts(2, 3, 4, 4, 3).double(), torch.randn(5, 4).double()
    experts.weights[2], experts.biases[2] = experts.weights[1], experts.biases[1]
    for layer in range(2):
        found = experts.unstacked()[layer].run_layer(0, hidden_BD)
        torch.testing.assert_close(found, experts.run_layer(layer, hidden_BD))


@pytest.mark.parametrize("name", ["dim", "hidden", "num_hidden"])
def test_an_expert_without_width_or_layers_is_refused(name):
    with pytest.raises(ValueError, match=f"^{name}=0: must be at least 1$"):
        MLPExperts(2, 3, **{"dim": 4, "hidden": 5, "num_hidden": 1, name: 0})


def test_a_factory_that_returns_one_module_for_several_nodes_is_refused():
    shared = nn.Linear(4, 4)
    rule = "expert: its factory returned one Linear for several nodes; must return a new one each time"
    with pytest.raises(ValueError, match=f"^{rule}$"):
        ModuleExperts(2, 3, lambda: shared)


def test_an_expert_that_is_a_module_and_no_factory_is_refused():
    with pytest.raises(ValueError, match=r"expert=Linear\(…\): must be a factory, .*; give lambda: Linear\(…\)"):
        rt.RaytracedExperts(6, 2, 3, expert=nn.Linear(6, 6))


def test_options_of_the_default_experts_do_not_go_with_ones_own():
    with pytest.raises(ValueError, match="hidden=3, num_hidden=2: are for the default MLP"):
        rt.RaytracedExperts(6, 2, 3, expert=Square, hidden=3)


@pytest.mark.parametrize("weighting", ["unit", "rates", "rates-to-one"])
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("select", ["greedy", "sample"])
@pytest.mark.parametrize(("batch", "hidden"), [(3, 8), (70, 8), (20, 200)])
def test_an_extended_prefix_is_the_model_with_that_budget_bit_for_bit(weighting, stream, select, batch, hidden):
    options = {"dim": 8, "num_layers": 3, "num_experts": 4, "hidden": hidden, "estimator": "reinmax"}
    model = rt.build("mre", image_shape=(1, 4, 4), num_classes=5, weighting=weighting, stream=stream, **options).eval()
    images, seed = torch.rand(batch, 1, 4, 4), lambda: torch.Generator().manual_seed(4)
    with torch.no_grad():
        for step in rt.anytime(model, images, select=select, generator=seed()):
            whole = model(images, select=select, max_experts=step.budget, generator=seed())
            assert torch.equal(step.logits, whole.logits)
            assert torch.equal(step.num_active, whole.routes[0].num_active)


@pytest.mark.skipif(not LIBRARY_IS_CHOSEN, reason="the library alone extends prefixes")
def test_a_prefix_runs_only_what_its_last_node_changes(monkeypatch):
    """The rows that run are those whose newest node lies in this layer or above it."""
    model, ran = rt.build("mre", image_shape=(1, 8, 8), num_classes=10).eval(), []
    cpp, *others = kernels.experts.implementations

    def counted(experts, hidden_nD, *rest):
        ran.append(len(hidden_nD))
        return cpp.run(experts, hidden_nD, *rest)

    images = torch.rand(100, 1, 8, 8)
    with torch.no_grad():
        nodes_BT = model(images).routes[0].nodes
        monkeypatch.setattr(kernels.experts, "implementations", (replace(cpp, run=counted), *others))
        steps = list(rt.anytime(model, images))
    newest_BT = nodes_BT // 8
    expected = [
        int(((nodes_BT[:, t] >= 0) & (newest_BT[:, t] <= l)).sum()) for t in range(len(steps) - 1) for l in range(4)
    ]
    assert ran == [num for num in expected if num]
    assert sum(ran) < 100 * len(ran)


def test_mixed_precision_runs_and_trains():
    """In a process of its own: a CPU may advertise instructions that end it."""
    program = """
import torch, raytraced as rt
torch.set_num_threads(1)
for way in ("dense", "sparse"):
    layer = rt.RaytracedExperts(16, 3, 4)
    with torch.autocast("cpu", torch.bfloat16), rt.kernels.use(experts=way):
        out = layer(torch.randn(12, 16), generator=torch.Generator().manual_seed(0))
    out.hidden.float().sum().backward()
    assert out.hidden.isfinite().all() and layer.experts.weights[0].grad.isfinite().all()
    assert layer.experts.weights[0].grad.ne(0).any()
"""
    env = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_exits_are_the_same_in_every_implementation():
    torch.manual_seed(0)
    experts, hidden = MLPExperts(3, 5, 4), torch.randn(7, 4)
    active = (torch.rand(7, 3, 5) < 0.4).float()
    sparse, dense = (run(experts, hidden, active, active, Stream.RESIDUAL, True) for run in (run_sparse, run_dense))
    assert sparse.shape == (4, 7, 4)
    torch.testing.assert_close(sparse, dense)
    torch.testing.assert_close(sparse[-1], run_sparse(experts, hidden, active, active, Stream.RESIDUAL))
