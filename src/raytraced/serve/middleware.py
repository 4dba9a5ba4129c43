"""In front of all paths: which requests are accepted, how many at a time, and what is counted."""

import asyncio
import hmac
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raytraced.serve.limits import Limits, RefusedError, shorten
from raytraced.serve.metrics import Metrics

LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")
WITHOUT_KEY = ("/healthz", "/readyz", "/v2/health/live", "/v2/health/ready")
UPLOADS = ("/api/upload",)


@dataclass
class Traffic:
    """What is in progress, what was counted, and whether the server is shutting down."""

    metrics: Metrics = field(default_factory=Metrics)
    in_progress: int = 0
    shutting_down: bool = False


def error_response(path: str, error: RefusedError) -> Response:
    """A refusal in the format of the protocol that the path belongs to."""
    content: Any = {"error": {"rule": error.rule, "message": error.message}}
    if path.startswith("/v1/"):
        kind = "invalid_request_error" if error.status_code < 500 else "server_error"
        content["error"] |= {"type": kind, "code": error.rule, "param": None}
    if path.startswith("/v2/"):
        content = {"error": error.message}
    # ASCII only: a message may quote half of a surrogate pair, which no encoding can express
    return Response(json.dumps(content).encode(), error.status_code, error.headers, "application/json")


class TrustedHosts(TrustedHostMiddleware):
    """Starlette's check of the host's name, with a refusal in JSON."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def accept(scope: Scope, receive: Receive, _: Send) -> None:
            await self.app(scope, receive, send)

        async def refuse(message: Message) -> None:
            host = shorten(Headers(scope=scope).get("host", ""))
            raise RefusedError(403, "host", f"host={host}: is not a name of this server; add it with --hosts")

        await TrustedHostMiddleware(accept, self.allowed_hosts, self.www_redirect)(scope, receive, refuse)


class Arrivals:
    """The bodies that are arriving. Where there are too many, the oldest is ended: a body that is sent fast is never old."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.deadlines: dict[asyncio.Timeout, str] = {}  # the client address of each body, oldest first
        self.per_address: Counter[str] = Counter()

    @asynccontextmanager
    async def body(self, address: str) -> AsyncIterator[None]:
        """The time in which one body arrives."""
        self.make_room(address)
        timeout = asyncio.timeout(self.limits.body_seconds)
        try:
            async with timeout:
                self.deadlines[timeout] = address
                self.per_address[address] += 1
                yield
        except TimeoutError:
            rule = f"must arrive within {self.limits.body_seconds:g} seconds, or sooner where many arrive"
            raise RefusedError(408, "body_seconds", f"body: {rule}; send it faster") from None
        finally:
            self.forget(timeout)

    def make_room(self, address: str) -> None:
        """End the oldest body of the address, or of all, where the limit is reached."""
        if self.per_address[address] >= self.limits.bodies_per_address:
            oldest = next(timeout for timeout, other in self.deadlines.items() if other == address)
        elif len(self.deadlines) >= self.limits.bodies:
            oldest = next(iter(self.deadlines))
        else:
            return
        self.forget(oldest)
        oldest.reschedule(asyncio.get_running_loop().time())

    def forget(self, timeout: asyncio.Timeout) -> None:
        """Count a body no longer."""
        address = self.deadlines.pop(timeout, None)
        if address is not None:
            self.per_address[address] -= 1
            if not self.per_address[address]:
                del self.per_address[address]


class Gate:
    """Refuses requests by their head, receives their bodies within limits, and counts them.

    Args:
        app: The application behind it.
        traffic: What is shared with the rest of the server.
        limits: How much is accepted.
        paths: The known paths; all others are counted as one.
        hosts: The names that the server may be called by.
        api_key: The key that requests must state; None for no key.
        check_body: Refuses a request by its body, before the application reads it.
    """

    def __init__(
        self,
        app: ASGIApp,
        traffic: Traffic,
        limits: Limits,
        paths: Collection[str] = (),
        hosts: Sequence[str] = LOOPBACK,
        api_key: bytes | None = None,
        check_body: Callable[[Scope, bytes], None] = lambda scope, body: None,
    ) -> None:
        self.app, self.traffic, self.limits, self.paths, self.api_key = app, traffic, limits, set(paths), api_key
        self.check_body = check_body
        self.arrivals = Arrivals(limits)
        self.checked = TrustedHosts(self.pass_on, list(hosts), www_redirect=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        arrived, status = scope.get("received", perf_counter()), 500
        scope["arrived"], scope["waited"] = arrived, perf_counter() - arrived
        await asyncio.sleep(0)  # requests that came at the same time are all stamped before one of them is read

        async def send_counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                safe = [(b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer")]
                message = {**message, "headers": [*message["headers"], *safe]}
            await send(message)

        try:
            await self.checked(scope, receive, send_counted)
        except RefusedError as error:
            await error_response(scope["path"], error)(scope, receive, send_counted)
        finally:
            path = scope["path"] if scope["path"] in self.paths else "other"
            metrics = self.traffic.metrics
            metrics.requests.labels(path, status).inc()
            metrics.request_seconds.labels(path).observe(perf_counter() - arrived)

    async def pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request, and hand it to the application."""
        headers = Headers(scope=scope)
        self.check_head(scope, headers)
        if scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        check_content_type(scope["path"], headers)
        body = await self.receive_body(scope, headers, receive)
        if self.traffic.in_progress >= self.limits.in_progress:
            message = f"{self.limits.in_progress} requests are in progress, more are not accepted; try again later"
            raise RefusedError(429, "in_progress", message)
        self.check_body(scope, body)
        self.count(1)
        try:
            await self.app(scope, replay(body, receive), send)
        finally:
            self.count(-1)

    def count(self, change: int) -> None:
        """Count requests in progress."""
        self.traffic.in_progress += change
        self.traffic.metrics.in_progress.set(self.traffic.in_progress)

    def check_head(self, scope: Scope, headers: Headers) -> None:
        """Refuse requests of other sites' pages, without the key, or during shutdown."""
        host = headers.get("host", "").lower()
        for origin in headers.getlist("origin"):
            if origin.lower() not in (f"http://{host}", f"https://{host}"):
                message = f"origin={shorten(origin)}: only this server's own page may send requests from a browser"
                raise RefusedError(403, "origin", message)
        if self.api_key is not None and scope["path"] not in WITHOUT_KEY:
            kind, _, key = headers.get("authorization", "").partition(" ")
            if not (kind.lower() == "bearer" and hmac.compare_digest(key.strip().encode("latin-1"), self.api_key)):
                rule = "must be Bearer and the server's API key (raytraced serve --api-key-file)"
                raise RefusedError(401, "api_key", f"authorization: {rule}")
        if self.traffic.shutting_down and scope["path"] not in WITHOUT_KEY:
            raise RefusedError(503, "shutting_down", "the server is shutting down and accepts no new requests")

    async def receive_body(self, scope: Scope, headers: Headers, receive: Receive) -> bytes:
        """The body of a request, of a size that is allowed and in time."""
        too_long = RefusedError(413, "body", f"body: must be at most {self.limits.body:,} bytes; send less at a time")
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length[:20]) > self.limits.body:
            raise too_long  # before anything is received
        body = bytearray()
        async with self.arrivals.body((scope.get("client") or ("",))[0]):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise RefusedError(400, "client", "body: the client closed the connection before its end")
                body += message.get("body", b"")
                if len(body) > self.limits.body:
                    raise too_long
                if not message.get("more_body", False):
                    return bytes(body)


def check_content_type(path: str, headers: Headers) -> None:
    """Refuse bodies that are not declared as what the path takes; the Open Inference Protocol declares nothing."""
    encoding = headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise RefusedError(415, "content_encoding", f"content-encoding={shorten(encoding)}: must be identity")
    if path.startswith("/v2/"):
        return
    expected = "multipart/form-data" if path in UPLOADS else "application/json"
    found = headers.get("content-type", "").partition(";")[0].strip().lower()
    if found != expected:
        raise RefusedError(
            415, "content_type", f"content-type={shorten(found)}: must be {expected} for {shorten(path)}"
        )


def replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives a body that was received already, then what follows it."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return pending.pop() if pending else await receive()

    return receive_again
