"""Train many runs, one worker process per core. Stopped at any moment, the same call continues where it was."""

import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.reproduce.plan import Run
from experiments.reproduce.records import SHOWN_WITHIN, Record, Store, read_line, write_line
from raytraced.files import lock_file, write_file
from raytraced.tables import clock
from raytraced.training.interrupt import Interrupted, listen
from raytraced.training.run_folder import RunFolder

MOST_TRIES = 2  # of a run whose worker process was killed or crashed
LOCK_SECONDS = 30  # a worker whose runner was killed needs a moment to save its run
MOST_BUDGETS = 20
WITHIN = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0)  # points of validation accuracy that an early exit may cost
HISTORY = ("train_loss", "train_accuracy", "validation_accuracy", "validation_bits_per_byte", "validation_experts",
           "seconds")  # fmt: skip
METRICS = ("num_samples", "accuracy", "bits_per_byte", "loss", "calibration_error", "mean_experts", "accuracy_per_class",
           "experts_per_class", "expert_load")  # fmt: skip


def run_all(
    runs: Sequence[Run], work: Path, records: Path, num_workers: int, data_root: str | None = None
) -> dict[str, str]:
    """Complete all runs and save their records.

    Args:
        runs: The runs. Those that have a record in their folder already are not trained.
        work: Folder of the run folders.
        records: Folder of the records.
        num_workers: Number of worker processes, each of which trains one run at a time on one core.
        data_root: Folder of the data sets.

    Returns:
        Key of each run that failed → what went wrong.

    Raises:
        SystemExit: on SIGINT, SIGTERM or SIGHUP, after the workers have saved their runs.
    """
    work.mkdir(parents=True, exist_ok=True)
    failures: dict[str, str] = {}
    with only_runner(work / ".runner"), listen() as request, Console(stderr=True).status("starting") as status:
        store, started = Store(records), time.monotonic()
        missing = [run for run in runs if publish(run, work, store) is None]
        waiting = deque(sorted(missing, key=lambda run: -run.expected_seconds))
        # One executor per worker: a process that dies breaks its own executor, and no other run is lost.
        free: list[Executor] = [start_worker() for _ in range(min(num_workers, len(missing)))]
        busy: dict[Future[str | None], tuple[Run, Executor]] = {}
        other_processes, tries = multiprocessing.active_children(), Counter[str]()
        try:
            while (waiting or busy) and not request.number:
                while waiting and free:
                    run, executor = waiting.popleft(), free.pop()
                    tries[run.key] += 1
                    busy[executor.submit(perform_in_worker, run, work, data_root)] = run, executor
                for future in wait(busy, timeout=0.5, return_when=FIRST_COMPLETED).done:
                    run, executor = busy.pop(future)
                    is_broken = isinstance(future.exception(), BrokenExecutor)
                    free.append(start_worker() if is_broken else executor)
                    if is_broken and tries[run.key] < MOST_TRIES:
                        waiting.appendleft(run)
                        continue
                    record = publish(run, work, store)
                    problem = find_problem(future) or ("left no record" if record is None else record.error)
                    failures |= {run.key: problem} if problem else {}
                    to_go = [*waiting, *(other for other, _ in busy.values())]
                    line = f"{describe_run(run, record, problem)}  ({time_left(missing, to_go, started)})"
                    line = f"[{len(runs) - len(to_go)}/{len(runs)}] {line}"
                    status.console.print(line, highlight=False, markup=False, soft_wrap=True)
                running = [run for run, _ in busy.values()]
                to_go, names = [*waiting, *running], ", ".join(run.key for run in running)
                status.update(f"{len(to_go)} runs to go, {time_left(missing, to_go, started)}; running: {names}")
        finally:
            stop_workers([*free, *(executor for _, executor in busy.values())], other_processes)
    if request.number:
        print("stopped; everything is saved. The same command continues from here.")
        raise SystemExit(128 + request.number)
    return failures


@contextmanager
def only_runner(path: Path) -> Iterator[None]:
    """Hold a lock that allows one runner at a time; it ends with the process."""
    with path.open("w") as file:
        try:
            lock_file(file)
        except BlockingIOError:
            message = f"{path.parent}: another `python -m experiments.reproduce` trains here; wait for it, or stop it"
            raise ValueError(message) from None
        yield


def publish(run: Run, work: Path, store: Store) -> Record | None:
    """Copy the record of a finished run into the store; None if the run is not finished."""
    path = work / run.folder / "record.json"
    record = read_line(path.read_text(encoding="utf-8")) if path.exists() else None
    if record is not None and store.find(run) != record:
        store.put(record)
    return record


def find_problem(future: Future[str | None]) -> str | None:
    """What went wrong with a run that has ended; None if nothing did."""
    error = future.exception()
    if isinstance(error, BrokenExecutor):
        return f"its worker process was killed or crashed {MOST_TRIES} times"
    return future.result() if error is None else f"{type(error).__name__}: {error}"


def describe_run(run: Run, record: Record | None, problem: str | None) -> str:
    """One line about a run that has ended."""
    outcome = f"failed: {problem}"
    if record is not None and not problem:
        score = f"{record.accuracy:.2%}" if "accuracy" in record.test else f"{record.bits:.3f} bits per byte"
        outcome = f"test {score}, {record.experts:.2f} experts, {clock(record.seconds)}"
    return f"{run.data} {run.label} seed {run.seed}{'' if run.group == 'main' else f' ({run.group})'}: {outcome}"


def time_left(runs: Sequence[Run], to_go: Sequence[Run], started: float) -> str:
    """An estimate from the time that the finished runs took, against the time that was expected."""
    together, expected = (sum(run.expected_seconds for run in some) for some in (runs, to_go))
    pace = (time.monotonic() - started) / (together - expected) if together > expected else 1.0
    return f"{clock(expected * pace)} left" if to_go else "all done"


def start_worker() -> Executor:
    """An executor with one worker process, which starts with the first run."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), prepare_worker)


def stop_workers(executors: Iterable[Executor], other_processes: list[BaseProcess]) -> None:
    """End all child processes but `other_processes`: a run that trains saves itself first."""
    for process in multiprocessing.active_children():
        if process not in other_processes:
            process.terminate()
    for executor in executors:
        executor.shutdown(cancel_futures=True)


def prepare_worker() -> None:
    """Set up a worker process: one core, its own process group, no output on stdout."""
    os.setsid()  # Ctrl-C goes to the runner, which asks the workers to stop
    os.dup2(2, 1)  # stdout is for the runner's result
    os.environ |= {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    threading.Thread(target=end_with_runner, daemon=True).start()


def end_with_runner() -> None:
    """Ask this process to stop when the runner is killed: a run that trains saves itself."""
    runner = multiprocessing.parent_process()
    assert runner is not None
    runner.join()
    os.kill(os.getpid(), signal.SIGTERM)


def perform_in_worker(run: Run, work: Path, data_root: str | None) -> str | None:
    """Perform a run in a worker process; return what went wrong, or None."""
    problem = None
    try:
        perform(run, work, data_root)
    except Interrupted as stop:
        problem = str(stop)
    except (ValueError, OSError) as error:
        problem = str(error)
    runner = multiprocessing.parent_process()
    if runner is not None and not runner.is_alive():
        os._exit(1)  # no runner is left to read the result or to end this process
    return problem


def perform(run: Run, work: Path, data_root: str | None) -> None:
    """Train a run, or resume it, and write its record into its folder."""
    from raytraced.training.evaluation import Diverged
    from raytraced.training.loop import train

    folder = RunFolder(work / run.folder)
    deadline = time.monotonic() + LOCK_SECONDS
    while folder.writer() is not None and time.monotonic() < deadline:
        time.sleep(0.1)  # a worker of a killed runner is still saving this run
    started = (folder.path / "config.yaml").exists()
    config = replace(run.config, runs_dir=str(work), name=run.folder, data_root=data_root)
    try:
        if folder.read_summary() is None:
            train(config, folder if started else None, callbacks=())
        record = make_record(run, folder)
        if "accuracy" in record.test:
            record = replace(record, early_exit=measure_early_exit(run, folder, data_root))
    except Diverged as error:
        record = Record(**vars(run), error=str(error).partition(";")[0])
    write_file(folder.path / "record.json", write_line(record))
    for leftover in ("last", "events", "best"):
        shutil.rmtree(folder.path / leftover, ignore_errors=True)


def measure_early_exit(run: Run, folder: RunFolder, data_root: str | None) -> dict[str, Any]:
    """Accuracy and cost with early exit, for a model that was trained for it: thresholds from validation images, test results.

    Returns:
        "points": a row for each of WITHIN, the points of validation accuracy that may be lost;
        "exits": a row for each exit, taken by all images;
        "runs": number of experts run at the threshold that may lose SHOWN_WITHIN points → [images, correct images].
        Empty for a model that was not trained for early exit.
    """
    if not run.config.exit_loss and not run.config.anytime_loss and run.config.model != "multi-exit":
        return {}
    from raytraced.io.saving import load
    from raytraced.tasks.registry import find_task
    from raytraced.training.calibration import calibrate, evaluate_exits

    model, task = load(folder.path), find_task(run.data)
    data = task.load_for(model, run.data, data_root)
    validation, test = (evaluate_exits(model, task, data, split, "layer") for split in ("validation", "test"))
    points = []
    for within in WITHIN:
        confidence = calibrate(validation, within)
        validated = {f"validation_{name}": value for name, value in validation.stop(confidence).items()}
        points.append({"within": within, "confidence": confidence} | validated | test.stop(confidence))
    return {"points": points, "exits": test.exits(), "runs": test.by_runs(calibrate(validation, SHOWN_WITHIN))}


def make_record(run: Run, folder: RunFolder) -> Record:
    """The record of a finished run, from its folder."""
    summary, epochs = folder.read_summary(), folder.read_metrics()
    assert summary is not None
    validation, test = summary["validation"], summary["test"]
    rows, validated = test.get("budgets", [])[: MOST_BUDGETS + 1], validation.get("budgets", [])
    validated += validated[-1:] * (
        len(rows) - len(validated)
    )  # no validation image runs as many experts: its answers stay
    return Record(
        **vars(run),
        **{name: summary[name] for name in ("best_epoch", "parameters", "seconds", "versions")},
        history={name: [epoch[name] for epoch in epochs] for name in HISTORY if name in epochs[0]},
        validation={name: validation[name] for name in METRICS if name in validation},
        test={name: value for name, value in test.items() if name != "budgets" and value is not None},
        budgets=[
            {f"validation_{name}": other[name] for name in ("accuracy", "bits_per_byte", "macs") if name in other} | row
            for row, other in zip(rows, validated, strict=False)
        ],
    )
