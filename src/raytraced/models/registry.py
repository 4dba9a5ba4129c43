"""Every model by name: `build("mre", image_shape=(1, 28, 28), num_classes=10)`.

A name is a layer's, or a family's and a layer's ("gpt-mre" is the layer of "mre" in the family "gpt"). Importing this
file does not import torch: the command line checks names with it.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from raytraced.errors import did_you_mean, fits, require, type_words
from raytraced.models.card import ModelCard
from raytraced.plugins import all_plugins, find_plugin, on_register, plugin_names, refuse_taken_name

if TYPE_CHECKING:
    from raytraced.models.output import Model

GRID = {"dim": 16, "num_layers": 4, "num_experts": 8}
# What the paper's text says, and where it is open, the reading that comes nearest to its own tables: docs/paper/paper.md.
# The defaults of RaytracedExperts are our recipe.
PAPER = {"stream": "residual", "weighting": "unit", "mask_gradient": "all", "estimator": "gumbel", "temperature": 20.0,
         "train_select": "sample", "gate_init": "uniform", "output_logit_offset": 0.0, "input_rank": 0}  # fmt: skip
# A path through a whole decoder that is short from the start, and weights that do not change when experts join:
# docs/lab/paths.md.
DECODER = {"weighting": "relative", "weight_scale": 2.0, "stop": 0.2, "entry_scale": 16.0, "input_init_std": 3.0,
           "output_logit_offset": 8.0}  # fmt: skip


@dataclass(frozen=True)
class ModelInfo:
    """Where a model's layer is, where it comes from, and whether it adapts its compute and answers along the way."""

    layer: str | type
    """a router or a whole layer, as "module:Class" of raytraced or as the class; its arguments are the model's options"""
    defaults: dict[str, Any]
    """options where they differ from the class's own"""
    reference: str
    """in full in docs/guides/models.md"""
    adaptive: bool = False
    """whether the number of experts differs between inputs"""
    anytime: bool = False
    """whether it has an answer after each step or expert"""
    recipe: dict[str, Any] = field(default_factory=dict)
    """more defaults, which hold in every family"""
    model: str | None = None
    """ "module:Class" of the whole, where the family's own does not do"""
    in_decoder: dict[str, Any] = field(default_factory=dict)
    """more defaults, which hold in language models"""
    routing_input: str = "block"
    """default of a language model's option `routing_input`; "block": the router does not plan, and there is no other"""
    origin: str | None = None
    """of a plugin: the package or file that has it"""


MLP, EXITS = "routers.dense:MLPLayers", "models.multi_exit:MultiExit"
RAYTRACED = "routers.raytraced:RaytracedExperts"

MODELS = {
    "mre": ModelInfo(RAYTRACED, GRID, "Perin 2025, ours", True, True, in_decoder=DECODER, routing_input="token"),
    "mre-paper": ModelInfo(RAYTRACED, GRID, "Perin 2025", True, True, recipe=PAPER, routing_input="token"),
    "top-k": ModelInfo("routers.top_k:TopK", GRID, "Shazeer 2017"),
    "planned": ModelInfo("routers.planned:PlannedTopK", GRID, "top-k, our control", routing_input="embedding"),
    "matryoshka": ModelInfo("routers.matryoshka:MatryoshkaTopK", GRID, "Wang 2025, M-MoE"),
    "seq-top-k": ModelInfo("routers.seq_top_k:SeqTopK", GRID, "Wen 2025, SeqTopK", adaptive=True),
    "mixture-of-depths": ModelInfo("routers.mixture_of_depths:MixtureOfDepths", GRID, "Raposo 2024", adaptive=True),
    "hash": ModelInfo("routers.hash:HashRouting", GRID, "Roller 2021", routing_input="token"),
    "threshold": ModelInfo("routers.threshold:Threshold", GRID, "Huang 2024", adaptive=True),
    "mlp-total": ModelInfo(MLP, {"dim": 36, "num_layers": 8}, "plain, MRE's size"),
    "mlp-avg": ModelInfo(MLP, {"dim": 24, "num_layers": 8}, "plain, MRE's use"),
    "ada-k": ModelInfo("routers.ada_k:AdaK", GRID, "Yue 2025", adaptive=True),
    "dense": ModelInfo("routers.dense:DenseBlocks", {"dim": 16, "num_blocks": 4}, "no routing"),
    "aux-free": ModelInfo("routers.aux_free:AuxFree", GRID, "Wang 2024"),
    "relu": ModelInfo("routers.relu:ReLURouting", GRID, "Wang 2024, ReMoE", adaptive=True),
    "top-any": ModelInfo("routers.top_any:TopAny", GRID, "Guo 2024, DynMoE", adaptive=True),
    "null-experts": ModelInfo("routers.null_experts:NullExperts", GRID, "Zeng 2024, AdaMoE", adaptive=True),
    "chain": ModelInfo("routers.chain:ChainOfExperts", GRID, "Wang 2025, CoE"),
    "multi-exit": ModelInfo(
        EXITS, {"dim": 36, "num_layers": 8}, "BranchyNet 2016", True, True, model=f"{EXITS}Classifier"
    ),
}  # fmt: skip

on_register("router", refuse_taken_name(MODELS))

# The trained models inside the package, in pretrained/.
SHIPPED_IMAGES = ("mre-mnist", "mre-fashion-mnist", "mre-cifar10", "mre-digits", "mre-paper-fashion-mnist")
SHIPPED = (*SHIPPED_IMAGES, "mre-text")

# What a family's models are made of: called with a function that makes a layer, its width, and the rest of a task's spec.
FAMILIES = {"": "models.classifier:Classifier", "gpt": "models.gpt:GPT"}


# The options of a layer that a language model sets to its depth; in a decoder the stream is always residual.
FOLLOWS_DEPTH = ("num_layers", "num_blocks")


def find_model(name: str) -> tuple[str, ModelInfo]:
    """The family and the layer that a model's name stands for."""
    for families in (lambda: FAMILIES, plugin_families):  # plugins are imported only for a name that is not ours
        for family in sorted(families(), key=len, reverse=True):
            layer = name.removeprefix(f"{family}-") if family else name
            info = _find_layer(layer) if name.startswith(family) else None
            # a layer that needs a whole model of its own (multi-exit) is of no other family
            if info is not None and not (family and info.model):
                return family, info
    raise ValueError(f"model={name}: no such model; {did_you_mean(name, model_names(name))}")


def _find_layer(name: str) -> ModelInfo | None:
    """The layer of a name: one of MODELS, or a plugin's; None where there is none."""
    if name in MODELS or (found := find_plugin("router", name)) is None:
        return MODELS.get(name)
    from raytraced.layer import RoutedLayer
    from raytraced.router import Router

    thing, origin = found
    if isinstance(thing, ModelInfo):
        return replace(thing, origin=origin)
    if not (isinstance(thing, type) and issubclass(thing, Router | RoutedLayer)):
        raise ValueError(f"router {name} of {origin}: is {thing!r:.60}; must be a subclass of Router, or a ModelInfo")
    return ModelInfo(thing, GRID, origin, anytime=getattr(thing, "answers_along_the_way", False), origin=origin)


def plugin_families() -> dict[str, Any]:
    """The families of models that plugins' tasks have: the class of their models by name."""
    tasks = [task for task, _ in all_plugins("task").values()]
    return {task.family: task.model_class for task in tasks if getattr(task, "model_class", None) is not None}


def model_names(like: str = "") -> list[str]:
    """The names that models of one family have, that of a name which begins as it does."""
    family = next((each for each in (*FAMILIES, *plugin_families()) if each and like.startswith(each)), "")
    names = [*MODELS, *(name for name in plugin_names("router") if name not in MODELS)]
    whole = [name for name in MODELS if MODELS[name].model]
    return [f"{family}-{layer}" for layer in names if layer not in whole] if family else names


def _resolve(thing: Any) -> Any:
    """A class, from its place in raytraced ("module:Class") or as it is."""
    return resolve_name(f"raytraced.{thing}") if isinstance(thing, str) else thing


def _model_class(family: str, info: ModelInfo) -> Any:
    """What a family's models are made of."""
    return _resolve(info.model or FAMILIES.get(family) or plugin_families()[family])


def _origins(family: str, info: ModelInfo) -> list[str]:
    """The packages and files that a model needs besides raytraced."""
    origins = {info.origin} if info.origin else set()
    if family not in FAMILIES:
        origins |= {origin for task, origin in all_plugins("task").values() if task.family == family}
    return sorted(origins)


def build(name: str, **options: Any) -> "Model":
    """Build a model by its name, with fresh weights.

    Args:
        name: A name of the registry, for instance "mre", "top-k" or "gpt-mre"; see `raytraced models`.
        **options: What the family of the model needs, and options of its layer. Classifiers need `image_shape` (channels,
            height, width), `num_classes` or `class_names`, and take `mean` and `std` of each channel. Language models
            ("gpt-…") take `depth`, `num_heads`, `context`, `vocab_size`, `tokenizer`, `routing_input` and `routing_dim`.

    Returns:
        The model; its `card` holds all options, defaults included.
    """
    family, info = find_model(name)
    made = _model_class(family, info)
    arguments = inspect.signature(made).parameters
    accepted = {key: each for key, each in arguments.items() if key not in ("make_layer", "dim")}
    class_names = options.pop("class_names", None)
    if class_names is not None:
        num = options.setdefault("num_classes", len(class_names))
        are_words = not isinstance(class_names, str) and all(isinstance(word, str) for word in class_names)
        require(are_words, "class_names", class_names, "must be a list of words")
        require(num == len(class_names), "num_classes", num, f"must be {len(class_names)}, as many as class_names")
    spec = {key: options.pop(key) for key in accepted if key in options}
    if "routing_input" in accepted:
        spec = {"routing_input": info.routing_input} | spec
        rule = f"{name} chooses in every block by the vectors that reach it; leave routing_input out"
        allowed = info.routing_input != "block" or spec["routing_input"] == "block"
        require(allowed, "routing_input", spec["routing_input"], rule)
    if missing := [key for key, each in accepted.items() if key not in spec and each.default is each.empty]:
        raise ValueError(f"{name}: needs {', '.join(missing)}")
    # Defaults are spelled out, so that a card keeps its meaning when defaults change; None means no choice.
    spec |= {key: each.default for key, each in accepted.items() if key not in spec and each.default is not None}
    layer_options = complete_options(name, options)
    model: Model = made(_LayerFactory(info.layer, layer_options), layer_options["dim"], **spec)
    spec |= {key: getattr(model, key) for key in accepted if key not in spec and getattr(model, key, None) is not None}
    names = {} if class_names is None else {"class_names": list(class_names)}
    card_options = _spell_out(layer_options, model)
    model.card = ModelCard(model=name, spec=spec | names, options=card_options, plugins=_origins(family, info))
    return model


def _spell_out(options: dict[str, Any], model: "Model") -> dict[str, Any]:
    """The options with "auto" replaced by what it stands for in the grid of this model."""
    automatic = [key for key, value in options.items() if value == "auto"]
    if not automatic:
        return options
    config: Any = model.routed_layers()[0].router.config
    return options | {key: getattr(config, key) for key in automatic}


def complete_options(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """All options of a model's layer, checked; defaults are spelled out, so that they keep their meaning.

    Args:
        name: Name of the model.
        options: Options that differ from the defaults.

    Returns:
        The value of each option by name.
    """
    family, info = find_model(name)
    _, known = _layer(info.layer)
    made = _model_class(family, info)
    around = [key for key in inspect.signature(made).parameters if family and key != "make_layer"]
    if family == "gpt":
        if grid := sorted(set(options) & set(FOLLOWS_DEPTH)):
            raise ValueError(
                f"{grid[0]}={options[grid[0]]}: {name} has one grid for all blocks, a layer of it per block; set depth instead"
                " (the form with a grid inside each block is gone)"
            )
        known = {key: each for key, each in known.items() if key not in (*FOLLOWS_DEPTH, "stream")}
    for option, value in options.items():
        if option not in known:
            meant = did_you_mean(option, [*around, *known])
            raise ValueError(f"model option {option}: {name} has no such option; {meant}")
        kind = known[option].annotation
        if kind is not inspect.Parameter.empty:
            require(fits(value, kind), option, repr(value), f"must be {type_words(kind)}")
    own = {key: each.default for key, each in known.items() if each.default is not each.empty}
    in_family = info.in_decoder if family == "gpt" else {}
    by_family = {key: value for key, value in made.layer_defaults.items() if key in known}
    return {
        key: value
        for key, value in (own | info.defaults | by_family | in_family | info.recipe | options).items()
        if key in known
    }


class _LayerFactory:
    """Makes a layer with some options; a family may add how many layers the grid has, and what the router reads."""

    def __init__(self, path: str | type, options: dict[str, Any]) -> None:
        self.path, self.options = path, options

    def __call__(self, num_layers: int | None = None, routing_dim: int | None = None) -> Any:
        make, known = _layer(self.path)
        options = dict(self.options)
        if num_layers is not None:
            options[next(name for name in FOLLOWS_DEPTH if name in known)] = num_layers
        if routing_dim is not None:
            options["routing_dim"] = routing_dim
        return make(**options)


def _layer(path: str | type) -> tuple[Callable[..., Any], dict[str, inspect.Parameter]]:
    """A function that makes a layer, and its options: those of the class, of its config, and of the grid behind a router."""
    from raytraced.layer import routed_layer
    from raytraced.router import Router

    made = _resolve(path)
    known = dict(inspect.signature(made).parameters)
    make = made
    if issubclass(made, Router):
        known = dict(inspect.signature(routed_layer).parameters) | known
        make = partial(routed_layer, made)
    elif hasattr(made, "config_type"):
        known |= inspect.signature(made.config_type).parameters
    return make, {key: each for key, each in known.items() if key not in ("router", "config", "options", "routing_dim")}
