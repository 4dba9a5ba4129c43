"""Trains many runs with one worker process a core; stopped at any moment, the same call goes on where it was."""

import errno
import json
import os
import selectors
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from raytraced.reproduce import worker
from raytraced.reproduce.plan import Run
from raytraced.reproduce.progress import Progress
from raytraced.reproduce.records import read_record
from raytraced.training.interrupt import StopRequest, listen

LOCK_SECONDS = 30  # a worker that outlived its runner needs a moment to save


class Stopped(Exception):  # noqa: N818 (not an error)
    """Asked to stop; everything is saved."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by signal {number}")
        self.exit_code = 128 + number


@dataclass(frozen=True)
class Place:
    """Where runs are trained, where their records go, where data sets are, and the open lock file."""

    work: Path
    raw: Path
    data_root: str | None
    lock: int


@dataclass
class Worker:
    """A worker process and the run it is at."""

    process: "subprocess.Popen[str]"
    run: Run | None = None

    def give(self, run: Run) -> None:
        """Start a run."""
        assert self.process.stdin is not None
        self.run = run
        print(worker.encode(run), file=self.process.stdin, flush=True)

    def end(self) -> None:
        """Say goodbye to a worker that is idle."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            print(worker.QUIT, file=self.process.stdin, flush=True)
        self.process.wait()

    def stop(self) -> None:
        """Hang up: a run at work saves itself and ends."""
        assert self.process.stdin is not None
        self.process.stdin.close()


def run_all(
    runs: Sequence[Run], work: Path, raw: Path, num_workers: int, data_root: str | None = None
) -> dict[str, str]:
    """Bring all runs to their end and copy their records to `raw`; returns what failed, by key.

    Raises:
        Stopped: on SIGINT or SIGTERM, after the workers have saved.
    """
    work.mkdir(parents=True, exist_ok=True)
    raw.mkdir(parents=True, exist_ok=True)
    with locked(work) as lock:
        missing = [run for run in runs if not publish(run, work, raw)]
        if not missing:
            return {}
        missing.sort(key=lambda run: run.expected_seconds)  # taken from the end: the longest first
        num_workers = min(num_workers, len(missing))
        progress = Progress(missing, len(runs) - len(missing), num_workers, work)
        workers: list[Worker] = []
        try:
            with listen() as request:
                place = Place(work, raw, data_root, lock)
                workers += [start_worker(place) for _ in range(num_workers)]
                return _serve(workers, missing, place, progress, request)
        finally:
            for one in workers:
                one.stop()
            for one in workers:
                one.process.wait()
            progress.close()


def _serve(
    workers: list[Worker], waiting: list[Run], place: Place, progress: Progress, request: StopRequest
) -> dict[str, str]:
    """Hand out runs and take in answers until nothing waits and nobody works."""
    failures: dict[str, str] = {}
    waiting = list(waiting)
    with selectors.DefaultSelector() as selector:
        for one in workers:
            _hand_out(one, waiting, selector, progress)
        while any(one.run for one in workers):
            if request.number:
                raise Stopped(request.number)
            for ready, _ in selector.select(timeout=0.5):
                one = ready.data
                run = one.run
                problem = _read_answer(one)
                publish(run, place.work, place.raw)
                record = read_record(place.raw / f"{run.key}.json")
                if problem or record is None or record.error:
                    failures[run.key] = problem or (record.error if record and record.error else "left no record")
                progress.finish(run, record, problem)
                one.run = None
                selector.unregister(one.process.stdout)
                if one.process.poll() is not None and waiting:
                    workers.remove(one)
                    one = start_worker(place)
                    workers.append(one)
                _hand_out(one, waiting, selector, progress)
            progress.tick()
    return failures


def _hand_out(one: Worker, waiting: list[Run], selector: selectors.DefaultSelector, progress: Progress) -> None:
    """Give a worker the next run, or send it home."""
    if not waiting:
        one.end()
        return
    run = waiting.pop()
    one.give(run)
    progress.start(run)
    assert one.process.stdout is not None
    selector.register(one.process.stdout, selectors.EVENT_READ, one)


def _read_answer(one: Worker) -> str | None:
    """What a worker says about its run: None if all is well, else the problem."""
    assert one.process.stdout is not None
    line = one.process.stdout.readline()
    if not line:
        return f"its process ended with code {one.process.wait()}"
    answer = json.loads(line)
    if "stopped" in answer:  # the worker was sent a signal of its own
        one.process.wait()
        return "its process was asked to stop"
    return str(answer["error"]) if "failed" in answer else None


def start_worker(place: Place) -> Worker:
    """A process of one thread, in a session of its own: Ctrl-C reaches it through the runner only."""
    command = [sys.executable, "-m", "raytraced.reproduce.worker", str(place.work), place.data_root or ""]
    threads = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        pass_fds=(place.lock,),  # while a worker lives, the folder stays locked, even if the runner is killed
        env=os.environ | threads,
    )
    return Worker(process)


def publish(run: Run, work: Path, raw: Path) -> bool:
    """Copy the record of a finished run to where results are kept; False while the run is not over."""
    source, target = work / run.folder / "record.json", raw / f"{run.key}.json"
    record = read_record(source)
    if record is None:
        return False
    if read_record(target) != record:
        shutil.copyfile(source, target)
    return True


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """One runner at a time in a folder; the lock goes with the process, however it ends."""
    import fcntl

    with (folder / ".lock").open("w") as file:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES) or time.monotonic() > deadline:
                    raise ValueError(
                        f"{folder}: another `raytraced reproduce` is at work here; wait or stop it"
                    ) from None
                time.sleep(0.2)
        yield file.fileno()
