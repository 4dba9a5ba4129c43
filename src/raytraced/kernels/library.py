"""Finds and loads the compiled kernels, or says why there are none; RAYTRACED_KERNELS=off turns them off."""

import ctypes
import os
import warnings
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch


def _share_team(library: ctypes.CDLL) -> None:
    """Let the kernels run on the threads that PyTorch keeps, where its OpenMP library is the one beside it."""
    path = Path(torch.__file__).parent / "lib" / "libgomp.so.1"
    if path.exists():
        function = ctypes.CDLL(str(path)).GOMP_parallel
        library.raytraced_share_team.argtypes, library.raytraced_share_team.restype = (ctypes.c_void_p,), None
        library.raytraced_share_team(ctypes.cast(function, ctypes.c_void_p))


def _load() -> tuple[ctypes.CDLL | None, str | None]:
    if os.environ.get("RAYTRACED_KERNELS", "on").lower() in ("off", "0", "no", "false"):
        return None, "turned off by RAYTRACED_KERNELS"
    folder = Path(__file__).parent
    path = next((p for suffix in EXTENSION_SUFFIXES if (p := folder / f"_cpu{suffix}").exists()), None)
    if path is None:
        reason = "not built (no C++ compiler at install time?)"
    else:
        try:
            library = ctypes.CDLL(str(path))
            _share_team(library)
            return library, None
        except OSError as error:
            reason = f"cannot be loaded: {error}"
    warnings.warn(f"the compiled kernels are {reason}; the slower plain path is used", RuntimeWarning, stacklevel=2)
    return None, reason


cpu, reason = _load()


def bind(name: str) -> "ctypes._NamedFuncPointer":
    """A function of the library that takes one packed block of arguments and returns 0, or 1 for want of memory."""
    if cpu is None:
        raise RuntimeError(f"kernel {name}: the compiled kernels are {reason}")
    function = getattr(cpu, name)
    function.argtypes, function.restype = (ctypes.c_char_p,), ctypes.c_int
    return function
