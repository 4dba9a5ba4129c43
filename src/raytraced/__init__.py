"""Mixtures of Raytraced Experts: networks that choose for every sample which experts to run, in which order, how many."""

from importlib import import_module

__version__ = "0.1.0"

TYPE_CHECKING = False  # typing's own takes ten times as long as the rest, in which Ctrl-C is not yet told in one line

# The public names of each file; no names: the file itself. They are imported when first used: `raytraced --help` must not
# wait for torch.
_HOMES = {
    "routing": ("RoutingNetwork", "Rates"),
    "sequence": ("Route", "stop_losses"),
    "grid": ("MLPExperts",),
    "layer": ("RoutedLayer", "LayerOutput"),
    "routers.raytraced": ("activation_sequence", "RaytracedExperts"),
    "models.output": ("Output", "Model"),
    "models.table": ("build", "PAPER"),
    "models.gpt": ("GPT",),
    "stopping": ("anytime", "Step"),
    "saving": ("load", "save"),
    "replace": ("HiddenOnly", "replace_feed_forward"),
    "operations": (),
    "rays": (),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names or (home,)}

__all__ = [*_HOME_OF, "__version__"]

if TYPE_CHECKING:
    from raytraced import operations as operations
    from raytraced import rays as rays
    from raytraced.grid import MLPExperts as MLPExperts
    from raytraced.layer import LayerOutput as LayerOutput
    from raytraced.layer import RoutedLayer as RoutedLayer
    from raytraced.models.gpt import GPT as GPT
    from raytraced.models.output import Model as Model
    from raytraced.models.output import Output as Output
    from raytraced.models.table import PAPER as PAPER
    from raytraced.models.table import build as build
    from raytraced.replace import HiddenOnly as HiddenOnly
    from raytraced.replace import replace_feed_forward as replace_feed_forward
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
    if name not in _HOME_OF:
        raise AttributeError(f"module 'raytraced' has no attribute {name!r}")
    home = import_module(f"raytraced.{_HOME_OF[name]}")
    value = getattr(home, name) if _HOMES[_HOME_OF[name]] else home
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
