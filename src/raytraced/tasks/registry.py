"""Every task by name, and the task of a data set. Importing this file does not import torch."""

from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple

from raytraced.errors import did_you_mean, printable
from raytraced.models.card import ModelCard
from raytraced.plugins import (
    all_plugins,
    find_plugin,
    missing_plugins,
    on_register,
    plugin_names,
    refuse_taken_name,
)

if TYPE_CHECKING:
    from raytraced.data.sources import Entry
    from raytraced.tasks.task import Task


class TaskInfo(NamedTuple):
    """A task and its catalogue, each as "module:NAME" under raytraced.tasks, or as the object itself."""

    task: Any
    names: Any
    takes: Any
    """a function that decides whether a path holds data of this task"""


TASKS = {
    "images": TaskInfo("images.task:ImageTask", "images.catalog:CATALOG", "images.catalog:takes_path"),
    "text": TaskInfo("text.task:TextTask", "text.catalog:CATALOG", "text.catalog:takes_path"),
}


on_register("task", refuse_taken_name(TASKS))


def all_tasks() -> dict[str, TaskInfo]:
    """The tasks of the package and of plugins, by name."""
    from_outside = {name: plugin_task(name, task, origin) for name, (task, origin) in all_plugins("task").items()}
    return TASKS | {name: info for name, info in from_outside.items() if name not in TASKS}


def plugin_task(name: str, task: Any, origin: str) -> TaskInfo:
    """A plugin's task as a line of the table."""
    from raytraced.tasks.task import Task

    if not (isinstance(task, type) and issubclass(task, Task)):
        raise ValueError(f"task {name} of {origin}: is {task!r:.60}; must be a subclass of raytraced.tasks.task.Task")
    if task.name != name:
        raise ValueError(f"task {name} of {origin}: its class says name = {task.name!r}; must be the same name")
    return TaskInfo(task, task.data_names, task.takes_path)


def find_task(data: str) -> "Task[Any]":
    """Find the task of a data set.

    Args:
        data: Name or path of a data set.

    Returns:
        The task.
    """
    tasks = TASKS if is_built_in(data) else all_tasks()
    known = {name: task for task, info in tasks.items() for name in data_names(info)}
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
    takers = (task for task, info in reversed(tasks.items()) if _import(info.takes)(path))
    task = known.get(data) or next(takers, None)
    if task is None:
        raise ValueError(
            f"data={data}: no task can read it; see docs/guides/data.md for what a folder or file may hold"
        )
    return named_task(task)


def is_built_in(data: str | None) -> bool:
    """Whether a name is that of a data set that raytraced itself lists."""
    return data is not None and any(data in _import(info.names) for info in TASKS.values())


def data_names(info: TaskInfo) -> Any:
    """The names of a task's data sets; data sets of plugins are added to the catalogue first."""
    names = _import(info.names)
    if isinstance(names, dict) and names:
        for name in plugin_names("dataset"):
            if name not in names and (entry := plugin_entry(name)) is not None and takes_entry(names, entry):
                names[name] = entry
    return names


def plugin_entry(name: str) -> "Entry | None":
    """A plugin's data set as an entry of a catalogue."""
    from raytraced.data.sources import Entry, PublicSet

    found = find_plugin("dataset", name)
    if found is None:
        return None
    thing, origin = found
    if isinstance(thing, PublicSet):
        thing = Entry(f"{thing.num_bytes / 1e6:.1f} MB, of {origin}", (thing,))
    if not (isinstance(thing, Entry) and thing.parts):
        rule = "must be an ImageSet, a text of public_text, or an Entry of them"
        raise ValueError(f"dataset {name} of {origin}: is {thing!r:.60}; {rule}")
    return thing


def takes_entry(names: "dict[str, Entry]", entry: "Entry") -> bool:
    """Whether an entry belongs into a catalogue: its data is of the kind of those in it."""
    kinds = tuple({type(part) for known in names.values() for part in known.parts})
    return all(isinstance(part, kinds) for part in entry.parts)


def is_catalogued(data: str | None) -> bool:
    """Whether a name is that of a data set in the catalogue, or of a plugin."""
    return is_built_in(data) or (data is not None and any(data in data_names(info) for info in all_tasks().values()))


def whole_path(data: str) -> str:
    """A catalogued name as it is, a path as an absolute one: a run must find its data from any folder."""
    path = Path(data).expanduser()
    return data if is_catalogued(data) or not path.exists() else str(path.resolve())


def catalog() -> "dict[str, Entry]":
    """The catalogue's entries by name, of every task that has entries."""
    catalogs = [names for info in all_tasks().values() if isinstance(names := data_names(info), dict)]
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


def named_task(name: str, plugins: Sequence[str] = ()) -> "Task[Any]":
    """The task of a name.

    Args:
        name: The name, as a card has it.
        plugins: What the card says that the model needs, for the error message.

    Returns:
        The task.
    """
    tasks = TASKS if name in TASKS else all_tasks()
    if name not in tasks:
        remedy = f"the model {missing_plugins(plugins)}" if plugins else did_you_mean(name, tasks)
        raise ValueError(f"task={printable(name)}: no such task; {remedy}")
    task: Task[Any] = _import(tasks[name].task)()
    return task


def task_origin(name: str) -> str | None:
    """The package or file that a task comes from; None for those of raytraced."""
    found = None if name in TASKS else find_plugin("task", name)
    return None if found is None else found[1]


def _import(path: Any) -> Any:
    return resolve_name(f"raytraced.tasks.{path}") if isinstance(path, str) else path
