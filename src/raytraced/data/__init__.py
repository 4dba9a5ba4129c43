"""Data sets and batches: `load(name)` gives a `Dataset`, `Loader` the batches of one of its splits."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .dataset import Dataset, Split
    from .loader import Batch, Loader
    from .loading import load

__all__ = ["Batch", "Dataset", "Loader", "Split", "load"]

# The command line imports this package for its signatures: torch is loaded when a name is first used, not before.
_HOMES = {"Batch": "loader", "Dataset": "dataset", "Loader": "loader", "Split": "dataset", "load": "loading"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
