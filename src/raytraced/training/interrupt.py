"""Ctrl-C, SIGTERM and a terminal that closes: finish the step, save, and print how to resume."""

import atexit
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

# Windows has no SIGHUP.
SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Interrupted(Exception):  # noqa: N818 (not an error)
    """A signal stopped the run, which is saved.

    Args:
        number: The signal.
        step: Number of steps that are done.
        run: The run folder.
    """

    def __init__(self, number: int, step: int, run: Path) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} after step {step}")
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
def listen() -> Iterator[StopRequest]:
    """Inside this context SIGINT, SIGTERM and SIGHUP are requests.

    Yields:
        The request, whose number is 0 until a signal arrives.
    """
    request = StopRequest()
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
