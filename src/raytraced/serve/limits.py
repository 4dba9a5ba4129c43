"""What the server takes, and how it says no."""

from dataclasses import dataclass


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

    def __init__(self, status: int, rule: str, message: str) -> None:
        super().__init__(message)
        self.status, self.rule, self.message = status, rule, message


def shown(value: object) -> str:
    """A value in a message: its beginning."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
