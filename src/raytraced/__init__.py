"""Mixtures of Raytraced Experts: networks that choose for every sample which experts to run, in which order, how many."""

from importlib import import_module

__version__ = "0.1.0"

TYPE_CHECKING = False  # typing's own takes ten times as long as the rest, in which Ctrl-C is not yet told in one line

# Where each public name lives. They are imported when first used: `raytraced --help` must not wait for torch.
_HOME = {
    "RoutingNetwork": "routing",
    "Rates": "routing",
    "Route": "sequence",
    "stop_losses": "sequence",
    "MLPExperts": "grid",
    "RoutedLayer": "layer",
    "LayerOutput": "layer",
    "HiddenOnly": "layer",
    "activation_sequence": "routers.raytraced",
    "RaytracedExperts": "routers.raytraced",
    "PAPER": "routers.raytraced",
    "Output": "models.output",
    "Model": "models.output",
    "build": "models.table",
    "GPT": "models.gpt",
    "anytime": "stopping",
    "Step": "stopping",
    "load": "saving",
    "save": "saving",
    "replace_feed_forward": "replace",
    "operations": "",
    "rays": "",
}

__all__ = [*_HOME, "__version__"]

if TYPE_CHECKING:
    from raytraced import operations as operations
    from raytraced import rays as rays
    from raytraced.grid import MLPExperts as MLPExperts
    from raytraced.layer import HiddenOnly as HiddenOnly
    from raytraced.layer import LayerOutput as LayerOutput
    from raytraced.layer import RoutedLayer as RoutedLayer
    from raytraced.models.gpt import GPT as GPT
    from raytraced.models.output import Model as Model
    from raytraced.models.output import Output as Output
    from raytraced.models.table import build as build
    from raytraced.replace import replace_feed_forward as replace_feed_forward
    from raytraced.routers.raytraced import PAPER as PAPER
    from raytraced.routers.raytraced import RaytracedExperts as RaytracedExperts
    from raytraced.routers.raytraced import activation_sequence as activation_sequence
    from raytraced.routing import Rates as Rates
    from raytraced.routing import RoutingNetwork as RoutingNetwork
    from raytraced.saving import load as load
    from raytraced.saving import save as save
    from raytraced.sequence import Route as Route
    from raytraced.sequence import stop_losses as stop_losses
    from raytraced.stopping import Step as Step
    from raytraced.stopping import anytime as anytime


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'raytraced' has no attribute {name!r}")
    home = _HOME[name]
    value = getattr(import_module(f"raytraced.{home}"), name) if home else import_module(f"raytraced.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
