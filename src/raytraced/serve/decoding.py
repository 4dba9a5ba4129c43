"""Image files and large JSON bodies -> pixels and fields, in processes of their own that are ended when they take too long.

Decoding in the server's own process would stop all answers for as long as it takes, and no thread can be ended.

Legend: C channels, H and W height and width.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raytraced.serve.decode_worker import pack_message
from raytraced.serve.limits import Limits, RefusedError


class DecoderProcess:
    """One process, and the connection to it.

    It shares none of the server's standard streams: the reader of those waits for the server alone.

    Args:
        seconds: The most seconds that it spends on a message, whatever becomes of the server.
    """

    def __init__(self, seconds: float) -> None:
        self.socket, other = socket.socketpair()
        words = [str(word) for word in (other.fileno(), seconds, os.getpid())]
        command = [sys.executable, "-m", "raytraced.serve.decode_worker", *words]
        none = subprocess.DEVNULL
        with other:
            self.process = subprocess.Popen(command, pass_fds=[other.fileno()], stdin=none, stdout=none, stderr=none)
        self.reader: asyncio.StreamReader | None = None

    async def connect(self) -> None:
        """Wait until the process is ready; only the first call takes time."""
        if self.reader is None:
            reader, self.writer = await asyncio.open_connection(sock=self.socket)
            self.reader = reader
            await self.receive()

    async def receive(self) -> tuple[dict[str, Any], bytes]:
        """One message of the process."""
        assert self.reader is not None
        length = int.from_bytes(await self.reader.readexactly(4), "big")
        header = json.loads(await self.reader.readexactly(length))
        return header, await self.reader.readexactly(header["size"])

    async def ask(self, message: bytes) -> tuple[dict[str, Any], bytes]:
        """Send a message, and wait for the reply."""
        self.writer.write(message)
        return await self.receive()

    def end(self) -> None:
        """End the process, whatever it does."""
        self.process.kill()
        self.process.wait()
        if self.reader is None:
            self.socket.close()
        else:
            self.writer.close()


class Decoders:
    """A small pool of processes.

    Args:
        limits: How many processes there are, and what they refuse.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.idle: asyncio.Queue[DecoderProcess] = asyncio.Queue()
        self.all: set[DecoderProcess] = set()

    def start(self) -> None:
        """Start all processes; they are ready a moment later."""
        for _ in range(self.limits.decoders):
            self.add()

    def add(self) -> None:
        """Start one process."""
        process = DecoderProcess(2 * self.limits.decode_seconds + 1)
        self.all.add(process)
        self.idle.put_nowait(process)

    def remove(self, process: DecoderProcess) -> None:
        """End one process."""
        self.all.discard(process)
        process.end()

    def end(self) -> None:
        """End all processes."""
        for process in list(self.all):
            self.remove(process)

    async def decode(self, files: dict[str, bytes], shape: tuple[int, int, int], base64: bool = False) -> list[Tensor]:
        """Decode the files of one request.

        Args:
            files: The files' contents, by the names that messages call them.
            shape: (C, H, W) of the model.
            base64: Whether the contents are in base64.

        Returns:
            One uint8 tensor (1, C, H, W) per file.
        """
        options = {"base64": base64, "shape": shape, "pixels": self.limits.pixels, "scans": self.limits.scans}
        header = {"files": [(name, len(content)) for name, content in files.items()], "options": options}
        _, pixels = await self.ask(pack_message(header, *files.values()))
        arrays = np.frombuffer(bytearray(pixels), dtype=np.uint8).reshape(-1, 1, *shape)
        return list(torch.from_numpy(arrays))

    async def parse_json(self, body: bytes) -> Any:
        """The value of a JSON body; nested lists of pixels become arrays of uint8."""
        reply, content = await self.ask(pack_message({"files": [("body", len(body))], "json": True}, body))
        value, start = json.loads(content[: reply["length"]]), reply["length"]
        for path, shape in reply["images"]:
            pixels = np.frombuffer(content, dtype=np.uint8, count=prod(shape), offset=start).reshape(shape)
            start += pixels.size
            holder = value
            for key in path[:-1]:
                holder = holder[key]
            holder[path[-1]] = pixels
        return value

    async def ask(self, message: bytes) -> tuple[dict[str, Any], bytes]:
        """The reply of an idle process; one that is late, or ends by itself, is replaced."""
        process = await self.idle.get()
        finished = False
        try:
            await process.connect()
            async with asyncio.timeout(self.limits.decode_seconds):
                reply = await process.ask(message)
            finished = True
            if "rule" in reply[0]:
                raise RefusedError(422, reply[0]["rule"], reply[0]["message"])
            return reply
        except TimeoutError:
            rule = f"must take at most {self.limits.decode_seconds:g} seconds; send smaller or simpler files"
            raise RefusedError(422, "decode_seconds", f"body: takes too long to decode, {rule}") from None
        except (EOFError, ConnectionError):
            raise RefusedError(422, "image", "body: the decoder ended on these files; send other files") from None
        finally:
            if finished:
                self.idle.put_nowait(process)
            elif process in self.all:  # not at the end of the server, which has ended it
                self.remove(process)
                self.add()
