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

import difflib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from raytraced.files import flush_folder, remove_leftovers, write_file
from raytraced.training.config import TrainConfig, read_config, write_config


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run's files, and the small text files' reading and writing."""

    path: Path

    @property
    def config(self) -> TrainConfig:
        """What was asked for."""
        return read_config(self.path / "config.yaml")

    @property
    def last(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "last"

    @property
    def best(self) -> Path:
        """The model of the best epoch."""
        return self.path / "best" / "model.safetensors"

    @property
    def model(self) -> Path:
        """The trained model."""
        return self.path / "model.safetensors"

    def read_metrics(self) -> list[dict[str, Any]]:
        """One dict an epoch; a last line that a crash cut short is left out."""
        path = self.path / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def write_metrics(self, history: list[dict[str, Any]]) -> None:
        """Write the whole history anew: after a crash the file may be ahead of, or behind, the checkpoint."""
        write_file(self.path / "metrics.jsonl", "".join(json.dumps(epoch) + "\n" for epoch in history))

    def read_summary(self) -> dict[str, Any] | None:
        """What came out, or None while the run is not over."""
        path = self.path / "summary.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def read_continuations(self) -> list[dict[str, Any]]:
        """What was changed on the way, each time with the whole configuration from then on."""
        path = self.path / "continuations.jsonl"
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []

    def add_continuation(self, config: TrainConfig, changes: dict[str, Any], after: dict[str, Any]) -> None:
        """Note that the run goes on otherwise; a finished one is open again, its summary is kept with the note."""
        stated = {**after, "changes": changes, "summary": self.read_summary(), "config": asdict(config)}
        lines = [*self.read_continuations(), stated]
        write_file(self.path / "continuations.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
        write_file(self.path / "config.yaml", write_config(config))
        (self.path / "summary.json").unlink(missing_ok=True)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Be the only process that writes this run, while inside; the lock goes with the process, however it ends."""
        with (self.path / ".lock").open("a+") as file:
            if not _take(file, shared=False):
                raise ValueError(f"{self.path}: is being trained by process {self.writer()}; wait for it, or stop it")
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield

    def writer(self) -> int | None:
        """The process that trains this run now, None if there is none."""
        path = self.path / ".lock"
        if not path.exists():
            return None
        with path.open() as file:
            return None if _take(file, shared=True) else int(file.read() or 0)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Its presence is what marks a run as finished, so it is written last."""
        write_file(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")


def create_run_folder(config: TrainConfig, started: str) -> RunFolder:
    """Make a new folder that holds config.yaml from its first moment on; a taken name gets a number.

    The name is config.name, or the time it started with data and model.
    """
    output = Path(config.output)
    output.mkdir(parents=True, exist_ok=True)
    data = Path(config.data).stem if os.sep in config.data else config.data
    name = config.name or f"{started}-{data}-{config.model}"
    try:
        hidden = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=output))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(output)) from error
    hidden.chmod(0o777 & ~_umask())
    write_file(hidden / "config.yaml", write_config(config))
    number = 1
    while True:
        path = output / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()  # claims the name: of two processes only one succeeds
        except FileExistsError:
            number += 1
            continue
        hidden.replace(path)
        flush_folder(output)
        return RunFolder(path)


def open_run(name: str, output: str = "runs") -> RunFolder:
    """The run that a path, or a name inside the output folder, leads to."""
    for path in (Path(name), Path(output) / name):
        if (path / "config.yaml").exists():
            remove_leftovers(path)
            return RunFolder(path)
    known = [run.path.name for run in list_runs(output)]
    close = difflib.get_close_matches(Path(name).name, known, n=1)
    remedy = f"did you mean {close[0]}?" if close else f"`raytraced runs --output {output}` lists them"
    raise ValueError(f"{name}: is not a run folder (has no config.yaml); {remedy}")


def list_runs(output: str = "runs") -> list[RunFolder]:
    """All runs in a folder, oldest first."""
    folders = [path.parent for path in Path(output).glob("*/config.yaml") if not path.parent.name.startswith(".")]
    return [RunFolder(path) for path in sorted(folders, key=lambda path: (path / "config.yaml").stat().st_mtime)]


def _take(file: IO[str], shared: bool) -> bool:
    """Take the lock on an open file, unless another process has it; where there are no such locks, all may write."""
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
