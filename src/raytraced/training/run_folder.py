"""The folder of one run: its files, and how a new folder is made without overwriting another.

config.yaml          the options of the run
continuations.jsonl  one line for each time it was continued with other options
metrics.jsonl        one line per epoch
last/                the two newest checkpoints
best/                model.safetensors of the epoch with the best figure on validation data
model.safetensors    the trained model, with its configuration inside
summary.json         the figures of the finished run
curves.png           loss, experts and the task's figures over the epochs
sequences.png        activation sequences of some test data (raytraced models)
events/              for TensorBoard, if it is installed
trackers.json        which runs of other trackers are this one, and how many epochs they have
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from uuid import uuid4

from raytraced.errors import did_you_mean
from raytraced.files import flush_folder, lock_file, remove_leftovers, write_file
from raytraced.training.config import TrainConfig, read_config, write_config


class RunFolder:
    """Paths of a run's files; reads and writes the small text files.

    Args:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last = path / "last"
        self.best = path / "best" / "model.safetensors"
        self.model = path / "model.safetensors"

    @property
    def config(self) -> TrainConfig:
        """The options of the run."""
        return read_config(self.path / "config.yaml")

    def read_metrics(self) -> list[dict[str, Any]]:
        """One dict per epoch."""
        return self._read_lines("metrics.jsonl")

    def write_metrics(self, history: list[dict[str, Any]]) -> None:
        """Write the whole history: after a crash the file may be ahead of the checkpoint, or behind it."""
        self._write_lines("metrics.jsonl", history)

    def read_summary(self) -> dict[str, Any] | None:
        """The figures of the run, or None while it is not complete."""
        path = self.path / "summary.json"
        return parse_json(path, path.read_text(encoding="utf-8")) if path.exists() else None

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write the figures of the run; the file marks the run as complete."""
        write_file(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")

    def read_continuations(self) -> list[dict[str, Any]]:
        """The changes of options, each with the whole configuration from then on."""
        return self._read_lines("continuations.jsonl")

    def add_continuation(self, config: TrainConfig, changes: dict[str, Any]) -> None:
        """Note that the run continues with other options; a finished run is open again, and its summary is kept here."""
        stated = {"after_epoch": len(self.read_metrics()), "changes": changes, "summary": self.read_summary()}
        self._write_lines("continuations.jsonl", [*self.read_continuations(), stated | {"config": asdict(config)}])
        write_file(self.path / "config.yaml", write_config(config))
        (self.path / "summary.json").unlink(missing_ok=True)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the lock of this run inside this context; it is released when the process ends, for whatever reason."""
        with (self.path / ".lock").open("a+") as file:
            try:
                lock_file(file)
            except BlockingIOError:
                self.refuse_writer()
                raise
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            for folder in (self.path, self.last, self.best.parent):  # no other process can be writing now
                remove_leftovers(folder)
            yield

    def writer(self) -> int | None:
        """The number of the process that trains this run now, None if there is none."""
        path = self.path / ".lock"
        if not path.exists():
            return None
        with path.open() as file:
            try:
                lock_file(file, shared=True)
            except BlockingIOError:
                return int(file.read() or 0)
        return None

    def refuse_writer(self) -> None:
        """Raise an error if another process trains this run: two processes must never write one run."""
        if (process := self.writer()) is not None:
            raise ValueError(f"{self.path}: is being trained by process {process}; wait for it, or stop it")

    def _read_lines(self, name: str) -> list[dict[str, Any]]:
        """The lines of a file; a last line that a crash cut short is left out."""
        path = self.path / name
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        return [parse_json(path, line) for line in lines if line.endswith("\n")]

    def _write_lines(self, name: str, lines: Sequence[dict[str, Any]]) -> None:
        write_file(self.path / name, "".join(json.dumps(line) + "\n" for line in lines))


def parse_json(path: Path, text: str) -> Any:
    """Parse the text of a file; an error names the file."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}: is not what training wrote ({error})") from None


def create_run_folder(config: TrainConfig, started: str) -> RunFolder:
    """Make a new run folder, which holds config.yaml as soon as it exists.

    Args:
        config: The options of the run; the folder's name is config.name, or the time with data and model.
        started: The time, as part of the name.

    Returns:
        The run folder; if the name is taken, a number is added to it.
    """
    output = Path(config.runs_dir)
    output.mkdir(parents=True, exist_ok=True)
    data = Path(config.data).stem if os.sep in config.data else config.data
    name = config.name or f"{started}-{data}-{config.model}"
    hidden = output / f".{name}-{uuid4().hex}"
    try:
        hidden.mkdir()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(output)) from error
    write_file(hidden / "config.yaml", write_config(config))
    number, path = 1, output / name
    while True:
        try:
            path.mkdir()  # takes the name: of two processes only one succeeds
            break
        except FileExistsError:
            number += 1
            path = output / f"{name}-{number}"
    hidden.replace(path)
    flush_folder(output)
    return RunFolder(path)


def open_run(name: str, output: str = "runs", others: Iterable[str] = ()) -> RunFolder:
    """The run that a path, or a name inside the output folder, leads to; `others` may have been meant too."""
    for path in (Path(name), Path(output) / name):
        if (path / "config.yaml").exists():
            return RunFolder(path)
    known = [*(run.path.name for run in list_runs(output)), *others]
    remedy = did_you_mean(Path(name).name, known, f"`raytraced runs --runs-dir {output}` lists them")
    raise ValueError(f"{name}: is not a run folder (has no config.yaml); {remedy}")


def list_runs(output: str = "runs") -> list[RunFolder]:
    """All runs in a folder, oldest first."""
    folders = [path.parent for path in Path(output).glob("*/config.yaml") if not path.parent.name.startswith(".")]
    return [RunFolder(path) for path in sorted(folders, key=lambda path: (path / "config.yaml").stat().st_mtime)]
