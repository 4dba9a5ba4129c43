"""Runs that take a fraction of a second."""

from dataclasses import replace
from pathlib import Path

import pytest

from raytraced.training.config import TrainConfig
from raytraced.training.loop import train
from training.stripes import GRID, write_stripes


@pytest.fixture(scope="session")
def data_file(tmp_path_factory) -> Path:
    return write_stripes(tmp_path_factory.mktemp("data") / "stripes.npz")


@pytest.fixture
def config(data_file, tmp_path) -> TrainConfig:
    return TrainConfig(
        data=str(data_file),
        model_options=GRID,
        epochs=3,
        batch_size=16,
        threads=1,
        device="cpu",
        runs_dir=str(tmp_path / "runs"),
        name="run",
    )


@pytest.fixture
def no_pictures(monkeypatch):
    """Leave out what takes longer than such a run: events; pictures are left out everywhere."""
    monkeypatch.setattr("raytraced.training.trackers.tensorboard.write_event", lambda *_: None)


@pytest.fixture
def train_with(config, no_pictures):
    """Train the small configuration with some options changed."""
    return lambda **options: train(replace(config, **options))
