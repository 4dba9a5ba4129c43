"""A small public set of no kind of task, and a web server that has its files."""

import contextlib
import gzip
import hashlib
import http.server
import threading
import zlib

import numpy as np

from raytraced.data.sources import Address, ArrayInfo, PublicSet

SHAPES = {"letters": (40, 30), "numbers": (40,), "signs": (10, 30), "marks": (10,)}
ARRAYS = {key: np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8) for key, shape in SHAPES.items()}
FILES = {f"{key}.gz": gzip.compress(array.tobytes()) for key, array in ARRAYS.items()}


def decode(files):
    arrays = {}
    for key, shape in SHAPES.items():
        name = f"{key}.gz"
        try:
            content = gzip.decompress(files[name])
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(f"{name}: cut or damaged gzip file ({error})") from None
        arrays[key] = np.frombuffer(content, dtype=np.uint8).reshape(-1, *shape[1:])
    return arrays


def info_of(array):
    return ArrayInfo(array.shape, hashlib.sha256(array.tobytes()).hexdigest())


def tiny_set(*sources):
    return PublicSet(
        name="tiny",
        arrays={key: info_of(array) for key, array in ARRAYS.items()},
        file_names=frozenset(FILES),
        decode=decode,
        sources=sources,
        folders=("Tiny/raw", "."),
        archives=("tiny.tar.gz",),
    )


def assert_same(arrays, expected):
    assert arrays.keys() == expected.keys()
    for key, array in expected.items():
        np.testing.assert_array_equal(arrays[key], array)


class FileServer:
    """Serves bytes from a dict on a free local port; `sent` may be fewer than the length it announces."""

    def __init__(self, files):
        self.files = files
        self.announced = {}
        self.requests = []
        self.gate = threading.Event()  # no answer is sent until it is set
        self.gate.set()
        self.arrived = threading.Event()  # set by the first request
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                name = self.path.lstrip("/")
                server.requests.append(name)
                server.arrived.set()
                server.gate.wait(60)
                if name not in server.files:
                    self.send_error(404)
                    return
                content = server.files[name]
                with contextlib.suppress(ConnectionError):  # a client that gave up has closed it
                    self.send_response(200)
                    self.send_header("Content-Length", str(server.announced.get(name, len(content))))
                    self.end_headers()
                    self.wfile.write(content)

            def log_message(self, *_):
                pass

        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = Address(f"http://127.0.0.1:{self._http.server_port}/", tuple(files))
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def close(self):
        self.gate.set()
        self._http.shutdown()
        self._http.server_close()
