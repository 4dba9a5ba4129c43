"""Offered load against latency and accuracy: a server with and without `--adaptive`, beside a top-k model.

    python -m experiments.server_load                # trains two models, writes benchmarks/server-load.*; some minutes
    python -m experiments.server_load --busy         # the same while another process keeps one core busy
    python -m experiments.server_load --redraw       # table and figure again, from the numbers of the last run

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
STYLES = {"mre": ("tab:blue", "o-"), "mre, --adaptive": ("tab:orange", "s-"), "top-k": ("dimgray", "^--")}


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
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    axes = figure.subplots(1, 3)
    panels = {"p99": "99th percentile of latency (ms)", "accuracy": "accuracy of answers (%)"}
    panels |= {"right": "right answers per second"}
    for axis, (name, title) in zip(axes, panels.items(), strict=True):
        for curve, rows in results.items():
            colour, style = STYLES[curve]
            values = [factor_of(name) * row[name] for row in rows]
            axis.plot([row["offered"] for row in rows], values, style, color=colour, label=curve, markersize=5)
        axis.set_xscale("log")
        axis.set_xticks(LOADS, [str(load) for load in LOADS])
        axis.minorticks_off()
        axis.set(xlabel="offered load (requests per second)", title=title)
        axis.set_ylim(0, 1.1 * max(factor_of(name) * row[name] for rows in results.values() for row in rows))
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].axhline(MAX_MS, color="black", linewidth=0.8, linestyle=":")
    place = {"xycoords": ("axes fraction", "data"), "xytext": (0, 3), "textcoords": "offset points"}
    axes[0].annotate(f"max_ms={MAX_MS}", (0.02, MAX_MS), **place, fontsize=8)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(results), frameon=False)
    figure.savefig(path, dpi=130)


def factor_of(name: str) -> float:
    """Shares are drawn in percent."""
    return 100 if name in ("accuracy", "in_time") else 1


def check_aims(results: dict[str, list[dict[str, float]]], busy: bool) -> list[str]:
    """Each aim of aims-server-load.md that such a run decides, and whether it is met."""
    usual, adaptive, baseline = (results[curve] for curve in CURVES)
    shares = [(curve, row["offered"], row["in_time"]) for curve in ("mre", "mre, --adaptive") for row in results[curve]]
    missed = [f"{curve} at {load:.0f}: {100 * share:.1f} %" for curve, load, share in shares if share < 0.99]
    number = "2" if busy else "1"
    lines = [f"{number}. 99 of 100 within {MAX_MS} ms: " + (f"missed ({'; '.join(missed)})." if missed else "met.")]
    if busy:
        return lines
    answered, right = (
        (usual[-1]["answered"], adaptive[-1]["answered"]),
        [rows[-1]["right"] for rows in results.values()],
    )
    met = {True: "met", False: "missed"}
    more = met[answered[1] > answered[0]]
    lines.append(f"3. More answers with `--adaptive`: {more} ({answered[1]:.0f} against {answered[0]:.0f} per second).")
    best = met[right[1] > max(right[0], baseline[-1]["right"])]
    lines.append(
        f"4. More right answers: {best} ({right[1]:.0f} per second; without {right[0]:.0f}, top-k {right[2]:.0f})."
    )
    return lines


def write_report(results: dict[str, list[dict[str, float]]], busy: bool) -> None:
    """The table, the verdicts and the figure."""
    name = "server-load-busy" if busy else "server-load"
    columns = {"offered": ("offered per s", "{:.0f}"), "answered": ("answered", "{:.0f}")}
    columns |= {"refused": ("refused", "{:.0f}"), "p50": ("p50 ms", "{:.1f}"), "p99": ("p99 ms", "{:.1f}")}
    columns |= {"in_time": ("in time %", "{:.2f}"), "accuracy": ("accuracy %", "{:.1f}")}
    columns |= {"right": ("right per s", "{:.0f}"), "effort": ("effort", "{:.2f}")}
    header = ["curve", *(title for title, _ in columns.values())]
    rows = [
        [curve, *(form.format(factor_of(column) * row[column]) for column, (_, form) in columns.items())]
        for curve, found in results.items()
        for row in found
    ]
    note = " ".join((__doc__ or "").partition("Both models")[1:])
    title = "The server under load" + (", one core kept busy" if busy else "")
    table = Table(title, header, rows, note.strip())
    words = "python -m experiments.server_load" + (" --busy" if busy else "")
    lines = [table.markdown().replace("###", "#", 1), f"![load]({name}.png)", ""]
    lines += ["The [aims](aims-server-load.md), written before the runs:", "", *check_aims(results, busy), ""]
    lines += [f"Written by `{words}`.", ""]
    (BENCHMARKS / f"{name}.md").write_text("\n".join(lines), encoding="utf-8")
    draw(results, BENCHMARKS / f"{name}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", action="store_true", help="keep one core busy meanwhile")
    parser.add_argument("--models", type=Path, help="folder of the trained models (default: a temporary one)")
    parser.add_argument("--seconds", type=float, default=10.0, help="per load")
    parser.add_argument("--redraw", action="store_true", help="measure nothing")
    options = parser.parse_args()
    record = BENCHMARKS / ("server-load-busy.json" if options.busy else "server-load.json")
    if not options.redraw:
        with tempfile.TemporaryDirectory() as temporary:
            folder = options.models or Path(temporary)
            train_models(folder)
            with busy_core(options.busy):
                results = measure(folder, options.seconds)
        record.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    write_report(json.loads(record.read_text(encoding="utf-8")), options.busy)


if __name__ == "__main__":
    main()
