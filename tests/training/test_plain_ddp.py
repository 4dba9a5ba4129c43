"""Custom experts under PyTorch's DDP: those that no sample chose take part, and two processes train as one."""

import os
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from forked import run_together
from raytraced import RaytracedExperts, kernels
from raytraced.layer import routed_layer
from raytraced.routers.chain import ChainOfExperts
from raytraced.routers.top_k import TopK

NUM_STEPS, NUM_ROWS = 3, 4


def expert():
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))


LAYERS = {
    "a plan": lambda: RaytracedExperts(5, 3, 8, expert=expert, estimator="reinmax"),
    "step by step": lambda: routed_layer(TopK, 5, 3, 8, expert=expert),
    "in rounds": lambda: routed_layer(ChainOfExperts, 5, 2, 8, expert=expert),
    "stacks, no expert active": lambda: RaytracedExperts(5, 2, 3, estimator="reinmax", input_rank=0),
    "modules, no expert active": lambda: RaytracedExperts(5, 2, 3, expert=expert, estimator="reinmax", input_rank=0),
}


class Model(nn.Module):
    """A routed layer between other layers, as a user has it."""

    def __init__(self, name):
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(4, 5), LAYERS[name](), nn.Linear(5, 1)
        self.options = {"max_experts": 0} if "no expert" in name else {}
        self.way = {"experts": "sparse"}

    def forward(self, x):
        with kernels.use(**self.way):
            out = self.layer(self.first(x), **self.options)
        # What the path costs is part of the loss: without it, a batch without active experts leaves the gates out of it.
        return self.last(out.hidden).square().sum(-1) + 0.1 * out.route.active.sum((-1, -2))


def train(name, wrap, part):
    """The gradients of each step, on a part of its batch."""
    torch.manual_seed(0)
    model = Model(name).double()
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    for step in range(NUM_STEPS):
        batch = torch.randn(NUM_ROWS, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        wrapped(batch[part]).mean().backward()
        found.append({key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    return found


def one_of_two(folder):
    """What each of two processes does; process 0 writes what they did."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    part = slice(rank * NUM_ROWS // 2, (rank + 1) * NUM_ROWS // 2)
    results = {name: train(name, DistributedDataParallel, part) for name in LAYERS}
    if rank == 0:
        torch.save(results, Path(folder) / "results.pt")
    distributed.barrier()  # neither leaves while the other still waits for it
    distributed.destroy_process_group()
    os._exit(
        0
    )  # gloo's threads may abort a process that ends in the usual way; its gradients are all that is asked for


@pytest.fixture(scope="module")
def of_two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    run_together(2, one_of_two, folder)
    return torch.load(folder / "results.pt")


@pytest.mark.parametrize("name", LAYERS)
def test_two_processes_have_the_gradients_of_one_with_the_whole_batch(name, of_two_processes):
    alone, idle = train(name, lambda model: model, slice(None)), 0
    for found, wanted in zip(of_two_processes[name], alone, strict=True):
        assert wanted.keys() <= found.keys()
        for key, value in found.items():
            idle += key not in wanted
            torch.testing.assert_close(value, wanted.get(key, torch.zeros_like(value)), rtol=0, atol=1e-12, msg=key)
    # Where no expert ran at all, one process has gradients of zeros as well.
    assert idle > 0 or "no expert" in name, "every parameter was used: nothing was tried"


def test_one_process_alone_leaves_experts_without_rows_without_a_gradient():
    """As PyTorch's optimizers expect it of what did not run."""
    assert any(
        len(step) < len(list(Model("a plan").parameters())) for step in train("a plan", lambda m: m, slice(None))
    )
