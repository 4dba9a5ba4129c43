"""An operation: one plain definition, any number of faster implementations, and the switch that forces one."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, ParamSpec, TypeVar

from raytraced.plugins import Plugin, load_plugin_object

P = ParamSpec("P")
R = TypeVar("R")
Kind = Literal["compiled", "plain", "steps"]

VARIABLE = "RAYTRACED_KERNELS"
OPERATIONS: dict[str, "Operation[Any, Any]"] = {}


class Forced(NamedTuple):
    """What a switch forces: the name or kind of an implementation, for all operations and for single ones."""

    everywhere: str | None = None
    single: Mapping[str, str] = {}  # by the operation's name; goes before `everywhere`

    def then(self, later: "Forced") -> "Forced":
        """Both switches, one inside the other: one for all operations puts an end to all before it."""
        if later.everywhere is not None:
            return later
        return Forced(self.everywhere, {**self.single, **later.single})


_FREE = Forced()
# None until the environment was read, when an operation is first called. A plain global, not a ContextVar: torch.compile can
# read it, and traces again when it changes.
_forced: Forced | None = None
_uses: list[Forced] = []


def _no_reason(*args: Any, **kwargs: Any) -> None:
    return None


@dataclass(frozen=True)
class Implementation(Generic[P, R]):
    """One way to run an operation.

    Args:
        name: The name by which it can be forced.
        run: The function, with the signature of the operation's plain definition.
        kind: "compiled", "plain" (PyTorch's operators) or "steps" (other operations, which choose for themselves).
        unsupported_reason: Called with the same arguments: why this implementation cannot run them, None if it can.
        slower_reason: Called with the same arguments: why a later one in the list is better for them, None if none is.
    """

    name: str
    run: Callable[P, R]
    kind: Kind = "compiled"
    unsupported_reason: Callable[..., str | None] = _no_reason
    slower_reason: Callable[..., str | None] = _no_reason

    @property
    def words(self) -> tuple[str, ...]:
        """The words that force it."""
        return (self.name,) if self.kind == "compiled" else (self.name, self.kind)


class Explanation(NamedTuple):
    """Which implementation takes some arguments, and why those before it do not."""

    name: str  # of the implementation that runs
    reason: str  # why those before it do not


class Operation(Generic[P, R]):
    """Called like a function: runs the first implementation that has no better one and is able to take the arguments.

    Args:
        name: The name by which `use` knows it.
        *implementations: Ways to run it, the preferred one first; the last one takes all arguments.
    """

    def __init__(self, name: str, *implementations: Implementation[P, R]) -> None:
        self.name, self.implementations = name, implementations
        OPERATIONS[name] = self

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        for implementation in self.implementations if _forced == _FREE else self.allowed():
            if implementation.slower_reason(*args, **kwargs) is not None:
                continue
            if implementation.unsupported_reason(*args, **kwargs) is None:
                return implementation.run(*args, **kwargs)
        return self._choose(*args, **kwargs)[0].run(*args, **kwargs)

    def explain(self, *args: P.args, **kwargs: P.kwargs) -> Explanation:
        """Which implementation would run these arguments, and why."""
        implementation, reason = self._choose(*args, **kwargs)
        return Explanation(implementation.name, reason)

    def _choose(self, *args: P.args, **kwargs: P.kwargs) -> tuple[Implementation[P, R], str]:
        able: list[Implementation[P, R]] = []
        refusals: list[str] = []
        for implementation in self.allowed():
            slower = implementation.slower_reason(*args, **kwargs)
            unsupported = implementation.unsupported_reason(*args, **kwargs)
            if slower is None and unsupported is None:
                return implementation, "; ".join(refusals) or "the first choice"
            if unsupported is None:
                able.append(implementation)
            refusals.append(f"not {implementation.name}: {unsupported or slower}")
        if able:
            return able[0], "forced"
        raise ValueError(f"operation {self.name} cannot run as forced ({'; '.join(refusals)}): force nothing, or plain")

    def allowed(self) -> tuple[Implementation[P, R], ...]:
        """The implementations that the switch leaves to choose from."""
        forced = _read_switch()
        if self.name in forced.single:
            return tuple(i for i in self.implementations if forced.single[self.name] in i.words)
        # Steps are operations of their own, which obey; an operation without anything of this name is left free.
        chosen = tuple(i for i in self.implementations if forced.everywhere in i.words or i.kind == "steps")
        return chosen if forced.everywhere and chosen else self.implementations


def forced_reason(*operations: str) -> str | None:
    """Why an implementation that replaces several operations is left aside: one of them is forced, and runs by itself."""
    if _forced == _FREE:
        return None
    single = _read_switch().single
    return next(
        (f"{name}={single[name]} is forced, which this replaces" for name in operations if name in single), None
    )


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


def _read_switch() -> Forced:
    if _forced is None:
        word = os.environ.get(VARIABLE, "")
        _check(VARIABLE, word, OPERATIONS)
        _set_switch([Forced(word)] if word else [])
    assert _forced is not None
    return _forced


def _set_switch(uses: list[Forced]) -> None:
    global _uses, _forced
    _uses, forced = uses, _FREE
    for each in uses:
        forced = forced.then(each)
    _forced = forced


def _check(name: str, word: str, kernels: "dict[str, Operation[Any, Any]]") -> None:
    known = {known for operation in kernels.values() for i in operation.implementations for known in i.words}
    if word and word not in known:
        raise ValueError(f"{name}={word!r}: must be one of {', '.join(sorted(known))}")


@contextmanager
def use(word: str = "", **each: str) -> Iterator[None]:
    """Force implementations inside a `with` block: use("plain") for all operations, use(experts="sparse") for one.

    Args:
        word: Name or kind of an implementation, for all operations; "": each chooses for itself.
        **each: Name or kind of an implementation by the name of an operation.

    Returns:
        A context manager.
    """
    _read_switch()
    _check("use", word, OPERATIONS)
    for name, value in each.items():
        if name not in OPERATIONS:
            raise ValueError(f"{name}={value!r}: is no operation; must be one of {', '.join(OPERATIONS)}")
        _check(name, value, {name: OPERATIONS[name]})
    mine = Forced(word or None, each)
    _set_switch([*_uses, mine])
    try:
        yield
    finally:
        _set_switch([use for use in _uses if use is not mine])  # another thread may have begun one, and not ended it
