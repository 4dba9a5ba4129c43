"""`raytraced checks`: what a bug report needs to tell of a machine. Importing this file does not import torch."""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from json import dumps
from pathlib import Path
from typing import Any

# what the extras of the package bring
EXTRAS = (
    "matplotlib", "tensorboard", "scikit-learn", "tokenizers", "starlette", "uvicorn", "triton", "huggingface_hub",
    "transformers", "accelerate", "onnx", "onnx-ir", "onnxscript", "onnxruntime",
)  # fmt: skip


def checks(root: str | None = None, json: bool = False) -> int:
    """Versions, compiled operations, threads, devices and cached data: what a bug report needs."""
    found = look_around(root)
    if json:
        print(dumps(found, indent=2, ensure_ascii=False))
    else:
        for name, value in found.items():
            parts = value.items() if isinstance(value, dict) else [("", value)]
            told = "; ".join(f"{_words(key)} {_told(each)}".strip() for key, each in parts)
            print(f"{_words(name) + ':':<21}{told}")
    return 0 if found["compiled_operations"]["agree_with_plain"] else 1


def look_around(root: str | None = None) -> dict[str, Any]:
    """All of it, as plain values."""
    import numpy as np
    import torch

    from raytraced import __file__ as package
    from raytraced import __version__, operations
    from raytraced.benchmark.results import describe_machine
    from raytraced.data.cache import cache_root, is_cached
    from raytraced.operations.operation import VARIABLE
    from raytraced.tasks.table import catalog

    machine, folder, known = describe_machine(), cache_root(root), catalog()
    difference = compare_with_plain()
    return {
        "raytraced": {"version": __version__, "folder": str(Path(package).parent)},
        "python": {"version": machine["python"], "folder": sys.prefix},
        "torch": machine["torch"],
        "numpy": np.__version__,
        "extras": {name: _version(name) for name in EXTRAS},
        "system": platform.platform(),
        "processor": {
            "name": machine["processor"],
            "architecture": platform.machine(),
            "instructions_of_torch": machine["instructions"],
        },
        "compiled_operations": {
            "there": operations.available(),
            "why_not": operations.why_not(),
            "instructions": operations.instructions(),
            "forced": os.environ.get(VARIABLE),
            "agree_with_plain": difference < 1e-4,
            "largest_difference": difference,
        },
        "threads": {
            "torch": torch.get_num_threads(),
            "cores": machine["cores"],
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        },
        "devices": {
            "cuda": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
            "mps": torch.backends.mps.is_available(),
        },
        "data": {
            "folder": str(folder),
            "cached": [name for name, entry in known.items() if entry.parts and is_cached(folder, *entry.parts)],
        },
    }


def compare_with_plain() -> float:
    """How far a small layer's vectors are from those that plain PyTorch gives, at most."""
    import torch

    from raytraced import RaytracedExperts, operations

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        layer, hidden_BD = RaytracedExperts(8, 2, 3).eval(), torch.randn(16, 8)
        out_BD = layer(hidden_BD).hidden
        with operations.use("plain"):
            return float((out_BD - layer(hidden_BD).hidden).abs().max())


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _words(key: str) -> str:
    return key if key.isupper() else key.replace("_", " ")


def _told(value: object) -> str:
    """A value as one reads it."""
    if isinstance(value, list):
        return ", ".join(value) or "none"
    if isinstance(value, float):
        return f"{value:.1g}"
    if isinstance(value, bool):  # 1 is a number, though it equals True
        return "yes" if value else "no"
    return "–" if value is None else str(value)
