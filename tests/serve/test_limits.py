"""Requests and connections that would occupy the server end at a limit, and other clients are answered meanwhile."""

import asyncio
import json
import os
import resource
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPConnection
from itertools import count
from types import SimpleNamespace

import httpx
import numpy as np
import openai
import pytest
from uvicorn.server import ServerState

from experiments.server.process import ServerProcess
from raytraced.serve.app import Server
from raytraced.serve.connections import BACKLOG, RESERVED_FILES, Connections
from raytraced.serve.engine import LARGE_BODY
from raytraced.serve.limits import Limits
from serve.conftest import in_base64, png, running, some_images

DIGIT = some_images((1, 8, 8), 3)[1, 0].numpy()
FILE = in_base64(png(DIGIT))
HEAD = "POST /api/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"


def connect(address: str) -> socket.socket:
    host, _, port = address.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def received(connection: socket.socket) -> bytes:
    """All that arrives until the other side closes."""
    content = b""
    try:
        while part := connection.recv(4096):
            content += part
    except ConnectionResetError:
        pass
    return content


def wait_until(holds, seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.001)


def refusal(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["rule"]


@pytest.fixture
def start(models):
    """A function that starts a server of the shipped digits, or of another model, with some limits."""
    with ExitStack() as stack:

        def start(name: str = "mre-digits", **limits) -> tuple[Server, str]:
            served = [one for one in models if one.name == name]
            server = Server(served, Limits(**{"decoders": 1} | limits))
            run = running(server)
            address = next(run)
            wait_until(lambda: httpx.get(f"{address}/readyz").status_code == 200)
            stack.callback(lambda: next(run, None))
            return server, address

        yield start


# Images


def test_a_progressive_jpeg_of_many_scans_is_refused_unread(start):
    """Issue H2: empty scans cost the decoder time, but an attacker hardly any bytes."""
    from io import BytesIO

    from PIL import Image

    file = BytesIO()
    Image.fromarray(DIGIT.repeat(8, 0).repeat(8, 1)).save(file, "JPEG", progressive=True)
    content = file.getvalue()
    last_scan = content[content.rindex(b"\xff\xda") : -2]
    _, address = start()
    for num, status in ((0, 200), (200, 422)):
        image = in_base64(content[:-2] + last_scan * num + content[-2:])
        response = httpx.post(f"{address}/api/predict", json={"image": image})
        assert response.status_code == status, response.text
    message = response.json()["error"]["message"]
    assert message.startswith("image: is a JPEG file of 2")
    assert message.endswith("scans, must be at most 100; save it as a baseline JPEG")


def test_others_are_answered_while_a_file_is_decoded(start):
    """Issue H2: a file that takes long to decode stopped all answers."""
    server, address = start(decode_seconds=60.0)
    (decoder,) = server.engine.decoders.all
    os.kill(decoder.process.pid, signal.SIGSTOP)
    with connect(address) as connection:
        body = b'{"image": "' + FILE.encode() + b'"}'
        connection.sendall(HEAD.replace("9", str(len(body))).encode() + body)
        wait_until(lambda: server.traffic.in_progress == 1)
        for _ in range(3):
            assert httpx.get(f"{address}/healthz").json()["in_progress"] == 1
            assert httpx.post(f"{address}/api/predict", json={"image": DIGIT.tolist()}).status_code == 200
        os.kill(decoder.process.pid, signal.SIGCONT)
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_a_decoder_that_is_late_is_ended_and_replaced(start):
    """Issue H2: SIGTERM had to wait for a file that took a minute to decode."""
    server, address = start(decode_seconds=0.0)
    (late,) = server.engine.decoders.all
    response = httpx.post(f"{address}/api/predict", json={"image": FILE}, timeout=30)
    assert refusal(response) == (422, "decode_seconds")
    assert late.process.returncode == -signal.SIGKILL
    (other,) = server.engine.decoders.all
    assert other is not late


def test_a_decoder_that_dies_is_replaced(start):
    server, address = start()
    (process,) = server.engine.decoders.all
    process.process.kill()
    assert refusal(httpx.post(f"{address}/api/predict", json={"image": FILE})) == (422, "image")
    assert httpx.post(f"{address}/api/predict", json={"image": FILE}).status_code == 200


def test_pixels_are_counted_before_anything_is_decompressed(start):
    _, address = start(pixels=99)
    black = in_base64(png(np.zeros((10, 10), np.uint8)))
    assert refusal(httpx.post(f"{address}/api/predict", json={"image": black})) == (422, "pixels")
    assert refusal(httpx.post(f"{address}/api/predict", json={"images": [FILE, FILE]})) == (422, "pixels")
    assert httpx.post(f"{address}/api/predict", json={"image": FILE}).status_code == 200


# Bodies


def test_slow_bodies_take_no_place_from_others(start):
    """Issue H3: slow bodies held all places, and other requests were refused."""
    server, address = start(bodies_per_address=4, in_progress=2)
    slow = [connect(address) for _ in range(6)]
    for number, connection in enumerate(slow, 1):
        connection.sendall(HEAD.encode() + b"{")
        wait_until(lambda number=number: len(server.app.arrivals.deadlines) == min(number, 4))
    for _ in range(3):
        assert httpx.post(f"{address}/api/predict", json={"image": FILE}).status_code == 200
    for connection in slow[:3]:  # the oldest made room
        assert received(connection).startswith(b"HTTP/1.1 408 ")
    for connection in slow:
        connection.close()
    wait_until(lambda: not server.app.arrivals.deadlines)
    assert not server.app.arrivals.per_address


def test_a_body_has_a_time_limit(start):
    _, address = start(body_seconds=0.2)
    with connect(address) as connection:
        connection.sendall(HEAD.encode() + b"{")
        answer = received(connection)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"must arrive within 0.2 seconds" in answer


def test_a_large_json_body_is_parsed_in_another_process(start):
    """Two megabytes of numbers would stop all answers for a fraction of a second."""
    server, address = start(decode_seconds=60.0)
    images = some_images((1, 8, 8), 200)[:, 0]
    body = {"images": images.tolist(), "max_experts": 2}
    assert len(json.dumps(body)) < LARGE_BODY
    expected = httpx.post(f"{address}/api/predict", json=body).json()
    (decoder,) = server.engine.decoders.all
    os.kill(decoder.process.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        text = json.dumps(body, indent=8)  # the same values, and spaces
        assert len(text) > LARGE_BODY
        headers = {"content-type": "application/json"}
        large = pool.submit(httpx.post, f"{address}/api/predict", content=text, headers=headers, timeout=60)
        wait_until(lambda: server.traffic.in_progress == 1)
        assert httpx.get(f"{address}/healthz").json()["in_progress"] == 1
        assert not large.done()
        os.kill(decoder.process.pid, signal.SIGCONT)
        assert large.result().json() == expected


LONG = " " * 70_000


@pytest.mark.parametrize(
    ("body", "rule", "message"),
    [
        ('{"image": [[1, 2' + LONG, "json_invalid", "body: must be JSON ("),
        ("[" * 70_000, "json_invalid", "body: must be JSON ("),
        ('{"image": [' + "{}, " * 300_000 + "{}]}", "values", "body: has more than 300,000 values besides images"),
        (str([1] * 70_000), "json_invalid", "body: must be a JSON object"),
        (json.dumps({"image": [[1] * 300] * 300}), "image", "image: has shape (300, 300), must be (1, 8, 8) (chan"),
        (json.dumps({"image": [[-1] * 200] * 200}), "image", "image: has shape (200, 200), must be (1, 8, 8) (chan"),
        (json.dumps({"images": [[[1] * 8] * 8] * 3000}), "too_long", "images=[array([[1, 1, 1, 1, 1, 1, 1, 1], [1, 1,"),
        (json.dumps({"images": [[[1] * 9] * 9] * 200, "seed": 1}) + LONG, "image", "images[0]: has shape (9, 9)"),
        (json.dumps({"max_experts": [[1] * 8] * 8, "image": FILE}) + LONG, "int_type", "max_experts=array("),
        ('{"image": [' + "NaN," * 20_000 + "1]}", "image", "image: has shape (20001,)"),
    ],
)
def test_a_large_body_is_refused_as_a_small_one_would_be(client, body, rule, message):
    response = client.post("/api/predict", content=body, headers={"content-type": "application/json"})
    assert refusal(response) == (422, rule)
    assert response.json()["error"]["message"].startswith(message)


# Connections


def test_a_head_has_a_time_limit(start):
    """Issue H3: half-sent heads stayed for ever."""
    server, address = start(head_seconds=0.2)
    with connect(address) as silent, connect(address) as half:
        half.sendall(b"GET /healthz HTTP/1.1\r\nHost: loc")
        assert received(silent) == received(half) == b""
    wait_until(lambda: not server.connections.open)
    assert not server.connections.per_address


def test_connections_are_capped_and_the_one_that_waits_longest_is_closed(start):
    """Issue H3: half-sent heads made the server unreachable."""
    server, address = start(connections=5)
    half = []
    for number in range(8):
        half.append(connect(address))
        half[-1].sendall(b"GET /healthz HTTP/1.1\r\nHost: loc")
        wait_until(lambda number=number: len(server.connections.open) >= min(number + 1, 5))
    for _ in range(3):
        assert httpx.get(f"{address}/healthz").status_code == 200
    assert received(half[0]) == received(half[1]) == b""
    assert len(server.connections.open) <= 5
    for connection in half:
        connection.close()


def test_connections_of_one_address_are_capped(start):
    server, address = start(connections_per_address=3)
    connections = [connect(address) for _ in range(6)]
    wait_until(lambda: server.connections.per_address == {"127.0.0.1": 3})
    host, _, port = address.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), source_address=("127.0.0.2", 0)):
        wait_until(lambda: server.connections.per_address == {"127.0.0.1": 3, "127.0.0.2": 1})
    for connection in connections:
        connection.close()


def test_requests_in_progress_are_never_closed_to_make_room(start):
    server, address = start(connections=2, body_seconds=30)
    with connect(address) as busy:
        busy.sendall(HEAD.encode() + b"{")
        wait_until(lambda: server.app.arrivals.deadlines)
        for _ in range(4):
            assert httpx.get(f"{address}/healthz").status_code == 200
        busy.sendall(b"        ")
        assert busy.recv(4096).startswith(b"HTTP/1.1 422 ")


def test_connections_leave_file_descriptors_for_the_rest():
    assert Connections(Limits(), max_files=1 << 20).most == Limits().connections
    assert Connections(Limits(), max_files=300).most == 300 - BACKLOG - RESERVED_FILES
    assert Connections(Limits(), max_files=10).most == 1


def test_failures_to_accept_are_one_line(capsys):
    """Issue H3: without file descriptors, the log grew by 237 MB in a minute."""
    connections = Connections(Limits())
    context = {"message": "socket.accept() out of system resource", "exception": OSError(24, "Too many open files")}
    for _ in range(1000):
        connections.report(SimpleNamespace(), context)
    assert capsys.readouterr().err.count("\n") == 1


def test_a_client_that_does_not_read_is_disconnected(start, tmp_path):
    """Issue: clients that asked for the page and did not read it held 1.5 GB."""
    server, address = start(write_seconds=0.2)
    (tmp_path / "page.html").write_bytes(bytes(20_000_000))
    server.page.folder = tmp_path
    host, _, port = address.removeprefix("http://").partition(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_until(lambda: server.connections.open)
        (connection,) = server.connections.open
        largest = 0

        def is_closed() -> bool:
            nonlocal largest
            largest = max(largest, connection.transport.get_write_buffer_size())
            return not server.connections.open

        wait_until(is_closed)
    assert 0 < largest < 500_000


def test_a_client_that_reads_slowly_is_not_disconnected():
    async def lateness(sizes: list[int]) -> list[bool]:
        server = SimpleNamespace(connections=Connections(Limits(write_seconds=1.5)))
        config = SimpleNamespace(
            loaded=True, loaded_app=None, h11_max_incomplete_event_size=None, ws_protocol_class=None, root_path="",
            asgi_version="3.0", limit_concurrency=None, timeout_keep_alive=5,
        )  # fmt: skip
        connection = server.connections.protocol(
            config=config, server_state=ServerState(), app_state={}, _loop=asyncio.get_running_loop()
        )
        connection.cycle = SimpleNamespace(response_complete=False)
        times, left = count(connection.progress_since), iter(sizes)
        connection.transport = SimpleNamespace(get_write_buffer_size=lambda: next(left))
        return [connection.is_late(next(times)) for _ in sizes]

    assert asyncio.run(lateness([9, 9, 9, 9])) == [False, False, True, True]
    assert asyncio.run(lateness([9, 9, 8, 8, 7, 7])) == [False] * 6
    assert asyncio.run(lateness([0] * 5)) == [False] * 5


def test_a_deadline_counts_from_when_the_connection_came(start):
    """While the loop computes, a new connection waits as a request of an old one does."""
    server, address = start()
    arrived, app = [], server.app.app

    async def record(scope, receive, send):
        arrived.append(scope["arrived"])
        await app(scope, receive, send)

    server.app.app = record
    with connect(address):
        wait_until(lambda: server.connections.open)
        loop = next(iter(server.connections.open)).loop
        loop.call_soon_threadsafe(time.sleep, 0.3)  # a computation
        time.sleep(0.1)
        sent = time.perf_counter()
        with connect(address) as late:
            late.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert received(late).startswith(b"HTTP/1.1 200 ")
    assert arrived[-1] <= sent


def test_a_refusal_for_want_of_time_leaves_the_connection_open(start):
    """A new connection would cost a server that is short of time more than the refusal."""
    server, address = start()
    server.engine.admission.margin.add(9.0)
    server.traffic.in_progress = 1
    connection = HTTPConnection(address.removeprefix("http://"), timeout=30)
    for _ in range(2):
        body = json.dumps({"image": DIGIT.tolist(), "max_ms": 50})
        connection.request("POST", "/api/predict", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert (response.status, response.getheader("Retry-After")) == (429, "1")
        response.read()
        assert connection.sock is not None
    connection.close()
    server.traffic.in_progress = 0


def test_a_stream_whose_client_does_not_read_delays_no_other(models):
    """The reader of one text stops after its first tokens; another text and an answer are complete meanwhile."""
    server = Server(models, Limits(decoders=0))
    has_stopped, reads_again = asyncio.Event(), asyncio.Event()

    async def request(path: str, reads: bool = True, **body) -> bytes:
        content, received = b"", iter([{"type": "http.request", "body": json.dumps(body).encode()}])

        async def receive():
            if (message := next(received, None)) is None:
                await asyncio.sleep(60)  # the client stays
            return message

        async def send(message):
            nonlocal content
            content += message.get("body", b"")
            if not reads and content:
                has_stopped.set()
                await reads_again.wait()

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "path": path, "method": "POST", "headers": headers, "query_string": b""}
        await server.app(scope | {"http_version": "1.1", "scheme": "http", "root_path": ""}, receive, send)
        return content

    async def ask() -> tuple[list[bytes], bytes]:
        async with server.lifespan(server.api):
            text = {"text": "Once", "length": 60, "seed": 1}
            slow = asyncio.create_task(request("/api/generate", reads=False, **text))
            await has_stopped.wait()
            others = [await request("/api/generate", **text), await request("/api/predict", image=DIGIT.tolist())]
            assert not slow.done()
            reads_again.set()
            return others, await slow

    (text, answer), slow_text = asyncio.run(asyncio.wait_for(ask(), 60))
    assert b'"stop": "length"' in text
    assert b'"stop": "end"' in answer
    assert slow_text == text


def test_a_socket_that_stops_reading_a_completion_delays_no_other_text(start):
    """Its socket and buffers are full; another client's text is complete before its deadline."""
    server, address = start("gpt-mre")
    host, _, port = address.removeprefix("http://").partition(":")
    body = json.dumps({"prompt": ["Once"] * 8, "max_tokens": 4096, "logprobs": 20, "stream": True})
    head = HEAD.replace("/api/predict", "/v1/completions").replace("9", str(len(body)))
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client, socket.socket() as slow:
        options = {"model": "gpt-mre", "prompt": "Once", "max_tokens": 40, "seed": 1}
        alone = client.completions.create(**options).choices[0]
        known = set(server.connections.open)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((host, int(port)))
        slow.sendall((head + body).encode())
        wait_until(lambda: len(server.connections.open) > len(known))
        (connection,) = set(server.connections.open) - known
        wait_until(lambda: connection.transport.get_write_buffer_size() > 0)
        found = client.completions.create(**options, extra_body={"max_ms": 15_000}).choices[0]
        assert (found.text, found.stop) == (alone.text, "length")
        assert connection.transport.get_write_buffer_size() > 0
        wait_until(lambda: server.traffic.in_progress == 1)
    wait_until(lambda: not server.traffic.in_progress)
    wait_until(lambda: not any(batch.texts for batch in server.engine.worker.texts.values()))


def test_what_is_not_http_is_refused_in_json(start):
    _, address = start()
    for content in (
        b"\x16\x03\x01\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    ):
        with connect(address) as connection:
            connection.sendall(content)
            head, _, body = received(connection).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert b'"rule": "http"' in body


@pytest.mark.slow
def test_half_sent_heads_at_the_file_limit_leave_the_server_reachable():
    files = 400

    def limit_files() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    with ServerProcess("mre-digits", preexec_fn=limit_files) as server:
        half = [connect(server.address) for _ in range(files + 200)]
        for connection in half:
            connection.send(b"GET / HTTP/1.1\r\nHost: loc")
        for _ in range(20):
            assert httpx.post(f"{server.address}/api/predict", json={"image": FILE}).status_code == 200
        for connection in half:
            connection.close()
        assert len(server.log()) < 1000, server.log()[:1000]
