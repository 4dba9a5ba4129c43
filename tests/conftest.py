"""One thread and derandomised examples: a failure here is a failure everywhere."""

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("project", deadline=None, derandomize=True, max_examples=30)
hypothesis.settings.load_profile("project")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
