"""Small data sets in the original formats, and a web server that serves them."""

import hashlib
import http.server
import struct
import threading
from dataclasses import dataclass, field

from raytraced.data.catalog import Address, ArrayInfo, PublicSet


def encode_idx(array):
    """An IDX file as its page describes it: two zeros, the type, the number of axes, the sizes, the bytes."""
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


@dataclass
class TinySet:
    """Four random arrays as the three public sets have them, and the same as gzipped IDX files."""

    arrays: dict = field(default_factory=dict)
    files: dict = field(default_factory=dict)

    def public_set(self, *sources):
        infos = {
            key: ArrayInfo(array.shape, hashlib.sha256(array.tobytes()).hexdigest())
            for key, array in self.arrays.items()
        }
        return PublicSet("tiny", "idx", ("a", "b"), infos, sources, ("Tiny/raw", "."))


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
