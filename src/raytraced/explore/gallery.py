"""Test images of a model from easy to hard, and how many images of each class run each expert.

Axes: n test images, Y classes, M nodes.
"""

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
NUM_EVALUATED = 2000
GALLERY_BATCH = 500
BRIGHT = 64  # brighter pixels of a grey image belong to the object


def has_images(name: str, root: str | None = None) -> bool:
    """Whether an image data set of the catalogue can be read without a download; an altered copy raises a ValueError."""
    try:
        return all(bool(read_entry(cache_root(root), part)) for part in CATALOG[name].parts)
    except FileNotFoundError:
        return False


@torch.no_grad()
def pack_gallery(model: Classifier, data: str, root: str | None = None) -> dict[str, Any]:
    """Evaluate a model on test images and pack some of them for the page.

    Args:
        model: An image model with one routed layer.
        data: Name or path of a data set. Neither becomes part of the result.
        root: Folder of the data cache; the default one if None.

    Returns:
        JSON values: ``images`` and ``labels`` of the chosen images, ``num_evaluated``, ``shares`` (Y, M) of each class's
        images that run each node, in thousandths, and ``ink``, the size that the page scales drawings to.
    """
    test = ImageTask().load_for(model, data, root).test
    images, labels_n = test.images[:NUM_EVALUATED], test.labels[:NUM_EVALUATED]
    probs_nY, active_nM = classify_images(model, images)
    probs_n = probs_nY.gather(1, labels_n[:, None])[:, 0]
    shown = choose_images(probs_n, probs_nY.argmax(-1) == labels_n, labels_n)
    counts_Y1 = labels_n.bincount(minlength=probs_nY.shape[1])[:, None].clamp_min(1)
    share_YM = torch.zeros(probs_nY.shape[1], active_nM.shape[1]).index_add(0, labels_n, active_nM) / counts_Y1
    return {
        "num_evaluated": len(labels_n),
        # Differences of neighbouring bytes: they are small, which deflates well.
        "images": deflated(np.diff(images[shown].numpy().ravel(), prepend=np.uint8(0)).tobytes()),
        "labels": labels_n[shown].tolist(),
        "shares": (share_YM * 1000).round().int().tolist(),
        "ink": ink_of(images) if images.shape[1] == 1 else None,
    }


def classify_images(model: Classifier, images: Tensor) -> tuple[Tensor, Tensor]:
    """Class probabilities (n, Y) and active nodes (n, M) of images, batch by batch."""
    device = model.head.weight.device
    probs, active = [], []
    for batch in images.split(GALLERY_BATCH):
        out = model(batch.to(device))
        probs.append(out.logits.float().softmax(-1).cpu())
        active.append(out.routes[0].active.flatten(1).float().cpu())
    return torch.cat(probs), torch.cat(active)


def choose_images(probs_n: Tensor, correct_n: Tensor, labels_n: Tensor) -> list[int]:
    """Rows of about NUM_SHOWN images, two answered correctly for each wrong one in every class, sorted from easy to hard.

    `probs_n` is the probability of the right class: the higher, the easier.
    """
    classes = labels_n.unique().tolist()
    classes = classes[:: max(1, -(-3 * len(classes) // NUM_SHOWN))]
    num_per_class = max(3, NUM_SHOWN // len(classes))
    num_wrong = num_per_class // 3
    shown: list[int] = []
    for label in classes:
        for correct, num in ((True, num_per_class - num_wrong), (False, num_wrong)):
            rows = ((labels_n == label) & (correct_n == correct)).nonzero()[:, 0]
            rows = rows[probs_n[rows].argsort(descending=True, stable=True)]
            places = torch.linspace(0.1, 0.9, num) * (len(rows) - 1)
            shown += rows[places.round().long()].unique().tolist() if len(rows) else []
    return sorted(set(shown), key=lambda row: -float(probs_n[row]))


def ink_of(images: Tensor) -> float:
    """Median extent of the bright pixels of grey images (n, 1, H, W), as a fraction of the frame's longer side.

    The page scales drawings to this extent, so that they resemble the training images.
    """
    bright = images[:, 0] > BRIGHT
    sides = torch.stack((bright.any(2).sum(1), bright.any(1).sum(1))).amax(0)
    return float(sides.float().median()) / max(images.shape[2:])
