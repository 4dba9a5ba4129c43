"""Trains many runs with one worker process a core; stopped at any moment, the same call goes on where it was."""

import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from rich.console import Console

from raytraced.files import lock_file, write_file
from raytraced.reproduce.plan import Run
from raytraced.reproduce.records import SHOWN_WITHIN, Record, Store, read_line, write_line
from raytraced.training.interrupt import Interrupted, listen
from raytraced.training.run_folder import RunFolder
from raytraced.training.tables import clock

LOCK_SECONDS = 30  # a worker that outlived its runner needs a moment to save
MOST_BUDGETS = 20
WITHIN = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0)  # points of validation accuracy that an early stop may cost
HISTORY = ("train_loss", "train_accuracy", "validation_accuracy", "validation_bits_per_byte", "validation_experts",
           "seconds")  # fmt: skip
JUDGED = ("num_samples", "accuracy", "bits_per_byte", "loss", "calibration_error", "mean_experts", "accuracy_per_class",
          "experts_per_class", "expert_load")  # fmt: skip


def run_all(
    runs: Sequence[Run], work: Path, records: Path, num_workers: int, data_root: str | None = None
) -> dict[str, str]:
    """Bring all runs to their end and keep their records; returns what failed, by key.

    Raises:
        SystemExit: on SIGINT, SIGTERM or SIGHUP, after the workers have saved.
    """
    work.mkdir(parents=True, exist_ok=True)
    failures: dict[str, str] = {}
    crew: dict[Connection, SpawnProcess] = {}  # our end of the pipe to a worker → its process
    busy: dict[Connection, Run] = {}
    with only_runner(work / ".workers"), listen() as request, Console(stderr=True).status("starting") as status:
        store, started = Store(records), time.monotonic()
        missing = [run for run in runs if publish(run, work, store) is None]
        waiting = deque(sorted(missing, key=lambda run: -run.expected_seconds))
        try:
            while (waiting or busy) and not request.number:
                while waiting and len(busy) < num_workers:
                    pipe = next((one for one in crew if one not in busy), None) or start(crew, work, data_root)
                    busy[pipe] = waiting.popleft()
                    with suppress(OSError):  # to a worker that has died: noticed below
                        pipe.send(busy[pipe])
                ready = wait(busy, timeout=0.5)
                for pipe in [one for one in busy if one in ready]:
                    run, problem = busy.pop(pipe), hear(pipe, crew)
                    record = publish(run, work, store)
                    problem = problem or ("left no record" if record is None else record.error)
                    failures |= {run.key: problem} if problem else {}
                    to_go = [*waiting, *busy.values()]
                    told = f"{tell_run(run, record, problem)}  ({time_left(missing, to_go, started)})"
                    told = f"[{len(runs) - len(to_go)}/{len(runs)}] {told}"
                    status.console.print(told, highlight=False, markup=False, soft_wrap=True)
                to_go, at_work = [*waiting, *busy.values()], ", ".join(run.key for run in busy.values())
                status.update(f"{len(to_go)} runs to go, {time_left(missing, to_go, started)}; at work: {at_work}")
        finally:
            for pipe, process in crew.items():
                process.terminate()  # a run at work saves itself
                pipe.close()  # one that had just ended waits for no other
            for process in crew.values():
                process.join()
    if request.number:
        print("stopped; everything is saved. The same command goes on from here.")
        raise SystemExit(128 + request.number)
    return failures


@contextmanager
def only_runner(path: Path) -> Iterator[None]:
    """One runner at a time, and none while workers of a killed one save; the lock goes with the processes, however they end."""
    with path.open("w") as file:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                lock_file(file)
                lock_file(file, shared=True)  # with the workers
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    message = f"{path.parent}: another `raytraced reproduce` is at work here; wait or stop it"
                    raise ValueError(message) from None
                time.sleep(0.2)
        yield


def publish(run: Run, work: Path, store: Store) -> Record | None:
    """Keep the record of a finished run where results are kept; None while the run is not over."""
    path = work / run.folder / "record.json"
    record = read_line(path.read_text(encoding="utf-8")) if path.exists() else None
    if record is not None and store.find(run) != record:
        store.put(record)
    return record


def tell_run(run: Run, record: Record | None, problem: str | None) -> str:
    """A run that has ended, in a reader's words."""
    told = f"failed: {problem}"
    if record is not None and not problem:
        figure = f"{record.accuracy:.2%}" if "accuracy" in record.test else f"{record.bits:.3f} bits a byte"
        told = f"test {figure}, {record.experts:.2f} experts, {clock(record.seconds)}"
    return f"{run.data} {run.label} seed {run.seed}{'' if run.group == 'main' else f' ({run.group})'}: {told}"


def time_left(runs: Sequence[Run], to_go: Sequence[Run], started: float) -> str:
    """A guess from how long the runs that are done took, against what was expected of them."""
    together, expected = (sum(run.expected_seconds for run in some) for some in (runs, to_go))
    pace = (time.monotonic() - started) / (together - expected) if together > expected else 1.0
    return f"{clock(expected * pace)} left" if to_go else "all done"


def start(crew: dict[Connection, SpawnProcess], work: Path, data_root: str | None) -> Connection:
    """Our end of the pipe to a new worker."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    crew[ours] = context.Process(target=be_worker, args=(theirs, work, data_root), daemon=True)
    crew[ours].start()
    theirs.close()  # so that our end notices when the worker is gone
    return ours


def hear(pipe: Connection, crew: dict[Connection, SpawnProcess]) -> str | None:
    """What went wrong with the run of a worker, which may be gone itself."""
    try:
        problem: str | None = pipe.recv()
    except (EOFError, OSError):
        process = crew.pop(pipe)
        process.join()
        problem = f"its process ended with code {process.exitcode}"
    return problem


def be_worker(pipe: Connection, work: Path, data_root: str | None) -> None:
    """The worker: train every run that comes through the pipe on one core; answer with None, or with what went wrong."""
    os.setsid()  # Ctrl-C is the runner's: it asks the workers to stop
    os.dup2(2, 1)  # what libraries print is no part of the runner's output
    os.environ |= {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    threading.Thread(target=end_with_runner, daemon=True).start()
    with (work / ".workers").open("w") as file, suppress(EOFError, BrokenPipeError):
        # While a worker lives, no other runner starts, even if its own was killed.
        lock_file(file, shared=True, wait=True)
        while True:
            run, problem = pipe.recv(), None
            try:
                perform(run, work, data_root)
            except Interrupted as stop:
                raise SystemExit(stop.exit_code) from None
            except (ValueError, OSError) as error:
                problem = str(error)
            pipe.send(problem)


def end_with_runner() -> None:
    """If the runner is killed, ask this process to stop: a run at work saves itself."""
    runner = multiprocessing.parent_process()
    assert runner is not None
    runner.join()
    os.kill(os.getpid(), signal.SIGTERM)


def perform(run: Run, work: Path, data_root: str | None) -> None:
    """Train a run, or go on with it; the record in its folder says that it is done."""
    from raytraced.training.evaluation import Diverged
    from raytraced.training.loop import train

    folder = RunFolder(work / run.folder)
    started = (folder.path / "config.yaml").exists()
    config = replace(run.config, output=str(work), name=run.folder, data_root=data_root)
    try:
        if folder.read_summary() is None:
            train(config, folder if started else None, pictures=False)
        record = make_record(run, folder)
        if "accuracy" in record.test:
            record = replace(record, sure=stops(run, folder, data_root))
    except Diverged as error:
        record = Record(**vars(run), error=str(error).partition(";")[0])
    write_file(folder.path / "record.json", write_line(record))
    for leftover in ("last", "events", "best"):
        shutil.rmtree(folder.path / leftover, ignore_errors=True)


def stops(run: Run, folder: RunFolder, data_root: str | None) -> dict[str, Any]:
    """What stopping when sure gives a model that learnt to answer early, thresholds from validation, figures from test images.

    "points": a row for each number of points that may be lost; "looks": a row where everyone stops after as many layers;
    "runs": by experts run at the threshold that may lose SHOWN_WITHIN points, how many images, and how many of them are right.
    """
    if not run.config.look_loss and not run.config.anytime_loss and run.config.model != "multi-exit":
        return {}
    from raytraced.saving import load
    from raytraced.tasks.table import find_task
    from raytraced.training.calibration import calibrate, look_at_all

    model, task = load(folder.path), find_task(run.data)
    data = task.load_for(model, run.data, data_root)
    seen, shown = (look_at_all(model, task, data, split, "layer") for split in ("validation", "test"))
    points = []
    for within in WITHIN:
        sure = calibrate(seen, within)
        validation = {f"validation_{name}": value for name, value in seen.stop(sure).items()}
        points.append({"within": within, "sure": sure} | validation | shown.stop(sure))
    return {"points": points, "looks": shown.looks(), "runs": shown.by_runs(calibrate(seen, SHOWN_WITHIN))}


def make_record(run: Run, folder: RunFolder) -> Record:
    """What a finished run's folder tells, without what can be worked out from the rest."""
    summary, epochs = folder.read_summary(), folder.read_metrics()
    assert summary is not None
    validation, test = summary["validation"], summary["test"]
    rows, validated = test.get("budgets", [])[: MOST_BUDGETS + 1], validation.get("budgets", [])
    validated += validated[-1:] * (len(rows) - len(validated))  # no validation image runs as many: the answers stay
    return Record(
        **vars(run),
        **{name: summary[name] for name in ("best_epoch", "parameters", "seconds", "versions")},
        history={name: [epoch[name] for epoch in epochs] for name in HISTORY if name in epochs[0]},
        validation={name: validation[name] for name in JUDGED if name in validation},
        test={name: value for name, value in test.items() if name != "budgets" and value is not None},
        budgets=[
            {f"validation_{name}": other[name] for name in ("accuracy", "bits_per_byte", "macs") if name in other} | row
            for row, other in zip(rows, validated, strict=False)
        ],
    )
