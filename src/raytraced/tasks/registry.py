"""Every task by name, and the task of a data set. Importing this file does not import torch."""

from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple

from raytraced.errors import did_you_mean
from raytraced.models.card import ModelCard

if TYPE_CHECKING:
    from raytraced.data.sources import Entry
    from raytraced.tasks.task import Task


class TaskInfo(NamedTuple):
    """Where a task and its catalogue are, as "module:NAME" under raytraced.tasks."""

    task: str
    names: str
    takes: str
    """a function that decides whether a path holds data of this task"""


TASKS = {
    "images": TaskInfo("images.task:ImageTask", "images.catalog:CATALOG", "images.catalog:takes_path"),
    "text": TaskInfo("text.task:TextTask", "text.catalog:CATALOG", "text.catalog:takes_path"),
}


def find_task(data: str) -> "Task[Any]":
    """Find the task of a data set.

    Args:
        data: Name or path of a data set.

    Returns:
        The task.
    """
    known = {name: task for task, info in TASKS.items() for name in _import(info.names)}
    path = Path(data).expanduser()
    if data not in known and (not data or not path.exists()):
        remedy = "give the path of existing data with --data" if path.is_absolute() else did_you_mean(data, known)
        raise ValueError(f"data={data}: no such data set, file or folder; {remedy}")
    # iterdir first: rglob hides that a folder may not be read
    if (
        data not in known
        and path.is_dir()
        and not (any(path.iterdir()) and any(one.is_file() for one in path.rglob("*")))
    ):
        raise ValueError(f"data={data}: the folder holds no files; see docs/guides/data.md for what it may hold")
    # The last task first: images take every folder.
    takers = (task for task, info in reversed(TASKS.items()) if _import(info.takes)(path))
    task = known.get(data) or next(takers, None)
    if task is None:
        raise ValueError(
            f"data={data}: no task can read it; see docs/guides/data.md for what a folder or file may hold"
        )
    return named_task(task)


def is_catalogued(data: str | None) -> bool:
    """Whether a name is that of a data set in the catalogue."""
    return data is not None and any(data in _import(info.names) for info in TASKS.values())


def whole_path(data: str) -> str:
    """A catalogued name as it is, a path as an absolute one: a run must find its data from any folder."""
    path = Path(data).expanduser()
    return data if is_catalogued(data) or not path.exists() else str(path.resolve())


def catalog() -> "dict[str, Entry]":
    """The catalogue's entries by name, of every task that has entries."""
    catalogs = [names for info in TASKS.values() if isinstance(names := _import(info.names), dict)]
    return {name: entry for names in catalogs for name, entry in names.items()}


def catalogued_data(card: ModelCard) -> str | None:
    """The data set that a model's card names, if the catalogue has it; anything else in a card is never opened.

    A card comes with a model file from somebody else: if its text were used as a path, the file could choose what this
    machine reads. To use other data, pass its path on the command line.

    Args:
        card: The card of a loaded model.

    Returns:
        A name that `find_task` knows, or None where the card names no data set, a path, or one that is not catalogued.
    """
    return card.data if is_catalogued(card.data) else None


def named_task(name: str) -> "Task[Any]":
    """The task of a name."""
    if name not in TASKS:
        raise ValueError(f"task={name}: no such task; {did_you_mean(name, TASKS)}")
    task: Task[Any] = _import(TASKS[name].task)()
    return task


def _import(path: str) -> Any:
    return resolve_name(f"raytraced.tasks.{path}")
