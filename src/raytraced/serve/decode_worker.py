"""A process that decodes image files and large JSON bodies: `python -m raytraced.serve.decode_worker`, over a socket.

It imports neither torch nor the server, so that it starts quickly and can be ended at any moment without a loss. A message
is the length of a JSON header (4 bytes), the header, and the contents it announces.

Legend: C channels, H and W height and width.
"""

import base64
import io
import json
import os
import select
import signal
import socket
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from raytraced.tasks.images.image_file import read_image

FILE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
START_OF_SCAN = b"\xff\xda"
FEWEST_PIXELS = 32  # shorter lists of numbers stay as they are
MAX_VALUES = 300_000  # of a body, each image counted as one
PARENT_SECONDS = 1.0  # how often an idle process checks whether the server still exists


class ContentError(ValueError):
    """An image file or a body that is refused: the rule that it breaks, and why."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(message)
        self.rule = rule


def decode(files: dict[str, bytes], options: dict[str, Any]) -> list[NDArray[np.uint8]]:
    """Decode image files, by the names that messages call them, into arrays (C, H, W) of one size.

    `options` holds `base64` (whether the files are in base64), `shape` (C, H, W), `pixels` and `scans` (the limits).
    """
    contents = {name: decode_base64(name, content) if options["base64"] else content for name, content in files.items()}
    total = sum(num_pixels(name, content) for name, content in contents.items())
    if total > options["pixels"]:
        rule = f"have more than {options['pixels']:,} pixels in all; send smaller files, or fewer"
        raise ContentError("pixels", f"images: {rule}")
    for name, content in contents.items():
        # JPEG data never contains the marker's two bytes, so that every scan is counted
        num = content.count(START_OF_SCAN) if content.startswith(b"\xff\xd8") else 0
        if num > options["scans"]:
            limit = f"must be at most {options['scans']}; save it as a baseline JPEG"
            raise ContentError("scans", f"{name}: is a JPEG file of {num:,} scans, {limit}")
    C, H, W = options["shape"]
    arrays = []
    for name, content in contents.items():
        try:
            arrays.append(read_image(io.BytesIO(content), height=H, width=W, colour=C > 1))
        except ValueError as error:  # its message begins with the file, which has no name in memory
            raise ContentError("image", f"{name}: {str(error).partition(': ')[2]}") from None
    return arrays


def decode_base64(name: str, content: bytes) -> bytes:
    """The bytes that base64 stands for."""
    try:
        return base64.b64decode(content, validate=True)
    except ValueError:
        raise ContentError("image", f"{name}: must be an image file in base64, or lists of pixels") from None


def num_pixels(name: str, content: bytes) -> float:
    """The number of pixels that a file's header states; nothing is decompressed before it is known."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(content), formats=FILE_FORMATS) as image:
                return image.width * image.height
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        return inf
    except Exception:  # a damaged file can fail in any way, in any of Pillow's decoders
        rule = f"must be a {', '.join(FILE_FORMATS[:-1])} or {FILE_FORMATS[-1]} file that Pillow can read"
        raise ContentError("image", f"{name}: {rule}") from None


class CompactBody:
    """A JSON body whose images, as nested lists of numbers, are taken out: what remains is read quickly.

    Args:
        text: The body.
    """

    def __init__(self, text: bytes) -> None:
        self.places: list[tuple[list[str | int], tuple[int, ...]]] = []
        self.pixels: list[bytes] = []
        self.num_values = 0
        value = json.loads(text)
        if not isinstance(value, dict):
            raise ContentError("json_invalid", "body: must be a JSON object")
        self.text = json.dumps(self.reduce(value, []))

    def reduce(self, value: Any, path: list[str | int]) -> Any:
        """The same value, with None in the place of each image."""
        self.num_values += 1
        if self.num_values > MAX_VALUES:
            raise ContentError(
                "values", f"body: has more than {MAX_VALUES:,} values besides images; send less at a time"
            )
        if isinstance(value, dict):
            return {name: self.reduce(one, [*path, name]) for name, one in value.items()}
        if not isinstance(value, list):
            return value
        pixels = as_pixels(value)
        if pixels is None:
            return [self.reduce(one, [*path, number]) for number, one in enumerate(value)]
        self.places.append((path, pixels.shape))
        self.pixels.append(pixels.tobytes())
        return None


def as_pixels(rows: list[Any]) -> NDArray[np.uint8] | None:
    """Nested lists of whole numbers in 0 … 255, at least some, as an array; None for anything else."""
    flat: list[Any] = rows
    shape = [len(rows)]
    while flat and all(isinstance(one, list) for one in flat):
        if len({len(one) for one in flat}) != 1 or len(shape) == 4:
            return None
        shape.append(len(flat[0]))
        flat = [one for row in flat for one in row]
    if len(flat) < FEWEST_PIXELS or set(map(type, flat)) != {int} or min(flat) < 0 or max(flat) > 255:
        return None
    return np.array(flat, dtype=np.uint8).reshape(shape)


def parse_body(content: bytes) -> tuple[dict[str, Any], bytes]:
    """The reply to a JSON body: places and shapes of images in the header, then the rest as JSON, then all pixels."""
    try:
        body = CompactBody(content)
    except (ValueError, RecursionError) as error:
        if isinstance(error, ContentError):
            raise
        raise ContentError("json_invalid", f"body: must be JSON ({str(error)[:60]})") from None
    text = body.text.encode()
    reply = b"".join((text, *body.pixels))
    return {"images": body.places, "length": len(text), "size": len(reply)}, reply


def answer_message(header: dict[str, Any], content: bytes) -> tuple[dict[str, Any], bytes]:
    """The reply to one message: a header, and the pixels of all images or what a JSON body holds."""
    try:
        return parse_body(content) if header.get("json") else decode_files(header, content)
    except ContentError as error:
        return {"rule": error.rule, "message": str(error), "size": 0}, b""


def decode_files(header: dict[str, Any], content: bytes) -> tuple[dict[str, Any], bytes]:
    """The reply to image files: the pixels of all of them."""
    files, start = {}, 0
    for name, size in header["files"]:
        files[name], start = content[start : start + size], start + size
    pixels = b"".join(array.tobytes() for array in decode(files, header["options"]))
    return {"size": len(pixels)}, pixels


def pack_message(header: dict[str, Any], *contents: bytes) -> bytes:
    """A message as it is sent."""
    text = json.dumps(header).encode()
    return b"".join((len(text).to_bytes(4, "big"), text, *contents))


def serve_messages(receive: Callable[[int], bytes], send: Callable[[bytes], None], wait: Callable[[], bool]) -> None:
    """Answer messages until the other side closes, or `wait` says that there will be no other message."""
    send(pack_message({"size": 0}))  # ready
    while wait() and (length := receive(4)):
        header = json.loads(receive(int.from_bytes(length, "big")))
        content = receive(sum(size for _, size in header["files"]))
        send(pack_message(*answer_message(header, content)))


def serve_socket() -> None:
    """Serve a socket. The arguments are its number, the most seconds that a message may take, and the server's process.

    The process ends with the server, in whatever way the server ends: the socket closes, or the server is no longer the
    parent (a process forked from the server can keep the socket open), or the alarm ends a message that takes too long.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the server, which closes the socket
    descriptor, seconds, parent = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    connection = socket.socket(fileno=descriptor)

    def wait() -> bool:
        signal.setitimer(signal.ITIMER_REAL, 0)
        while not select.select([connection], [], [], PARENT_SECONDS)[0]:
            if os.getppid() != parent:
                return False
        signal.setitimer(
            signal.ITIMER_REAL, seconds
        )  # nothing handles SIGALRM: it ends the process, even inside a decoder
        return True

    with connection, connection.makefile("rb") as file, suppress(ConnectionError):  # the server may end first
        serve_messages(file.read, connection.sendall, wait)


if __name__ == "__main__":
    serve_socket()
