"""`raytraced serve` in a process group of its own."""

import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

import raytraced

START_SECONDS = 120
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(raytraced.__file__).parent.parent)}


class ServerProcess:
    """A server of some models on a free port, which is killed with all its processes where the `with` block ends.

    Its messages go into a file: a pipe that is not read would stop the server.

    Args:
        words: Models and options of `raytraced serve`.
        preexec_fn: Called in the new process before the server starts.
    """

    def __init__(self, *words: str, preexec_fn: Callable[[], None] | None = None) -> None:
        command = [sys.executable, "-m", "raytraced", "serve", *words, "--port", "0"]
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed in __exit__)
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=ENVIRONMENT,
            start_new_session=True,
            preexec_fn=preexec_fn,
        )

    def __enter__(self) -> Self:
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], START_SECONDS)
        line = self.process.stdout.readline() if readable else ""
        if "http://" not in line:
            log = self.log()
            self.__exit__()
            raise RuntimeError(f"the server did not start within {START_SECONDS} s: {log}")
        self.address = "http://" + line.partition("http://")[2].partition("/")[0]
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.errors.close()

    def log(self) -> str:
        """All that the server has written to stderr."""
        self.errors.seek(0)
        return self.errors.read()
