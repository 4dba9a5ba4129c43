"""The folder of one run: where each file is, and how it is made without ever overwriting another.

config.yaml          what was asked for
continuations.jsonl  a line for each time it was continued with other options
metrics.jsonl        a line an epoch
last/                the two newest checkpoints
best/                model.safetensors of the epoch that did best on validation data
model.safetensors    the trained model, with its configuration inside
summary.json         what came out
curves.png           loss, experts and the task's figures over the epochs
sequences.png        activation sequences of some test data (raytraced models)
events/              for TensorBoard, if it is installed
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from uuid import uuid4

from raytraced.files import flush_folder, lock_file, remove_leftovers, write_file
from raytraced.training.config import TrainConfig, read_config, write_config
from raytraced.words import did_you_mean


class RunFolder:
    """Paths of a run's files, and the small text files' reading and writing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last = path / "last"
        self.best = path / "best" / "model.safetensors"
        self.model = path / "model.safetensors"

    @property
    def config(self) -> TrainConfig:
        """What was asked for."""
        return read_config(self.path / "config.yaml")

    def read_metrics(self) -> list[dict[str, Any]]:
        """One dict an epoch."""
        return self._read_lines("metrics.jsonl")

    def write_metrics(self, history: list[dict[str, Any]]) -> None:
        """Write the whole history anew: after a crash the file may be ahead of, or behind, the checkpoint."""
        self._write_lines("metrics.jsonl", history)

    def read_summary(self) -> dict[str, Any] | None:
        """What came out, or None while the run is not over."""
        path = self.path / "summary.json"
        return parse_json(path, path.read_text(encoding="utf-8")) if path.exists() else None

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Its presence is what marks a run as finished, so it is written last."""
        write_file(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")

    def read_continuations(self) -> list[dict[str, Any]]:
        """What was changed on the way, each time with the whole configuration from then on."""
        return self._read_lines("continuations.jsonl")

    def add_continuation(self, config: TrainConfig, changes: dict[str, Any]) -> None:
        """Note that the run goes on otherwise; a finished one is open again, its summary is kept with the note."""
        stated = {"after_epoch": len(self.read_metrics()), "changes": changes, "summary": self.read_summary()}
        self._write_lines("continuations.jsonl", [*self.read_continuations(), stated | {"config": asdict(config)}])
        write_file(self.path / "config.yaml", write_config(config))
        (self.path / "summary.json").unlink(missing_ok=True)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Be the only process that writes this run, while inside; the lock goes with the process, however it ends."""
        with (self.path / ".lock").open("a+") as file:
            try:
                lock_file(file)
            except BlockingIOError:
                self.refuse_writer()
                raise
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            for folder in (self.path, self.last, self.best.parent):  # nobody else can be writing now
                remove_leftovers(folder)
            yield

    def writer(self) -> int | None:
        """The process that trains this run now, None if there is none."""
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
        """Two processes must never write one run."""
        if (process := self.writer()) is not None:
            raise ValueError(f"{self.path}: is being trained by process {process}; wait for it, or stop it")

    def _read_lines(self, name: str) -> list[dict[str, Any]]:
        """A last line that a crash cut short is left out."""
        path = self.path / name
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        return [parse_json(path, line) for line in lines if line.endswith("\n")]

    def _write_lines(self, name: str, lines: Sequence[dict[str, Any]]) -> None:
        write_file(self.path / name, "".join(json.dumps(line) + "\n" for line in lines))


def parse_json(path: Path, text: str) -> Any:
    """What a file's text says; where it is no JSON, the file is named."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}: is not what training wrote ({error})") from None


def create_run_folder(config: TrainConfig, started: str) -> RunFolder:
    """Make a new folder that holds config.yaml from its first moment on; a taken name gets a number.

    The name is config.name, or the time it started with data and model.
    """
    output = Path(config.output)
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
            path.mkdir()  # claims the name: of two processes only one succeeds
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
    remedy = did_you_mean(Path(name).name, known, f"`raytraced runs --output {output}` lists them")
    raise ValueError(f"{name}: is not a run folder (has no config.yaml); {remedy}")


def list_runs(output: str = "runs") -> list[RunFolder]:
    """All runs in a folder, oldest first."""
    folders = [path.parent for path in Path(output).glob("*/config.yaml") if not path.parent.name.startswith(".")]
    return [RunFolder(path) for path in sorted(folders, key=lambda path: (path / "config.yaml").stat().st_mtime)]
