"""One process of several that share experts: `main(FOLDER, EXPERT_PROCESSES, STRATEGY)`.

It trains two steps on its own rows of a batch, writes a checkpoint, and process 0 writes what was found.
"""

import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from raytraced import RaytracedExperts
from raytraced.training.expert_parallel import make_mesh, parallelise

NUM_ROWS = 11
CASES = {
    "drawn": {"train_select": "sample", "output_logit_offset": 0.0},
    "greedy, skip-sum": {"stream": "skip-sum"},
    "last": {"stream": "last", "estimator": "straight-through"},
    "one expert": {},  # the first of every layer: all other processes' experts get nothing
    "no expert": {},
}


class Net(nn.Module):
    """A routed layer between other layers, in double precision."""

    def __init__(self, case):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.layer, self.last = nn.Linear(5, 6), RaytracedExperts(6, 3, 4, **CASES[case]), nn.Linear(6, 2)
        self.options = {"max_experts": {"no expert": 0, "one expert": 1}.get(case)}
        if case == "one expert":
            self.layer.router.gate["bias"].data[0] += 50
        self.double()

    def forward(self, x, rows):
        out = self.layer(self.first(x), generator=torch.Generator().manual_seed(4), rows=rows, **self.options)
        return self.last(out.hidden).square().sum() + 0.1 * out.route.active.sum()


def train(model, wrapped, part, num_processes, num_steps=2):
    """Losses and gradients of each step, on a part of the batch; the sum over processes is that of one process."""
    optimizer, found = torch.optim.SGD(model.parameters(), 0.05), []
    for step in range(num_steps):
        x = torch.randn(NUM_ROWS, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        loss = wrapped(x[part], torch.arange(NUM_ROWS)[part])
        optimizer.zero_grad()
        (loss * num_processes).backward()
        grads = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        total = loss.detach().clone()
        if num_processes > 1:
            dist.all_reduce(total)
        found.append({"loss": total} | grads)
    return found


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def main(folder, expert_processes, strategy):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = make_mesh("cpu", size, expert_processes)
    found = {}
    for case in CASES:
        model = Net(case)
        wrapped = parallelise(model, mesh, strategy)
        # the last process has no row at all
        part = slice(rank, None, size - 1) if rank < size - 1 else slice(0, 0)
        found[case] = train(model, wrapped, part, size)
        if case == "drawn":
            dcp.save(model.state_dict(), checkpoint_id=Path(folder) / "checkpoint")
            fresh = Net(case)
            fresh.last.weight.data.zero_()
            other = make_mesh("cpu", size, size)  # another layout than what was saved
            parallelise(fresh, other, "ddp")
            state = fresh.state_dict()
            dcp.load(state, checkpoint_id=Path(folder) / "checkpoint")
            fresh.load_state_dict(state)
            found["restored"] = {name: whole(each) for name, each in fresh.state_dict().items()}
            found["saved"] = {name: whole(each) for name, each in model.state_dict().items()}
    if rank == 0:
        torch.save(found, Path(folder) / "found.pt")
    dist.barrier()
    time.sleep(0.25)  # gloo's threads let go of the last tensor
    dist.destroy_process_group()
