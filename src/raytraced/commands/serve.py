"""`raytraced serve`: models behind HTTP; torch and the server's libraries are imported only when it begins."""

import os
import signal
import socket
import sys
from typing import Any, Literal

from raytraced.commands.training import find_source
from raytraced.reproduce.variants import SHIPPED
from raytraced.words import require

GRACE = 30  # seconds that a server which was told to end waits for what is under way


def serve(
    models: list[str] = [],  # noqa: B006  (read, never changed)
    host: str = "127.0.0.1",
    port: int = 8000,
    hosts: str = "",
    threads: int = 1,
    weights: Literal["last", "best"] = "last",
    output: str = "runs",
) -> None:
    """Answer over HTTP with deadlines that are kept: predictions, streams of answers, text; and a page to look at.

    Args:
        models: Run folders, their names in the output folder, model.safetensors files or shipped models; default: all shipped.
        host: The address to listen on; 0.0.0.0 for the whole network.
        port: The port to listen on; 0 for any that is free.
        hosts: Names, with commas, by which it may be called besides localhost and its address.
        threads: CPU threads of one computation.
    """
    require(0 <= port <= 65535, "port", port, "must lie in 0 … 65535")
    require(threads >= 1, "threads", threads, "must be at least 1")
    try:
        import starlette  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise ValueError(f"serve: needs {error.name}; install it with pip install 'raytraced[serve]'") from None
    sources = [find_source(name, output, weights) for name in models or SHIPPED]
    with open_socket(host, port) as listening:
        import torch

        from raytraced.serve.app import Server
        from raytraced.serve.models import serve_model

        torch.set_num_threads(threads)
        served = [serve_model(source) for source in sources]
        known = [one.name for one in served]
        if doubled := [name for name in known if known.count(name) > 1]:
            raise ValueError(f"{doubled[0]}: two models have this name; rename a folder or file")
        given = [host, *(name.strip() for name in hosts.split(",") if name.strip())]
        server = Server(served, hosts=given)
        config = uvicorn.Config(
            server.app,
            http="h11",
            loop="asyncio",
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=GRACE,
        )
        address = f"[{host}]" if ":" in host else host
        print(f"{', '.join(known)}: http://{address}:{listening.getsockname()[1]}/ (Ctrl-C ends it)", flush=True)
        run(uvicorn.Server(config), server, listening)


def run(uvicorn_server: Any, server: Any, listening: socket.socket) -> None:
    """Serve until a signal; then nothing new is begun, and what is under way is finished, unless Ctrl-C comes again."""

    def end(number: int, frame: Any) -> None:
        if server.traffic.ending and number == signal.SIGINT:  # a second Ctrl-C does not wait; nothing is being written
            print("raytraced: ended at once; what was under way is cut off", file=sys.stderr, flush=True)
            os._exit(130)
        server.traffic.ending = uvicorn_server.should_exit = True

    uvicorn_server.handle_exit = end  # its own would raise the signal again at the end
    uvicorn_server.run(sockets=[listening])


def open_socket(host: str, port: int) -> socket.socket:
    """A socket that listens; refuses an address that cannot be had, in one line."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, UnicodeError, OverflowError) as error:
        number = error.errno if isinstance(error, OSError) else None
        reason = (os.strerror(number) if number and number > 0 else str(error)).lower()
        raise ValueError(f"{host}:{port}: {reason}; give another with --host or --port (0: any that is free)") from None
    # for every connection: the end of a response must not wait until its beginning was acknowledged, 40 ms later
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening
