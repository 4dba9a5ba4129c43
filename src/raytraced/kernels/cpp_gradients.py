"""Memory for the gradients of large parameters: used again, and one place for layers that are run by calls of their own."""

import threading
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from raytraced.experts import Experts, Layer
from raytraced.kernels.cpp_library import unfit_reason

_HUGE_BYTES = 2**25


def empty_block(like: Tensor) -> np.ndarray:
    """Memory for a large tensor, not filled in: numpy asks for huge pages, whose first touch costs a quarter."""
    return np.empty(tuple(like.shape), np.float64 if like.dtype == torch.float64 else np.float32)


# For each large parameter the memory of its gradient, and the view of it that was lent last.
_memories, _memories_lock = WeakTensorKeyDictionary(), threading.Lock()


def empty_gradient(parameter: Tensor) -> Tensor:
    """A tensor for the gradient of a parameter, not filled in; a large one in memory that is no longer in use.

    Fresh pages cost more than the arithmetic on them, every step anew, since so large a block goes back to the system as
    soon as it is free. numpy's memory, because it asks for huge pages and because its views report when they are released.
    """
    if parameter.nbytes < _HUGE_BYTES:
        return torch.empty(parameter.shape, dtype=parameter.dtype)
    with _memories_lock:
        block, lent = _memories.get(parameter, (None, None))
        fits = block is not None and block.shape == parameter.shape and block.itemsize == parameter.itemsize
        if not fits or lent() is not None:
            block = empty_block(parameter)
        view = block[:]
        _memories[parameter] = block, weakref.ref(view)
        return torch.from_numpy(view)


class GradientHome(Sequence[Tensor]):
    """The layers of a large stacked parameter, as views, with one place for the gradient of all of them.

    Each layer's call writes its gradient where it belongs; putting separate ones together would copy them all.
    """

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = parameter
        self.gradient: Tensor | None = None
        self.lent: set[int] = set()
        self.layers: tuple[Tensor, ...] = _Unstack.apply(parameter, self)

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, layer):  # type: ignore[no-untyped-def]
        return self.layers[layer]

    def place(self, layer: int) -> Tensor:
        """Where a call may write the gradient of one layer; a second call for the same layer gets its own."""
        if self.gradient is None:
            self.gradient, self.lent = empty_gradient(self.parameter), set()
        if layer in self.lent:
            return torch.empty_like(self.gradient[layer])
        self.lent.add(layer)
        return self.gradient[layer]


class _Unstack(torch.autograd.Function):
    """unbind(0) whose gradients are at home already, or are copied there."""

    @staticmethod
    def forward(ctx, parameter, home):  # type: ignore[no-untyped-def]
        ctx.home = home
        return parameter.unbind(0)

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        home = ctx.home
        whole, home.gradient = home.gradient, None
        if torch.is_grad_enabled():  # second derivatives are wanted: what is written in place has none
            return torch.stack([torch.zeros_like(home.parameter[0]) if g is None else g for g in grads]), None
        if whole is None:
            whole = empty_gradient(home.parameter)
        for place, grad in zip(whole.unbind(0), grads, strict=True):
            if grad is None:
                place.zero_()
            elif grad.data_ptr() != place.data_ptr():
                place.copy_(grad)
        return whole, None


def _unbind(parameter: Tensor) -> Sequence[Tensor]:
    large = parameter.nbytes >= _HUGE_BYTES and parameter.requires_grad and unfit_reason((parameter,)) is None
    return GradientHome(parameter) if large else parameter.unbind(0)


def unstacked(experts: Experts, hidden_BD: Tensor) -> Sequence[Layer]:
    """The layers of a grid, for one call that runs them one by one on these vectors."""
    special = torch.compiler.is_compiling() or not torch.is_grad_enabled() or unfit_reason((hidden_BD,)) is not None
    return experts.unstacked() if special else experts.unstacked(_unbind)
