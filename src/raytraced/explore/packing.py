"""A trained model as what engine.js opens: its options, the shapes of its tensors, and their numbers as a short text."""

import zlib
from base64 import b85encode
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raytraced.grid import MLPExperts
from raytraced.models.classifier import Classifier
from raytraced.models.gpt import GPT
from raytraced.models.output import Model
from raytraced.routers.raytraced import RaytracedExperts
from raytraced.tasks.images.task import known_classes

# bits of 23: numbers to 5e-7 of themselves, about what float32 sums differ by, and a page a tenth smaller
MANTISSA = 20
OPTIONS = ("num_layers", "num_experts", "stream", "weighting", "stop", "estimator")


def why_unpackable(model: Model) -> str | None:
    """Why a model cannot run in the page, None if it can."""
    if not isinstance(model, Classifier | GPT) or not model.card.model:
        return "only models made by raytraced.build or load, of images or of text, run in the page"
    for layer in model.routed_layers():
        if not isinstance(layer, RaytracedExperts):
            return "its experts are not raytraced; the page shows models mre and gpt-mre"
        if not isinstance(layer.experts, MLPExperts):
            return "its experts are modules of one's own; the page runs MLPs"
    if isinstance(model, GPT) and model.tokenizer is not None:
        return "it has a tokenizer; the page reads bytes"
    return None


def pack_model(name: str, model: Model) -> dict[str, Any]:
    """All that engine.js asks for."""
    if reason := why_unpackable(model):
        raise ValueError(f"{name}: {reason}")
    state, spec = model.state_dict(), model.card.spec
    numbers = np.concatenate([tensor.detach().cpu().float().numpy().ravel() for tensor in state.values()])
    pack: dict[str, Any] = {
        "name": name,
        "model": model.card.model,
        "options": {key: model.card.options[key] for key in OPTIONS},
        "shapes": [[key, list(tensor.shape)] for key, tensor in state.items()],
        "weights": deflated(planes_of(numbers)),
    }
    if isinstance(model, GPT):
        return pack | {"kind": "text", "context": model.context, "num_heads": spec["num_heads"]}
    return pack | {"kind": "image", "image_shape": list(spec["image_shape"]), "classes": list(known_classes(model))}


def planes_of(numbers: NDArray[np.float32]) -> bytes:
    """All first bytes of the rounded numbers, then all second ones, …: what is alike lies together, and deflates."""
    dropped = 23 - MANTISSA
    words = numbers.astype("<f4").view("<u4")
    rounded = (words + np.uint32(1 << dropped - 1)) >> dropped << dropped
    finite = np.isfinite(numbers) & np.isfinite(rounded.astype("<u4").view("<f4"))
    return np.where(finite, rounded, words).astype("<u4").view(np.uint8).reshape(-1, 4).T.tobytes()


def deflated(content: bytes) -> str:
    """Bytes as engine.js's `inflate` takes them."""
    # five letters for four bytes; a comma for the "<" that no text of the page may hold
    return b85encode(zlib.compress(content, 9)).replace(b"<", b",").decode()
