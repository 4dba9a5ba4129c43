"""What two runs must share to count as the same."""

import pytest
import torch
from safetensors.torch import load_file

from raytraced.training.run_folder import RunFolder

TIMING_FIELDS = ("seconds", "samples_per_second")  # of a metrics line, which two identical runs need not share


def weights(run: RunFolder) -> dict[str, torch.Tensor]:
    return load_file(run.model)


def metrics(run: RunFolder) -> list[dict]:
    """The metrics of every epoch, without the fields that are timings."""
    return [{key: value for key, value in line.items() if key not in TIMING_FIELDS} for line in run.read_metrics()]


def summary(run: RunFolder) -> dict:
    content = run.read_summary()
    return {key: value for key, value in content.items() if key not in ("seconds", "finished")}


def assert_same_run(one: RunFolder, other: RunFolder) -> None:
    """Bit by bit."""
    assert metrics(one) == metrics(other)
    assert summary(one) == summary(other)
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    assert weights_of_best(one) == weights_of_best(other)


def weights_of_best(run: RunFolder) -> bytes:
    tensors = load_file(run.best)
    return b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors))


def assert_close(found, expected, name: str = "") -> None:
    """Counts equal, sums up to their order."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), name
        for key in expected:
            assert_close(found[key], expected[key], f"{name}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), name
        for number, pair in enumerate(zip(found, expected, strict=True)):
            assert_close(*pair, f"{name}[{number}]")
    else:
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-9), name
