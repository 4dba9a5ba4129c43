"""In front of all paths: who may call, how many at a time, and what is counted."""

import asyncio
import ipaddress
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raytraced.serve.limits import Limits, RefusedError
from raytraced.serve.metrics import Metrics

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass
class Traffic:
    """What is under way, what was counted, and whether the server is about to end."""

    metrics: Metrics = field(default_factory=Metrics)
    under_way: int = 0
    ending: bool = False


class Guard:
    """Refuses requests by their head alone; passes the others on."""

    def __init__(
        self, app: ASGIApp, traffic: Traffic, limits: Limits, paths: Collection[str], hosts: Sequence[str] = ()
    ) -> None:
        self.app, self.traffic, self.limits, self.paths = app, traffic, limits, set(paths)
        self.hosts = {*LOOPBACK, *(host.lower() for host in hosts)}
        # Behind an address of a network there may be any number of others; a page cannot lie about a number, only about a name.
        self.takes_numbers = bool({*hosts} - {*LOOPBACK})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        arrived, status = perf_counter(), 500
        scope["arrived"] = arrived
        await asyncio.sleep(0)  # whoever came at the same time has arrived too, before any of them is read
        works = scope["path"].startswith("/api/") and scope["method"] == "POST"

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                safe = [(b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer")]
                message = {**message, "headers": [*message["headers"], *safe]}
            await send(message)

        self.traffic.under_way += works
        try:
            self.check(scope, works)
            await self.app(scope, receive, send_on)
        except RefusedError as error:
            await error.response()(scope, receive, send_on)
        finally:
            self.traffic.under_way -= works
            path = scope["path"] if scope["path"] in self.paths else "other"
            self.traffic.metrics.add("raytraced_requests_total", path=path, status=status)
            self.traffic.metrics.observe("raytraced_request_seconds", perf_counter() - arrived, path=path)

    def check(self, scope: Scope, works: bool) -> None:
        """Refuse a request by its head."""
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self.knows(host_of(f"//{hosts[0]}")):
            raise RefusedError(403, "host", "host: this server is called by another name; see --hosts")
        for origin in headers.getlist("origin"):
            # a page of another server may not ask: its origin is not the address that it asks
            if origin.lower() not in (f"http://{hosts[0]}".lower(), f"https://{hosts[0]}".lower()):
                raise RefusedError(403, "origin", "origin: only this server's own page may ask")
        if self.traffic.ending:
            raise RefusedError(503, "ending", "the server is about to end; nothing new is begun")
        if works and self.traffic.under_way > self.limits.under_way:
            most = self.limits.under_way
            raise RefusedError(429, "under_way", f"{most} requests are under way, no more are taken; try again")

    def knows(self, host: str | None) -> bool:
        """Whether the server may be called by this name."""
        if host in self.hosts:
            return True
        try:
            ipaddress.ip_address(host or "")
        except ValueError:
            return False
        return self.takes_numbers


def host_of(address: str) -> str | None:
    """The host's name in an address, in small letters; None where there is none."""
    try:
        return urlsplit(address).hostname
    except ValueError:
        return None
