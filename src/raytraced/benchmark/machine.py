"""What the figures were measured on."""

import os
import platform
from pathlib import Path
from typing import Any

FLAGS = ("sse4_2", "avx", "avx2", "fma", "avx512f", "avx512_bf16", "amx_tile", "asimd", "sve")


def describe_machine() -> dict[str, Any]:
    """Processor, memory, versions, and which kernels run; the same from run to run on one machine."""
    import torch

    from raytraced import kernels

    model, flags = processor()
    return {
        "processor": model,
        "instructions": flags,
        "cores": os.cpu_count(),
        "memory_gb": memory_gb(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_instructions": torch.backends.cpu.get_cpu_capability(),
        "blas": "mkl" if torch.backends.mkl.is_available() else "other",
        "kernels": kernel_instructions() if kernels.available() else f"none: {kernels.why_not()}",
    }


def kernel_instructions() -> str:
    """The instruction set that the compiled kernels chose."""
    import ctypes

    from raytraced.kernels import library

    tell = getattr(library.cpu, "raytraced_instructions")  # noqa: B009 (a symbol, not an attribute)
    tell.restype = ctypes.c_char_p
    return bytes(tell()).decode()


def processor() -> tuple[str, list[str]]:
    """The processor's name and those of its instruction sets that matter here."""
    name, flags = platform.processor() or platform.machine(), set()
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = value.strip()
            elif key.strip() in ("flags", "Features"):
                flags = set(value.split())
    return name, [flag for flag in FLAGS if flag in flags]


def memory_gb() -> int | None:
    """Installed memory."""
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    except (ValueError, OSError, AttributeError):  # not every system tells
        return None


def load() -> float | None:
    """How many processes want a core, on average over the last minute; None where the system does not tell."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None
