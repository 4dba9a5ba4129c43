"""Where runs are trained: processes of this machine, a Dask cluster, Ray, or SLURM, each behind `concurrent.futures.Executor`.

A job whose worker dies raises one of the executor's `lost` errors, and the runner submits its run again.
"""

import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from raytraced.errors import did_you_mean

ROOT = Path(__file__).parents[2]
EXTRAS = {"local": "", "dask": "distributed", "ray": "ray", "slurm": "submitit"}
"""names of executors → the package that each needs"""
POLL_SECONDS = 0.5  # seconds between two checks of the jobs of SLURM


class JobExecutor(Executor):
    """An executor of runs."""

    lost: tuple[type[BaseException], ...] = (BrokenExecutor, CancelledError)
    """errors of a job whose worker died"""

    def cancel(self) -> None:
        """Drop the jobs that have not started, and ask the others to stop; a run that trains saves itself first."""
        raise NotImplementedError


def make_executor(name: str, num_workers: int | None, work: Path) -> JobExecutor:
    """Find an executor by its name.

    Args:
        name: local, dask:ADDRESS, ray, ray:ADDRESS, slurm, or slurm:OPTION=VALUE,… with options of submitit.
        num_workers: Number of processes of the local executor.
        work: Folder of the run folders, which all workers must see under this path.

    Returns:
        The executor, ready for jobs.
    """
    kind, _, place = name.partition(":")
    if kind not in EXTRAS:
        raise ValueError(f"executor={name}: no such executor; {did_you_mean(kind, EXTRAS)}")
    if EXTRAS[kind] and find_spec(EXTRAS[kind]) is None:
        remedy = f"install it with pip install '.[{kind}]'"
        raise ValueError(f"executor={name}: the package {EXTRAS[kind]} is not installed; {remedy}")
    if kind == "local":
        return LocalExecutor(num_workers or 1)
    if kind == "ray":
        return RayExecutor(place or None)
    if kind == "slurm":
        return SlurmExecutor(work / ".slurm", read_options(name, place))
    if not place:
        raise ValueError(
            f"executor={name}: a Dask cluster has an address; give dask:ADDRESS, such as dask:127.0.0.1:8786"
        )
    return DaskExecutor(place)


def read_options(name: str, text: str) -> dict[str, Any]:
    """The options of `slurm:partition=cpu,timeout_min=60`; whole numbers are numbers."""
    options: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"executor={name}: {part} is not OPTION=VALUE; give slurm:partition=cpu,timeout_min=60")
        options[key] = int(value) if value.isdigit() else value
    return options


class LocalExecutor(JobExecutor):
    """Worker processes of this machine, each of which trains one run at a time on one core.

    Args:
        num_workers: Number of processes; they start with the first jobs.
    """

    def __init__(self, num_workers: int) -> None:
        # A thread per worker, each with a pool of one process: a process that dies breaks its own pool, and no other.
        self.threads = ThreadPoolExecutor(num_workers)
        self.own, self.pools = threading.local(), list[ProcessPoolExecutor]()
        self.others = multiprocessing.active_children()

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return self.threads.submit(self._call, function, *args, **kwargs)

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if getattr(self.own, "pool", None) is None:
            self.own.pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), prepare_worker)
            self.pools.append(self.own.pool)
        try:
            return self.own.pool.submit(function, *args, **kwargs).result()
        except BrokenExecutor:
            self.own.pool = None
            raise

    def cancel(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            if process not in self.others:
                process.terminate()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the workers."""
        self.cancel()
        self.threads.shutdown(wait=wait)
        for pool in self.pools:  # a worker that ignores signals ends when it has nothing to do
            pool.shutdown(wait=wait, cancel_futures=True)


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


class DaskExecutor(JobExecutor):
    """A Dask cluster: its scheduler gives the job of a dead worker to another one.

    Args:
        address: Of the scheduler.
    """

    def __init__(self, address: str) -> None:
        from distributed import Client, KilledWorker

        self.lost = (*JobExecutor.lost, KilledWorker)
        try:
            self.client = Client(address, timeout=10)
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"executor=dask:{address}: cannot reach the scheduler ({reason})") from error
        self.executor = self.client.get_executor(pure=False)

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return self.executor.submit(function, *args, **kwargs)

    def cancel(self) -> None:
        self.executor.shutdown(wait=False)  # what a worker has begun ends by the stop file

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.executor.shutdown(wait=False)
        self.client.close()


class RayExecutor(JobExecutor):
    """Ray, on this machine or on a cluster; a job takes one core.

    Args:
        address: Of the cluster; None uses RAY_ADDRESS, or starts Ray on this machine.
    """

    def __init__(self, address: str | None) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere
        import ray
        from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError, WorkerCrashedError

        self.lost = (*JobExecutor.lost, WorkerCrashedError, NodeDiedError, OutOfMemoryError, RayActorError)
        paths = os.pathsep.join(dict.fromkeys([str(ROOT), *(path for path in sys.path if path)]))
        own: dict[str, Any] = {"runtime_env": {"env_vars": {"PYTHONPATH": paths}}, "log_to_driver": False}
        if address is None and "RAY_ADDRESS" not in os.environ:
            own |= {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        try:
            ray.init(address, logging_level=logging.ERROR, **own)
        except (ConnectionError, ValueError) as error:
            raise ValueError(f"executor=ray:{address}: cannot reach Ray ({' '.join(str(error).split())})") from error
        self.ray = ray
        self.jobs: list[Any] = []

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        # The runner submits a run again, so that all executors count in the same way.
        job = self.ray.remote(num_cpus=1, max_retries=0)(function).remote(*args, **kwargs)
        self.jobs.append(job)
        found: Future[Any] = job.future()
        return found

    def cancel(self) -> None:
        for job in self.jobs:
            self.ray.cancel(job, force=False)  # SIGINT for what has begun

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.ray.shutdown()


class SlurmExecutor(JobExecutor):
    """SLURM, through submitit: a job per run, which is requeued when it is pre-empted or out of time.

    Args:
        folder: Where submitit writes its scripts, logs and results.
        options: Parameters of submitit, such as timeout_min; `partition` stands for slurm_partition, and so on. The option
            cluster=local starts the jobs on this machine, without SLURM.
    """

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        import submitit
        from submitit.core.utils import FailedJobError, UncompletedJobError

        self.lost = (*JobExecutor.lost, FailedJobError, UncompletedJobError)
        options = {"timeout_min": 240, "cpus_per_task": 1} | options
        cluster = options.pop("cluster", "slurm")
        known = ("timeout_min", "cpus_per_task", "mem_gb", "gpus_per_node", "nodes", "tasks_per_node", "name")
        named = {key if key in known else f"slurm_{key}": value for key, value in options.items()}
        try:
            self.executor = submitit.AutoExecutor(folder, cluster)
            self.executor.update_parameters(**named)
        except (RuntimeError, ValueError, TypeError, NameError) as error:
            raise ValueError(f"executor=slurm: {' '.join(str(error).split())}") from error
        self.pending: dict[Future[Any], Any] = {}
        self.ended = threading.Event()
        self.watcher = threading.Thread(target=self._watch, daemon=True)
        self.watcher.start()

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        self.pending[future] = self.executor.submit(Requeued(function), *args, **kwargs)
        return future

    def _watch(self) -> None:
        """Complete the futures of jobs that have ended."""
        while not self.ended.wait(POLL_SECONDS):
            for future, job in list(self.pending.items()):
                if not job.done():
                    continue
                error = job.exception()
                future.set_result(job.result()) if error is None else future.set_exception(error)
                self.pending.pop(future)

    def cancel(self) -> None:
        for job in list(self.pending.values()):
            job.cancel(check=False)  # SIGTERM for what has begun

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.ended.set()
        self.watcher.join()


class Requeued:
    """A job that submitit may requeue: it is called again with the same arguments, and resumes its run.

    Args:
        function: What the job calls.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """What submitit submits again; the run has been saved before."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, *args, **kwargs)


def requeue(number: int) -> None:
    """Hand a signal of SLURM to submitit, which requeues the job and ends the process; without submitit, do nothing."""
    handler = signal.getsignal(number)
    if number in requeue_signals() and callable(handler):
        handler(number, None)


def requeue_signals() -> Iterable[int]:
    """The signals by which SLURM says that a job will be stopped; Windows has none of them."""
    return [getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name)]
