"""Every task by name, and which one a data set belongs to. Importing this file does not import torch."""

from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple

from raytraced.words import did_you_mean

if TYPE_CHECKING:
    from raytraced.data.sources import Entry
    from raytraced.tasks.task import Task


class TaskInfo(NamedTuple):
    """Where a task is, and where its data sets are listed: both "module:NAME" under raytraced.tasks."""

    task: str
    names: str
    takes: str
    """a function that says whether a path holds data of this kind"""


TASKS = {
    "images": TaskInfo("images.task:ImageTask", "images.catalog:CATALOG", "images.catalog:takes_path"),
    "text": TaskInfo("text.task:TextTask", "text.catalog:CATALOG", "text.catalog:takes_path"),
}


def find_task(data: str) -> "Task[Any]":
    """The task that a data set, by its name or path, belongs to."""
    known = {name: task for task, info in TASKS.items() for name in _import(info.names)}
    path = Path(data).expanduser()
    if data not in known and (not data or not path.exists()):
        moved = "if it has moved, say where with --data" if path.is_absolute() else did_you_mean(data, known)
        raise ValueError(f"data={data}: no such data set, nor such a path; {moved}")
    # the first of it is asked for by itself: rglob hides that a folder may not be read
    if (
        data not in known
        and path.is_dir()
        and not (any(path.iterdir()) and any(one.is_file() for one in path.rglob("*")))
    ):
        raise ValueError(f"data={data}: the folder holds no files; see docs/data.md for what it may hold")
    # the last first: images take every folder
    takers = (task for task, info in reversed(TASKS.items()) if _import(info.takes)(path))
    task = known.get(data) or next(takers, None)
    if task is None:
        raise ValueError(f"data={data}: no task can read it; see docs/data.md for what a folder or file may hold")
    return named_task(task)


def whole_path(data: str) -> str:
    """A data set's name as it is, a path from the root on: a run must find its data from anywhere."""
    path = Path(data).expanduser()
    is_name = any(data in _import(info.names) for info in TASKS.values())
    return data if is_name or not path.exists() else str(path.resolve())


def catalog() -> "dict[str, Entry]":
    """What a name stands for, of every task that tells."""
    told = [known for info in TASKS.values() if isinstance(known := _import(info.names), dict)]
    return {name: entry for known in told for name, entry in known.items()}


def named_task(name: str) -> "Task[Any]":
    """A task itself."""
    if name not in TASKS:
        raise ValueError(f"task={name}: no such task; {did_you_mean(name, TASKS)}")
    task: Task[Any] = _import(TASKS[name].task)()
    return task


def _import(path: str) -> Any:
    return resolve_name(f"raytraced.tasks.{path}")
