"""Runs that take a fraction of a second: 96 images of 3 classes, a grid of 2 × 3 experts."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from raytraced.training.config import TrainConfig
from raytraced.training.loop import train

GRID = {"dim": 8, "num_layers": 2, "num_experts": 3}


def write_data(path: Path) -> Path:
    """Three kinds of stripes, learnable in a few steps, as an .npz file."""
    random = np.random.default_rng(0)
    labels = np.arange(96) % 3
    images = random.integers(0, 120, (96, 8, 8))
    for label, image in zip(labels, images, strict=True):
        image[label::3] += 100
    images = images.astype(np.uint8)
    np.savez(path, x_train=images, y_train=labels, x_test=images[:30], y_test=labels[:30])
    return path


@pytest.fixture(scope="session")
def data_file(tmp_path_factory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "stripes.npz")


@pytest.fixture
def config(data_file, tmp_path) -> TrainConfig:
    return TrainConfig(
        data=str(data_file),
        model_options=GRID,
        epochs=3,
        batch_size=16,
        threads=1,
        device="cpu",
        output=str(tmp_path / "runs"),
        name="run",
    )


@pytest.fixture
def no_pictures(monkeypatch):
    """Leave out what takes longer than such a run: pictures and events."""
    monkeypatch.setattr("raytraced.analysis.curves.draw_curves", lambda *_: None)
    monkeypatch.setattr("raytraced.analysis.pictures.draw_sequences", lambda *_: None)
    monkeypatch.setattr("raytraced.training.loop.write_event", lambda *_: None)


@pytest.fixture
def train_with(config, no_pictures):
    """Train the small configuration with some options changed."""
    return lambda **options: train(replace(config, **options))
