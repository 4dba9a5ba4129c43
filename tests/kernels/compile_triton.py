"""Compiles the sequence's Triton kernels for GPUs that need not be there: `python compile_triton.py` prints docs/lab/gpu.md's tables.

Of each kernel and GPU: registers of a thread / bytes of them that spill to memory / shared memory of a program.
"""

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

GRIDS = ((2, 4), (4, 8), (4, 16), (8, 16), (8, 32), (8, 64))
TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}
_GREEDY = {"DRAWN": False, "HAS_ROWS": False, "INPUT_CONDITIONED": True}
# What kernels are compiled for where it differs from a drawn sequence with reinmax.
KERNELS: dict[str, dict[str, dict[str, Any]]] = {
    "Greedy, without gradients of draws, input-conditioned gates": {
        "forward": _GREEDY,
        "backward": _GREEDY | {"ESTIMATOR": 3, "HAS_ACTIVE": False},
    },
    "Drawn, with reinmax": {"forward": {}, "backward": {}},
}
_POINTERS = {"seed": "*i64", "rows": "*i64", "nodes": "*i64", "num_active": "*i64", "temperature": "*fp64"}


class Compiled(NamedTuple):
    """What one kernel takes on one target; None where the target's tools do not report it."""

    registers: int | None
    spilled: int | None
    shared: int


def compile_kernel(name: str, grid: tuple[int, int], target: str, kind: str = "*fp32", **options: Any) -> Compiled:
    """One kernel of a grid for a target; the options are those that it is compiled for."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from raytraced.kernels import triton_kernels
    from raytraced.kernels.triton_sequence import launch

    size = launch(*grid)
    kernel = getattr(triton_kernels, f"sequence_{name}")
    fixed = dict(zip("LNQPR", size, strict=False))
    fixed |= {"INPUT_CONDITIONED": False, "DRAWN": True, "HAS_ROWS": True}
    if name == "forward":
        fixed |= {"RACE": False, "DOMINANT": False, "COUNTS": 1.0, "HAS_STOPS": False}
    else:
        fixed |= {"ESTIMATOR": 1, "FLOOR": 1e-6, "HAS_ACTIVE": True, "HAS_RATES": True, "HAS_OUTPUT": True}
    fixed |= options
    names = [each for each in kernel.arg_names if each not in fixed]
    kinds = {each: "i32" if each in "BT" else _POINTERS.get(each, kind) for each in names}
    source = ASTSource(kernel, kinds | dict.fromkeys(fixed, "constexpr"), fixed)
    found = triton.compile(source, target=GPUTarget(*TARGETS[target]), options={"num_warps": size.num_warps})
    if target == "gfx942":
        return Compiled(*_read_amdgcn(found.asm["amdgcn"]), found.metadata.shared)
    return Compiled(*_read_cubin(found.asm["cubin"]), found.metadata.shared)


def _read_amdgcn(text: str) -> tuple[int, int]:
    """Vector registers and spills, as the compiler notes them at the end of its assembly."""
    registers = int(re.findall(r"\.vgpr_count:\s+(\d+)", text)[-1])
    return registers, 4 * int(re.findall(r"\.vgpr_spill_count:\s+(\d+)", text)[-1])


def _read_cubin(cubin: bytes) -> tuple[int, int]:
    """Registers and stack of a binary, from cuobjdump, which comes with triton."""
    import triton

    tool = next(Path(triton.__file__).parent.rglob("cuobjdump"))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        text = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True).stdout
    return int(re.findall(r"REG:(\d+)", text)[0]), int(re.findall(r"STACK:(\d+)", text)[0])


def line(kernels: str, name: str, grid: tuple[int, int]) -> str:
    """One kernel of a grid on all targets, a row of the table."""
    from raytraced.kernels.triton_sequence import launch

    size, (L, N) = launch(*grid), grid
    found = [compile_kernel(name, grid, target, **KERNELS[kernels][name]) for target in TARGETS]
    cells = (f"{one.registers} / {one.spilled} / {one.shared}" for one in found)
    return f"| {name} | {L}×{N} | {size.R}, {size.num_warps} | {' | '.join(cells)} |"


def main() -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    for kernels in KERNELS:
        print(f"\n{kernels}:\n\n| kernel | grid | rows, warps | {' | '.join(TARGETS)} |")
        print("|---|---|---|" + "---:|" * len(TARGETS))
        for name in ("forward", "backward"):
            for grid in GRIDS:
                print(line(kernels, name, grid), flush=True)


if __name__ == "__main__":
    main()
