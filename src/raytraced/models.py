"""Every model by name: `build_model("mre", image_shape, num_classes)` gives a module that is called as model(images) -> Output.

Importing this file does not import torch: the command line checks names with it.
"""

import difflib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

if TYPE_CHECKING:
    from torch import nn

ImageShape = tuple[int, int, int]

GRID = {"dim": 16, "num_layers": 4, "num_experts": 8}
# Greedy in training too, outputs weighted by rates: the most accurate at its cost on validation images (docs/recipe.md).
OURS = GRID | {"train_select": "greedy", "weighting": "rates"}


@dataclass(frozen=True)
class ModelInfo:
    """How a model is built, where it comes from, and whether it adapts its compute and answers along the way."""

    build: Callable[..., "nn.Module"]
    reference: str  # in full in docs/models.md
    adaptive: bool
    anytime: bool


def routed(
    layer_path: str, defaults: dict[str, Any], classifier_path: str = "classifier:RoutedClassifier"
) -> Callable[..., "nn.Module"]:
    """A builder: input block, the layer "module:Class" with its options, output layer."""

    def build(name: str, image_shape: ImageShape, num_classes: int, **given: Any) -> "nn.Module":
        from raytraced.classifier import input_block

        layer_class = _import(layer_path)
        check_options(name, given, layer_class)
        layer = layer_class(**defaults | given)
        model: nn.Module = _import(classifier_path)(input_block(image_shape, layer.dim), layer, num_classes)
        return model

    return build


def _mre_paper(name: str, image_shape: ImageShape, num_classes: int, **given: Any) -> "nn.Module":
    from raytraced.classifier import AS_IN_PAPER

    build = routed("layer:RaytracedExperts", GRID | AS_IN_PAPER, "classifier:RaytracedClassifier")
    return build(name, image_shape, num_classes, **given)


def _multi_exit(name: str, image_shape: ImageShape, num_classes: int, **given: Any) -> "nn.Module":
    from raytraced.baselines.multi_exit import MultiExitClassifier
    from raytraced.classifier import input_block

    check_options(name, given, MultiExitClassifier, hidden=("input_block", "num_classes"))
    options = {"dim": 36, "num_layers": 8} | given
    return MultiExitClassifier(input_block(image_shape, options["dim"]), num_classes=num_classes, **options)


MODELS = {
    "mre": ModelInfo(
        routed("layer:RaytracedExperts", OURS, "classifier:RaytracedClassifier"),
        "Perin 2025, ours",
        adaptive=True,
        anytime=True,
    ),
    "mre-paper": ModelInfo(_mre_paper, "Perin 2025", adaptive=True, anytime=True),
    "top-k": ModelInfo(routed("baselines.top_k:TopKExperts", GRID), "Shazeer 2017", adaptive=False, anytime=False),
    "threshold": ModelInfo(
        routed("baselines.threshold:ThresholdExperts", GRID), "Huang 2024", adaptive=True, anytime=False
    ),
    "mlp-total": ModelInfo(
        routed("baselines.mlp:MLPLayers", {"dim": 36, "num_layers": 8}),
        "plain, MRE's size",
        adaptive=False,
        anytime=False,
    ),
    "mlp-avg": ModelInfo(
        routed("baselines.mlp:MLPLayers", {"dim": 24, "num_layers": 8}),
        "plain, MRE's use",
        adaptive=False,
        anytime=False,
    ),
    "ada-k": ModelInfo(
        routed("baselines.ada_k:AdaKExperts", GRID, "baselines.ada_k:AdaKClassifier"),
        "Yue 2025",
        adaptive=True,
        anytime=False,
    ),
    "dense": ModelInfo(
        routed("baselines.dense:DenseBlocks", {"dim": 16, "num_blocks": 4}),
        "no routing",
        adaptive=False,
        anytime=False,
    ),
    "aux-free": ModelInfo(
        routed("baselines.aux_free:AuxFreeExperts", GRID), "Wang 2024", adaptive=False, anytime=False
    ),
    "top-any": ModelInfo(
        routed("baselines.top_any:TopAnyExperts", GRID), "Guo 2024, DynMoE", adaptive=True, anytime=False
    ),
    "null-experts": ModelInfo(
        routed("baselines.null_experts:NullExpertsLayer", GRID),
        "Zeng 2024, AdaMoE",
        adaptive=True,
        anytime=False,
    ),
    "chain": ModelInfo(routed("baselines.chain:ChainOfExperts", GRID), "Wang 2025, CoE", adaptive=False, anytime=False),
    "multi-exit": ModelInfo(_multi_exit, "BranchyNet 2016", adaptive=True, anytime=True),
}


def check_model_name(name: str) -> None:
    """Refuse a name that is not in the table, with what was probably meant."""
    if name not in MODELS:
        raise ValueError(f"model={name}: no such model; {_hint(name, MODELS)}")


def build_model(name: str, image_shape: ImageShape, num_classes: int, **options: Any) -> "nn.Module":
    """The named model for images (C, H, W) and a number of classes; options as its layer's keyword arguments."""
    check_model_name(name)
    if len(image_shape) != 3 or min(image_shape) < 1:
        raise ValueError(f"image_shape={tuple(image_shape)}: must be three positive numbers (channels, height, width)")
    return MODELS[name].build(name, image_shape, num_classes, **options)


def parameter_group(name: str) -> Literal["routing", "experts", "rest"]:
    """What a parameter of any of these models is for: inside the layer, all that is not an expert routes."""
    if not name.startswith("layer."):
        return "rest"
    return "experts" if name.startswith("layer.experts.") else "routing"


def check_options(model: str, options: dict[str, Any], layer_class: type, hidden: tuple[str, ...] = ()) -> None:
    """Refuse an option that the model does not have, or whose value is of another kind."""
    known = option_types(layer_class, hidden)
    for name, value in options.items():
        if name not in known:
            raise ValueError(f"model option {name}: {model} has no such option; {_hint(name, known)}")
        if not _fits(value, known[name]):
            raise ValueError(f"{name}={value!r}: must be {_describe(known[name])}")


def option_types(layer_class: type, hidden: tuple[str, ...] = ()) -> dict[str, Any]:
    """The options of a class by name: its own arguments and, if it takes more than it names, those of its base."""
    parameters = inspect.signature(layer_class).parameters.values()
    types = {each.name: each.annotation for each in parameters if each.kind is not each.VAR_KEYWORD}
    if len(types) < len(parameters):
        # What a base offers to the classes made of it only: each names what it hands on to its users.
        types = option_types(inspect.getmro(layer_class)[1], hidden=("num_outlets", "num_rounds")) | types
    return {key: kind for key, kind in types.items() if key not in hidden}


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value may be given for an annotation."""
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if isinstance(kind, UnionType):
        return any(_fits(value, member) for member in get_args(kind))
    if get_origin(kind) is Callable:
        return callable(value)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is kind


def _describe(kind: Any) -> str:
    """An annotation in a user's words."""
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    if isinstance(kind, UnionType):
        return " or ".join(_describe(member) for member in get_args(kind))
    names = {int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}
    return names.get(kind, "a function")


def _hint(word: str, known: Iterable[str]) -> str:
    """What was probably meant, else what there is."""
    names = list(known)
    close = difflib.get_close_matches(word, names, n=1)
    return f"did you mean {close[0]}?" if close else f"must be one of {', '.join(names)}"


def _import(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(import_module(f"raytraced.{module}"), attribute)
