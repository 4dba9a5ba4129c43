"""`raytraced benchmark`; torch is imported only when measuring begins."""

import sys
import time
from pathlib import Path
from typing import Any, Literal

from raytraced.benchmark.results import chosen
from raytraced.words import require


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
        data: The images that models see.
        output: Folder for the results; what was measured there with the same code on this machine is kept.
        fresh: Measure that anew too.
    """
    names, folder = chosen(only), Path(output) / "quick" if quick else Path(output)
    require(not folder.is_file(), "output", output, f"{folder} is a file; name a folder")
    import matplotlib  # noqa: F401 (where it is missing, that is told before it measures)

    from raytraced.benchmark.timing import LONG, SHORT

    run(names, folder, SHORT if quick else LONG, data, fresh)


def run(names: list[str], folder: Path, settings: Any, data: str, fresh: bool) -> None:
    """Measure what is not yet measured, save each workload at once, then write the report."""
    import torch
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from raytraced.benchmark import layer_workloads, model_workloads, report, results

    if "gpu" in names and not torch.cuda.is_available():
        require(names != ["gpu"], "only", "gpu", "no GPU, or a PyTorch without CUDA; see docs/gpu.md")
        print("gpu: left out, no GPU here")
        names = [name for name in names if name != "gpu"]
    stamp = {"code": results.code_hash(Path(__file__).parent.parent), "settings": settings._asdict()}
    machine = results.describe_machine() | {"images": data}
    file = results.ResultsFile(folder / "results.json", machine, stamp, fresh=fresh)
    todo = [name for name in names if not file.is_done(name)]
    bench = model_workloads.Bench(settings, data)
    functions = vars(model_workloads) | vars(layer_workloads)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # no refresh by itself: a thread that redraws while times are taken would disturb them
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
                outcome = functions[name.replace("-", "_")](bench)
            except KeyboardInterrupt:
                print("stopped; what is finished is saved, the same command goes on")
                raise
            entry = file.add(name, outcome, time.monotonic() - started, results.others_share(ticks))
            print(report.text(name, entry), flush=True)
            move(1)
    report.write(file.content, folder)
    print(f"\n{folder / 'results.json'}, results.md and ratios.png written.")
