"""The Triton kernels compile for GPUs that are not there, whatever the options; `python compile_triton.py` prints the table."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from kernels.compile_triton import GRIDS, KERNELS, TARGETS, compile_kernel, line

pytestmark = [
    pytest.mark.skipif(
        find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
        reason="triton is not installed, or in its interpreter: make test-triton",
    ),
    pytest.mark.filterwarnings("ignore:.*FP_FUSION"),  # triton's, of what it will do in its next version
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("forward", {"RACE": True, "INPUT_CONDITIONED": True}),
        ("forward", {"DRAWN": False, "HAS_ROWS": False, "DOMINANT": True}),
        ("backward", {"ESTIMATOR": 0}),
        ("backward", {"ESTIMATOR": 2, "INPUT_CONDITIONED": True}),
        ("backward", {"ESTIMATOR": 3, "DRAWN": False, "HAS_ACTIVE": False}),
        ("backward", {"ESTIMATOR": 3, "DRAWN": False, "HAS_ACTIVE": False, "INPUT_CONDITIONED": True}),
    ],
)
def test_the_kernels_compile_without_a_device_and_keep_to_registers(target, name, options):
    found = compile_kernel(name, (2, 4), target, **options)
    assert 0 < found.registers <= 512
    assert found.spilled <= 64  # some of it is a stack frame, not a spill
    assert found.shared <= 48 * 1024


@pytest.mark.parametrize("name", ["forward", "backward"])
@pytest.mark.parametrize(
    ("grid", "options"),
    [((1, 4), {}), ((2, 1), {}), ((2, 4), {"B": 1, "T": 1}), ((3, 2), {"kind": "*fp64"})],
    ids=[
        "one layer",
        "one expert",
        "a batch and a step of one, which are constants to the compiler",
        "double precision",
    ],
)
def test_odd_sizes_compile(name, grid, options):
    assert compile_kernel(name, grid, "sm_90", **options).registers


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", ["forward", "backward"])
@pytest.mark.parametrize("kernels", KERNELS)
def test_the_page_has_what_the_compiler_says(kernels, name, grid):
    page = (Path(__file__).parents[2] / "docs" / "lab" / "gpu.md").read_text()
    table = page.partition(f"{kernels}:")[2].partition("\n\n|")[2].partition("\n\n")[0]
    assert line(kernels, name, grid) in table.splitlines()
