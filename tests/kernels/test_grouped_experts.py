"""Experts in grouped products against the plain definition: outputs and gradients, on the CPU or on a GPU if there is one.

Single precision is compared with double: 2e-6 of the largest number leaves the order of sums free, and no more.
"""

import os
from copy import deepcopy
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import forked
from raytraced import kernels
from raytraced.experts import MLPExperts, ModuleExperts, Stream, run_dense
from raytraced.kernels import grouped_experts
from raytraced.layer import routed_layer
from raytraced.routers.top_k import TopK

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STREAMS = tuple(Stream)


def make(num_layers=3, num_experts=4, batch=7, dim=8, hidden=16, share=0.4, seed=0):
    """A grid, hidden vectors, who is active, and weights that are not zero elsewhere."""
    torch.manual_seed(seed)
    grid = MLPExperts(num_layers, num_experts, dim, hidden).to(DEVICE)
    active_BLN = (torch.rand(batch, num_layers, num_experts, device=DEVICE) < share).float()
    weights_BLN = torch.rand(batch, num_layers, num_experts, device=DEVICE, requires_grad=True)
    return grid, torch.randn(batch, dim, device=DEVICE, requires_grad=True), active_BLN, weights_BLN


def run(way, case, stream, exits=False):
    """The answer, and its gradients against fixed numbers."""
    grid, hidden_BD, active_BLN, weights_BLN = case
    answer = way(grid, hidden_BD, active_BLN, weights_BLN, stream, exits)
    toward = torch.randn(answer.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(answer)
    sources = (hidden_BD, weights_BLN, *grid.parameters())
    return answer.detach(), *torch.autograd.grad(answer, sources, toward, allow_unused=True, materialize_grads=True)


def double(case):
    grid, *tensors = case
    wide = [each.detach().double().requires_grad_(each.requires_grad) for each in tensors]
    return deepcopy(grid).double(), *wide


def assert_agrees(case, stream, exits=False):
    found, truth = run(grouped_experts.run, case, stream, exits), run(run_dense, double(case), stream, exits)
    for got, exact in zip(found, truth, strict=True):
        assert bool(got.isfinite().all())
        bound = 2e-6 * max(1.0, float(exact.abs().max())) if exact.numel() else 0
        torch.testing.assert_close(got.double(), exact, rtol=0, atol=bound)


@pytest.mark.parametrize(("stream", "exits"), list(product(STREAMS, (False, True))))
def test_outputs_and_gradients_are_those_of_the_plain_definition(stream, exits):
    assert_agrees(make(), stream, exits)


@pytest.mark.parametrize("share", [0.0, 0.05, 1.0])
def test_no_expert_few_experts_and_all_experts_may_run(share):
    assert_agrees(make(share=share), Stream.RESIDUAL)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    num_layers=st.integers(1, 3),
    num_experts=st.integers(1, 7),
    batch=st.integers(0, 20),
    dim=st.sampled_from((4, 8, 12)),
    hidden=st.sampled_from((4, 20)),
    share=st.sampled_from((0.1, 0.5, 0.9)),
    seed=st.integers(0, 100),
    stream=st.sampled_from(STREAMS),
)
def test_random_sizes_agree(stream, **sizes):
    assert_agrees(make(**sizes), stream)


def test_a_layer_at_a_time_agrees():
    torch.manual_seed(0)
    layer = routed_layer(TopK, 8, 3, 4, k=2).to(DEVICE)
    hidden_BD = torch.randn(9, 8, device=DEVICE)
    with kernels.use(experts="dense"):
        expected = layer(hidden_BD).hidden
    with kernels.use(experts="grouped"):
        torch.testing.assert_close(layer(hidden_BD).hidden, expected, rtol=0, atol=2e-6)


def test_rows_do_not_depend_on_the_others_in_the_batch():
    grid, hidden_BD, active_BLN, weights_BLN = make(batch=40)
    whole = grouped_experts.run(grid, hidden_BD, active_BLN, weights_BLN, Stream.RESIDUAL)
    part = grouped_experts.run(grid, hidden_BD[5:9], active_BLN[5:9], weights_BLN[5:9], Stream.RESIDUAL)
    torch.testing.assert_close(part, whole[5:9], rtol=0, atol=2e-6)


def test_it_is_chosen_on_a_gpu_in_bfloat16_alone():
    grid, hidden_BD, active_BLN, weights_BLN = make()
    explained = kernels.experts.explain(grid, hidden_BD, active_BLN, weights_BLN, Stream.RESIDUAL)
    assert explained.name != "grouped"
    with kernels.use(experts="grouped"):
        assert kernels.experts.explain(grid, hidden_BD, active_BLN, weights_BLN, Stream.RESIDUAL).name == "grouped"
    args = (hidden_BD, active_BLN, weights_BLN, Stream.RESIDUAL)
    assert "no torch.float64" in grouped_experts.unsupported_reason(grid.double(), hidden_BD.double(), *args[1:])
    assert "multiples of 4" in grouped_experts.unsupported_reason(MLPExperts(3, 4, 8, 6), *args)
    assert grouped_experts.unsupported_reason(ModuleExperts(3, 4, torch.nn.Identity), *args) == "custom experts"
    if DEVICE == "cuda":
        half = [each.bfloat16() for each in (hidden_BD, active_BLN, weights_BLN)]
        assert kernels.experts.explain(grid.bfloat16(), *half, Stream.RESIDUAL).name == "grouped"


def test_half_precision_is_near_single_precision_and_compiles_whole():
    # In a process of its own: on some CPUs oneDNN would choose instructions for bfloat16 that end the process.
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    done = forked.run(compare_half_precision, env=environment)
    assert done.returncode == 0, done.stderr


def compare_half_precision():
    case = make(dim=16, hidden=32)
    half = deepcopy(case[0]).bfloat16(), *(t.detach().bfloat16().requires_grad_(t.requires_grad) for t in case[1:])
    expected = run(run_dense, case, Stream.RESIDUAL)[0]
    # three layers of sums of at most 32 numbers, each rounded to 8 bits
    found = run(grouped_experts.run, half, Stream.RESIDUAL)
    torch.testing.assert_close(found[0].float(), expected, rtol=0.05, atol=0.05)
    whole = torch.compile(grouped_experts.run, fullgraph=True, backend="aot_eager")
    for one, other in zip(run(whole, half, Stream.RESIDUAL), found, strict=True):
        torch.testing.assert_close(one, other)
