"""Connections within limits: a request's head has a time limit, their number is capped, and a client must read.

uvicorn has no such limits, but lets its protocol be replaced: the subclass below adds them, and one task checks all
connections twice a second.
"""

import asyncio
import json
import sys
from collections import Counter
from time import monotonic
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from raytraced.serve.clock import TimedLoop
from raytraced.serve.limits import Limits

BACKLOG = 128  # connections that the event loop accepts in one pass
RESERVED_FILES = 100  # descriptors for models, decoders, pages and libraries
CHECK_SECONDS = 0.5
LOG_SECONDS = 10.0


class Connections:
    """All open connections of a server, oldest first.

    Args:
        limits: How many connections there may be, and how long they may take.
        max_files: The number of files that the process may open.
    """

    def __init__(self, limits: Limits, max_files: int | None = None) -> None:
        room = limits.connections if max_files is None else max_files - BACKLOG - RESERVED_FILES
        self.limits, self.most = limits, max(1, min(limits.connections, room))
        self.open: dict[LimitedProtocol, None] = {}
        self.per_address: Counter[str] = Counter()
        self.last_log = -LOG_SECONDS

    def protocol(self, **options: Any) -> "LimitedProtocol":
        """The protocol of one new connection, as uvicorn asks for it."""
        return LimitedProtocol(self, **options)

    def add(self, connection: "LimitedProtocol") -> None:
        """Take a new connection in, and close one where there are too many."""
        self.open[connection] = None
        self.per_address[connection.address] += 1
        if self.per_address[connection.address] > self.limits.connections_per_address:
            candidates = [other for other in self.open if other.address == connection.address]
        elif len(self.open) > self.most:
            candidates = list(self.open)
        else:
            return
        # requests in progress are not ended; the newest connection always waits, so that there is one to close
        self.close(next(other for other in candidates if other.is_waiting))

    def remove(self, connection: "LimitedProtocol") -> None:
        """Forget a connection."""
        if connection in self.open:
            del self.open[connection]
            self.per_address[connection.address] -= 1
            if not self.per_address[connection.address]:
                del self.per_address[connection.address]

    def close(self, connection: "LimitedProtocol") -> None:
        """End a connection; it counts no longer from now on."""
        self.remove(connection)
        connection.transport.abort()

    async def watch(self) -> None:
        """Close connections that have exceeded a time limit, again and again."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            self.check(monotonic())

    def check(self, now: float) -> None:
        """Close connections that have exceeded a time limit."""
        for connection in list(self.open):
            if connection.is_late(now):
                self.close(connection)

    def report(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Print an error of the event loop; one line per ten seconds where connections cannot be accepted."""
        if not isinstance(context.get("exception"), OSError):
            loop.default_exception_handler(context)
            return
        if monotonic() - self.last_log >= LOG_SECONDS:
            self.last_log = monotonic()
            print(f"raytraced: serve: {context['message']}: {context['exception']}", file=sys.stderr, flush=True)


class LimitedProtocol(H11Protocol):
    """One connection: uvicorn's protocol, with times."""

    def __init__(self, registry: Connections, **options: Any) -> None:
        super().__init__(**options)
        self.registry, self.address = registry, ""
        self.waiting_since = self.progress_since = monotonic()
        self.unsent = 0
        self.accepted, self.made = (
            0.0,
            0,
        )  # since when the connection may have waited, and the loop's pass since which it is open

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if isinstance(self.loop, TimedLoop):
            self.accepted, self.made = self.loop.clock.last[0], self.loop.clock.passes
        self.address = self.client[0] if self.client else ""
        self.registry.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.registry.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before and isinstance(self.loop, TimedLoop):
            clock = self.loop.clock
            came_along = clock.passes == self.made + 1 and not clock.waited  # with the connection itself
            self.cycle.scope["received"] = self.accepted if came_along else clock.earliest  # type: ignore[typeddict-unknown-key]

    def on_response_complete(self) -> None:
        self.waiting_since = monotonic()
        super().on_response_complete()

    @property
    def is_waiting(self) -> bool:
        """Whether no request is in progress: its head has not arrived."""
        return self.cycle is None or self.cycle.response_complete

    def is_late(self, now: float) -> bool:
        """Whether a head takes too long, or the client does not read what is sent."""
        unsent = self.transport.get_write_buffer_size()
        if unsent == 0 or unsent < self.unsent:
            self.progress_since = now
        self.unsent = unsent
        if now - self.progress_since > self.registry.limits.write_seconds:
            return True
        return self.is_waiting and unsent == 0 and now - self.waiting_since > self.registry.limits.head_seconds

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, in JSON as all refusals are."""
        content = json.dumps({"error": {"rule": "http", "message": f"request: is not valid HTTP/1.1 ({msg})"}}).encode()
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=content),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
