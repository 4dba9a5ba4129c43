"""`python -m experiments.benchmark`. Importing this file does not import torch."""

import sys
import time
from pathlib import Path
from typing import Any, Literal

from experiments import ROOT
from experiments.benchmark.results import chosen
from raytraced.errors import require


def benchmark(
    quick: bool = False,
    only: str = "",
    data: Literal["mnist", "fashion-mnist", "cifar10", "digits"] = "mnist",
    output: str = "benchmarks",
    fresh: bool = False,
) -> None:
    """Measure speed and memory as ratios, side by side in one process; writes results.json, a table and a plot.

    Args:
        quick: Fewer repeats, about two minutes in all; written to the sub-folder quick.
        only: Names of workloads, such as step or step,latency (default: all; a wrong name lists them).
        data: Data set of the images.
        output: Folder for the results. Workloads in it that were measured with the same code on this machine are kept.
        fresh: Measure these again, too.
    """
    names, folder = chosen(only), Path(output) / "quick" if quick else Path(output)
    require(not folder.is_file(), "output", output, f"{folder} is a file; name a folder")
    import matplotlib  # noqa: F401 (a missing one is reported before hours of measurements)

    from experiments.benchmark.timing import LONG, SHORT

    run(names, folder, SHORT if quick else LONG, data, fresh)


def run(names: list[str], folder: Path, settings: Any, data: str, fresh: bool) -> None:
    """Measure the workloads that are not yet measured, save each at once, then write the report."""
    import torch
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from experiments.benchmark import layer_workloads, model_workloads, report, results

    if "gpu" in names and not torch.cuda.is_available():
        require(names != ["gpu"], "only", "gpu", "no GPU, or a PyTorch without CUDA; see docs/guides/gpu.md")
        print("gpu: left out, no GPU here")
        names = [name for name in names if name != "gpu"]
    stamp = {"code": results.code_hash(ROOT), "settings": settings._asdict()}
    machine = results.describe_machine() | {"images": data}
    file = results.ResultsFile(folder / "results.json", machine, stamp, fresh=fresh)
    todo = [name for name in names if not file.is_done(name)]
    bench = model_workloads.Bench(settings, data)
    measurements = model_workloads.MEASUREMENTS | layer_workloads.MEASUREMENTS
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # No automatic refresh: a thread that redraws while times are taken would disturb them.
    with Progress(*columns, disable=not sys.stdout.isatty(), auto_refresh=False) as bars:
        bar = bars.add_task("benchmark", total=len(names))
        if num_kept := len(names) - len(todo):
            print(f"{num_kept} of {len(names)} measured before with this code on this machine: kept")
        for done, name in enumerate(todo, num_kept):

            def move(share: float, name: str = name, done: int = done) -> None:
                bars.update(bar, description=name, completed=done + share, refresh=True)

            bench.tick = move
            move(0)
            torch.set_num_threads(1)
            torch.manual_seed(0)
            started, ticks = time.monotonic(), results.read_ticks()
            try:
                outcome = measurements[name](bench)
            except KeyboardInterrupt:
                print("stopped; finished workloads are saved, the same command continues after them")
                raise
            entry = file.add(name, outcome, time.monotonic() - started, results.others_share(ticks))
            print(report.text(name, entry), flush=True)
            move(1)
    report.write(file.content, folder)
    print(f"\n{folder / 'results.json'}, results.md and ratios.png written.")
