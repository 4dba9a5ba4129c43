"""`raytraced export`: a trained classifier as a file for other runtimes; torch is imported only when it begins."""

from pathlib import Path
from typing import Literal

from raytraced.commands.training import find_source

ENDINGS = {"onnx": ".onnx", "torch": ".pt2"}


def export(
    run: str,
    format: Literal["onnx", "torch"] = "onnx",
    output: str | None = None,
    prefixes: bool = False,
    pixels: Literal["uint8", "float"] = "uint8",
    opset: int = 20,
    weights: Literal["last", "best"] = "last",
) -> None:
    """Write a trained classifier as one graph for other runtimes: any batch size, the budget of experts as an input.

    Args:
        run: A run folder, its name in the folder runs, a model.safetensors file, or a shipped model's name.
        format: For onnxruntime and the like (onnx), or for torch.export.load (torch).
        output: The file to write; default: the run's name with .onnx or .pt2.
        prefixes: Give the answers after 0, 1, 2, … experts in place of the last alone.
        pixels: What images are: bytes (uint8) or fractions in 0 … 1 (float).
        opset: The version of ONNX's operators, 18 to 23.
    """
    source = find_source(run, "runs", weights)
    path = Path(output or Path(run).name.removesuffix(".safetensors") + ENDINGS[format])
    from raytraced.export import export as write
    from raytraced.saving import load

    inputs, outputs = write(load(source), path, format, pixels=pixels, prefixes=prefixes, opset=opset)
    print(f"{path}: {path.stat().st_size / 1024:.0f} KiB, takes {', '.join(inputs)}, gives {', '.join(outputs)}")
