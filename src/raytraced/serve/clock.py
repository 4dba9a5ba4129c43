"""An event loop that knows since when a request may have waited to be read.

While the loop computes, requests wait in the operating system. What is read after that may have come at any moment since
the loop last looked: a deadline counts from then.
"""

import asyncio
import selectors
from time import perf_counter

BLOCKED = 0.0002  # seconds; a call that took longer has waited, and what it returns has just come


class TimedSelector(selectors.DefaultSelector):
    """The system's selector, with the earliest moment at which the newest events can have come."""

    def __init__(self) -> None:
        super().__init__()
        self.returned = self.earliest = perf_counter()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        called = perf_counter()
        events = super().select(timeout)
        now = perf_counter()
        waited = (timeout is None or timeout > 0) and now - called > BLOCKED
        self.earliest, self.returned = now if waited else self.returned, now
        return events


class TimedLoop(asyncio.SelectorEventLoop):
    """asyncio's event loop over a `TimedSelector`."""

    def __init__(self) -> None:
        self.clock = TimedSelector()
        super().__init__(self.clock)
