"""An HTTP client that costs little beside what it measures."""

import asyncio
import json
from typing import Any, NamedTuple, Self


class Reply(NamedTuple):
    """A response: its status (None where the server closed the connection without one), headers and body."""

    status: int | None
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """The body's value."""
        return json.loads(self.body)


CLOSED = Reply(None, {}, b"")


class Client:
    """One connection at a time to a server; it connects again where the server has closed.

    Args:
        address: `http://HOST:PORT`.
        timeout: The most seconds for one request.
    """

    def __init__(self, address: str, timeout: float = 30.0) -> None:
        self.host, _, port = address.removeprefix("http://").partition(":")
        self.port, self.timeout = int(port), timeout
        self.writer: asyncio.StreamWriter | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection."""
        if self.writer is not None:
            self.writer.close()
            self.writer = None

    async def send(self, content: bytes) -> None:
        """Send bytes, over a new connection where there is none."""
        if self.writer is None:
            self.reader, self.writer = await asyncio.open_connection(self.host, self.port, limit=1 << 20)
        self.writer.write(content)
        await self.writer.drain()

    async def post(self, path: str, body: bytes, content_type: str = "application/json") -> Reply:
        """The response to a POST."""
        head = f"POST {path} HTTP/1.1\r\nHost: {self.host}\r\nContent-Type: {content_type}\r\n"
        return await self.exchange(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    async def get(self, path: str) -> Reply:
        """The response to a GET."""
        return await self.exchange(f"GET {path} HTTP/1.1\r\nHost: {self.host}\r\n\r\n".encode())

    async def exchange(self, content: bytes) -> Reply:
        """The response to a request as bytes; once more where an idle connection was closed meanwhile."""
        was_open = self.writer is not None
        async with asyncio.timeout(self.timeout):
            reply = await self.try_exchange(content)
            return await self.try_exchange(content) if reply is CLOSED and was_open else reply

    async def try_exchange(self, content: bytes) -> Reply:
        try:
            await self.send(content)
            return await self.receive()
        except (ConnectionError, asyncio.IncompleteReadError):
            await self.close()
            return CLOSED

    async def receive(self) -> Reply:
        """One response."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines if line)}
        status = int(first.split()[1])
        if headers.get("transfer-encoding") == "chunked":
            body = b"".join([chunk async for chunk in self.chunks()])
        elif "content-length" in headers:
            body = await self.reader.readexactly(int(headers["content-length"]))
        else:
            body = await self.reader.read()
        if headers.get("connection") == "close":
            await self.close()
        return Reply(status, headers, body)

    async def chunks(self) -> Any:
        """The chunks of a response's body."""
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            yield (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readexactly(2)
