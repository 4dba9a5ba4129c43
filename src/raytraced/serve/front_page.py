"""The page at `/`, in which the models run: built once, in a process of its own, into files that are sent piece by piece."""

import asyncio
import gzip
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Sequence
from html import escape
from pathlib import Path

from raytraced.serve.limits import RefusedError
from raytraced.serve.models import Served, serve_model


class FrontPage:
    """The page's files, plain and compressed; they are made when the first visitor asks.

    Args:
        models: The models that the page shows.
    """

    def __init__(self, models: Sequence[Served]) -> None:
        self.models, self.lock = list(models), asyncio.Lock()
        self.folder: Path | None = None
        self.process: asyncio.subprocess.Process | None = None

    async def file(self, compressed: bool) -> Path:
        """The path of the page; all visitors meanwhile wait for the same one."""
        async with self.lock:
            if self.folder is None:
                self.folder = await self.build()
        return self.folder / ("page.html.gz" if compressed else "page.html")

    async def build(self) -> Path:
        """Run this file as a process: neither its time nor its memory is the server's; it ends when the server does."""
        folder = Path(tempfile.mkdtemp(prefix="raytraced-page-"))
        words = [word for served in self.models for word in (served.name, served.source)]
        command = [sys.executable, "-m", "raytraced.serve.front_page", str(folder), *words]
        pipe, none = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        self.process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=none, stderr=pipe)
        assert self.process.stderr is not None
        try:
            log = await self.process.stderr.read()  # not `communicate`, which would close stdin
            status = await self.process.wait()
        finally:
            self.end_process()
        if status != 0:
            print(log.decode(errors="replace"), end="", file=sys.stderr, flush=True)
            shutil.rmtree(folder, ignore_errors=True)
            raise RefusedError(503, "page", "the page could not be built; the server's log says why")
        return folder

    def end_process(self) -> None:
        """End the process if it still runs."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()

    def end(self) -> None:
        """End the process, and remove the files."""
        self.end_process()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def render_page(models: Sequence[Served]) -> str:
    """The page of the models that can run in a browser; a list of all models where none can."""
    from raytraced.explore.packing import unpackable_reason
    from raytraced.explore.page import make_page

    runnable = [(served.name, served.model) for served in models if unpackable_reason(served.model) is None]
    if runnable:
        return make_page(runnable)
    names = "".join(f"<li>{escape(served.name)}</li>" for served in models)
    paths = "".join(f'<li><a href="{path}">{path}</a></li>' for path in ("/api/models", "/openapi.json", "/metrics"))
    head = '<!doctype html><html lang="en"><meta charset="utf-8"><title>raytraced</title><h1>raytraced</h1>'
    return f"{head}<p>Models:</p><ul>{names}</ul><p>Paths:</p><ul>{paths}</ul></html>"


def write_front_page(words: Sequence[str]) -> None:
    """Write the page of models, given as names and sources in turn, into a folder."""
    os.nice(10)  # the server's answers come first
    folder, *rest = words
    models = [serve_model(source, name) for name, source in zip(rest[::2], rest[1::2], strict=True)]
    content = render_page(models).encode()
    Path(folder, "page.html").write_bytes(content)
    Path(folder, "page.html.gz").write_bytes(gzip.compress(content, 6, mtime=0))


def end_with_stdin() -> None:
    """End the process when the server's end of its stdin closes: at the server's end, whatever its cause."""

    def watch() -> None:
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    end_with_stdin()
    write_front_page(sys.argv[1:])
