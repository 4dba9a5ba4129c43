"""What the server takes, and how it says no."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

CLOSED = {"Connection": "close"}  # what is left of a body that is not wanted would have to be read
HEADERS = dict.fromkeys((403, 408, 413), CLOSED) | dict.fromkeys((429, 503), CLOSED | {"Retry-After": "1"})


@dataclass(frozen=True)
class Limits:
    """The most of everything that one server takes on."""

    body: int = 2_000_000
    """bytes of a request"""
    batch: int = 256
    """images of a request"""
    pixels: int = 1 << 24
    """pixels that the image files of a request hold, all together"""
    text: int = 65_536
    """characters of a text"""
    tokens: int = 4096
    """tokens that one request may have generated"""
    under_way: int = 128
    """requests that are read, answered or streamed at a time"""
    seconds: float = 10.0
    """that a request may take to arrive"""


class RefusedError(Exception):
    """A request that is not answered: its HTTP status, the rule that it breaks, and a sentence."""

    def __init__(self, status: int, rule: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.content = status, {"error": {"rule": rule, "message": message}}
        self.headers = {**(headers or {}), **HEADERS.get(status, {})}

    def response(self) -> Response:
        return send_json(self.content, self.status, self.headers)


def send_json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    # Only ASCII: a message may quote half a surrogate pair, which no encoding has.
    return Response(json.dumps(value).encode(), status, headers, "application/json")


def shown(value: object) -> str:
    """A value in a message: its beginning."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
