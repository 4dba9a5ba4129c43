"""Every task by name, and which one a data set belongs to. Importing this file does not import torch."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from raytraced.words import did_you_mean

if TYPE_CHECKING:
    from raytraced.tasks.task import Task


class TaskInfo(NamedTuple):
    """Where a task is, and where its data sets are listed: both "module:NAME" under raytraced.tasks."""

    task: str
    names: str
    takes: str
    """a function that says whether a path holds data of this kind"""


TASKS = {"images": TaskInfo("images.task:ImageTask", "images.catalog:CATALOG", "images.catalog:takes_path")}


def find_task(data: str) -> "Task[Any]":
    """The task that a data set, by its name or path, belongs to."""
    names: list[str] = []
    for info in TASKS.values():
        known = _import(info.names)
        names += known
        if data in known:
            return named_task(info)
    path = Path(data).expanduser()
    if path.exists():
        for info in TASKS.values():
            if _import(info.takes)(path):
                return named_task(info)
        raise ValueError(f"data={data}: no task can read it; see docs/data.md for what a folder or file may hold")
    moved = "if it has moved, say where with --data" if path.is_absolute() else did_you_mean(data, names)
    raise ValueError(f"data={data}: no such data set, nor such a path; {moved}")


def whole_path(data: str) -> str:
    """A data set's name as it is, a path from the root on: a run must find its data from anywhere."""
    path = Path(data).expanduser()
    is_name = any(data in _import(info.names) for info in TASKS.values())
    return data if is_name or not path.exists() else str(path.resolve())


def named_task(name: "str | TaskInfo") -> "Task[Any]":
    """A task itself."""
    info = TASKS[name] if isinstance(name, str) else name
    task: Task[Any] = _import(info.task)()
    return task


def _import(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(import_module(f"raytraced.tasks.{module}"), attribute)
