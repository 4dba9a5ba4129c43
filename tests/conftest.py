"""One thread and derandomised examples: a failure here is a failure everywhere."""

import gc
import os

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("project", deadline=None, derandomize=True, max_examples=30)
hypothesis.settings.load_profile("project")
torch.set_num_threads(1)


def pytest_collection_finish():
    """What was imported stays: no collection of garbage need look through it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _no_waiting_for_the_disk():
    """No test cuts the power, so none need wait until a file would survive that; processes of their own wait as ever."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # which refuses what is no open file, too
        yield


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
