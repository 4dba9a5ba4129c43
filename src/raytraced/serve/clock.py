"""An event loop that knows since when a request may have waited to be read.

While the loop computes, requests wait in the operating system. What is read after that may have come at any moment since
the loop last read the clock: a deadline counts from then.
"""

import asyncio
import selectors
from collections import deque
from time import perf_counter


class TimedSelector(selectors.DefaultSelector):
    """The system's selector, with the earliest moment at which the newest events can have come."""

    def __init__(self) -> None:
        super().__init__()
        self.returned = self.earliest = perf_counter()
        self.waited = False
        self.passes, self.last = 0, deque([self.earliest], maxlen=3)  # calls so far; `earliest` of the last three

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)  # what is there already may have come at any moment since the last call
        self.waited = not events and (timeout is None or timeout > 0)
        if self.waited:
            events = super().select(timeout)
        now = perf_counter()
        self.earliest, self.returned = now if self.waited else self.returned, now
        self.passes += 1
        self.last.append(self.earliest)
        return events


class TimedLoop(asyncio.SelectorEventLoop):
    """asyncio's event loop over a `TimedSelector`.

    A new connection is accepted in one pass, gets its protocol in the second pass after that, and is read in the third.
    """

    def __init__(self) -> None:
        self.clock = TimedSelector()
        super().__init__(self.clock)
