"""Custom experts under PyTorch's DDP where one process runs no expert: both train, and as one process would."""

import os
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from forked import run_together
from raytraced import RaytracedExperts
from raytraced.layer import routed_layer
from raytraced.routers.mixture_of_depths import MixtureOfDepths
from raytraced.routers.seq_top_k import SeqTopK
from raytraced.routers.threshold import Threshold
from raytraced.routers.top_any import TopAny
from raytraced.routers.top_k import TopK

NUM_ROWS, NUM_STEPS = 4, 2


def expert():
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))


LAYERS = {
    "raytraced": lambda: RaytracedExperts(5, 3, 4, expert=expert),
    "top-k": lambda: routed_layer(TopK, 5, 2, 4, expert=expert),
    "threshold": lambda: routed_layer(Threshold, 5, 2, 4, expert=expert),
    "seq-top-k": lambda: routed_layer(SeqTopK, 5, 2, 4, expert=expert),
    "mixture-of-depths": lambda: routed_layer(MixtureOfDepths, 5, 2, 4, expert=expert),
    "top-any": lambda: routed_layer(TopAny, 5, 2, 4, expert=expert),
}
IDLE = {  # how a process comes to run no expert: the size of its share and the options of its calls
    "an empty share": (0, {}),
    "no budget": (NUM_ROWS, {"max_experts": 0}),
    "a mask that keeps nothing": (NUM_ROWS, {"mask": torch.zeros(NUM_ROWS, dtype=torch.bool)}),
}
CASES = [(name, idle) for name in LAYERS for idle in IDLE if name == "raytraced" or idle != "no budget"]


class Model(nn.Module):
    """A routed layer between two linear layers."""

    def __init__(self, name):
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(4, 5), LAYERS[name](), nn.Linear(5, 1)

    def forward(self, x, **options):
        return self.last(self.layer(self.first(x), **options).hidden)


def train(name, idle, rank, wrap):
    """The gradients of every step of the process with this rank; rank 0 has rows and runs experts, rank 1 runs none."""
    torch.manual_seed(0)
    model = Model(name).double()
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    num_rows, options = (NUM_ROWS, {}) if rank == 0 else IDLE[idle]
    gradients = []
    for step in range(NUM_STEPS):
        rows = torch.randn(num_rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        wrapped(rows, **options).square().sum().backward()
        gradients.append({key: None if p.grad is None else p.grad.clone() for key, p in model.named_parameters()})
        optimizer.step()
    return gradients


def one_of_two(folder):
    """What each of two processes does; process 0 writes the gradients that they agreed on."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    results = {case: train(*case, rank, DistributedDataParallel) for case in CASES}
    if rank == 0:
        torch.save(results, Path(folder) / "results.pt")
    distributed.barrier()  # neither process ends while the other still waits for it
    distributed.destroy_process_group()
    os._exit(0)  # gloo's threads may abort a process that ends in the usual way


@pytest.fixture(scope="module")
def of_two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    run_together(2, one_of_two, folder)
    return torch.load(folder / "results.pt")


@pytest.mark.parametrize("case", CASES, ids=" with ".join)
def test_a_process_that_runs_no_expert_takes_part_in_training(case, of_two_processes):
    for gradients in of_two_processes[case]:
        assert all(gradient is not None for gradient in gradients.values())
        layer = {key: gradient for key, gradient in gradients.items() if "layer" in key}
        assert any(gradient.abs().max() > 0 for gradient in layer.values())


def test_an_idle_process_changes_nothing_but_the_mean(of_two_processes):
    """The first step of two processes, one with an empty share, is half that of the process with rows alone."""
    for name in LAYERS:
        alone = train(name, "an empty share", 0, lambda model: model)[0]
        for key, gradient in of_two_processes[name, "an empty share"][0].items():
            expected = torch.zeros_like(gradient) if alone[key] is None else alone[key] / 2
            torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12, msg=f"{name} {key}")


@pytest.mark.parametrize("case", CASES, ids=" with ".join)
def test_a_batch_that_runs_no_expert_gives_every_parameter_a_gradient_of_zeros(case):
    """Also in one process: what a layer returns is a function of all its parameters, whatever its batch is."""
    for gradients in train(*case, 1, lambda model: model):
        for key, gradient in gradients.items():
            assert gradient is not None, key
            assert "layer" not in key or not gradient.any(), key
