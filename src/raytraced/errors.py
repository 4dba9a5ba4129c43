"""The words of an error: what was given, the rule, and what was probably meant."""

import difflib
from collections.abc import Callable, Iterable
from numbers import Integral
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

E = TypeVar("E", bound=Exception)
NOT_FINITE = "its weights are not finite: training diverged, or the file is damaged; train it again"

TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null",
         dict: "a table of names and values", tuple: "a list of numbers"}  # fmt: skip
MAX_THREADS = 1024


class DivergedError(ValueError):
    """The answers of a model are not finite."""


def require(holds: bool, name: str, value: object, rule: str) -> None:
    """Refuse an option, naming it, its value and the rule."""
    if not holds:
        raise ValueError(f"{name}={value}: {rule}")


def check_budget(max_experts: int | None) -> None:
    """Refuse a budget that is not a whole number of experts, at least 0."""
    is_number = isinstance(max_experts, Integral) and not isinstance(max_experts, bool)
    fits = max_experts is None or (is_number and max_experts >= 0)
    require(fits, "max_experts", repr(max_experts), "must be a whole number, at least 0, or None for no budget")


def check_seed(seed: int) -> None:
    """Refuse a seed that generators do not take."""
    require(0 <= seed < 2**63, "seed", seed, "must lie in 0 … 2**63 - 1")


def check_threads(threads: int | None) -> None:
    """Refuse a number of CPU threads that ends the process: an operating system cannot start millions."""
    fits = threads is None or 1 <= threads <= MAX_THREADS
    require(fits, "threads", threads, f"must lie in 1 … {MAX_THREADS}; the number of cores is a good choice")


def require_one_of(name: str, value: object, allowed: Iterable[str]) -> None:
    """Refuse a word that is not one of those allowed."""
    allowed = tuple(allowed)
    require(value in allowed, name, repr(value), f"must be one of {', '.join(allowed)}")


def fits(value: object, kind: Any) -> bool:
    """Whether a value may be given for an annotation."""
    if type(value) is kind:
        return True
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        return any(fits(value, member) for member in get_args(kind))
    if get_origin(kind) is Callable:
        return callable(value)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if get_origin(kind) is tuple:  # a list, where it was read from a file or the command line
        members = get_args(kind)
        return isinstance(value, list | tuple) and len(value) == len(members) and all(map(fits, value, members))
    return type(value) is get_origin(kind)


def type_words(kind: Any) -> str:
    """An annotation in a user's words."""
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(map(type_words, get_args(kind)))
    return "a function" if get_origin(kind) is Callable else TYPES.get(get_origin(kind) or kind, str(kind))


def with_notes(error: E, notes: Iterable[str]) -> E:
    """Add details to an error, one line each; the command line prints them below the error's own line.

    Args:
        error: The error, whose text is one line.
        notes: Further lines, such as each file that could not be read.

    Returns:
        The same error, to be raised.
    """
    for note in notes:
        error.add_note(note)
    return error


def install_extra(extra: str) -> str:
    """The command that installs an extra of this package: pip finds extras by name only on an index, which has no raytraced."""
    return f"pip install '.[{extra}]' in a clone of raytraced"


def did_you_mean(
    word: str, known: Iterable[str], otherwise: str | None = None, shown: Callable[[str], str] = str
) -> str:
    """The end of an error message: the nearest known word, as it is shown, else all of them."""
    names = {name.replace("_", "-"): name for name in known}
    close = difflib.get_close_matches(word.replace("_", "-"), names, n=1)
    return (
        f"did you mean {shown(names[close[0]])}?"
        if close
        else otherwise or f"must be one of {', '.join(names.values())}"
    )


def printable(text: object) -> str:
    """Escape what a terminal would obey: control characters, and those that reorder or hide text, as \\x1b or \\u202e.

    Args:
        text: Names and messages that may hold what a file, a card or a folder made up.

    Returns:
        One line; letters of all scripts stay as they are, a byte of a file's name that is no letter is shown as \\xe9.
    """
    return "".join(one if one.isprintable() else _escaped(one) for one in str(text))


def _escaped(one: str) -> str:
    """A character as an escape; Python holds an odd byte of a file's name as a character from U+DC80 to U+DCFF."""
    is_byte = "\udc80" <= one <= "\udcff"
    return f"\\x{ord(one) - 0xDC00:02x}" if is_byte else one.encode("unicode_escape").decode()
