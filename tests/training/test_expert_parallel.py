"""Experts on several processes do what they do in one, up to the order of sums, in every layout of the mesh."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from forked import run_together
from kernels.test_no_round_trips import host_reads_of
from raytraced import PAPER, RaytracedExperts
from raytraced.experts import MLPExperts, Stream, run_sparse
from raytraced.kernels import sharded_experts
from raytraced.kernels.sharded_experts import THIRDS, Exchange, ShardedExperts
from raytraced.layer import routed_layer
from raytraced.routers.top_k import TopK
from raytraced.training.expert_parallel import make_mesh, shard_experts
from raytraced.training.optim import whole
from training import expert_worker
from training.expert_worker import CASES, Net, train


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # it is: one process reads what several wrote
@pytest.mark.parametrize(
    ("num_processes", "expert_processes", "strategy"),
    [
        (2, 2, "ddp"),
        (4, 2, "fsdp"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, 2, "fsdp"), (4, 2, "ddp"), (4, 4, "ddp"))),
    ],
)
def test_a_mesh_of_processes_trains_as_one_and_moves_its_checkpoints(
    num_processes, expert_processes, strategy, tmp_path
):
    run_together(num_processes, expert_worker.main, tmp_path, expert_processes, strategy)
    found = torch.load(tmp_path / "found.pt")
    for case in CASES:
        model = Net(case)
        for ours, theirs in zip(found[case], train(model, model, slice(None), 1), strict=True):
            for name, exact in theirs.items():
                torch.testing.assert_close(
                    ours[name], exact, rtol=1e-9, atol=1e-11, msg=lambda m, n=name, c=case: f"{c}: {n}: {m}"
                )
    for name, tensor in found["saved"].items():
        assert torch.equal(found["restored"][name], tensor)
    # in one process too, without a mesh
    alone = Net("drawn")
    state = alone.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    for name, tensor in found["saved"].items():
        assert torch.equal(state[name], tensor)


@pytest.fixture
def mesh(tmp_path):
    """A mesh of one process, in this one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield make_mesh("cpu", 1, 1)
    dist.destroy_process_group()


@pytest.mark.parametrize("stream", list(Stream))
def test_a_mesh_of_one_gives_the_plain_answer_and_its_exits(mesh, stream):
    grid, active_BLN = MLPExperts(3, 4, 6), (torch.rand(9, 3, 4) < 0.3).float()
    hidden_BD, weights_BLN = torch.randn(9, 6, requires_grad=True), torch.rand(9, 3, 4, requires_grad=True)
    sharded = ShardedExperts(grid, mesh["experts"])
    expected = run_sparse(grid, hidden_BD, active_BLN, weights_BLN, stream, True)
    found = sharded(hidden_BD, active_BLN, weights_BLN, stream, True)
    torch.testing.assert_close(found, expected)
    sources = (hidden_BD, weights_BLN)
    for one, other in zip(
        torch.autograd.grad(found.square().sum(), sources),
        torch.autograd.grad(expected.square().sum(), sources),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_one_exchange_plans_all_layers_in_three_thirds(mesh, monkeypatch):
    calls, usual = [], dist.all_to_all_single
    monkeypatch.setattr(dist, "all_to_all_single", lambda *args, **options: calls.append(1) or usual(*args, **options))
    active_BLN = torch.tensor([[[1, 0], [0, 1]], [[1, 1], [0, 0]], [[0, 0], [1, 1]], [[0, 1], [0, 0]]])
    plan = Exchange(active_BLN, mesh["experts"])
    assert len(calls) == 1
    assert plan.rows == [1, 1, 2]
    rows = [[plan.pairs[layer][third][0].tolist() for third in THIRDS] for layer in range(2)]
    assert rows == [[[0], [0, 0], [1]], [[0], [], [0, 0]]]  # counted from the first of their third
    assert [plan.pieces(layer, 2) for layer in range(2)] == [[[0, 1]], [[1, 1]]]


def test_the_plan_reads_from_the_device_once(mesh):
    active_BLN, column = (torch.rand(9, 3, 4) < 0.5).float(), mesh["experts"]
    assert host_reads_of(lambda: Exchange(active_BLN, column)) == ["tolist"]


def events(monkeypatch, run):
    """What is sent (">"), awaited ("<") and computed ("="), in its order."""
    found, start, local = [], sharded_experts._Handle.start, sharded_experts.run_local

    def starts(handle, *args):
        found.append(f">{names.setdefault(handle, len(names))}")
        return start(handle, *args)

    names = {}
    for which, way in ((sharded_experts._Finish, "forward"), (sharded_experts._Start, "backward")):
        usual = getattr(which, way)

        def waits(ctx, tensor, handle=None, usual=usual):
            found.append(f"<{names[handle or ctx.handle]}")
            return usual(ctx, tensor, *([] if handle is None else [handle]))

        monkeypatch.setattr(which, way, staticmethod(waits))
    monkeypatch.setattr(sharded_experts._Handle, "start", starts)
    monkeypatch.setattr(sharded_experts, "run_local", lambda *args: found.append("=") or local(*args))
    run()
    return found


def test_rows_leave_for_the_next_layer_while_experts_of_this_one_compute(mesh, monkeypatch):
    hidden_BD, ones_BLN = torch.randn(6, 3, requires_grad=True), torch.ones(6, 2, 2)
    sharded = ShardedExperts(MLPExperts(2, 2, 3), mesh["experts"])
    found = events(monkeypatch, lambda: sharded(hidden_BD, ones_BLN, ones_BLN, Stream.RESIDUAL, False).sum().backward())
    leave = [">0", ">1", ">2"]  # three thirds, for the first layer
    first = ["<0", "=", ">3"]  # is computed, and goes home
    second = ["<1", "=", ">4", "<3", ">5"]  # is computed meanwhile; the first, home, leaves for the second layer
    third = ["<2", "=", ">6", "<4", ">7"]  # is computed while the first travels there
    rest = ["<5", "=", ">8", "<6", ">9", "<7", "=", ">10", "<8", "<9", "=", ">11", "<10", "<11"]
    forward = leave + first + second + third + rest
    assert found[: len(forward)] == forward
    # backward, the same in reverse: what was awaited is sent, what was sent is awaited
    turned = [{">": "<", "<": ">"}[each[0]] + each[1:] for each in reversed(forward) if each != "="]
    assert found[len(forward) :] == turned


def test_an_active_node_has_an_active_one_above_it():
    # why no row can be sent ahead of the layer above: its input is never known before that layer has run
    layer = RaytracedExperts(6, 4, 8, output_logit_offset=0.0)
    active_BLN = layer(torch.randn(200, 6), select="sample").route.active
    runs_BL = active_BLN.sum(-1) > 0
    assert bool(runs_BL[:, 2].any())
    assert bool((runs_BL[:, :-1] | ~runs_BL[:, 1:]).all())


def test_mistakes_are_refused_in_one_line(mesh):
    with pytest.raises(ValueError, match="expert_processes=2: must divide the 3 processes"):
        make_mesh("cpu", 3, 2)
    with pytest.raises(ValueError, match=r"4 experts per layer on a mesh of shape \(1, 1\)"):
        ShardedExperts(MLPExperts(2, 4, 3), mesh)
    with pytest.raises(ValueError, match="Linear: has no routed layer with MLP experts"):
        shard_experts(torch.nn.Linear(2, 2), mesh)
    layer = RaytracedExperts(6, 3, 4, **PAPER).train()
    shard_experts(layer, mesh)
    with pytest.raises(ValueError, match="use mask_gradient=active"):
        layer(torch.randn(3, 6))


def test_experts_on_several_processes_run_layer_by_layer_too(mesh):
    torch.manual_seed(0)
    layer, hidden = routed_layer(TopK, 6, 3, 4), torch.randn(5, 6)
    expected = layer(hidden)
    expected.hidden.square().sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}
    layer.zero_grad()
    shard_experts(layer, mesh)
    found = layer(hidden)
    torch.testing.assert_close(found.hidden, expected.hidden)
    found.hidden.square().sum().backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(whole(parameter.grad), gradients[name])
