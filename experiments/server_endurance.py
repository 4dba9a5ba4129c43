"""Ten thousand malformed requests and fifty clients for a minute, with the server's memory before and after.

    python -m experiments.server_endurance                  # writes benchmarks/server.md; some six minutes
    python -m experiments.server_endurance --only clients   # one part; the other is taken from the last run

Each part has a server of three shipped classifiers and two small language models of its own. *Malformed*: a thousand valid
random requests, so that everything is in use once, then ten thousand malformed ones, eight at a time. *Clients*: fifty
clients for 60 seconds, each as fast as it can, then for 20 seconds at a third of that rate, with pauses at random; run this
part on an idle machine. Of the clients' requests one fifth states `confidence`, one fifth `max_ms=50`; a client that is
refused waits as long as `Retry-After` says. An answer to a request without a deadline must equal the one that the server
gave before, byte by byte. A status of 500 or more, no response within 30 seconds and any other answer are errors. *In time*:
the share of the answers with `max_ms=50` that the client had within 50 ms. Memory is what the operating system counts as
resident, after five seconds of rest.
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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
Found = dict[str, Any]
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


def measure_malformed(server: ServerProcess, models: list[ServedModel]) -> Found:
    """Valid requests, then malformed ones."""
    rng, statuses = random.Random(0), Counter[str]()
    memory = {"start": read_memory(server)}
    valid = [draw_valid(rng, models) for _ in range(PIECE)]
    failures = asyncio.run(send_all(server.address, valid, all_valid=True))[1]
    memory[f"{PIECE:,} valid requests"] = read_memory(server)
    for _ in range(NUM_MALFORMED // PIECE):
        piece = [draw_malformed(rng, models) for _ in range(PIECE)]
        found, failed = asyncio.run(send_all(server.address, piece, all_valid=False))
        statuses.update(found)
        failures += failed
    memory[f"{NUM_MALFORMED:,} malformed requests"] = read_memory(server)
    return {"statuses": statuses, "failures": failures, "memory": memory}


def measure_clients(server: ServerProcess, models: list[ServedModel]) -> Found:
    """Fifty clients at full speed, then at a third of it."""
    asyncio.run(run_clients(server.address, models, 2.0))  # everything is in use once
    memory = {"two seconds of clients": read_memory(server)}
    full = asyncio.run(run_clients(server.address, models, SECONDS))
    memory[f"{CLIENTS} clients for {SECONDS:.0f} s"] = read_memory(server)
    third = asyncio.run(run_clients(server.address, models, SECONDS / 3, pause=3 * CLIENTS / full.rate))
    memory["a third of that for 20 s"] = read_memory(server)
    rows = [full.row("as fast as they can"), third.row("a third of that")]
    return {"rows": rows, "failures": full.errors + third.errors, "memory": memory}


PARTS: dict[str, Callable[[ServerProcess, list[ServedModel]], Found]] = {
    "malformed": measure_malformed,
    "clients": measure_clients,
}


def run_part(part: str) -> Found:
    """One part, with a server of its own."""
    with tempfile.TemporaryDirectory() as folder, ServerProcess(*SHIPPED_MODELS, *write_models(Path(folder))) as server:
        models = asyncio.run(known_models(server.address))
        found = PARTS[part](server, models)
        found["failures"] += ["the server printed a traceback"] if "Traceback" in server.log() else []
    return found


def write_report(found: dict[str, Found]) -> str:
    """The page of all parts that were measured."""
    memory = [(name, *two) for part in PARTS if part in found for name, two in found[part]["memory"].items()]
    tables = []
    if "clients" in found:
        names = ("no limit", "confidence", "max_ms=50")
        kinds = [f"{name}, {column}" for name in names for column in ("p50 ms", "p99 ms")]
        header = ["load", "answers per s", "errors", *kinds, "in time %", "refused per s"]
        tables.append(Table(f"{CLIENTS} clients", header, found["clients"]["rows"]))
    if "malformed" in found:
        statuses, failures = found["malformed"]["statuses"], found["malformed"]["failures"]
        listed = ", ".join(f"{status}: {count:,}" for status, count in sorted(statuses.items()))
        row = [f"{sum(statuses.values()):,}", str(len(failures)), listed]
        tables.append(Table("Malformed requests", ["number", "failures", "by status"], [row]))
    rows = [[name, f"{own:.0f}", f"{others:.0f}"] for name, own, others in memory]
    tables.append(Table("Memory", ["after", "server, MB", "its decoders, MB"], rows))
    note = (__doc__ or "").partition("last run\n\n")[2].strip()
    lines = ["# The server for a minute", "", *(table.markdown().replace("###", "##", 1) for table in tables)]
    return "\n".join([*lines, note, "", "Written by `python -m experiments.server_endurance`.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, help="one part (default: both)")
    options = parser.parse_args()
    record = BENCHMARKS / "server.json"
    found: dict[str, Found] = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    for part in [options.only] if options.only else PARTS:
        found[part] = run_part(part)
        record.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    report = write_report(found)
    (BENCHMARKS / "server.md").write_text(report, encoding="utf-8")
    print(report)
    for failure in [failure for part in found.values() for failure in part["failures"]][:10]:
        print("FAILED", failure)


if __name__ == "__main__":
    main()
