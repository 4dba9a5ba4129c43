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
# Greedy in training too, outputs weighted by rates, gates that reach deep at first: the most accurate at its cost on
# validation images (docs/recipe.md).
OURS = GRID | {"train_select": "greedy", "weighting": "rates-to-one", "reach": 10.0}
# The text of the paper taken as written (what it leaves open: τ = 20).
PAPER = GRID | {
    "stream": "last",
    "weighting": "unit",
    "mask_gradient": "all",
    "estimator": "gumbel",
    "temperature": 20.0,
    "train_select": "sample",
}


@dataclass(frozen=True)
class ModelInfo:
    """What a model is made of, where it comes from, and whether it adapts its compute and answers along the way."""

    layer: str
    """ "module:Class" of the layer between input block and output layer; its arguments are the model's options"""
    defaults: dict[str, Any]
    """options where they differ from the class's own"""
    reference: str
    """in full in docs/models.md"""
    adaptive: bool
    anytime: bool
    classifier: str | None = "classifier:RoutedClassifier"
    """what holds the three together; None: the class above is a whole model that takes its input block"""

    def hidden(self) -> tuple[str, ...]:
        """Arguments that are no options: they follow from the images and classes."""
        return ("input_block", "num_classes") if self.classifier is None else ()


RAYTRACED, RAYTRACED_CLASSIFIER = "layer:RaytracedExperts", "classifier:RaytracedClassifier"
MLP_LAYERS, ADA_K = "baselines.mlp:MLPLayers", "baselines.ada_k:AdaKExperts"

# layer, defaults, reference, adaptive, anytime, classifier
MODELS = {
    "mre": ModelInfo(RAYTRACED, OURS, "Perin 2025, ours", True, True, RAYTRACED_CLASSIFIER),
    "mre-paper": ModelInfo(RAYTRACED, PAPER, "Perin 2025", True, True, RAYTRACED_CLASSIFIER),
    "top-k": ModelInfo("baselines.top_k:TopKExperts", GRID, "Shazeer 2017", False, False),
    "threshold": ModelInfo("baselines.threshold:ThresholdExperts", GRID, "Huang 2024", True, False),
    "mlp-total": ModelInfo(MLP_LAYERS, {"dim": 36, "num_layers": 8}, "plain, MRE's size", False, False),
    "mlp-avg": ModelInfo(MLP_LAYERS, {"dim": 24, "num_layers": 8}, "plain, MRE's use", False, False),
    "ada-k": ModelInfo(ADA_K, GRID, "Yue 2025", True, False, "baselines.ada_k:AdaKClassifier"),
    "dense": ModelInfo("baselines.dense:DenseBlocks", {"dim": 16, "num_blocks": 4}, "no routing", False, False),
    "aux-free": ModelInfo("baselines.aux_free:AuxFreeExperts", GRID, "Wang 2024", False, False),
    "top-any": ModelInfo("baselines.top_any:TopAnyExperts", GRID, "Guo 2024, DynMoE", True, False),
    "null-experts": ModelInfo("baselines.null_experts:NullExpertsLayer", GRID, "Zeng 2024, AdaMoE", True, False),
    "chain": ModelInfo("baselines.chain:ChainOfExperts", GRID, "Wang 2025, CoE", False, False),
    "multi-exit": ModelInfo(
        "baselines.multi_exit:MultiExitClassifier", {"dim": 36, "num_layers": 8}, "BranchyNet 2016", True, True, None
    ),
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
    from raytraced.classifier import input_block

    info = MODELS[name]
    made = _import(info.layer)
    check_options(name, options, made, info.hidden())
    options = info.defaults | options
    if info.classifier is None:
        whole: nn.Module = made(input_block(image_shape, options["dim"]), num_classes=num_classes, **options)
        return whole
    layer = made(**options)
    model: nn.Module = _import(info.classifier)(input_block(image_shape, layer.dim), layer, num_classes)
    return model


def complete_options(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """All options of a model, defaults spelled out: built with them, it stays the same when defaults change."""
    info = MODELS[name]
    arguments = _arguments(_import(info.layer), info.hidden())
    own = {key: each.default for key, each in arguments.items() if each.default is not each.empty}
    return own | info.defaults | given


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
    """The options of a class by name, and what kind of value each takes."""
    return {name: each.annotation for name, each in _arguments(layer_class, hidden).items()}


def _arguments(layer_class: type, hidden: tuple[str, ...]) -> dict[str, inspect.Parameter]:
    """A class's own arguments and, if it takes more than it names, those of its base."""
    parameters = inspect.signature(layer_class).parameters
    named = {name: each for name, each in parameters.items() if each.kind is not each.VAR_KEYWORD}
    if len(named) < len(parameters):
        # What a base offers to the classes made of it only: each names what it hands on to its users.
        named = _arguments(inspect.getmro(layer_class)[1], hidden=("num_outlets", "num_rounds")) | named
    return {name: each for name, each in named.items() if name not in hidden}


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
