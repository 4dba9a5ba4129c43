"""One of several processes that share a batch: `main(FOLDER)`; process 0 writes the results to a file."""

from pathlib import Path

import torch
from torch import distributed

from raytraced import build

MODELS = {
    "top-k": {"balance": 0.5},
    "null-experts": {"balance": 0.5},
    "aux-free": {"update_rate": 0.01},
    "threshold": {"balance": 0.5},
    "relu": {"pace": 2.0},
}
NUM_SAMPLES = 8


def step(name, rows):
    """The gradients and buffers of one training step on some rows of the batch, its losses scaled by their share of it."""
    torch.manual_seed(0)
    model = build(
        name, image_shape=(1, 4, 4), num_classes=3, dim=6, num_layers=2, num_experts=4, **MODELS[name]
    ).double()
    images = torch.randn(NUM_SAMPLES, 1, 4, 4, dtype=torch.float64)[rows]
    out = model(images, rows=rows)
    loss = out.logits.square().sum() / NUM_SAMPLES
    if out.loss is not None:
        loss = loss + out.loss * len(rows) / NUM_SAMPLES
    loss.backward()
    grads = {key: torch.zeros_like(p) if p.grad is None else p.grad for key, p in model.named_parameters()}
    return grads, dict(model.named_buffers())


def main(folder):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    # An uneven split: five and three samples.
    rows = torch.arange(NUM_SAMPLES)[:5] if rank == 0 else torch.arange(NUM_SAMPLES)[5:]
    results = {}
    for name in MODELS:
        grads, buffers = step(name, rows)
        for grad in grads.values():
            distributed.all_reduce(grad)
        results[name] = (grads, buffers)
    if rank == 0:
        torch.save(results, Path(folder) / "results.pt")
    distributed.destroy_process_group()
