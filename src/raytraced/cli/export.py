"""`raytraced export`: a trained classifier as a file for other runtimes; torch is imported only when the command runs."""

from pathlib import Path
from typing import Literal, cast

from raytraced.cli.budgets import check_budget_options, check_without_route
from raytraced.cli.training import find_source
from raytraced.errors import printable

ENDINGS = {"onnx": ".onnx", "torch": ".pt2"}


def export(
    run: str,
    format: Literal["onnx", "torch"] = "onnx",
    output: str | None = None,
    prefixes: bool = False,
    route: bool = False,
    stop: float | None = None,
    experts: float | None = None,
    effort: float | None = None,
    pixels: Literal["uint8", "float"] = "uint8",
    opset: int = 20,
    weights: Literal["last", "best"] = "last",
    runs_dir: str = "runs",
) -> None:
    """Export a trained classifier as one graph for other runtimes: any batch size, the budget of experts as an input.

    --stop, and the budgets --experts and --effort that stand for one, are constants of the graph.

    Args:
        format: onnx for onnxruntime and other ONNX runtimes, torch for torch.export.load.
        output: The file to write (default: the run's name with .onnx or .pt2).
        prefixes: Return the answers after 0, 1, 2, … experts instead of only the last one.
        route: Run the experts of a route, an input of the graph, instead of a choice of its own.
        pixels: Type of the images: bytes (uint8) or fractions in 0 … 1 (float).
        opset: Version of ONNX's operators, 18 to 23.
    """
    if route:
        check_without_route("--route", stop=stop, experts=experts, effort=effort)
    source = find_source(run, runs_dir, weights)
    path = Path(output or Path(run).name.removesuffix(".safetensors") + ENDINGS[format])
    from raytraced.io.export import export as write
    from raytraced.io.saving import load

    model = load(source)
    check_budget_options(model, source, stop=stop, experts=experts, effort=effort)
    dial = cast("float | None", model.resolve_budget(stop, experts, effort))
    inputs, outputs = write(model, path, format, pixels=pixels, prefixes=prefixes, route=route, stop=dial, opset=opset)
    print(
        f"{printable(path)}: {path.stat().st_size / 1024:.0f} KiB, takes {', '.join(inputs)}, gives {', '.join(outputs)}"
    )
