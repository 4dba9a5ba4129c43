"""A trained model in the format of engine.js: its options, the shapes of its tensors, and their numbers as a short text."""

import zlib
from base64 import b85encode
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raytraced.experts import MLPExperts
from raytraced.layer import RoutedLayer
from raytraced.models.classifier import Classifier
from raytraced.models.gpt import GPT
from raytraced.models.output import Model
from raytraced.routers.raytraced import RaytracedExperts, RaytracedRouter
from raytraced.store.experts import StoredExperts
from raytraced.tasks.images.task import known_classes

# Of 23 bits: a relative error of 5e-7, about that of float32 sums, for a page that is a tenth smaller.
MANTISSA = 20
OPTIONS = ("weighting", "weight_scale", "stop")


def unpackable_reason(model: Model) -> str | None:
    """Why a model cannot run in the page.

    Args:
        model: Any model of this package.

    Returns:
        The reason, to be read after the model's name; None if the model can run.
    """
    if not isinstance(model, Classifier | GPT) or not model.card.model:
        return "the page runs image and text models made by raytraced.build or raytraced.load"
    for layer in model.routed_layers():
        if not isinstance(layer, RaytracedExperts):
            return "it is not a raytraced model; the page runs mre and gpt-mre"
        if isinstance(layer.experts, StoredExperts):
            return "its experts are in a store; the page holds all weights of a model"
        if not isinstance(layer.experts, MLPExperts):
            return "its experts are custom modules; the page runs MLPs"
    if isinstance(model, GPT) and model.tokenizer is not None:
        return "it has a tokenizer; the page runs models of bytes"
    if isinstance(model, GPT) and model.path_tokens > 1:
        return f"its paths depend on {model.path_tokens} tokens; the page runs those of one"
    return None


def pack_model(name: str, model: Model) -> dict[str, Any]:
    """Pack a model for engine.js.

    Args:
        name: The name in the page's list of models.
        model: An image model or a language model of bytes with raytraced experts.

    Returns:
        JSON values: the name, the kind, the options, the shape of each tensor and all weights as one text.

    Raises:
        ValueError: The model cannot run in the page.
    """
    if reason := unpackable_reason(model):
        raise ValueError(f"{name}: {reason}")
    state, spec, (layer,) = model.state_dict(), model.card.spec, model.routed_layers()
    numbers = np.concatenate([tensor.detach().cpu().float().numpy().ravel() for tensor in state.values()])
    pack: dict[str, Any] = {
        "name": name,
        "model": model.card.model,
        "options": layer_options(layer),
        "shapes": [[key, list(tensor.shape)] for key, tensor in state.items()],
        "weights": deflated(planes_of(numbers)),
        "dial": [[row["stop"], row["experts"]] for row in model.card.dial.get("rows", ())],
    }
    if isinstance(model, GPT):
        sizes = {"context": model.context, "num_heads": spec["num_heads"], "routing_input": model.routing_input}
        return pack | {"kind": "text", **sizes}
    return pack | {
        "kind": "image",
        "image_shape": list(spec["image_shape"]),
        "classes": [*map(str, known_classes(model))],
    }


def layer_options(layer: RoutedLayer) -> dict[str, Any]:
    """What engine.js needs to know of a raytraced layer."""
    router = layer.router
    assert isinstance(router, RaytracedRouter)
    grid = {"num_layers": router.num_layers, "num_experts": router.num_experts, "stream": str(layer.stream)}
    return grid | {key: getattr(router.config, key) for key in OPTIONS}


def planes_of(numbers: NDArray[np.float32]) -> bytes:
    """All first bytes of the rounded numbers, then all second bytes, …: similar bytes are neighbours and deflate well."""
    dropped = 23 - MANTISSA
    words = numbers.astype("<f4").view("<u4")
    rounded = (words + np.uint32(1 << dropped - 1)) >> dropped << dropped
    finite = np.isfinite(numbers) & np.isfinite(rounded.astype("<u4").view("<f4"))
    return np.where(finite, rounded, words).astype("<u4").view(np.uint8).reshape(-1, 4).T.tobytes()


def deflated(content: bytes) -> str:
    """Bytes as a text that `inflate` of engine.js decodes: deflate, then base 85, with a comma in place of "<"."""
    return b85encode(zlib.compress(content, 9)).replace(b"<", b",").decode()
