"""The compiled library: where it is, or why there is none, and how tensors are passed to it."""

import ctypes
import os
import warnings
from collections.abc import Iterable, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from raytraced.kernels.operation import VARIABLE

Int, Float, Pointer, PointerArray = ctypes.c_longlong, ctypes.c_double, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
PRECISIONS = (torch.float32, torch.float64)
_ORDINARY = frozenset((Tensor, torch.nn.Parameter))


def _share_team(library: ctypes.CDLL) -> None:
    """Let the library run on the threads that PyTorch keeps, where its OpenMP library is the one beside it."""
    path = Path(torch.__file__).parent / "lib" / "libgomp.so.1"
    if path.exists():
        function = ctypes.CDLL(str(path)).GOMP_parallel
        library.raytraced_share_team.argtypes, library.raytraced_share_team.restype = (ctypes.c_void_p,), None
        library.raytraced_share_team(ctypes.cast(function, ctypes.c_void_p))


def _load() -> tuple[ctypes.CDLL | None, str | None]:
    folder = Path(__file__).parent
    # the general ending first: a file for one Python alone is left from an older build
    path = next((p for suffix in reversed(EXTENSION_SUFFIXES) if (p := folder / f"_cpu{suffix}").exists()), None)
    reason, remedy = "not built (no C++ compiler at install time?)", "install g++ and reinstall"
    if path is not None:
        try:
            library = ctypes.CDLL(str(path))
            _share_team(library)
            return library, None
        except OSError as error:
            reason, remedy = f"cannot be loaded: {error}", "reinstall"
    _warn(reason, remedy)
    return None, reason


def _warn(reason: str, remedy: str) -> None:
    if os.environ.get(VARIABLE) != "plain":
        text = f"the compiled kernels are {reason}: {remedy} to run about 20 times faster; plain PyTorch runs now"
        warnings.warn(text, RuntimeWarning, stacklevel=3)


cpu, reason = _load()


def mirrors(structure: type[ctypes.Structure]) -> type[ctypes.Structure]:
    """A class that mirrors a struct of the library. A library in which the struct has another size is not used.

    It was built from other sources, and would read the fields at other places.
    """
    global cpu, reason
    if cpu is not None:
        size_of = getattr(cpu, "raytraced_size_of", None)
        if size_of is not None:
            size_of.argtypes, size_of.restype = (ctypes.c_char_p,), Int
        if size_of is None or size_of(structure.__name__.encode()) != ctypes.sizeof(structure):
            cpu, reason = None, "built from other sources"
            _warn(reason, "reinstall (in a clone: python setup.py build_ext --inplace)")
    return structure


def bind(name: str, *argument_types: Any, result: Any = ctypes.c_int) -> Any:
    """A function of the library; without one, nothing that could be called."""
    if cpu is None:
        return None
    function = getattr(cpu, name)
    function.argtypes, function.restype = argument_types, result
    return function


instruction_set = bind("raytraced_instructions", result=ctypes.c_char_p)


def fields(names: str, kind: Any) -> list[tuple[str, Any]]:
    """Fields of one kind, for a ctypes.Structure that mirrors a struct of the library."""
    return [(name, kind) for name in names.split()]


def point(names: Iterable[str], tensors: Iterable[Tensor | None]) -> dict[str, int]:
    """Where the memory of each tensor begins, by name, for those there are."""
    return {name: t.data_ptr() for name, t in zip(names, tensors, strict=False) if t is not None}


def pointer_array(tensors: Iterable[Tensor]) -> Any:
    """Where the memory of each of several tensors begins, in one field."""
    pointers = [*map(Tensor.data_ptr, tensors)]
    return (Pointer * len(pointers))(*pointers)


def run(function: Any, what: str, *args: Any) -> None:
    """Call a function of the library that returns 0, or 1 for want of memory."""
    if function(*args):
        raise MemoryError(f"{what}: no memory for the library's scratch")


def is_unchanged(instance: object, base: type, *methods: str) -> bool:
    """Whether these methods are the base class's own: neither a subclass nor the instance replaces one of them."""
    cls, own = type(instance), vars(instance)
    if cls is not base and not all([getattr(cls, method) is getattr(base, method) for method in methods]):
        return False
    return not any([method in own for method in methods])


def unfit_reason(candidates: Iterable[Tensor | None], dtype: torch.dtype | None = None) -> str | None:
    """Why the library cannot read these tensors: it needs ordinary CPU tensors, of one precision where `dtype` is set."""
    if cpu is None:
        return f"the compiled kernels are {reason}"
    tensors = [tensor for tensor in candidates if tensor is not None]
    if not all([tensor.is_cpu for tensor in tensors]):
        return "a tensor is not on the CPU"
    return unreadable_reason(tensors, dtype)


def are_ordinary(tensors: Sequence[Tensor], dtype: torch.dtype) -> bool:
    """Whether all are contiguous CPU tensors of one precision that nothing but PyTorch's own backward pass concerns."""
    if cpu is None or torch.compiler.is_compiling() or torch.jit.is_tracing() or _is_forward_mode():
        return False
    for tensor in tensors:
        if type(tensor) not in _ORDINARY or tensor.dtype is not dtype or not (tensor.is_cpu and tensor.is_contiguous()):
            return False
    try:
        return 0 not in map(Tensor.data_ptr, tensors)
    except RuntimeError:  # inside a transform of torch.func
        return False


def unreadable_reason(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> str | None:
    """Why no kernel on any device can read these tensors: it needs their memory, of one precision where `dtype` is set."""
    if dtype is not None and any([tensor.dtype is not dtype for tensor in tensors]):
        return "tensors of several precisions"
    if torch.compiler.is_compiling():
        return None
    if torch.jit.is_tracing():
        return "torch.jit.trace sees only PyTorch's operators"
    if not _ORDINARY.issuperset(map(type, tensors)):
        return "a tensor of another class"
    try:
        if 0 in map(Tensor.data_ptr, tensors) and any(t.numel() and not t.data_ptr() for t in tensors):
            return "a tensor without memory"
    except RuntimeError:
        return "inside a transform of torch.func a tensor has no memory of its own"
    if _is_forward_mode() and any([forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors]):
        return "a forward derivative is computed"
    return None


def _is_forward_mode() -> bool:
    """Whether forward derivatives are computed; to ask every tensor takes longer, and PyTorch has no public name for this."""
    return forward_ad._current_level >= 0
