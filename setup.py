"""Builds the compiled kernels, all of kernels/cpu/*.cpp; a file named *_<instructions>.cpp may use those instructions.

The library is loaded by ctypes and links neither Python nor torch: one wheel is for every version of both. It is optional:
where it cannot be built, the install succeeds and the plain PyTorch path is used.
"""

import os
import platform
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = Path("src/raytraced/kernels/cpu")
INSTRUCTIONS = {"avx2": ["-mavx2", "-mfma"]} if platform.machine() in ("x86_64", "AMD64") else {}
FOREIGN = set() if INSTRUCTIONS else {"avx2"}
# No -ffast-math: re-associated sums break the range reduction of exp() and the order of additions.
# -fno-wrapv against the -fwrapv of Python's own flags, which makes every int index a sign extension: 1.5 times slower.
COMMON = ["-std=c++17", "-fno-wrapv", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi", "-pthread"]
# RAYTRACED_SANITIZE=1: every memory access and undefined operation is checked at run time; see `make test-sanitizers`.
SANITIZERS = (
    ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"] if os.environ.get("RAYTRACED_SANITIZE") else []
)
FLAGS = [*COMMON, *SANITIZERS, *(["-O1", "-g1", "-fno-omit-frame-pointer"] if SANITIZERS else ["-O3", "-g0"])]


class BuildLibrary(build_ext):
    """Compiles each file with the instructions its name ends in."""

    def build_extensions(self) -> None:
        compile_one = self.compiler._compile

        def compile_with_instructions(obj, src, ext, cc_args, extra, pp_opts):  # type: ignore[no-untyped-def]
            extra = [*extra, *INSTRUCTIONS.get(Path(src).stem.rpartition("_")[2], [])]
            return compile_one(obj, src, ext, cc_args, extra, pp_opts)

        self.compiler._compile = compile_with_instructions
        super().build_extensions()


setup(
    # Windows: its compiler has none of the vectors that GCC and Clang have.
    ext_modules=[]
    if sys.platform == "win32"
    else [
        Extension(
            "raytraced.kernels._cpu",
            sources=sorted(str(p) for p in FOLDER.glob("*.cpp") if p.stem.rpartition("_")[2] not in FOREIGN),
            depends=sorted(str(p) for pattern in ("*.h", "*.inl") for p in FOLDER.glob(pattern)),
            extra_compile_args=FLAGS,
            extra_link_args=["-pthread", *SANITIZERS],
            language="c++",
            optional=True,
            py_limited_api=True,  # it uses none of it
        )
    ],
    cmdclass={"build_ext": BuildLibrary},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
