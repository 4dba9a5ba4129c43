"""A tiny public set, a server that has its files, and no settings of the user who runs the tests."""

import gzip

import numpy as np
import pytest

from data.originals import FileServer, TinySet, encode_idx
from raytraced.data.catalog import IDX_FILES


@pytest.fixture
def tiny():
    generator = np.random.default_rng(0)
    made = TinySet()
    for side, num in (("train", 40), ("test", 10)):
        made.arrays[f"{side}_images"] = generator.integers(0, 256, (num, 1, 6, 5), dtype=np.uint8)
        made.arrays[f"{side}_labels"] = np.arange(num, dtype=np.uint8) % 2
    for key, name in IDX_FILES.items():
        array = made.arrays[key]
        made.files[f"{name}.gz"] = gzip.compress(encode_idx(array[:, 0] if key.endswith("images") else array))
    return made


@pytest.fixture
def server(tiny):
    running = FileServer(dict(tiny.files))
    yield running
    running.close()


@pytest.fixture(autouse=True)
def _no_settings_of_the_user(monkeypatch, tmp_path):
    monkeypatch.delenv("RAYTRACED_DATA", raising=False)
    monkeypatch.setenv("RAYTRACED_HOME", str(tmp_path / "home"))
