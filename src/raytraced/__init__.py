"""Mixtures of Raytraced Experts: networks that choose for every sample which experts to run, in which order, how many.

Layers
    RaytracedExperts       a layer of experts that decides for every input vector which of them run
    RaytracedConfig        the options of such a layer; PAPER holds those of the paper
    RoutedLayer            the base class of this layer and of the baselines; LayerOutput is what it returns
    MLPExperts             the experts of a layer
    replace_feed_forward   replaces the feed-forward blocks of your model by such layers; HiddenOnly adapts their output

Models
    build, load, save      make a model by name, load a trained one, save it
    Model, Output, GPT     the base class of models, what they return, and the language model
    from_pretrained, save_pretrained, push_to_hub    share models through the Hugging Face Hub

Early exit
    anytime                the answers of a model after every step, best so far; Step is one of them
    ExitPolicy             when a sample leaves: confidence, number of experts, deadline

The paper's mathematics
    RoutingNetwork, Rates  the routing network and its firing rates
    activation_sequence, Route, stop_losses    the sequence of active nodes, its result, and the loss on its length
    rays                   simulated rays, which check the firing rates

    kernels                compiled operations, and the switch between them and plain PyTorch
    load_plugin            runs a file that defines routers, tasks, data sets or kernels

Names are imported when they are first used. The command line is described by `raytraced --help`.
"""

from importlib import import_module

__version__ = "0.2.0"

TYPE_CHECKING = False  # typing.TYPE_CHECKING would cost an import before Ctrl-C is handled

# The public names of each file; no names: the file itself. They are imported when first used: `raytraced --help` must not
# wait for torch.
_HOMES = {
    "plugins": ("load_plugin",),
    "routing": ("RoutingNetwork", "Rates"),
    "sequence": ("Route", "stop_losses"),
    "experts": ("MLPExperts",),
    "layer": ("RoutedLayer", "LayerOutput"),
    "routers.raytraced": ("activation_sequence", "RaytracedExperts"),
    "routers.raytraced_config": ("RaytracedConfig",),
    "early_exit": ("ExitPolicy",),
    "models.output": ("Output", "Model"),
    "models.registry": ("build", "PAPER"),
    "models.gpt": ("GPT",),
    "models.anytime": ("anytime", "Step"),
    "io.saving": ("load", "save"),
    "io.hub": ("from_pretrained", "save_pretrained", "push_to_hub"),
    "integrations.replace": ("HiddenOnly", "replace_feed_forward"),
    "kernels": (),
    "rays": (),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names or (home,)}

__all__ = [*_HOME_OF, "__version__"]

if TYPE_CHECKING:
    from raytraced import kernels as kernels
    from raytraced import rays as rays
    from raytraced.early_exit import ExitPolicy as ExitPolicy
    from raytraced.experts import MLPExperts as MLPExperts
    from raytraced.integrations.replace import HiddenOnly as HiddenOnly
    from raytraced.integrations.replace import replace_feed_forward as replace_feed_forward
    from raytraced.io.hub import from_pretrained as from_pretrained
    from raytraced.io.hub import push_to_hub as push_to_hub
    from raytraced.io.hub import save_pretrained as save_pretrained
    from raytraced.io.saving import load as load
    from raytraced.io.saving import save as save
    from raytraced.layer import LayerOutput as LayerOutput
    from raytraced.layer import RoutedLayer as RoutedLayer
    from raytraced.models.anytime import Step as Step
    from raytraced.models.anytime import anytime as anytime
    from raytraced.models.gpt import GPT as GPT
    from raytraced.models.output import Model as Model
    from raytraced.models.output import Output as Output
    from raytraced.models.registry import PAPER as PAPER
    from raytraced.models.registry import build as build
    from raytraced.plugins import load_plugin as load_plugin
    from raytraced.routers.raytraced import RaytracedExperts as RaytracedExperts
    from raytraced.routers.raytraced import activation_sequence as activation_sequence
    from raytraced.routers.raytraced_config import RaytracedConfig as RaytracedConfig
    from raytraced.routing import Rates as Rates
    from raytraced.routing import RoutingNetwork as RoutingNetwork
    from raytraced.sequence import Route as Route
    from raytraced.sequence import stop_losses as stop_losses


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'raytraced' has no attribute {name!r}")
    home = import_module(f"raytraced.{_HOME_OF[name]}")
    value = getattr(home, name) if _HOMES[_HOME_OF[name]] else home
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
