"""Offered load against latency and accuracy: a server with and without `--adaptive`, beside a top-k model.

    python -m experiments.server_load                # trains two models, writes benchmarks/server-load.*; some minutes
    python -m experiments.server_load --busy         # the same while another process keeps one core busy

Both models have a grid of 4 x 4 experts of width 8,192 and are trained briefly on the digits, `mre` with a table of budgets
(`raytraced calibrate`). Requests with `max_ms=50` arrive at random moments at a given mean rate, whether or not those before
are answered; those of `mre` state `effort` as a range, from 0.5 to 1. Without `--adaptive` the highest
effort is taken. *Right* are the right answers per second. Latencies are measured by the client, accuracy is that of the
answers, on the test digits.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import tempfile
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments import BENCHMARKS
from experiments.reproduce.tables import Table
from experiments.server.client import Client
from experiments.server.process import ServerProcess
from raytraced.cli.main import main as raytraced
from raytraced.io.saving import load
from raytraced.tasks.images.loading import load as load_data

MAX_MS = 50
LOWEST = 0.5  # of the efforts that requests allow
GRID = {"dim": 64, "hidden": 8192, "num_hidden": 1, "num_layers": 4, "num_experts": 4}
LOADS = (20, 40, 80, 160, 320)  # requests per second
CURVES = {"mre": ("mre", False), "mre, --adaptive": ("mre", True), "top-k": ("top-k", False)}
COLOURS = {"mre": "tab:blue", "mre, --adaptive": "tab:orange", "top-k": "tab:gray"}


def train_models(folder: Path) -> None:
    """Train both models and calibrate one; models that are there already are taken."""
    for name in ("mre", "top-k"):
        if (folder / name / "model.safetensors").exists():
            continue
        words = ["train", "--data", "digits", "--model", name, "--epochs", "4", "--threads", "1", "--quiet", "true"]
        words += ["--runs-dir", str(folder), "--name", name]
        words += [word for option, value in GRID.items() for word in (f"--model-options.{option}", str(value))]
        words += ["--model-options.stop_range", "[0.02,1.0]"] if name == "mre" else []
        assert raytraced(words) == 0
    calibrated = folder / "mre.safetensors"
    if not calibrated.exists():
        assert raytraced(["calibrate", str(folder / "mre" / "model.safetensors"), "--output", str(calibrated)]) == 0


async def offer(address: str, bodies: list[tuple[bytes, str]], rate: float, seconds: float) -> list[dict[str, Any]]:
    """Send requests at random moments; each reply's status and latency, and of answers their effort and whether right."""
    rng, found = random.Random(int(rate)), list[dict[str, Any]]()
    idle: list[Client] = []

    async def ask(body: bytes, label: str) -> None:
        client = idle.pop() if idle else Client(address)
        began = perf_counter()
        reply = await client.post("/api/predict", body)
        one: dict[str, Any] = {"status": reply.status, "ms": 1000 * (perf_counter() - began)}
        if reply.status == 200:
            (answer,) = reply.json()["answers"]
            one |= {"right": answer["label"] == label, "effort": answer.get("effort", 1.0), "stop": answer["stop"]}
        found.append(one)
        idle.append(client)

    end, moment, tasks = perf_counter() + seconds, perf_counter(), list[asyncio.Task[None]]()
    while moment < end:
        moment += rng.expovariate(rate)
        await asyncio.sleep(max(0.0, moment - perf_counter()))
        tasks.append(asyncio.create_task(ask(*rng.choice(bodies))))
    await asyncio.gather(*tasks)
    for client in idle:
        await client.close()
    return found


def summarise(found: list[dict[str, Any]], seconds: float) -> dict[str, float]:
    """What one load gave."""
    answers = [one for one in found if one["status"] == 200]
    unknown = [one for one in found if one["status"] not in (200, 429)]
    assert not unknown, unknown[:3]
    times = np.array([one["ms"] for one in answers])
    right = sum(one["right"] for one in answers)
    return {
        "answered": len(answers) / seconds,
        "refused": (len(found) - len(answers)) / seconds,
        "p50": float(np.percentile(times, 50)),
        "p99": float(np.percentile(times, 99)),
        "in_time": float((times <= MAX_MS).mean()),
        "accuracy": right / len(answers),
        "right": right / seconds,
        "effort": float(np.mean([one["effort"] for one in answers])),
    }


def keep_busy() -> None:
    """Occupy a core."""
    while True:
        pass


@contextmanager
def busy_core(wanted: bool) -> Any:
    """Another process that never rests, where it is wanted."""
    process = multiprocessing.get_context("spawn").Process(target=keep_busy, daemon=True)
    if wanted:
        process.start()
    try:
        yield
    finally:
        if wanted:
            process.terminate()
            process.join()


def measure(folder: Path, seconds: float) -> dict[str, list[dict[str, float]]]:
    """All loads of all curves."""
    data = load_data("digits").test
    dial = load(str(folder / "mre.safetensors")).card.dial["rows"]
    lowest = max(LOWEST, dial[0]["macs"] / dial[-1]["macs"])
    files = {"mre": folder / "mre.safetensors", "top-k": folder / "top-k" / "model.safetensors"}
    results: dict[str, list[dict[str, float]]] = {}
    for curve, (model, adaptive) in CURVES.items():
        options = {"max_ms": MAX_MS} | ({"effort": [lowest, 1.0]} if model == "mre" else {})
        bodies = [
            (json.dumps({"image": image[0].tolist()} | options).encode(), str(int(label)))
            for image, label in zip(data.images, data.labels, strict=True)
        ]
        results[curve] = []
        with ServerProcess(str(files[model]), *(["--adaptive"] if adaptive else [])) as server:
            asyncio.run(offer(server.address, bodies, 30, 4))  # times are measured before they are relied on
            for rate in LOADS:
                found = asyncio.run(offer(server.address, bodies, rate, seconds))
                results[curve].append({"offered": float(rate)} | summarise(found, seconds))
                print(curve, {name: round(value, 3) for name, value in results[curve][-1].items()}, flush=True)
    return results


def draw(results: dict[str, list[dict[str, float]]], path: Path) -> None:
    """Offered load against p99 latency, accuracy, and right answers per second."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    axes = figure.subplots(1, 3)
    panels = {"p99": "99th percentile of latency (ms)", "accuracy": "accuracy of answers (%)"}
    panels |= {"right": "right answers per second"}
    for axis, (name, title) in zip(axes, panels.items(), strict=True):
        for curve, rows in results.items():
            factor = 100 if name == "accuracy" else 1
            values = [factor * row[name] for row in rows]
            axis.plot([row["offered"] for row in rows], values, "o-", color=COLOURS[curve], label=curve, markersize=4)
        axis.set(xlabel="offered load (requests per second)", title=title)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].axhline(MAX_MS, color="black", linewidth=0.8, linestyle=":")
    axes[0].annotate(f"max_ms={MAX_MS}", (LOADS[0], MAX_MS), xytext=(0, 3), textcoords="offset points", fontsize=8)
    axes[0].set_ylim(bottom=0)
    axes[2].plot([0, LOADS[-1]], [0, LOADS[-1]], color="black", linewidth=0.8, linestyle=":")
    axes[2].set_ylim(0, 1.1 * max(row["right"] for rows in results.values() for row in rows))
    axes[1].legend(frameon=False)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", action="store_true", help="keep one core busy meanwhile")
    parser.add_argument("--models", type=Path, help="folder of the trained models (default: a temporary one)")
    parser.add_argument("--seconds", type=float, default=10.0, help="per load")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.models or Path(temporary)
        train_models(folder)
        with busy_core(options.busy):
            results = measure(folder, options.seconds)
    name = "server-load-busy" if options.busy else "server-load"
    columns = {"offered": ("offered per s", "{:.0f}", 1), "answered": ("answered", "{:.0f}", 1)}
    columns |= {"refused": ("refused", "{:.0f}", 1), "p50": ("p50 ms", "{:.1f}", 1), "p99": ("p99 ms", "{:.1f}", 1)}
    columns |= {"in_time": ("in time %", "{:.2f}", 100), "accuracy": ("accuracy %", "{:.1f}", 100)}
    columns |= {"right": ("right per s", "{:.0f}", 1), "effort": ("effort", "{:.2f}", 1)}
    header = ["curve", *(title for title, _, _ in columns.values())]
    rows = [
        [curve, *(form.format(factor * row[name]) for name, (_, form, factor) in columns.items())]
        for curve, found in results.items()
        for row in found
    ]
    note = " ".join((__doc__ or "").partition("Both models")[1:])
    title = "The server under load" + (", one core kept busy" if options.busy else "")
    table = Table(title, header, rows, note.strip())
    words = "python -m experiments.server_load" + (" --busy" if options.busy else "")
    lines = [table.markdown().replace("###", "#", 1), f"![load]({name}.png)", "", f"Written by `{words}`.", ""]
    (BENCHMARKS / f"{name}.md").write_text("\n".join(lines), encoding="utf-8")
    draw(results, BENCHMARKS / f"{name}.png")


if __name__ == "__main__":
    main()
