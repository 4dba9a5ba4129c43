"""Test images of a model from easy to hard, and which of its experts run for which class.

Axes: n test images, Y classes, M nodes.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raytraced.data.cache import cache_root, read_entry
from raytraced.explore.packing import deflated
from raytraced.models.classifier import Classifier
from raytraced.tasks.images.catalog import CATALOG
from raytraced.tasks.images.task import ImageTask

NUM_SHOWN = 30
NUM_JUDGED = 2000
BRIGHT = 64  # a pixel of a grey image that is brighter belongs to what is drawn


def at_hand(data: str, root: str | None = None) -> bool:
    """Whether a data set can be read without a download."""
    if data not in CATALOG:
        return Path(data).expanduser().exists()
    try:  # an altered copy is told, as to load it would fetch another
        return all(bool(read_entry(cache_root(root), part)) for part in CATALOG[data].parts)
    except FileNotFoundError:
        return False


@torch.no_grad()
def pack_gallery(model: Classifier, data: str, root: str | None = None) -> dict[str, Any]:
    """Images and labels, how sure the model is of the right answer, each node's share of a class's images (Y, M)."""
    test = ImageTask().load_for(model, data, root).test
    images, labels = test.images[:NUM_JUDGED], test.labels[:NUM_JUDGED]
    device = model.head.weight.device
    outputs = [model(part.to(device)) for part in images.split(500)]
    probs_nY = torch.cat([out.logits for out in outputs]).float().softmax(-1).cpu()
    active_nM = torch.cat([out.routes[0].active.flatten(1) for out in outputs]).float().cpu()
    right_n = probs_nY.gather(1, labels[:, None])[:, 0]
    shown = choose_images(right_n, probs_nY.argmax(-1) == labels, labels)
    counts_Y1 = labels.bincount(minlength=probs_nY.shape[1])[:, None].clamp_min(1)
    share_YM = torch.zeros(probs_nY.shape[1], active_nM.shape[1]).index_add(0, labels, active_nM) / counts_Y1
    return {
        "data": data,
        "num_judged": len(labels),
        # each byte less the one before it: neighbours are alike, which deflates
        "images": deflated(np.diff(images[shown].numpy().ravel(), prepend=np.uint8(0)).tobytes()),
        "labels": labels[shown].tolist(),
        "shares": (share_YM * 1000).round().int().tolist(),
        "ink": ink_of(images) if images.shape[1] == 1 else None,
    }


def choose_images(right_n: Tensor, correct_n: Tensor, labels_n: Tensor) -> list[int]:
    """For each class two images that the model knows for every one that it takes for another; from easy to hard."""
    classes = labels_n.unique().tolist()
    classes = classes[:: max(1, -(-3 * len(classes) // NUM_SHOWN))]
    each = max(3, NUM_SHOWN // len(classes))
    shown: list[int] = []
    for label in classes:
        for correct, wanted in ((True, each - each // 3), (False, each // 3)):
            rows = ((labels_n == label) & (correct_n == correct)).nonzero()[:, 0]
            rows = rows[right_n[rows].argsort(descending=True, stable=True)]
            places = torch.linspace(0.1, 0.9, wanted) * (len(rows) - 1)
            shown += rows[places.round().long()].unique().tolist() if len(rows) else []
    return sorted(set(shown), key=lambda row: -float(right_n[row]))


def ink_of(images: Tensor) -> float:
    """How much of the frame's longer side a drawing fills, in the median: the page brings drawings to that size."""
    bright = images[:, 0] > BRIGHT
    sides = torch.stack((bright.any(2).sum(1), bright.any(1).sum(1))).amax(0)
    return float(sides.float().median()) / max(images.shape[2:])
