"""Ctrl-C, SIGTERM, a terminal that closes, a cluster that wants its machine back: finish the step, save, and stop."""

import atexit
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

# SIGUSR1 and SIGUSR2: SLURM sends one of them before it stops a job. Windows has SIGINT and SIGTERM only.
NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
SIGNALS = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]


class Interrupted(Exception):  # noqa: N818 (not an error)
    """A signal stopped the run, which is saved.

    Args:
        number: The signal.
        step: Number of steps that are done.
        run: The run folder.
    """

    def __init__(self, number: int, step: int, run: Path) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} after step {step}")
        self.number = number
        self.exit_code = 128 + number
        self.run = run


class StopRequest:
    """Holds the number of the signal that asked to stop; 0 while there is none."""

    number = 0

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Note the first signal; a second one ends the process at once."""
        if self.number:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.number = number


@contextmanager
def listen(request: StopRequest | None = None) -> Iterator[StopRequest]:
    """Inside this context signals (SIGINT, SIGTERM, …) are requests.

    Args:
        request: What notes the signals; another thread may set its number, too. None makes a new one.

    Yields:
        The request, whose number is 0 until a signal arrives.
    """
    request = request or StopRequest()
    previous = {number: signal.signal(number, request.receive) for number in SIGNALS if in_main_thread()}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def in_main_thread() -> bool:
    """Whether this is the main thread: no other may set what signals do."""
    return threading.current_thread() is threading.main_thread()


def ignore_signals_at_exit() -> None:
    """Ignore the signals while the interpreter exits: a run that is complete must not end with the code of a signal."""

    def ignore() -> None:
        if in_main_thread():
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)

    atexit.register(ignore)
