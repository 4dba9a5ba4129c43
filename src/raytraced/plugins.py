"""Code from outside the package: routers, tasks, data sets and kernels of installed packages and of files.

A package names what it offers as entry points of the groups in `ENTRY_POINT_GROUPS`. A file, named by `--plugin FILE` or
`load_plugin`, defines tables of the same kind: `ROUTERS = {"positive": Positive}`. Only what is installed or named is ever
imported, never what a model file or its card asks for. Importing this file does not import torch.
"""

import sys
import warnings
from collections.abc import Callable, Collection, Iterable
from functools import cache
from importlib import util
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, NamedTuple

from raytraced.errors import did_you_mean, printable

ENTRY_POINT_GROUPS = {
    "router": "raytraced.routers",
    "task": "raytraced.tasks",
    "dataset": "raytraced.datasets",
    "kernel": "raytraced.kernels",
}
TABLES = {"ROUTERS": "router", "TASKS": "task", "DATASETS": "dataset", "KERNELS": "kernel"}
"""names of the tables in a file, and the kind of what they hold"""


class Plugin(NamedTuple):
    """One thing from outside the package."""

    kind: str
    """router, task, dataset or kernel"""
    name: str
    """by which it is asked for"""
    origin: str
    """what a user needs to have it: "package NAME VERSION", "file NAME" or "code", of a running program"""
    load: Callable[[], Any]
    """imports what it needs and returns the thing itself"""


_registered: dict[str, dict[str, Plugin]] = {kind: {} for kind in ENTRY_POINT_GROUPS}
_subscribers: dict[str, list[Callable[[Plugin], None]]] = {kind: [] for kind in ENTRY_POINT_GROUPS}


def register(kind: str, name: str, thing: Any, origin: str = "code") -> None:
    """Make a router, a task, a data set or a kernel known by name, in this process.

    Args:
        kind: "router", "task", "dataset" or "kernel".
        name: Its name. A second registration of a name replaces the first.
        thing: A subclass of Router or of Task, an entry of a catalogue, or an Implementation.
        origin: What a user needs to have it; models that use it state this in their card.
    """
    if kind not in ENTRY_POINT_GROUPS:
        raise ValueError(f"kind={kind}: no such kind of plugin; {did_you_mean(kind, ENTRY_POINT_GROUPS)}")
    plugin = Plugin(kind, name, origin, lambda: thing)
    for subscriber in _subscribers[kind]:
        subscriber(plugin)
    _registered[kind][name] = plugin


def load_plugin(path: str | Path) -> None:
    """Run a Python file and register what its tables ROUTERS, TASKS, DATASETS and KERNELS hold.

    Args:
        path: The file. Its code runs with all rights of this process.

    Raises:
        ValueError: The file is missing, fails, or has none of these tables.
    """
    file = Path(path)
    if not file.is_file() or file.suffix != ".py":
        raise ValueError(f"plugin={path}: must be an existing Python file, with the suffix .py")
    name = f"raytraced_plugin_{file.stem}"
    spec = util.spec_from_file_location(name, file.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules[name] = module  # as import does: dataclasses and pickle look a class's module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ValueError(f"plugin={path}: cannot be loaded ({describe_failure(error)}); fix the file") from error
    tables = {kind: getattr(module, table) for table, kind in TABLES.items() if hasattr(module, table)}
    if not tables:
        raise ValueError(f"plugin={path}: defines none of {', '.join(TABLES)}; add a table of names and classes")
    for kind, table in tables.items():
        if not isinstance(table, dict):
            raise ValueError(f"plugin={path}: its table of {kind}s is no dictionary; must hold names and values")
        for each, thing in table.items():
            if not isinstance(each, str) or not each:
                raise ValueError(f"plugin={path}: its table of {kind}s has the name {each!r}; names must be texts")
            register(kind, each, thing, f"file {file.name}")


def describe_failure(error: BaseException) -> str:
    """An error of somebody else's code as part of a line."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@cache
def _installed(kind: str) -> dict[str, Plugin]:
    """What installed packages offer, by name; nothing is imported."""

    def plugin(point: EntryPoint) -> Plugin:
        package = f"{point.dist.name} {point.dist.version}" if point.dist else point.module
        return Plugin(kind, point.name, f"package {package}", point.load)

    return {point.name: plugin(point) for point in entry_points(group=ENTRY_POINT_GROUPS[kind])}


def plugin_names(kind: str) -> list[str]:
    """The names of all plugins of a kind; nothing is imported."""
    return list(_installed(kind) | _registered[kind])


def find_plugin(kind: str, name: str) -> tuple[Any, str] | None:
    """A plugin by its name.

    Args:
        kind: "router", "task", "dataset" or "kernel".
        name: The name.

    Returns:
        The thing itself and its origin, or None where no plugin has this name.
    """
    plugin = _registered[kind].get(name) or _installed(kind).get(name)
    return None if plugin is None else (load_plugin_object(plugin), plugin.origin)


def all_plugins(kind: str) -> dict[str, tuple[Any, str]]:
    """All plugins of a kind, by name, with their origin; one that cannot be loaded is left out, with a warning."""
    found = {}
    for plugin in (_installed(kind) | _registered[kind]).values():
        try:
            found[plugin.name] = (load_plugin_object(plugin), plugin.origin)
        except ValueError as error:
            warnings.warn(f"{error}; it is left out", RuntimeWarning, stacklevel=2)
    return found


def on_register(kind: str, subscriber: Callable[[Plugin], None]) -> None:
    """Call a function for every plugin of a kind that is registered from now on; it may refuse with a ValueError."""
    _subscribers[kind].append(subscriber)


def refuse_taken_name(table: Collection[str]) -> Callable[[Plugin], None]:
    """A subscriber that refuses plugins with a name that a table of the package has."""

    def refuse(plugin: Plugin) -> None:
        if plugin.name in table:
            raise ValueError(f"{plugin.kind} {plugin.name} of {plugin.origin}: raytraced has this name; choose another")

    return refuse


def subscribe(kind: str, subscriber: Callable[[Plugin], None]) -> None:
    """Call a function for every plugin of a kind: those that are known, and those that are registered later."""
    on_register(kind, subscriber)
    for plugin in (_installed(kind) | _registered[kind]).values():
        try:
            subscriber(plugin)
        except ValueError as error:
            warnings.warn(f"{error}; it is left out", RuntimeWarning, stacklevel=2)


def load_plugin_object(plugin: Plugin) -> Any:
    """The thing itself; whatever goes wrong in its code becomes one line."""
    try:
        return plugin.load()
    except Exception as error:
        text = f"{plugin.kind} {plugin.name} of {plugin.origin}: cannot be loaded ({describe_failure(error)})"
        raise ValueError(text) from error


def missing_plugins(origins: Iterable[str]) -> str:
    """The end of an error message: what a model needs that is not here, and how to give it."""
    remedies = []
    for origin in origins:
        kind, _, name = printable(origin).partition(" ")
        if kind == "package":
            remedies.append(f"needs the package {name}: install it")
        elif kind == "file":
            remedies.append(f"needs the file {name}: give it with --plugin, or raytraced.load_plugin in Python")
        else:
            remedies.append("was made by code that called raytraced.plugins.register: run that code first")
    return "; ".join(remedies)
