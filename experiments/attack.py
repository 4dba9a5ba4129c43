"""Attack what the project promises, at the size of the attack that once found faults.

    python -m experiments.attack                      # all parts; some 20 minutes on two cores
    python -m experiments.attack --only valid kills   # some parts

Finished pieces are kept in benchmarks/attack.json and not repeated, so that you can stop at any time and continue later
(`--seconds 200` stops by itself); `--again` starts from nothing. The table is written to benchmarks/attack.md. Only
127.0.0.1 is attacked.

* malformed: damaged requests and bytes that are no requests, eight at a time. A status of 500 or more, or no end of the
  response within 30 seconds, is a failure. After every thousand, a known request must have the same answer as before.
* valid: random requests of all paths and models; each must be answered with 200.
* sigterm: SIGTERM while 25 texts are generated. All of them must be complete, and equal to those of another server.
* kills: training runs that are killed at random moments, five times each, and resumed. All files must equal those of a run
  that was not killed, bit for bit.
* files: pickles, Python files and archives of them, under every name that raytraced reads, are given to each command, to
  `load` and to a server. Each would leave a marker where its code runs: none may. (`--plugin FILE` runs a file; nothing else.)
* configurations: random grids and options, compiled kernels against the plain path, outputs and gradients.
"""

import argparse
import asyncio
import base64
import io
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from PIL import Image

from experiments import BENCHMARKS, ROOT
from experiments.code_files import MARKERS, run_themselves, take_markers, write_code_files
from experiments.reproduce.tables import Table
from experiments.server.client import Client
from experiments.server.process import ServerProcess
from experiments.server.random_requests import RandomRequest, draw_malformed, draw_valid, read_models
from raytraced import build, load, save
from raytraced.cli.main import main as main_of_raytraced
from raytraced.data.cache import from_folder
from raytraced.tasks.images.catalog import CATALOG

PIECE = 1000  # requests between two checks
CLIENTS = 8
NUM_MALFORMED, NUM_VALID, NUM_IN_FLIGHT = 24_000, 5_000, 25
SHIPPED_MODELS = ("mre-digits", "mre-mnist", "mre-cifar10")
RESUME_TESTS = "tests/training/test_resume.py::test_run_killed_five_times_ends_as_if_it_was_not"
KERNEL_TESTS = "tests/kernels/test_sequence_cpp.py::test_thousands_of_configurations_agree_with_the_plain_path"

Found = dict[str, Any]


def write_models(folder: Path) -> list[str]:
    """Small untrained models of other kinds beside the shipped ones."""
    torch.manual_seed(0)
    paths = []
    for name in ("gpt-mre", "gpt-top-k"):
        path = folder / f"{name}.safetensors"
        save(build(name, dim=16, num_heads=2, context=32, depth=2, hidden=8, num_experts=3), path)
        paths.append(str(path))
    return paths


async def send_all(address: str, requests: list[RandomRequest], all_valid: bool) -> tuple[Counter[str], list[str]]:
    """Send requests by some clients at the same time; returns the statuses and the failures."""
    statuses: Counter[str] = Counter()
    failures: list[str] = []
    waiting = list(reversed(requests))

    async def work() -> None:
        async with Client(address) as client:
            while waiting:
                request = waiting.pop()
                try:
                    if request.raw is not None:
                        await client.close()
                        reply = await client.exchange(request.raw)
                        await client.close()
                    else:
                        reply = await client.post(request.path, request.body, request.content_type)
                except TimeoutError:
                    await client.close()
                    if request.raw is None:
                        failures.append(f"no response within {client.timeout:g} s: {request}"[:2000])
                    statuses["no response"] += 1
                    continue
                statuses["closed" if reply.status is None else str(reply.status)] += 1
                failed = reply.status != 200 if all_valid else (reply.status or 0) >= 500
                if failed or b"event: error" in reply.body:
                    failures.append(f"{reply.status} {reply.body[:300]!r}: {request}"[:2000])

    await asyncio.gather(*(work() for _ in range(CLIENTS)))
    return statuses, failures


def flood(draw: Callable[..., RandomRequest], seed: int, all_valid: bool = False) -> Found:
    """A thousand requests to a new server."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder, ServerProcess(*SHIPPED_MODELS, *write_models(Path(folder))) as server:
        known = {"model": "mre-digits", "image": [[16 * (row ^ column) for column in range(8)] for row in range(8)]}

        async def attack() -> Found:
            async with Client(server.address) as client:
                models = read_models((await client.get("/api/models")).json()["models"])
                before = await client.post("/api/predict", json.dumps(known).encode())
                began = time.perf_counter()
                statuses, failures = await send_all(
                    server.address, [draw(rng, models) for _ in range(PIECE)], all_valid
                )
                seconds = time.perf_counter() - began
                await client.close()
                after = await client.post("/api/predict", json.dumps(known).encode())
                if (before.status, before.body) != (after.status, after.body):
                    failures.append(f"the known request's answer is now {after.status} {after.body[:300]!r}")
                alive = (await client.get("/healthz")).json()
                if alive["in_progress"]:
                    failures.append(f"requests are still in progress: {alive}")
                return {"statuses": statuses, "failures": failures, "seconds": seconds}

        found = asyncio.run(attack())
        if "Traceback" in server.log():
            found["failures"].append(server.log()[-3000:])
        return found | {"done": PIECE}


def attack_malformed(piece: int) -> Found:
    """One piece of the malformed requests."""
    return flood(draw_malformed, piece)


def attack_valid(piece: int) -> Found:
    """One piece of the valid requests: each must be answered with 200."""
    return flood(draw_valid, 10_000 + piece, all_valid=True)


async def texts_of(address: str, stop: Callable[[], None] | None) -> list[bytes]:
    """25 texts that are generated at the same time; `stop` is called when all have begun."""
    begun, all_connected = 0, asyncio.Event()

    async def read(number: int) -> bytes:
        nonlocal begun
        body = json.dumps({"model": "gpt-mre", "text": f"Text {number}", "length": 120, "seed": number}).encode()
        async with Client(address, timeout=60) as client:
            head = "POST /api/generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            await client.send(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            await client.reader.readuntil(b"\r\n\r\n")
            content = b""
            async for chunk in client.chunks():
                if not content:
                    begun += 1
                    if begun == NUM_IN_FLIGHT:
                        all_connected.set()
                content += chunk
            return content

    tasks = [asyncio.create_task(read(number)) for number in range(NUM_IN_FLIGHT)]
    await asyncio.wait_for(all_connected.wait(), 60)
    if stop is not None:
        assert not any(task.done() for task in tasks), "a text ended before the signal"
        stop()
    found = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
    return [one if isinstance(one, bytes) else repr(one).encode() for one in found]


def attack_sigterm(piece: int) -> Found:
    """SIGTERM while 25 texts are generated."""
    with tempfile.TemporaryDirectory() as folder:
        words = write_models(Path(folder))
        with ServerProcess(*words) as server:
            expected = asyncio.run(texts_of(server.address, None))
        with ServerProcess(*words) as server:
            signalled = [0.0]

            def stop() -> None:
                signalled[0] = time.perf_counter()
                server.process.send_signal(signal.SIGTERM)

            texts = asyncio.run(texts_of(server.address, stop))
            code = server.process.wait(60)
            seconds = time.perf_counter() - signalled[0]
    lost = [one for one, other in zip(texts, expected, strict=True) if one != other]
    failures = [f"{len(lost)} texts differ or are incomplete: {lost[0][-300:]!r}"] if lost else []
    failures += [f"exit code {code}"] if code != 0 else []
    return {"done": len(texts), "failures": failures, "seconds": seconds}


def run_tests(name: str, piece: int) -> Found:
    """Run a slow test with one seed; it records how much it did."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-m", "slow", "-p", "no:cacheprovider", "-o", "junit_family=xunit1"]
        began = time.perf_counter()
        ended = subprocess.run(
            [*command, f"--junitxml={report}", f"{name}[{piece}]"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=1200,
        )
        found = (
            [int(one.get("value", 0)) for one in ElementTree.parse(report).iter("property")] if report.exists() else []
        )
    failures = [] if ended.returncode == 0 else [ended.stdout[-3000:]]
    return {"done": sum(found), "failures": failures, "seconds": time.perf_counter() - began}


def attack_kills(piece: int) -> Found:
    """One run that is killed five times."""
    return run_tests(RESUME_TESTS, piece)


def attack_configurations(piece: int) -> Found:
    """Some hundreds of configurations."""
    return run_tests(KERNEL_TESTS, piece)


def attack_files(piece: int) -> Found:
    """Files that run code, to every reader; a marker is a failure, and so is an error that is not one line."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "files")
        folder.mkdir()
        paths, output = write_code_files(folder), Path(name, "output")
        output.mkdir()
        failures = [] if run_themselves(folder) == MARKERS else ["some files cannot leave a marker"]
        began, done = time.perf_counter(), 0
        for path in paths:
            for reader, words in readers(path, output).items():
                problem = read_file(words) if words else refusal(reader, path)
                failures += [f"{reader} {path.name}: {problem}"] if problem else []
                failures += [f"{reader} {path.name}: ran its code ({one})" for one in sorted(take_markers(folder))]
                done += 1
        with ServerProcess("mre-digits") as server:
            for path in (path for path in paths if path.is_file()):
                for reader, status in asyncio.run(send_file(server.address, path.read_bytes())).items():
                    failures += [f"{reader} {path.name}: {status}"] if status is None or status >= 500 else []
                    failures += [f"{reader} {path.name}: ran its code ({one})" for one in sorted(take_markers(folder))]
                    done += 1
        return {"done": done, "failures": failures, "seconds": time.perf_counter() - began}


def readers(path: Path, output: Path) -> dict[str, list[str]]:
    """The words of each command that is given a file or a folder; none for what is called in Python."""
    file, words = str(path), {"epochs": "1", "runs-dir": str(output), "data-root": str(output)}
    image, text, page, custom = (
        str(output / name) for name in ("image.png", "text.txt", "page.html", "model.safetensors")
    )
    model = load("mre-digits")
    model.card = replace(model.card, data=None)  # the page of a model of the catalogue reads no other data
    save(model, custom)
    Image.new("L", (8, 8), 9).save(image)
    Path(text).write_text("line by line, a text\n" * 200)
    training = [word for name, value in words.items() for word in (f"--{name}", value)] + ["--quiet"]
    small = [
        "--model",
        "gpt-mre",
        "--data-options.context",
        "16",
        "--data-options.steps",
        "1",
        "--model-options.dim",
        "8",
    ]
    small += ["--model-options.num-heads", "2", "--model-options.num-experts", "2"]
    return {
        "load": [],
        "original files": [],
        "train --data": ["train", "--data", file, *training],
        "train text --data": ["train", "--data", file, *small, *training],
        "train tokenizer": ["train", "--data", text, "--data-options.tokenizer", file, *small, *training],
        "train -c": ["train", "-c", file, *training],
        "sweep": ["sweep", file, "--output", str(output / "sweep")],
        "resume": ["resume", file],
        "evaluate": ["evaluate", file, "--data", "digits"],
        "evaluate --data": ["evaluate", "mre-digits", "--data", file, "--data-root", str(output)],
        "evaluate --routes": ["evaluate", "mre-digits", "--routes", file],
        "calibrate": ["calibrate", file, "--data", "digits"],
        "predict": ["predict", file, image],
        "predict FILE": ["predict", "mre-digits", file],
        "generate": ["generate", file, "text", "--length", "3"],
        "paths": ["paths", file],
        "explore": ["explore", file, "--output", page],
        "explore --data": ["explore", custom, "--data", file, "--output", page],
        "export": ["export", file, "--format", "torch", "--output", str(output / "model.pt2")],
        "store": ["store", file, str(output / "store.safetensors")],
        "runs": ["runs", "--runs-dir", file],
        "compare": ["compare", file, "--output", str(output / "curves.png")],
        "data show": ["data", "show", file, "--output", str(output / "sheet.png"), "--data-root", str(output)],
    }


def read_file(words: list[str]) -> str | None:
    """Run a command; returns what is wrong with how it ended, or None."""
    errors = io.StringIO()
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(errors):
            code = main_of_raytraced(words)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None if code in (0, 2) else f"exit code {code}: {errors.getvalue()[-500:]}"


def refusal(reader: str, path: Path) -> str | None:
    """Read a model, or the original files of a data set; returns what is wrong with the refusal, or None."""
    try:
        if reader == "load":
            load(path)
        else:
            from_folder(path, CATALOG["cifar10"].parts[0])
    except (ValueError, OSError):
        return None
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "was read"


async def send_file(address: str, content: bytes) -> dict[str, int | None]:
    """The status of a server's answer to a file, by the way it was sent."""
    mark = b"--boundary\r\nContent-Disposition: form-data; name="
    form = mark + b'"files"; filename="model.pt"\r\n\r\n' + content + b"\r\n" + mark + b'"model"\r\n\r\nmre-digits'
    body = json.dumps({"model": "mre-digits", "image": base64.b64encode(content).decode()}).encode()
    async with Client(address) as client:
        return {
            "/api/upload": (
                await client.post(
                    "/api/upload", form + b"\r\n--boundary--\r\n", "multipart/form-data; boundary=boundary"
                )
            ).status,
            "/api/predict": (await client.post("/api/predict", body)).status,
            "/api/predict, as it is": (await client.post("/api/predict", content)).status,
        }


PARTS: dict[str, tuple[int, Callable[[int], Found], str]] = {
    "malformed": (NUM_MALFORMED // PIECE, attack_malformed, "malformed requests: no 5xx, no hang"),
    "valid": (NUM_VALID // PIECE, attack_valid, "valid random requests: all answered with 200"),
    "sigterm": (4, attack_sigterm, "texts in progress at SIGTERM: all complete and equal"),
    "kills": (8, attack_kills, "kills of 8 training runs: resumed bit for bit"),
    "files": (1, attack_files, "files that run code, given to every reader: none ran"),
    "configurations": (5, attack_configurations, "configurations: compiled kernels equal the plain path"),
}


def write_table(found: dict[str, Found], path: Path) -> None:
    """The table of all pieces so far."""
    rows = []
    for part, (num, _, about) in PARTS.items():
        pieces = [found[f"{part} {piece}"] for piece in range(num) if f"{part} {piece}" in found]
        statuses: Counter[str] = Counter()
        for piece in pieces:
            statuses.update(piece.get("statuses", {}))
        listed = ", ".join(f"{status}: {count:,}" for status, count in sorted(statuses.items()))
        done, failures = sum(piece["done"] for piece in pieces), sum(len(piece["failures"]) for piece in pieces)
        rows.append([about, f"{done:,}", str(failures), listed])
    note = "Seeds are the numbers of the pieces. *closed*: the server ended a connection that did not speak HTTP."
    table = Table("Attacks", ["what", "number", "failures", "by status"], rows, note)
    source = "Written by `python -m experiments.attack`."
    path.write_text("\n".join([table.markdown().replace("###", "#", 1), source, ""]), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--again", action="store_true", help="forget the pieces of these parts that were finished")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no other piece after this time")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are ended, too
    until = time.monotonic() + args.seconds
    record = BENCHMARKS / "attack.json"
    found: dict[str, Found] = json.loads(record.read_text()) if record.exists() else {}
    if args.again:
        found = {name: one for name, one in found.items() if name.split()[0] not in args.only}
    for part in args.only:
        num, attack, about = PARTS[part]
        for piece in range(num):
            name = f"{part} {piece}"
            if name in found and not found[name]["failures"]:
                continue
            if time.monotonic() > until:
                sys.exit(f"experiments.attack: stopped before {name}; run it again to continue")
            found[name] = attack(piece)
            print(f"{name}: {found[name]['done']:,}, {found[name]['seconds']:.1f} s; {about}", flush=True)
            for failure in found[name]["failures"][:5]:
                print(f"  FAILED {failure}", flush=True)
            record.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
            write_table(found, BENCHMARKS / "attack.md")
    if any(found[f"{part} {piece}"]["failures"] for part in args.only for piece in range(PARTS[part][0])):
        sys.exit(1)


if __name__ == "__main__":
    main()
