"""`raytraced serve`: models behind HTTP. Torch and the server's libraries are imported only when it starts."""

import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from raytraced.cli.training import find_source
from raytraced.errors import check_threads, install_extra, printable, require
from raytraced.models.registry import SHIPPED

GRACE = 27  # seconds that the server waits for requests in progress when it shuts down
LAST_SECONDS = 30  # seconds after which it ends in any case


def serve(
    models: list[str] = [],  # noqa: B006  (read, never changed)
    host: str = "127.0.0.1",
    port: int = 8000,
    hosts: str = "",
    threads: int = 1,
    api_key_file: str | None = None,
    max_body: int = 2_000_000,
    max_pixels: int = 1 << 24,
    max_connections: int = 512,
    adaptive: bool = False,
    memory: str | None = None,
    weights: Literal["last", "best"] = "last",
    runs_dir: str = "runs",
) -> None:
    """Serve models over HTTP: predictions within a deadline, streams of answers, text, and a page in which the models run.

    Args:
        models: Run folders, their names in the runs folder, model.safetensors files or shipped models; default: all shipped.
        host: The address to listen on; 0.0.0.0 for the whole network.
        port: The port to listen on; 0 for any that is free.
        hosts: Names, separated by commas, by which the server may be called besides localhost and its address; * for any.
        threads: CPU threads per computation.
        api_key_file: A file that holds the key that requests must state as "Authorization: Bearer KEY"; default: no key.
        max_body: Largest body of a request, in bytes.
        max_pixels: Largest number of pixels of all image files of a request.
        max_connections: Largest number of open connections.
        adaptive: Lower the effort of requests that state it as a range where deadlines would be missed otherwise.
    """
    require(0 <= port <= 65535, "port", port, "must lie in 0 … 65535")
    check_threads(threads)
    for name, value in (("max_body", max_body), ("max_pixels", max_pixels), ("max_connections", max_connections)):
        require(value >= 1, name, value, "must be at least 1")
    api_key = None if api_key_file is None else read_api_key(api_key_file)
    try:
        for package in ("fastapi", "prometheus_client", "python_multipart", "uvicorn"):
            import_module(package)
    except ImportError as error:
        raise ValueError(f"serve: needs {error.name}; install it with {install_extra('serve')}") from None
    sources = [find_source(name, runs_dir, weights) for name in models or SHIPPED]
    with open_socket(host, port) as listening:
        import torch
        import uvicorn

        from raytraced.io.saving import is_store
        from raytraced.serve.app import Server
        from raytraced.serve.limits import Limits
        from raytraced.serve.models import serve_model

        torch.set_num_threads(threads)
        stores = [source for source in sources if memory is not None and is_store(source)]
        rule = "none of the models is a store; `raytraced store RUN FILE` writes one, serve that"
        require(memory is None or bool(stores), "memory", memory, rule)
        served = [serve_model(source, memory=memory if source in stores else None) for source in sources]
        known = [one.name for one in served]
        if doubled := [name for name in known if known.count(name) > 1]:
            raise ValueError(f"{printable(doubled[0])}: two models have this name; rename a folder or file")
        limits = Limits(body=max_body, pixels=max_pixels, connections=max_connections)
        names = allowed_names(host, [name.strip() for name in hosts.split(",") if name.strip()])
        server = Server(served, limits, names, api_key, max_open_files(), adaptive)
        address = f"[{host}]" if ":" in host else host
        where = f"http://{address}:{listening.getsockname()[1]}/"
        print(f"{printable(', '.join(known))}: {where} (Ctrl-C stops the server)", flush=True)
        run(uvicorn.Server(server.uvicorn_config(GRACE)), server, listening)


def read_api_key(path: str) -> bytes:
    """The key in a file, without the line's end."""
    try:
        key = Path(path).read_bytes().strip()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ValueError(f"api_key_file={path}: cannot be read ({reason}); state a file that holds a key") from None
    fits = key.isascii() and key.decode("ascii", "replace").isprintable() and b" " not in key and len(key) >= 8
    require(fits, "api_key_file", path, "must hold one key of at least 8 printable ASCII characters without spaces")
    return key


def allowed_names(host: str, hosts: list[str]) -> list[str]:
    """The names that the server may be called by: those of this machine, of its address, and those that were stated."""
    for name in hosts:
        fits = "*" not in name or name == "*" or (name.startswith("*.") and "*" not in name[1:])
        require(fits, "hosts", name, "must be a name, an address, *.example.org, or * for any name")
    names = ["127.0.0.1", "localhost", "::1", host, *hosts]
    if host in ("0.0.0.0", "::"):
        own = socket.gethostname()
        names.append(own)
        with suppress(OSError):  # the machine's name may have no address
            names += {str(found[4][0]) for found in socket.getaddrinfo(own, None)}
    return [variant for name in names for variant in ((name, f"[{name}]") if ":" in name else (name,))]


def max_open_files() -> int | None:
    """How many files this process may open; None where the system has no such limit."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def run(uvicorn_server: Any, server: Any, listening: socket.socket) -> None:
    """Serve until a signal; then finish the requests in progress, unless Ctrl-C comes again."""

    def shut_down(number: int, frame: Any) -> None:
        if server.traffic.shutting_down and number == signal.SIGINT:
            print("raytraced: stopped at once; requests in progress were cut off", file=sys.stderr, flush=True)
            os._exit(130)  # nothing is being written
        if not server.traffic.shutting_down:
            watchdog = threading.Timer(LAST_SECONDS, end_late)
            watchdog.daemon = True
            watchdog.start()
        server.traffic.shutting_down = uvicorn_server.should_exit = True

    uvicorn_server.handle_exit = shut_down  # uvicorn's own would raise the signal again at the end
    uvicorn_server.run(sockets=[listening])


def end_late() -> None:
    """End a server that could not shut down in time."""
    print(f"raytraced: not stopped after {LAST_SECONDS} seconds; requests were cut off", file=sys.stderr, flush=True)
    os._exit(1)


def open_socket(host: str, port: int) -> socket.socket:
    """A socket that listens; an address that cannot be used is refused in one line."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=128)
    except (OSError, UnicodeError, OverflowError) as error:
        number = error.errno if isinstance(error, OSError) else None
        reason = (os.strerror(number) if number and number > 0 else str(error)).lower()
        raise ValueError(
            f"{host}:{port}: {reason}; choose another with --host or --port (0: any that is free)"
        ) from None
    # The end of a response must not wait for the acknowledgement of its beginning, which takes 40 ms.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening
