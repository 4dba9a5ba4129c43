"""Load is that of all processes: two of them do what one does with the whole batch."""

import subprocess
import sys
from pathlib import Path

import torch

from routers import worker


def test_two_processes_balance_as_one_with_the_whole_batch(tmp_path):
    script = Path(worker.__file__)
    processes = [subprocess.Popen([sys.executable, script, str(rank), "2", str(tmp_path)]) for rank in range(2)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    results = torch.load(tmp_path / "results.pt")
    for name in worker.MODELS:
        grads, buffers = worker.step(name, torch.arange(worker.NUM_SAMPLES))
        assert grads.keys() == results[name][0].keys()
        for key in grads:
            torch.testing.assert_close(results[name][0][key], grads[key], msg=f"{name} {key}")
        for key in buffers:
            assert torch.equal(results[name][1][key], buffers[key]), f"{name} {key}"
    assert results["aux-free"][1]["layer.router.bias"].any()
