"""Time two versions of the package side by side: a process for each, taking turns, and the ratio of their medians.

    python -m experiments.versions OLD/src NEW/src --rounds 40

Each path is a folder that holds `raytraced`, with its kernels built. One thread, fixed seeds, noise in place of data.
"""

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

# The work of one process, which answers every line on its input with the seconds of one call. Versions before 0.2 have
# another name for one option.
WORKER = """
import inspect, sys, time, torch, raytraced as rt
torch.set_num_threads(1); torch.manual_seed(0)
kind = sys.argv[1]
options = inspect.signature(rt.RaytracedConfig if hasattr(rt, "RaytracedConfig") else rt.RaytracedExperts)
rank = "input_rank" if "input_rank" in options.parameters else "sight_rank"
if kind == "layer step":
    model = rt.RaytracedExperts(96, 4, 8, hidden=192, num_hidden=1, weighting="rates", **{rank: 16})
    inputs = torch.randn(1024, 96)
    loss_of = lambda out: out.hidden.square().mean()
else:
    model = rt.build("mre", image_shape=(1, 28, 28), num_classes=10)
    inputs = torch.randint(0, 256, (256 if kind == "model step" else 1, 1, 28, 28), dtype=torch.uint8)
    labels = torch.randint(0, 10, (len(inputs),))
    loss_of = lambda out: torch.nn.functional.cross_entropy(out.logits, labels)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # the weights stay: every call does the same
def step():
    optimizer.zero_grad(); loss_of(model(inputs)).backward(); optimizer.step()
def answer():
    with torch.no_grad():
        for _ in range(200): model(inputs)
if kind == "one image": model.eval()
call, num = (answer, 200) if kind == "one image" else (step, 1)
for _ in range(5): call()
print("ready", flush=True)
for line in sys.stdin:
    began = time.perf_counter(); call(); print((time.perf_counter() - began) / num, flush=True)
"""
KINDS = ("model step", "layer step", "one image")


class Worker:
    """A process that times one kind of call with one version of the package."""

    def __init__(self, source: Path, kind: str) -> None:
        environment = os.environ | {"PYTHONPATH": str(source)}
        command = [sys.executable, "-c", WORKER, kind]
        self.process = subprocess.Popen(
            command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        if self._read() != "ready":
            raise RuntimeError(f"{source}: the process for {kind!r} ended with code {self.process.wait()}")

    def time(self) -> float:
        """The seconds of one call."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self._read())

    def _read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        """Close its input, upon which the process ends."""
        self.process.communicate()


def compare(old: Path, new: Path, kind: str, rounds: int) -> str:
    """One line: the medians of both versions, and the median and the quartiles of new over old, round by round."""
    workers = [Worker(source, kind) for source in (old, new)]
    try:
        seconds = [[worker.time() for worker in workers] for _ in range(rounds)]
    finally:
        for worker in workers:
            worker.end()
    olds, news = zip(*seconds, strict=True)
    low, middle, high = statistics.quantiles([one[1] / one[0] for one in seconds], n=4)
    medians = [statistics.median(each) * 1e6 for each in (olds, news)]
    return f"| {kind} | {medians[0]:,.0f} | {medians[1]:,.0f} | {middle:.3f} | {low:.3f} … {high:.3f} |"


def main(arguments: list[str] | None = None) -> int:
    """Print a table of all kinds of calls."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="the folder `src` of the older version")
    parser.add_argument("new", type=Path, help="that of the newer one")
    parser.add_argument("--rounds", type=int, default=40, help="how often each version is timed (default: %(default)s)")
    options = parser.parse_args(arguments)
    for source in (options.old, options.new):
        if not (source / "raytraced").is_dir():
            parser.error(f"{source}: has no folder raytraced; give the folder src of a clone")
    if options.rounds < 2:
        parser.error(f"--rounds {options.rounds}: must be at least 2")
    print("| call | old, µs | new, µs | new / old | quartiles |\n|---|---:|---:|---:|---:|")
    for kind in KINDS:
        print(compare(options.old, options.new, kind, options.rounds), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
