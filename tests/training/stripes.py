"""Data and a grid for runs that take a fraction of a second: 96 images of 3 classes, 2 × 3 experts."""

from pathlib import Path

import numpy as np

GRID = {"dim": 8, "num_layers": 2, "num_experts": 3}


def write_stripes(path: Path, test_labels_off_by: int = 0) -> Path:
    """Three kinds of stripes, learnable in a few steps, as an .npz file; its test labels may be all wrong."""
    random = np.random.default_rng(0)
    labels = np.arange(96) % 3
    images = random.integers(0, 120, (96, 8, 8))
    for label, image in zip(labels, images, strict=True):
        image[label::3] += 100
    images = images.astype(np.uint8)
    test_labels = (labels[:30] + test_labels_off_by) % 3
    np.savez(path, x_train=images, y_train=labels, x_test=images[:30], y_test=test_labels)
    return path
