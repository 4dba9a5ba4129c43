"""Mixtures of Raytraced Experts: networks that choose for every sample which experts to run, in which order, how many."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Where each public name lives. They are imported when first used: `raytraced --help` must not wait for torch.
_HOME = {
    "RoutingNetwork": "routing",
    "Rates": "routing",
    "activation_sequence": "sequence",
    "Sequence": "sequence",
    "MLPExperts": "experts",
    "RaytracedExperts": "layer",
    "LayerOutput": "layer",
    "HiddenOnly": "layer",
    "RaytracedClassifier": "classifier",
    "Output": "classifier",
    "preset": "classifier",
    "anytime": "prefixes",
    "Step": "prefixes",
    "rays": "",
    "load": "saving",
}

__all__ = [*_HOME, "__version__"]

if TYPE_CHECKING:
    from raytraced import rays as rays
    from raytraced.classifier import Output as Output
    from raytraced.classifier import RaytracedClassifier as RaytracedClassifier
    from raytraced.classifier import preset as preset
    from raytraced.experts import MLPExperts as MLPExperts
    from raytraced.layer import HiddenOnly as HiddenOnly
    from raytraced.layer import LayerOutput as LayerOutput
    from raytraced.layer import RaytracedExperts as RaytracedExperts
    from raytraced.prefixes import Step as Step
    from raytraced.prefixes import anytime as anytime
    from raytraced.routing import Rates as Rates
    from raytraced.routing import RoutingNetwork as RoutingNetwork
    from raytraced.saving import load as load
    from raytraced.sequence import Sequence as Sequence
    from raytraced.sequence import activation_sequence as activation_sequence


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'raytraced' has no attribute {name!r}")
    home = _HOME[name]
    value = getattr(import_module(f"raytraced.{home}"), name) if home else import_module(f"raytraced.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
