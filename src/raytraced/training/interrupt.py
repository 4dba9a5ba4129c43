"""Ctrl-C, SIGTERM and a terminal that closes: finish the step, save, say how to go on."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

# Windows has no SIGHUP.
SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Interrupted(Exception):  # noqa: N818 (not an error)
    """The run was asked to stop, and has saved itself."""

    def __init__(self, number: int, step: int, run: Path) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} after step {step}")
        self.exit_code = 128 + number
        self.run = run


class StopRequest:
    """Remembers the signal that asked to stop; 0 while none has."""

    number = 0

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Note the first request; a second one does not wait."""
        if self.number:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.number = number


@contextmanager
def listen() -> Iterator[StopRequest]:
    """While inside, SIGINT, SIGTERM and SIGHUP are requests."""
    request = StopRequest()
    may_install = threading.current_thread() is threading.main_thread()  # no other thread may
    previous = {number: signal.signal(number, request.receive) for number in SIGNALS if may_install}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
