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
from torch.autograd.forward_ad import unpack_dual

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
    pointers = [tensor.data_ptr() for tensor in tensors]
    return (Pointer * len(pointers))(*pointers)


def run(function: Any, what: str, *args: Any) -> None:
    """Call a function of the library that returns 0, or 1 for want of memory."""
    if function(*args):
        raise MemoryError(f"{what}: no memory for the library's scratch")


def is_unchanged(instance: object, base: type, *methods: str) -> bool:
    """Whether these methods are the base class's own: neither a subclass nor the instance replaces one of them."""
    cls, own = type(instance), vars(instance)
    return all([getattr(cls, method) is getattr(base, method) and method not in own for method in methods])


def why_unfit(given: Iterable[Tensor | None], dtype: torch.dtype | None = None) -> str | None:
    """Why the library cannot read these tensors: it needs ordinary CPU tensors (of one precision, where it is given)."""
    if cpu is None:
        return f"the compiled kernels are {reason}"
    tensors = [tensor for tensor in given if tensor is not None]
    if not all([tensor.is_cpu for tensor in tensors]):
        return "a tensor is not on the CPU"
    return why_unreadable(tensors, dtype)


def why_unreadable(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> str | None:
    """Why no kernel can read these tensors, on whatever device: it needs their memory (of one precision, where it is given)."""
    if dtype is not None and any([tensor.dtype is not dtype for tensor in tensors]):
        return "tensors of several precisions"
    if torch.compiler.is_compiling():
        return None
    if torch.jit.is_tracing():
        return "torch.jit.trace sees only PyTorch's operators"
    if not _ORDINARY.issuperset([type(tensor) for tensor in tensors]):
        return "a tensor of another class"
    try:
        if 0 in [tensor.data_ptr() for tensor in tensors] and any(t.numel() and not t.data_ptr() for t in tensors):
            return "a tensor without memory"
    except RuntimeError:
        return "inside a transform of torch.func a tensor has no memory of its own"
    if any([unpack_dual(tensor).tangent is not None for tensor in tensors]):
        return "a forward derivative is wanted"
    return None


class LibraryCall:
    """A function of the library for PyTorch: an autograd function in eager mode, an operator under torch.compile.

    It takes plain numbers, data without and tensors with a gradient, all contiguous:

        forward(spec, data, tensors, keep) -> `num_answers` tensors with a gradient, and what the backward pass reads
        backward(spec, data, tensors, kept, grads) -> the gradient of each tensor
        empty(spec, data, tensors) -> the first `num_returned` of the above, not filled in

    Without a name it is no operator, its spec may be anything, and it gives NotImplemented where only an operator may run.
    """

    def __init__(
        self,
        name: str | None,
        forward: Any,
        backward: Any,
        empty: Any = None,
        num_answers: int = 1,
        num_returned: int = 1,
    ) -> None:
        self.forward, self.backward, self.num_answers, self.num_returned = forward, backward, num_answers, num_returned
        self.operator: Any = lambda *args: NotImplemented
        if name is not None:
            self._register(name, empty)

    def __call__(self, spec: tuple[Any, ...], data: Sequence[Tensor], *tensors: Tensor) -> Any:
        if torch.compiler.is_compiling():
            return self.operator(tensors, data, spec)
        tensors, data = tuple([t.contiguous() for t in tensors]), [t.contiguous() for t in data]
        if not torch.is_grad_enabled() or not any([t.requires_grad for t in tensors]):
            return self.forward(spec, data, tensors, False)
        try:
            # Straight to the library: a registered operator's dispatch takes longer than a batch of one.
            return _Eager.apply(self, spec, data, *tensors)
        except RuntimeError:
            # Inside torch.func's transforms, on tensors that none of them concerns, only an operator may run.
            return self.operator(tensors, data, spec)

    def send_back(self, spec, data, tensors, kept, grads):  # type: ignore[no-untyped-def]
        # A parameter is kept itself, and may have been given other memory since.
        tensors = [t.contiguous() for t in tensors]
        grads = [None if grad is None else grad.contiguous() for grad in grads[: self.num_answers]]
        return self.backward(spec, data, tensors, kept, grads)

    def _register(self, name: str, empty: Any) -> None:
        def forward(tensors: Sequence[Tensor], data: Sequence[Tensor], spec: Sequence[float]) -> list[Tensor]:
            return list(self.forward(spec, [t.contiguous() for t in data], [t.contiguous() for t in tensors], False))

        def backward(
            grads: Sequence[Tensor | None],
            tensors: Sequence[Tensor],
            data: Sequence[Tensor],
            kept: Sequence[Tensor],
            spec: Sequence[float],
        ) -> list[Tensor]:
            tensors, data = [t.contiguous() for t in tensors], [t.contiguous() for t in data]
            # How much there is to keep may not be known before: then the forward pass is run again.
            kept = kept or self.forward(spec, data, tensors, True)[self.num_answers :]
            gradients = self.send_back(spec, data, tensors, kept, grads)
            return [torch.zeros_like(t) if grad is None else grad for t, grad in zip(tensors, gradients, strict=True)]

        self.operator = torch.library.custom_op(f"raytraced::{name}", forward, mutates_args=())
        back = torch.library.custom_op(f"raytraced::{name}_backward", backward, mutates_args=())
        self.operator.register_fake(lambda tensors, data, spec: empty(spec, data, tensors))
        back.register_fake(lambda grads, tensors, *rest: [torch.empty_like(t).contiguous() for t in tensors])

        def keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
            tensors, data, ctx.spec = inputs
            ctx.sizes = [len(tensors), len(data), len(output) - self.num_answers]
            ctx.save_for_backward(*tensors, *data, *output[self.num_answers :])

        def send_back(ctx, grads):  # type: ignore[no-untyped-def]
            saved = iter(ctx.saved_tensors)
            tensors, data, kept = ([next(saved) for _ in range(size)] for size in ctx.sizes)
            return back(grads, tensors, data, kept, ctx.spec), [None] * len(data), None

        self.operator.register_autograd(send_back, setup_context=keep)


class _Eager(torch.autograd.Function):
    """One library call forward, one backward."""

    @staticmethod
    def forward(ctx, call, spec, data, *tensors):  # type: ignore[no-untyped-def]
        outputs = call.forward(spec, data, tensors, True)
        kept, returned = outputs[call.num_answers :], tuple(outputs[: call.num_returned])
        ctx.call, ctx.spec, ctx.data, ctx.num_tensors = call, spec, data, len(tensors)
        ctx.save_for_backward(*tensors, *kept)
        ctx.mark_non_differentiable(*returned[call.num_answers :])
        ctx.set_materialize_grads(False)
        return returned

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        saved = ctx.saved_tensors  # once: checkpointing computes them when asked, and refuses to be asked again
        tensors, kept = saved[: ctx.num_tensors], saved[ctx.num_tensors :]

        def send_back(*grads):  # type: ignore[no-untyped-def]
            return ctx.call.send_back(ctx.spec, ctx.data, tensors, kept, grads)

        wants_second = torch.is_grad_enabled()
        gradients = _First.apply(send_back, len(grads), *grads, *tensors) if wants_second else send_back(*grads)
        return None, None, None, *gradients


class _First(torch.autograd.Function):
    """First derivatives of which there are no second ones: marked once-differentiable, they would be constants in silence."""

    @staticmethod
    def forward(ctx, send_back, num_grads, *grads_and_tensors):  # type: ignore[no-untyped-def]
        return tuple(send_back(*grads_and_tensors[:num_grads]))

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        raise NotImplementedError(
            "second derivatives: the compiled kernels have none; "
            'run the layer inside `with raytraced.kernels.use("plain")`'
        )
