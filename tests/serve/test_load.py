"""Thousands of random requests, and fifty clients for a minute: no 5xx, no wrong answer, and deadlines are met."""

import asyncio
import json
import random
import time

import httpx
import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from experiments.server.process import ServerProcess
from raytraced.cli.main import main
from raytraced.serve.app import Server
from raytraced.serve.limits import Limits
from serve.conftest import in_base64, png, running, some_images

pytestmark = pytest.mark.slow
MODELS = ("mre-digits", "mre-mnist", "mre-cifar10")


@pytest.fixture(scope="module")
def process(files):
    with ServerProcess(*MODELS, *map(str, sorted(files.glob("*.safetensors")))) as server:
        yield server.address
        assert "Traceback" not in server.log(), server.log()


@pytest.fixture(scope="module")
def brief(models):
    """A server that accepts any request but generates short texts."""
    yield from running(Server(models, Limits(tokens=8)))


def fuzz(num: int):
    """Settings for this number of examples."""
    return hypothesis.settings(
        max_examples=num, deadline=None, derandomize=True, suppress_health_check=list(hypothesis.HealthCheck), database=None
    )  # fmt: skip


def report(counts: dict[int, int], what: str) -> None:
    assert not [status for status in counts if status >= 500], counts
    print(f"\n{sum(counts.values()):,} {what}, by status: {dict(sorted(counts.items()))}", flush=True)


NUMS = {  # ten thousand in all
    "/api/predict": 2000,
    "/api/stream": 2000,
    "/api/generate": 3000,
    "/v1/completions": 2000,
    "/v2/models/{name}/infer": 1000,
}


@pytest.mark.parametrize("path", NUMS)
def test_ten_thousand_requests_on_the_documented_schema_give_no_5xx(path, brief):
    import schemathesis  # takes seconds
    from schemathesis import GenerationMode

    counts: dict[int, int] = {}
    schema = schemathesis.openapi.from_dict(httpx.get(f"{brief}/openapi.json").json())
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):

        @fuzz(NUMS[path] // 2)
        @hypothesis.given(schema[path]["POST"].as_strategy(generation_mode=mode))
        def fuzzed(case):
            response = case.call(base_url=brief, timeout=60)
            counts[response.status_code] = counts.get(response.status_code, 0) + 1
            assert response.status_code < 500, case.as_curl_command()
            assert "event: error" not in response.text, case.as_curl_command()
            assert "server_error" not in response.text, case.as_curl_command()

        fuzzed()
    report(counts, f"requests on the documented schema of {path}")
    assert sum(counts.values()) >= NUMS[path]
    assert counts.get(200, 0) > 10 or path.startswith("/v2/")  # a random name is rarely that of a model


def test_damaged_requests_give_no_5xx(brief):
    counts: dict[int, int] = {}
    with httpx.Client(base_url=brief, timeout=60) as client:

        @fuzz(3000)
        @hypothesis.given(damaged_bodies())
        def damaged(asked):
            path, content = asked
            response = client.post(path, content=content, headers={"content-type": "application/json"})
            counts[response.status_code] = counts.get(response.status_code, 0) + 1
            assert response.status_code < 500, content
            assert "event: error" not in response.text, content

        damaged()
        assert client.get("/healthz").json()["in_progress"] == 0
    report(counts, "damaged requests")
    assert min(counts[200], counts[422]) > 200


def damaged_bodies():
    """Nearly valid requests: files with changed or missing bytes, options of any value, JSON with a byte changed."""
    pixels = some_images((3, 12, 12), 4).permute(0, 2, 3, 1).numpy()
    files = [png(image, kind) for image in pixels for kind in ("PNG", "JPEG")]
    changes = st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=4)

    def damage(content: bytes, changes, cut) -> bytes:
        damaged = bytearray(content)
        for place, byte in changes:
            damaged[place % len(damaged)] = byte
        return bytes(damaged[:cut])

    image = st.builds(damage, st.sampled_from(files), changes, st.none() | st.integers(0, 500)).map(in_base64)
    numbers = st.integers(-1, 3) | st.floats() | st.integers()

    def mostly(good):
        return st.integers(0, 9).flatmap(lambda number: good if number else numbers)

    options = st.fixed_dictionaries(
        {},
        optional={
            "model": st.sampled_from([*MODELS, "top-k", "multi-exit", "gpt-mre", "gpt-top-k", ""]),
            "max_experts": mostly(st.integers(0, 5)),
            "confidence": mostly(st.floats(0, 1)),
            "max_ms": mostly(st.floats(0.001, 50)),
            "seed": mostly(st.integers(0, 9)),
            "select": mostly(st.sampled_from(["sample", "greedy"])),
            "trace": st.booleans(),
        },
    )
    given = st.builds(lambda image: {"image": image}, image) | st.builds(
        lambda images: {"images": images}, st.lists(image, max_size=4)
    )
    given |= st.builds(lambda text: {"text": text}, st.text(max_size=20))
    bodies = st.builds(lambda given, options: json.dumps(given | options).encode(), given, options)
    bodies |= st.builds(damage, bodies, changes, st.none() | st.integers(0, 500))
    return st.tuples(st.sampled_from(["/api/predict", "/api/predict", "/api/stream", "/api/generate"]), bodies)


class Connection:
    """A client that costs little compared to what it measures."""

    def __init__(self, address: str) -> None:
        self.host, _, port = address.removeprefix("http://").partition(":")
        self.port = int(port)

    async def __aenter__(self):
        self.reader, self.writer = await asyncio.open_connection(self.host, self.port)
        return self

    async def __aexit__(self, *_):
        self.writer.close()
        await self.writer.wait_closed()

    async def post(self, body: bytes) -> tuple[int, bytes]:
        head = f"POST /api/predict HTTP/1.1\r\nHost: {self.host}\r\nContent-Type: application/json\r\n"
        self.writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(answer.partition("content-length: ")[2].partition("\r\n")[0])
        return int(answer.split()[1]), await self.reader.readexactly(length)


SECONDS, CLIENTS, MAX_MS = 60, 50, 50


def test_fifty_clients_for_a_minute(process, tmp_path, capsys):
    cases = []  # a body, and the output of `raytraced predict` for its file
    for model, shape in (("mre-digits", (1, 8, 8)), ("mre-mnist", (1, 28, 28)), ("mre-cifar10", (3, 32, 32))):
        for number, image in enumerate(some_images(shape, 6).permute(0, 2, 3, 1).numpy()):
            content, path = png(image.squeeze()), tmp_path / f"{model}-{number}.png"
            path.write_bytes(content)
            assert main(["predict", model, str(path), "--json"]) == 0
            printed = json.loads(capsys.readouterr().out)
            cases.append(({"image": in_base64(content), "model": model}, printed))
    times: dict[str, list[float]] = {"plain": [], "confidence": [], "max_ms": []}
    stops: dict[str, int] = {}
    wrong: list[object] = []
    refused: list[float] = []

    async def ask(number: int, until: float, pause: float = 0.0) -> None:
        rng = random.Random(number)
        async with Connection(process) as connection:
            while time.perf_counter() < until:
                await asyncio.sleep(rng.expovariate(1 / pause) if pause else 0)
                body, printed = rng.choice(cases)
                kind = rng.choice(["plain", "plain", "plain", "confidence", "max_ms"])
                options = {"plain": {}, "confidence": {"confidence": 0.9}, "max_ms": {"max_ms": MAX_MS}}[kind]
                content = json.dumps(body | options).encode()
                began = time.perf_counter()
                status, found = await connection.post(content)
                if status == 429 and kind == "max_ms":
                    refused.append(began)
                    await asyncio.sleep(1)  # as Retry-After states
                    continue
                times[kind].append(time.perf_counter() - began)
                if status != 200:
                    wrong.append((status, found))
                    continue
                (answer,) = json.loads(found)["answers"]
                if kind == "max_ms":
                    stops[answer["stop"]] = stops.get(answer["stop"], 0) + 1
                exact = answer["label"], answer["probability"], answer["experts"]
                if answer["stop"] == "end" and exact != (printed["answer"], printed["probability"], printed["experts"]):
                    wrong.append((exact, printed))

    async def all_of_them(seconds: float, pause: float = 0.0) -> None:
        until = time.perf_counter() + seconds
        await asyncio.gather(*(ask(number, until, pause) for number in range(CLIENTS)))

    def report(seconds: float, load: str) -> float:
        """Print what was measured, and start again; returns the requests per second."""
        rate = sum(map(len, times.values())) / seconds
        with capsys.disabled():
            print(f"\n{CLIENTS} clients, {load}, {seconds} s: {rate:,.0f} requests per second, {len(wrong)} errors")
            for kind, found in times.items():
                p50, p99, most = np.percentile(np.array(found) * 1000, [50, 99, 100])
                print(f"  {kind}: {len(found):,} requests, p50 {p50:.1f} ms, p99 {p99:.1f} ms, slowest {most:.1f} ms")
            late = np.maximum(np.array(times["max_ms"]) * 1000 - MAX_MS, 0)
            p50, p90, p99 = np.percentile(late, [50, 90, 99])
            print(f"  later than max_ms={MAX_MS}: p50 {p50:.1f} ms, p90 {p90:.1f} ms, p99 {p99:.1f} ms; {stops}")
            print(f"  refused with 429 because of max_ms={MAX_MS}: {len(refused):,}")
        for found in times.values():
            found.clear()
        stops.clear()
        refused.clear()
        return rate

    asyncio.run(all_of_them(SECONDS))
    rate = report(SECONDS, "each as fast as it can")
    asyncio.run(all_of_them(SECONDS / 3, pause=CLIENTS / (rate / 3)))
    report(SECONDS / 3, "a third of that")
    assert not wrong, wrong[:3]
    assert rate * SECONDS > 1000
