"""`raytraced checks`: facts about this machine for a bug report. Importing this file does not import torch."""

import os
import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from json import dumps
from pathlib import Path
from typing import Any

from raytraced.errors import printable

# Packages that the extras of this package install.
EXTRAS = (
    "matplotlib", "tensorboard", "wandb", "trackio", "mlflow", "optuna", "distributed", "ray", "submitit",
    "scikit-learn", "tokenizers", "fastapi", "pydantic",
    "prometheus_client", "python-multipart", "starlette", "uvicorn", "triton", "huggingface_hub",
    "transformers", "accelerate", "onnx", "onnx-ir", "onnxscript", "onnxruntime",
)  # fmt: skip


def checks(data_root: str | None = None, json: bool = False) -> int:
    """Print versions, compiled kernels, threads, devices and cached data: what a bug report needs."""
    found = collect(data_root)
    if json:
        print(dumps(found, indent=2))
    else:
        for name, value in found.items():
            parts = value.items() if isinstance(value, dict) else [("", value)]
            line = "; ".join(f"{_words(key)} {_format_value(each)}".strip() for key, each in parts)
            print(printable(f"{_words(name) + ':':<21}{line}"))
    return 0 if found["compiled_kernels"]["agree_with_plain"] else 1


def describe_machine() -> dict[str, Any]:
    """Processor, versions, the GPU if any, and whether kernels are compiled; constant on one machine."""
    import torch

    from raytraced import kernels

    info = Path("/proc/cpuinfo")
    name = re.search(r"model name\s*:\s*(.*)", info.read_text()) if info.exists() else None
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return gpu | {
        "processor": name[1] if name else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "compiled_kernels": "yes" if kernels.available() else f"no, {kernels.why_not()}",
    }


def collect(data_root: str | None = None) -> dict[str, Any]:
    """All facts that `checks` prints, as plain values."""
    import numpy as np
    import torch

    from raytraced import __file__ as package
    from raytraced import __version__, kernels
    from raytraced.data.cache import cache_root, is_cached
    from raytraced.kernels.operation import VARIABLE
    from raytraced.tasks.registry import catalog

    machine, folder, known = describe_machine(), cache_root(data_root), catalog()
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
        "compiled_kernels": {
            "there": kernels.available(),
            "why_not": kernels.why_not(),
            "instructions": kernels.instructions(),
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
    """The largest difference between a small layer's vectors and those that plain PyTorch computes."""
    import torch

    from raytraced import RaytracedExperts, kernels

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        layer, hidden_BD = RaytracedExperts(8, 2, 3).eval(), torch.randn(16, 8)
        out_BD = layer(hidden_BD).hidden
        with kernels.use("plain"):
            return float((out_BD - layer(hidden_BD).hidden).abs().max())


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _words(key: str) -> str:
    return key if key.isupper() else key.replace("_", " ")


def _format_value(value: object) -> str:
    """A value as text for people."""
    if isinstance(value, list):
        return ", ".join(value) or "none"
    if isinstance(value, float):
        return f"{value:.1g}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "–" if value is None else str(value)
