"""An operation: one plain definition, any number of faster implementations, and the switch that forces one."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

from raytraced.plugins import Plugin, load_plugin_object

P = ParamSpec("P")
R = TypeVar("R")

VARIABLE = "RAYTRACED_KERNELS"
OPERATIONS: dict[str, "Operation[Any, Any]"] = {}
# What is forced: a word for an operation's name, or for all of them under ""; None until the environment was read, when an
# operation is first called. A plain global, not a ContextVar: torch.compile can read it, and traces again when it changes.
_forced: dict[str, str] | None = None
_uses: list[dict[str, str]] = []


def _no_reason(*args: Any, **kwargs: Any) -> None:
    return None


@dataclass(frozen=True)
class Implementation(Generic[P, R]):
    """One way to run an operation, with the signature of its plain definition."""

    name: str
    run: Callable[P, R]
    kind: str = ""  # "plain": PyTorch's operators; "steps": other operations; nothing: compiled
    unsupported_reason: Callable[..., str | None] = (
        _no_reason  # why it is unable to take these arguments, None if it is able
    )
    slower_reason: Callable[..., str | None] = (
        _no_reason  # why one after it is better for them, None if there is no reason
    )
    parts: tuple[str, ...] = ()  # operations that it does itself: it does not run where one of those is forced
    declines: bool = False  # `run` itself gives NotImplemented where it cannot: to ask before would take too long


class Explanation(NamedTuple):
    """Which implementation takes some arguments, and why those before it do not."""

    name: str
    reason: str


class Operation(Generic[P, R]):
    """Called like a function: runs the first implementation that has no better one and is able to take the arguments."""

    def __init__(self, name: str, *implementations: Implementation[P, R]) -> None:
        self.name, self.implementations = name, implementations
        OPERATIONS[name] = self

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        for implementation in self.implementations if _forced == {} else self.allowed():
            if implementation.slower_reason(*args, **kwargs) is not None:
                continue
            if implementation.declines or implementation.unsupported_reason(*args, **kwargs) is None:
                result = implementation.run(*args, **kwargs)
                if result is not NotImplemented:
                    return result
        return self._choose(*args, **kwargs)[0].run(*args, **kwargs)

    def explain(self, *args: P.args, **kwargs: P.kwargs) -> Explanation:
        """Which implementation would run these arguments, and why."""
        implementation, reason = self._choose(*args, **kwargs)
        return Explanation(implementation.name, reason)

    def _choose(self, *args: P.args, **kwargs: P.kwargs) -> tuple[Implementation[P, R], str]:
        able: list[Implementation[P, R]] = []
        refusals: list[str] = []
        for implementation in self.allowed():
            better, unable = (
                implementation.slower_reason(*args, **kwargs),
                implementation.unsupported_reason(*args, **kwargs),
            )
            if better is None and unable is None:
                return implementation, "; ".join(refusals) or "the first choice"
            if unable is None:
                able.append(implementation)
            refusals.append(f"not {implementation.name}: {unable or better}")
        if able:
            return able[0], "forced"
        raise ValueError(f"operation {self.name} cannot run as forced ({'; '.join(refusals)}): force nothing, or plain")

    def allowed(self) -> tuple[Implementation[P, R], ...]:
        """The implementations that the switch leaves to choose from."""
        forced = _read_switch()
        word = forced.get(self.name)
        if word is not None:
            return tuple(i for i in self.implementations if word in (i.name, i.kind))
        # Steps are operations of their own, which obey; an operation without anything of this name is left free.
        word = forced.get("")
        free = tuple(i for i in self.implementations if not any(part in forced for part in i.parts))
        chosen = tuple(i for i in free if word in (i.name, i.kind) or i.kind == "steps")
        return chosen if word and chosen else free


def add_plugin(plugin: Plugin) -> None:
    """Put a plugin's implementation first in the list of the operation that its name "OPERATION.NAME" begins with."""
    target, _, name = plugin.name.partition(".")
    about = f"kernel {plugin.name} of {plugin.origin}"
    if target not in OPERATIONS or not name:
        operations = ", ".join(OPERATIONS)
        raise ValueError(f"{about}: must be named OPERATION.NAME, with one of the operations {operations}")
    thing = load_plugin_object(plugin)
    if not isinstance(thing, Implementation) or thing.name != name:
        raise ValueError(f"{about}: is {thing!r:.60}; must be an Implementation with the name {name!r}")
    operation = OPERATIONS[target]
    operation.implementations = (thing, *(one for one in operation.implementations if one.name != name))


def _read_switch() -> dict[str, str]:
    if _forced is None:
        word = os.environ.get(VARIABLE, "")
        _check(VARIABLE, word, OPERATIONS)
        _set_switch([{"": word}] if word else [])
    assert _forced is not None
    return _forced


def _set_switch(uses: list[dict[str, str]]) -> None:
    """The last word counts: one for all operations puts an end to all before it."""
    global _uses, _forced
    _uses, _forced = uses, {}
    for each in uses:
        _forced = each if "" in each else {**_forced, **each}


def _check(name: str, word: str, kernels: "dict[str, Operation[Any, Any]]") -> None:
    every = [i for operation in kernels.values() for i in operation.implementations]
    known = sorted({word for i in every for word in (i.name, i.kind)} - {""})
    if word and word not in known:
        raise ValueError(f"{name}={word!r}: must be one of {', '.join(known)}")


@contextmanager
def use(word: str = "", **each: str) -> Iterator[None]:
    """Force implementations by name or kind: use("plain") for all operations, use(experts="sparse") for one."""
    _read_switch()
    _check("use", word, OPERATIONS)
    for name, value in each.items():
        if name not in OPERATIONS:
            raise ValueError(f"{name}={value!r}: is no operation; must be one of {', '.join(OPERATIONS)}")
        _check(name, value, {name: OPERATIONS[name]})
    mine = {"": word, **each} if word else each
    _set_switch([*_uses, mine])
    try:
        yield
    finally:
        _set_switch([use for use in _uses if use is not mine])  # another thread may have begun one, and not ended it
