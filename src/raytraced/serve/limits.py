"""How much a server accepts, and how it refuses a request."""

from collections.abc import Mapping
from dataclasses import dataclass

from fastapi.exceptions import HTTPException

CLOSE = {"Connection": "close"}  # the rest of an unread body would have to be received otherwise
HEADERS = (
    dict.fromkeys((403, 408, 413), CLOSE)
    | {429: {"Retry-After": "1"}, 503: CLOSE | {"Retry-After": "1"}}  # 429 follows the whole body
    | {401: CLOSE | {"WWW-Authenticate": "Bearer"}}
)


@dataclass(frozen=True)
class Limits:
    """The most of everything that one server accepts."""

    body: int = 2_000_000
    """bytes of a request's body"""
    pixels: int = 1 << 24
    """pixels of all image files of a request together"""
    scans: int = 100
    """scans of a progressive JPEG file; cameras and editors write about ten"""
    decode_seconds: float = 3.0
    """seconds to decode the image files of a request"""
    decoders: int = 2
    """processes that decode image files"""
    tokens: int = 4096
    """tokens that one request may generate"""
    in_progress: int = 128
    """requests that are computed or streamed at the same time"""
    bodies_per_address: int = 32
    """bodies that arrive from one client address at the same time; the oldest is ended to make room"""
    bodies: int = 256
    """bodies that arrive at the same time; the oldest is ended to make room"""
    body_seconds: float = 10.0
    """seconds for a body to arrive"""
    head_seconds: float = 10.0
    """seconds for a request's head to arrive"""
    write_seconds: float = 20.0
    """seconds without progress after which a client that does not read is disconnected"""
    connections: int = 512
    """open connections; the one that has waited longest for a request is closed to make room"""
    connections_per_address: int = 256
    """open connections of one client address"""


class RefusedError(HTTPException):
    """A request that is not answered: its HTTP status, the rule that it breaks, and one line that says why.

    Args:
        status: The HTTP status.
        rule: A short name of the rule, for programs.
        message: What was wrong, its value, the rule and the remedy, for people.
        headers: Further headers of the response.
    """

    def __init__(self, status: int, rule: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(status, message, {**(headers or {}), **HEADERS.get(status, {})})
        self.rule, self.message = rule, message


def shorten(value: object) -> str:
    """The beginning of a value, for a message."""
    text = value if isinstance(value, str) else " ".join(repr(value).split())  # arrays take several lines
    return text if len(text) <= 60 else f"{text[:57]}…"
