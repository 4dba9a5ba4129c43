"""Ten thousand malformed requests and fifty clients for a minute, with the server's memory before and after.

    python -m experiments.server_endurance      # writes benchmarks/server.md; some four minutes, on an idle machine

One server of three shipped classifiers and two small language models gets, in this order: a thousand valid random requests,
so that everything is in use once; ten thousand malformed ones, eight at a time; and fifty clients for 60 seconds, each as
fast as it can, then for 20 seconds at a third of that rate, with pauses at random. Of the clients' requests one fifth states
`confidence`, one fifth `max_ms=50`; a client that is refused waits as long as `Retry-After` says. An answer to a request
without a deadline must equal the one that the server gave before, byte by byte. A status of 500 or more, no response within
30 seconds and any other answer are errors. *In time*: the share of the answers with `max_ms=50` that the client had within
50 ms. Memory is what the operating system counts as resident, after five seconds of rest.
"""

import argparse
import asyncio
import base64
import io
import json
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
from PIL import Image

from experiments import BENCHMARKS
from experiments.attack import PIECE, SHIPPED_MODELS, send_all, write_models
from experiments.reproduce.tables import Table
from experiments.server.client import Client
from experiments.server.process import ServerProcess
from experiments.server.random_requests import ServedModel, draw_malformed, draw_valid, read_models

NUM_MALFORMED, CLIENTS, SECONDS, MAX_MS = 10_000, 50, 60.0, 50
REST = 5.0  # seconds before memory is read
OPTIONS: dict[str, dict[str, float]] = {"plain": {}, "confidence": {"confidence": 0.9}, "max_ms": {"max_ms": MAX_MS}}
KINDS = ("plain", "plain", "plain", "confidence", "max_ms")


@dataclass
class Load:
    """What clients found."""

    seconds: float
    times: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in OPTIONS})
    refused: int = 0
    errors: list[str] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Answers per second."""
        return sum(map(len, self.times.values())) / self.seconds

    def row(self, name: str) -> list[str]:
        """The table's row."""
        cells = [name, f"{self.rate:,.0f}", str(len(self.errors))]
        for kind in OPTIONS:
            cells += [f"{value:.1f}" for value in np.percentile(1000 * np.array(self.times[kind]), [50, 99])]
        in_time = np.mean(1000 * np.array(self.times["max_ms"]) <= MAX_MS)
        return [*cells, f"{100 * in_time:.2f}", f"{self.refused / self.seconds:.0f}"]


def draw_cases(models: list[ServedModel]) -> list[dict[str, str]]:
    """Requests of six images for each classifier."""
    numbers, cases = np.random.default_rng(0), []
    for model in models:
        if model.image_shape is None:
            continue
        channels, height, width = model.image_shape
        for _ in range(6):
            pixels = numbers.integers(0, 256, (height, width, channels), dtype=np.uint8).squeeze()
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, "PNG")
            cases.append({"image": base64.b64encode(file.getvalue()).decode(), "model": model.name})
    return cases


def read_memory(server: ServerProcess) -> tuple[float, float]:
    """Resident megabytes of the server's process, and of its decoders together."""
    time.sleep(REST)
    process = psutil.Process(server.process.pid)
    decoders = sum(child.memory_info().rss for child in process.children(recursive=True))
    return process.memory_info().rss / 1e6, decoders / 1e6


async def run_clients(address: str, models: list[ServedModel], seconds: float, pause: float = 0.0) -> Load:
    """Let fifty clients ask; `pause` is the mean number of seconds before each request."""
    load, cases, expected = Load(seconds), draw_cases(models), dict[tuple[int, str], bytes]()
    async with Client(address) as client:
        for number, case in enumerate(cases):
            for kind in ("plain", "confidence"):
                reply = await client.post("/api/predict", json.dumps(case | OPTIONS[kind]).encode())
                expected[number, kind] = reply.body
    until = time.perf_counter() + seconds

    async def ask(number: int) -> None:
        rng = random.Random(number)
        async with Client(address) as client:
            while time.perf_counter() < until:
                await asyncio.sleep(rng.expovariate(1 / pause) if pause else 0)
                place, kind = rng.randrange(len(cases)), rng.choice(KINDS)
                body = json.dumps(cases[place] | OPTIONS[kind]).encode()
                began = time.perf_counter()
                reply = await client.post("/api/predict", body)
                took = time.perf_counter() - began
                if reply.status == 429 and kind == "max_ms":
                    load.refused += 1
                    await asyncio.sleep(float(reply.headers["retry-after"]))
                    continue
                load.times[kind].append(took)
                if reply.status != 200 or reply.body != expected.get((place, kind), reply.body):
                    load.errors.append(f"{reply.status} {reply.body[:300]!r}")

    await asyncio.gather(*(ask(number) for number in range(CLIENTS)))
    return load


async def known_models(address: str) -> list[ServedModel]:
    """The server's models."""
    async with Client(address) as client:
        return read_models((await client.get("/api/models")).json()["models"])


def measure() -> tuple[list[Load], Counter[str], list[str], dict[str, tuple[float, float]]]:
    """The loads, the statuses and failures of malformed requests, and megabytes after each part."""
    rng, statuses, failures = random.Random(0), Counter[str](), list[str]()
    with tempfile.TemporaryDirectory() as folder, ServerProcess(*SHIPPED_MODELS, *write_models(Path(folder))) as server:
        memory = {"start": read_memory(server)}
        models = asyncio.run(known_models(server.address))
        valid = [draw_valid(rng, models) for _ in range(PIECE)]
        failures += asyncio.run(send_all(server.address, valid, all_valid=True))[1]
        memory["1,000 valid requests"] = read_memory(server)
        for _ in range(NUM_MALFORMED // PIECE):
            piece = [draw_malformed(rng, models) for _ in range(PIECE)]
            found, failed = asyncio.run(send_all(server.address, piece, all_valid=False))
            statuses.update(found)
            failures += failed
        memory[f"{NUM_MALFORMED:,} malformed requests"] = read_memory(server)
        full = asyncio.run(run_clients(server.address, models, SECONDS))
        memory[f"{CLIENTS} clients for {SECONDS:.0f} s"] = read_memory(server)
        third = asyncio.run(run_clients(server.address, models, SECONDS / 3, pause=3 * CLIENTS / full.rate))
        memory["a third of the load"] = read_memory(server)
        failures += ["the server printed a traceback"] if "Traceback" in server.log() else []
    return [full, third], statuses, failures, memory


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    (full, third), statuses, failures, memory = measure()
    kinds = [f"{kind}, {column}" for kind in ("no limit", "confidence", "max_ms=50") for column in ("p50 ms", "p99 ms")]
    header = ["load", "answers per s", "errors", *kinds, "in time %", "refused per s"]
    rows = [full.row("as fast as they can"), third.row("a third of that")]
    listed = ", ".join(f"{status}: {count:,}" for status, count in sorted(statuses.items()))
    tables = [
        Table(f"{CLIENTS} clients", header, rows),
        Table("Malformed requests", ["number", "failures", "by status"],
              [[f"{statuses.total():,}", str(len(failures)), listed]]),
        Table("Memory", ["after", "server, MB", "its decoders, MB"],
              [[name, f"{own:.0f}", f"{others:.0f}"] for name, (own, others) in memory.items()]),
    ]  # fmt: skip
    note = (__doc__ or "").partition("on an idle machine\n\n")[2].strip()
    lines = ["# The server for a minute", "", *(table.markdown().replace("###", "##", 1) for table in tables)]
    lines += [note, "", "Written by `python -m experiments.server_endurance`.", ""]
    (BENCHMARKS / "server.md").write_text("\n".join(lines), encoding="utf-8")
    print("\n".join(lines))
    for failure in [*failures, *full.errors, *third.errors][:10]:
        print("FAILED", failure)


if __name__ == "__main__":
    main()
