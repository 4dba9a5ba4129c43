"""Real processes, of which none has to import PyTorch: each is forked from a server that has done that, and nothing else.

No process outlives the one that runs the tests, however that ends: one that waits for it would do so without end.
"""

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from multiprocessing import forkserver
from pathlib import Path

from torch.distributed import TCPStore

IMPORTED = (
    "torch._dynamo",  # by the first optimizer
    "torch.utils.tensorboard",
    "torch.distributed.fsdp",
    "raytraced.cli.training",
    "raytraced.tasks.images.sequences",
    "raytraced.training.curves",
    "raytraced.training.expert_parallel",
    "raytraced.training.loop",
)
SERVER = ("_forkserver_address", "_forkserver_authkey")
METHOD = next(name for name in ("forkserver", "spawn") if name in multiprocessing.get_all_start_methods())
context = multiprocessing.get_context(METHOD)
context.set_forkserver_preload(list(IMPORTED))
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
END_WITH_PARENT = f"""
import ctypes, os, sys
sys.platform == "linux" and ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, {signal.SIGKILL:d})
os.execv(sys.argv[1], sys.argv[1:])
"""


def with_parent(command):
    """A command of Python, of which the process is killed when the one that starts it ends (on Linux)."""
    return [sys.executable, "-I", "-S", "-c", END_WITH_PARENT, *map(str, command)]


class Forked:
    """What `subprocess.Popen` is for a program, for a function; it prints into one pipe, unless files are named."""

    def __init__(self, target, *args, env=None, files=None):
        reader, writer = context.Pipe(duplex=False)
        place = (os.getcwd(), dict(os.environ if env is None else env), files or writer)
        self.process = context.Process(target=begin, args=(*place, the_server(), target, args), daemon=True)
        self.process.start()
        self.pid, self.stdout = self.process.pid, os.fdopen(os.dup(reader.fileno()), encoding="utf-8")
        writer.close()
        reader.close()

    @property
    def returncode(self):
        return self.process.exitcode

    def poll(self):
        return self.process.exitcode

    def wait(self, timeout=None):
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(self.process.name, timeout)
        return self.process.exitcode

    def communicate(self, timeout=120):
        """All that it prints, to its end; past its time it is killed."""
        late = threading.Timer(timeout, self.kill)
        late.daemon = True
        late.start()
        with self.stdout:
            printed = self.stdout.read()
        self.wait(timeout)
        late.cancel()
        return printed, None

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def the_server():
    """Where the server is, for those who were forked from it; Python itself would start another for each of them."""
    if METHOD != "forkserver":
        return {}
    forkserver.ensure_running()
    return {name: vars(forkserver._forkserver)[name] for name in SERVER if name in vars(forkserver._forkserver)}


def begin(folder, environment, output, server, target, args):
    """The first thing that such a process does: be where, and print to where, it shall; it may have children."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # its parent is the server, which ends with the tests
    multiprocessing.current_process()._config["daemon"] = False
    if server:
        vars(forkserver._forkserver).update(server, ensure_running=lambda: None)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, stream in enumerate(("stdout", "stderr")):
        place = os.open(output[number], os.O_WRONLY) if isinstance(output, list) else output.fileno()
        os.dup2(place, 1 + number)
        setattr(sys, stream, os.fdopen(1 + number, "w", buffering=-1 if stream == "stdout" else 1, closefd=False))
    code = target(*args)
    sys.exit(code if isinstance(code, int) else 0)


def command(*words):
    """`raytraced WORDS`, in such a process."""
    from raytraced.cli.main import main

    return main([str(word) for word in words])


def program(code, *words):
    """`python -c CODE WORDS`, in such a process."""
    sys.argv = ["-c", *map(str, words)]
    exec(compile(code, "<program>", "exec"), {"__name__": "__main__"})


def run(target, *args, env=None, timeout=120):
    """What `subprocess.run` gives for a program: its exit code, and what it printed where."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("stdout", "stderr")]
        for file in files:
            file.touch()
        process = Forked(target, *args, env=env, files=files)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
            process.stdout.close()
        return subprocess.CompletedProcess(args, code, *(file.read_text(encoding="utf-8") for file in files))


def run_together(size, target, *args, timeout=100):
    """What torchrun does on one host: processes that get a common address; all must succeed. What each printed."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    place |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    processes = [
        Forked(target, *args, env=os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(size)
    ]
    try:
        printed = [process.communicate(timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * size, "\n".join(printed)
    return printed
