"""Train many runs on an executor. Stopped at any moment, the same call continues where it was; two calls may share a folder."""

import hashlib
import math
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple
from uuid import uuid4

from rich.console import Console
from rich.status import Status

import raytraced
from experiments.reproduce.executors import JobExecutor, make_executor, requeue
from experiments.reproduce.plan import Run
from experiments.reproduce.records import SHOWN_WITHIN, Record, Store, read_line, write_line
from raytraced.files import write_file
from raytraced.tables import clock
from raytraced.training.callbacks import Callback, RunInfo
from raytraced.training.claims import ClaimedError, claim, is_claimed
from raytraced.training.interrupt import Interrupted, StopRequest, listen
from raytraced.training.run_folder import RunFolder

MOST_TRIES = 2  # of a run whose worker was killed or crashed
POLL_SECONDS = 1.0  # between two checks of runs that another runner trains
STOP_SECONDS = 60.0  # that workers of other machines get to save their runs
MOST_BUDGETS = 20
WITHIN = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0)  # points of validation accuracy that an early exit may cost
HISTORY = ("train_loss", "train_accuracy", "validation_accuracy", "validation_bits_per_byte", "validation_experts",
           "seconds")  # fmt: skip
METRICS = ("num_samples", "accuracy", "bits_per_byte", "loss", "calibration_error", "mean_experts", "accuracy_per_class",
           "experts_per_class", "expert_load")  # fmt: skip
# Models whose budget can be turned after training: the option, and the settings that are measured.
DIALS: dict[str, tuple[str, tuple[float, ...]]] = {
    "mre": ("stop", (64.0, 32.0, 16.0, 8.0, 4.0, 2.0, 1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01)),
    "gpt-mre": ("stop", (4.0, 1.0, 0.5, 0.2, 0.1, 0.05, 0.02)),
    "gpt-matryoshka": ("k", (1, 2, 4, 8)),
    "gpt-threshold": ("threshold", (0.1, 0.3, 0.5, 0.7)),
}
UNTRAINED = ("cli", "explore", "serve", "integrations")  # folders of the package that no training imports


class Outcome(NamedTuple):
    """How a job ended.

    Args:
        state: "done": there is a record. "claimed": another process trains the run. "stopped": a signal stopped it, and it
            is saved. "failed": it cannot be trained.
        problem: What went wrong.
    """

    state: Literal["done", "claimed", "stopped", "failed"]
    problem: str | None = None


def run_all(
    runs: Sequence[Run],
    work: Path,
    records: Path,
    num_workers: int | None,
    data_root: str | None = None,
    executor: str = "local",
    again: Sequence[str] = (),
) -> dict[str, str]:
    """Complete all runs and save their records.

    Args:
        runs: The runs. Those that have a record in their folder already are not trained.
        work: Folder of the run folders; all workers must see it under the same path.
        records: Folder of the records.
        num_workers: Number of runs that are trained at the same time; None leaves that to the executor.
        data_root: Folder of the data sets.
        executor: Where runs are trained: what `make_executor` takes.
        again: Labels or keys of runs that are trained again if the code has changed since; "all" for all runs.

    Returns:
        Key of each run that failed → what went wrong.

    Raises:
        SystemExit: on a signal that asks to stop, after the workers have saved their runs.
    """
    work = work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    drop_stale([run for run in runs if {"all", run.label, run.key} & {*again}], work)
    store = Store(records)
    missing = [run for run in runs if publish(run, work, store) is None]
    if not missing:
        return {}
    with listen() as request, Console(stderr=True).status("starting") as status:
        jobs = make_executor(executor, min(num_workers or 1, len(missing)), work)
        runner = Runner(missing, len(runs), work, store, jobs, num_workers, data_root, status)
        runner.run(request)
    if request.number:
        print("stopped; everything is saved. The same command continues from here.")
        raise SystemExit(128 + request.number)
    return runner.failures


class Runner:
    """Keeps an executor busy until every run has a record.

    Args:
        missing: The runs without a record.
        num_runs: Number of all runs, for messages.
        work: Folder of the run folders.
        store: The records.
        jobs: Where runs are trained.
        num_workers: Number of jobs that are submitted at the same time; None: all.
        data_root: Folder of the data sets.
        status: Shows what is going on.
    """

    def __init__(
        self,
        missing: Sequence[Run],
        num_runs: int,
        work: Path,
        store: Store,
        jobs: JobExecutor,
        num_workers: int | None,
        data_root: str | None,
        status: Status,
    ) -> None:
        self.missing, self.num_runs, self.work, self.store = missing, num_runs, work, store
        self.jobs, self.num_workers, self.data_root, self.status = jobs, num_workers or len(missing), data_root, status
        self.waiting = deque(sorted(missing, key=lambda run: -run.expected_seconds))
        self.busy: dict[Future[Outcome], Run] = {}
        self.elsewhere: list[Run] = []  # trained by another runner
        self.tries, self.failures, self.started = Counter[str](), dict[str, str](), time.monotonic()
        self.stop_file = work / f".stop-{uuid4().hex}"
        self.polled = 0.0

    @property
    def to_go(self) -> list[Run]:
        """The runs that have not ended yet."""
        return [*self.waiting, *self.busy.values(), *self.elsewhere]

    def run(self, request: StopRequest) -> None:
        """Submit, wait and report until all runs have ended, or a signal asks to stop."""
        try:
            while self.to_go and not request.number:
                self.submit_waiting()
                if self.busy:
                    done = wait(self.busy, timeout=0.5, return_when=FIRST_COMPLETED).done
                else:
                    time.sleep(POLL_SECONDS / 4)
                    done = set()
                for future in done:
                    self.end_job(self.busy.pop(future), future)
                self.publish_elsewhere()
                names = ", ".join(run.key for run in self.busy.values())
                self.status.update(f"{len(self.to_go)} runs to go, {self.time_left()}; running: {names}")
        finally:
            self.stop()

    def submit_waiting(self) -> None:
        """Submit as many runs as may be trained at the same time."""
        while self.waiting and len(self.busy) < self.num_workers:
            run = self.waiting.popleft()
            self.tries[run.key] += 1
            job = self.jobs.submit(perform_in_worker, run, self.work, self.data_root, self.stop_file)
            self.busy[job] = run

    def end_job(self, run: Run, future: Future[Outcome]) -> None:
        """Publish what a job left, or give its run back."""
        error = CancelledError() if future.cancelled() else future.exception()
        is_lost = isinstance(error, self.jobs.lost)
        outcome = future.result() if error is None else Outcome("failed", f"{type(error).__name__}: {error}")
        if outcome.state == "claimed":
            self.tries[run.key] -= 1
            self.elsewhere.append(run)
            return
        if (is_lost or outcome.state == "stopped") and self.tries[run.key] < MOST_TRIES:
            self.waiting.appendleft(run)
            return
        problem = f"its worker process was killed or crashed {MOST_TRIES} times" if is_lost else outcome.problem
        self.report(run, problem)

    def publish_elsewhere(self) -> None:
        """Publish the runs that another runner has completed, and take back those that it gave up."""
        if time.monotonic() - self.polled < POLL_SECONDS:
            return
        self.polled = time.monotonic()
        for run in list(self.elsewhere):
            if publish(run, self.work, self.store) is not None:
                self.elsewhere.remove(run)
                self.report(run, None)
            elif not is_claimed(self.work, run.folder):
                self.elsewhere.remove(run)
                self.waiting.append(run)

    def report(self, run: Run, problem: str | None) -> None:
        """Publish the record of a run that has ended, and print a line about it."""
        record = publish(run, self.work, self.store)
        problem = problem or ("left no record" if record is None else record.error)
        self.failures |= {run.key: problem} if problem else {}
        line = f"{describe_run(run, record, problem)}  ({self.time_left()})"
        line = f"[{self.num_runs - len(self.to_go)}/{self.num_runs}] {line}"
        self.status.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def time_left(self) -> str:
        return time_left(self.missing, self.to_go, self.started)

    def stop(self) -> None:
        """End all jobs: a run that trains saves itself first."""
        running = [run.folder for run in self.busy.values()]
        if running:
            self.stop_file.touch()
            self.jobs.cancel()
            deadline = time.monotonic() + STOP_SECONDS
            while time.monotonic() < deadline and any(is_claimed(self.work, folder) for folder in running):
                time.sleep(POLL_SECONDS / 10)
        self.jobs.shutdown()
        self.stop_file.unlink(missing_ok=True)


def drop_stale(runs: Sequence[Run], work: Path) -> None:
    """Remove the run folders that other code than today's has written; one that is being trained stays."""
    for run in runs:
        folder = work / run.folder
        note = folder / "code.txt"
        if folder.exists() and not (note.exists() and note.read_text(encoding="utf-8") == code_digest()):
            try:
                with claim(work, run.folder):
                    shutil.rmtree(folder)
            except ClaimedError:
                continue


@cache
def code_digest() -> str:
    """A short hash of all files that training may depend on."""
    root = Path(raytraced.__file__).parent
    paths = [path for kind in ("*.py", "*.cpp", "*.h", "*.inl") for path in root.rglob(kind)]
    digest = hashlib.sha256()
    for path in sorted(path for path in paths if path.relative_to(root).parts[0] not in UNTRAINED):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


class CodeNote(Callback):
    """Notes in a new run folder which code trains the run."""

    def on_train_start(self, info: RunInfo, state: Any) -> None:
        path = info.run.path / "code.txt"
        if not path.exists():
            # A run that other code began has no note: it stays without one.
            write_file(path, code_digest() if state.step == 0 else "unknown")


def publish(run: Run, work: Path, store: Store) -> Record | None:
    """Copy the record of a finished run into the store; None if the run is not finished."""
    path = work / run.folder / "record.json"
    record = read_line(path.read_text(encoding="utf-8")) if path.exists() else None
    if record is not None and store.find(run) != record:
        store.put(record)
    return record


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


def perform_in_worker(run: Run, work: Path, data_root: str | None, stop_file: Path | None = None) -> Outcome:
    """Perform a run in a worker, which may be a thread of it; a stop file that appears is a request to stop."""
    try:
        with claim(work, run.folder), watch(stop_file) as request:
            perform(run, work, data_root, request)
        outcome = Outcome("done")
    except ClaimedError as error:
        outcome = Outcome("claimed", str(error))
    except Interrupted as stop:
        requeue(stop.number)  # in a job of SLURM this ends the process
        outcome = Outcome("stopped", str(stop))
    except (ValueError, OSError) as error:
        outcome = Outcome("failed", str(error))
    runner = multiprocessing.parent_process()
    if runner is not None and not runner.is_alive():
        os._exit(1)  # no runner is left to read the result or to end this process
    return outcome


@contextmanager
def watch(stop_file: Path | None) -> Iterator[StopRequest]:
    """Make a request to stop, which another thread sets when a file appears."""
    request, ended = StopRequest(), threading.Event()

    def poll() -> None:
        while stop_file is not None and not ended.wait(POLL_SECONDS / 4):
            if stop_file.exists():
                request.number = signal.SIGTERM
                return

    threading.Thread(target=poll, daemon=True).start()
    try:
        yield request
    finally:
        ended.set()


ONE_AT_A_TIME = threading.Lock()
"""a model starts from PyTorch's own generator: threads of one worker train one after the other"""


def perform(run: Run, work: Path, data_root: str | None, request: StopRequest | None = None) -> None:
    """Train a run, or resume it, and write its record into its folder; one that has a record stays as it is."""
    from experiments import path_routers
    from raytraced.training.evaluation import Diverged
    from raytraced.training.loop import train

    if run.config.model.removeprefix("gpt-") in path_routers.ROUTERS:
        path_routers.register()
    folder = RunFolder(work / run.folder)
    if (folder.path / "record.json").exists():
        return
    started = (folder.path / "config.yaml").exists()
    config = replace(run.config, runs_dir=str(work), name=run.folder, data_root=data_root)
    with ONE_AT_A_TIME:
        try:
            if folder.read_summary() is None:
                train(config, folder if started else None, callbacks=[CodeNote()], request=request)
            record = make_record(run, folder)
            if "accuracy" in record.test:
                record = replace(record, early_exit=measure_early_exit(run, folder, data_root))
            if run.group != "search":
                record = replace(record, dial=measure_dial(run, folder, data_root))
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


def measure_dial(run: Run, folder: RunFolder, data_root: str | None) -> list[dict[str, float]]:
    """A model at several settings of its dial, turned after training.

    Returns:
        For each setting, "setting", the means per test target of "experts" and "macs", and the quality on test and validation
        data: of text "bits_per_byte" and "validation_bits_per_byte", of images "accuracy" and "validation_accuracy". Empty for
        a model without a dial, and for one of images that was not trained for it.
    """
    from raytraced.io.saving import load
    from raytraced.tasks.registry import find_task
    from raytraced.training.calibration import measure_means

    option, settings = DIALS.get(run.config.model, ("", ()))
    if run.config.model == "mre" and "stop_range" not in run.config.model_options:
        settings = ()
    if not settings:
        return []
    model, task = load(folder.path), find_task(run.data)
    model.eval()
    data = task.load_for(model, run.data, data_root)
    rows = []
    for setting in settings:
        options: dict[str, Any] = {"stop": setting} if option == "stop" else {}
        if not options:
            setattr(model.routed_layers()[0].router, option, setting)
        test, validation = (measure_means(model, task, data, split, **options) for split in ("test", "validation"))
        quality = quality_of(test) | {f"validation_{name}": value for name, value in quality_of(validation).items()}
        rows.append({"setting": setting, "experts": test["experts"], "macs": test["macs"]} | quality)
    return rows


def quality_of(means: dict[str, float]) -> dict[str, float]:
    """Bits per byte of text, accuracy of images."""
    if not means["bytes"]:
        return {"accuracy": means["accuracy"]}
    return {"bits_per_byte": means["loss"] / means["bytes"] / math.log(2)}


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
