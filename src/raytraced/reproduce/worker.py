"""One process that trains runs, one after the other, on one core: a run a line on stdin, an answer a line on stdout.

It is started by the runner. If stdin ends before the word "quit", the runner is gone: the run at work saves itself.
"""

import json
import os
import queue
import shutil
import signal
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

from raytraced.reproduce.plan import PRIVATE, Run
from raytraced.reproduce.records import Record, new_record, read_record, write_record
from raytraced.training.config import TrainConfig
from raytraced.training.run_folder import RunFolder

HISTORY = ("epoch", "train_loss", "train_accuracy", "validation_accuracy", "validation_experts", "seconds")
QUIT = "quit"


def perform(run: Run, work: Path, data_root: str | None) -> Record:
    """Train a run, or go on with it, then measure it; the record in its folder says that it is done."""
    from raytraced.training.loop import train

    folder = RunFolder(work / run.folder)
    done = read_record(folder.path / "record.json")
    if done is not None:
        return done
    started = (folder.path / "config.yaml").exists()
    config = replace(run.config, output=str(work), name=run.folder, data_root=data_root)
    try:
        if folder.read_summary() is None:
            train(config, folder if started else None, pictures=False)
        record = make_record(run, folder, data_root)
    except ValueError as error:  # the training loop's word for a loss that is not finite
        if "not finite" not in str(error):
            raise
        record = new_record(run, error=str(error).partition(";")[0])
    write_record(folder.path / "record.json", record)
    for leftover in ("last", "events", "best"):
        shutil.rmtree(folder.path / leftover, ignore_errors=True)
    return record


def make_record(run: Run, folder: RunFolder, data_root: str | None) -> Record:
    """Put together what the run folder tells and what the model shows on the test images."""
    import torch

    from raytraced.data import load
    from raytraced.reproduce.measure import measure_run
    from raytraced.saving import load_with_card

    torch.set_num_threads(1)
    model, card = load_with_card(folder.path)
    summary = folder.read_summary()
    assert summary is not None
    return new_record(
        run,
        config={name: value for name, value in asdict(run.config).items() if name not in PRIVATE},
        history=[{name: epoch[name] for name in HISTORY} for epoch in folder.read_metrics()],
        **{name: summary[name] for name in ("best_epoch", "validation", "test", "parameters", "seconds", "versions")},
        **measure_run(model, card, load(run.data, data_root)),
    )


def encode(run: Run) -> str:
    """A run as a line."""
    return json.dumps({"group": run.group, "label": run.label, "config": asdict(run.config)})


def decode(line: str) -> Run:
    """The run that a line tells."""
    values = json.loads(line)
    return Run(values["group"], values["label"], TrainConfig(**values["config"]))


def listen_for_end(stream: IO[str], lines: "queue.Queue[str]") -> None:
    """Hand lines on; when the stream ends without a goodbye, ask this process to stop."""
    for line in stream:
        lines.put(line.strip())
        if line.strip() == QUIT:
            return
    os.kill(os.getpid(), signal.SIGTERM)


def main(work: str, data_root: str = "") -> None:
    """Answer each run with {"done": …}, {"failed": …} or {"stopped": …}."""
    from raytraced.training.interrupt import Interrupted

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints must not mix with the answers
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=listen_for_end, args=(sys.stdin, lines), daemon=True).start()

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    while (line := lines.get()) != QUIT:
        run = decode(line)
        try:
            perform(run, Path(work), data_root or None)
            answer(done=run.key)
        except Interrupted:
            answer(stopped=run.key)
            return
        except (ValueError, OSError) as error:
            answer(failed=run.key, error=str(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
