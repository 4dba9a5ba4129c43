"""The load is summed over all processes: two processes train as one process with the whole batch."""

import torch

from forked import run_together
from routers import worker


def test_two_processes_balance_as_one_with_the_whole_batch(tmp_path):
    run_together(2, worker.main, tmp_path)
    results = torch.load(tmp_path / "results.pt")
    for name in worker.MODELS:
        grads, buffers = worker.step(name, torch.arange(worker.NUM_SAMPLES))
        assert grads.keys() == results[name][0].keys()
        for key in grads:
            torch.testing.assert_close(results[name][0][key], grads[key], msg=f"{name} {key}")
        for key in buffers:
            assert torch.equal(results[name][1][key], buffers[key]), f"{name} {key}"
    assert results["aux-free"][1]["layer.router.bias"].any()
