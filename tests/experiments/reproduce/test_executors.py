"""Runs on Dask, Ray and submitit, with real workers that are killed; what is wrong with the name of an executor."""

import json
import os
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec

import pytest

import tiny_runs as tiny
from experiments.reproduce import executors
from experiments.reproduce.executors import EXTRAS, Requeued, make_executor, requeue
from raytraced.training.claims import claim_path
from tiny_runs import NUM_EPOCHS, RUNS, SECONDS, epochs_done, outcome, wait_for

CLUSTER = """
import sys
from distributed import LocalCluster
with LocalCluster(n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address=None) as cluster:
    print(cluster.scheduler_address, flush=True)
    sys.stdin.read()
"""
RUNNER = """
import sys
from pathlib import Path
import tiny_runs
from experiments.reproduce.run import run_all
folder = Path(sys.argv[1])
failures = run_all(tiny_runs.RUNS, folder / "work", folder / "records", None, executor=sys.argv[2])
print(failures)
sys.exit(len(failures))
"""


def begin(program, *words):
    """A program of its own, which finds what this one finds."""
    paths = os.pathsep.join(path for path in sys.path if path)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, words)], env=os.environ | {"PYTHONPATH": paths}, **pipes
    )


def end_well(process):
    """Wait for the end of a runner, which must succeed."""
    printed, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, printed
    return printed


def needs(name):
    return pytest.mark.skipif(find_spec(EXTRAS[name]) is None, reason=f"needs {EXTRAS[name]}: pip install '.[{name}]'")


def kill_worker_of_first_run(folder, runner):
    """Kill the process that trains the first run, in the middle of it."""
    wait_for(lambda: epochs_done(folder)[0] > 1, runner)
    process = json.loads(claim_path(folder / "work", RUNS[0].folder).read_text())["process"]
    assert process != runner.pid
    os.kill(process, signal.SIGKILL)
    assert epochs_done(folder)[0] < NUM_EPOCHS


@pytest.mark.slow
@needs("dask")
def test_dask_gives_the_run_of_a_killed_worker_to_another_one(undisturbed, tmp_path):
    cluster = begin(CLUSTER)
    try:
        address = cluster.stdout.readline().strip()
        assert address.startswith("tcp://127.0.0.1:")
        runner = begin(RUNNER, tmp_path, f"dask:{address}")
        kill_worker_of_first_run(tmp_path, runner)
        end_well(runner)
    finally:
        cluster.communicate("", timeout=60)
    assert outcome(tmp_path) == outcome(undisturbed[0])


@pytest.mark.slow
@needs("dask")
def test_a_runner_on_dask_that_is_stopped_lets_the_workers_save_and_the_same_call_continues(undisturbed, tmp_path):
    cluster = begin(CLUSTER)
    try:
        address = cluster.stdout.readline().strip()
        runner = begin(RUNNER, tmp_path, f"dask:{address}")
        wait_for(lambda: epochs_done(tmp_path)[0] > 1, runner)
        runner.send_signal(signal.SIGINT)
        printed, _ = runner.communicate(timeout=SECONDS)
        assert runner.returncode == 128 + signal.SIGINT, printed
        assert "stopped; everything is saved" in printed
        assert epochs_done(tmp_path)[0] < NUM_EPOCHS  # no worker continued it
        assert not list((tmp_path / "work").glob(".stop-*"))
        end_well(begin(RUNNER, tmp_path, f"dask:{address}"))
    finally:
        cluster.communicate("", timeout=60)
    assert outcome(tmp_path) == outcome(undisturbed[0])


@pytest.mark.slow
@needs("ray")
def test_ray_trains_the_run_of_a_killed_worker_again(undisturbed, tmp_path):
    runner = begin(RUNNER, tmp_path, "ray")
    kill_worker_of_first_run(tmp_path, runner)
    end_well(runner)
    assert outcome(tmp_path) == outcome(undisturbed[0])


@pytest.mark.slow
@needs("slurm")
def test_submitit_trains_the_run_of_a_killed_job_again(undisturbed, tmp_path):
    runner = begin(RUNNER, tmp_path, "slurm:cluster=local")
    kill_worker_of_first_run(tmp_path, runner)
    end_well(runner)
    assert outcome(tmp_path) == outcome(undisturbed[0])


@pytest.mark.slow
@needs("slurm")
def test_the_signal_of_slurm_saves_the_run_and_requeues_the_job(undisturbed, tmp_path):
    runner = begin(RUNNER, tmp_path, "slurm:cluster=local")
    wait_for(lambda: epochs_done(tmp_path)[0] > 1, runner)
    process = json.loads(claim_path(tmp_path / "work", RUNS[0].folder).read_text())["process"]
    os.kill(process, signal.SIGUSR2)
    end_well(runner)
    logs = "".join(path.read_text() for path in (tmp_path / "work" / ".slurm").glob("*_log.*"))
    assert logs.count("Requeued job") == 1, logs
    assert outcome(tmp_path) == outcome(undisturbed[0])


def slurm_nodes():
    """The nodes of a SLURM that answers on this machine; nothing where there is none."""
    if not (find_spec("submitit") and shutil.which("sinfo") and shutil.which("sbatch")):
        return []
    asked = subprocess.run(
        ["sinfo", "--noheader", "--states=idle,mixed", "--format=%n"], capture_output=True, text=True
    )
    return asked.stdout.split()


@pytest.mark.slow
@pytest.mark.timeout(900)  # SLURM itself waits two minutes before it starts a requeued job
@pytest.mark.skipif(not slurm_nodes(), reason="needs submitit and a SLURM with a free node: see docs/testing.md")
def test_a_job_of_slurm_itself_is_signalled_requeued_and_resumed(undisturbed, tmp_path):
    runner = begin(RUNNER, tmp_path, "slurm:timeout_min=15")
    wait_for(lambda: epochs_done(tmp_path)[0] > 1, runner)
    logs = tmp_path / "work" / ".slurm"
    first = min(int(path.name.partition("_")[0]) for path in logs.glob("*_submitted.pkl"))
    subprocess.run(["scancel", "--signal=USR2", str(first)], check=True)
    printed, _ = runner.communicate(timeout=840)
    assert runner.returncode == 0, printed
    assert sum(path.read_text().count("Requeued job") for path in logs.glob("*_log.*")) == 1
    assert outcome(tmp_path) == outcome(undisturbed[0])


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("dusk:x", "executor=dusk:x: no such executor; did you mean dask?"),
        ("dask", "executor=dask: a Dask cluster has an address; give dask:ADDRESS, such as dask:127.0.0.1:8786"),
        ("slurm:cpu", "executor=slurm:cpu: cpu is not OPTION=VALUE; give slurm:partition=cpu,timeout_min=60"),
    ],
)
def test_a_wrong_name_is_one_line(tmp_path, name, line):
    with pytest.raises(ValueError, match="executor=") as error:
        make_executor(name, 1, tmp_path)
    assert str(error.value) == line


@pytest.mark.parametrize("name", ["dask:127.0.0.1:1", "ray", "slurm"])
def test_a_package_that_is_missing_is_one_line(tmp_path, monkeypatch, name):
    monkeypatch.setattr(executors, "find_spec", lambda _: None)
    kind = name.partition(":")[0]
    remedy = f"the package {EXTRAS[kind]} is not installed; install it with pip install '.[{kind}]'"
    with pytest.raises(ValueError, match="executor=") as error:
        make_executor(name, 1, tmp_path)
    assert str(error.value) == f"executor={name}: {remedy}"


@needs("slurm")
def test_without_slurm_its_executor_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"^executor=slurm: .*srun|sbatch") as error:
        make_executor("slurm", 1, tmp_path)
    assert "\n" not in str(error.value)


def test_a_signal_is_handed_on_only_where_a_cluster_has_set_what_it_does():
    heard = []
    before = signal.signal(signal.SIGUSR2, lambda number, _: heard.append(number))
    try:
        requeue(signal.SIGUSR2)
        requeue(signal.SIGTERM)
        requeue(signal.SIGINT)  # Python's own handler would raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGUSR2, before)
    requeue(signal.SIGUSR2)  # its default would end the process
    assert heard == [signal.SIGUSR2]


@needs("slurm")
def test_a_requeued_job_is_the_same_call():
    job = Requeued(tiny.epochs_done)
    again = job.checkpoint("work", "data")
    assert (again.function, again.args) == (job, ("work", "data"))
