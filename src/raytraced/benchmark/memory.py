"""Peak memory of one training step of paper-mnist, measured in a process of its own; prints JSON.

Two measures. The peak of tensors is exact: the sum of PyTorch's allocations and releases during the step, in order, on
top of what was there before (weights, batch, the optimizer's state). The resident set is what the system counts, with
kernels' own buffers and the allocator's slack.
"""

import ctypes
import json
import os
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from raytraced.benchmark.workloads import TrainingStep, new_model, open_images

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def tensor_peak(step: TrainingStep) -> int:
    """The most bytes of tensors alive at once during a step, above those alive before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step()
    assert record.profiler is not None
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def resident_peak(step: TrainingStep) -> int | None:
    """By how much a step raises the resident set at most; None where the system does not tell."""
    try:
        ctypes.CDLL(None).malloc_trim(0)  # what earlier work left free would hold the step unseen
        CLEAR.write_text("5")  # forget the highest value so far
        before = status_bytes("VmRSS")
        step()
        return status_bytes("VmHWM") - before
    except (OSError, AttributeError, TypeError):
        return None


def status_bytes(field: str) -> int:
    """One of the system's figures about this process."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def main() -> None:
    torch.set_num_threads(1)
    images, labels = open_images().batch(256)
    step = TrainingStep(new_model("mre"), images[:2], labels[:2])
    step()  # a tiny batch first: code and optimizer state are loaded, but no memory of the step's size is kept
    step.images, step.labels = images, labels
    resident = resident_peak(step)
    print(json.dumps({"tensor_bytes": tensor_peak(step), "resident_bytes": resident}))


if __name__ == "__main__":
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # the profiler's own messages
    main()
