"""A function of the compiled library as PyTorch sees it: an autograd function, and an operator under torch.compile."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor


class Options(Protocol):
    """Plain numbers that a library function takes beside tensors: a NamedTuple per function."""

    def numbers(self) -> list[float]:
        """The numbers as an operator takes them."""

    @classmethod
    def from_numbers(cls, numbers: Sequence[float]) -> Self:
        """The options again."""


O = TypeVar("O", bound=Options)


class Inputs(NamedTuple, Generic[O]):
    """What a library function is given; all tensors are contiguous."""

    options: O
    data: Sequence[Tensor | None]  # tensors without a gradient
    tensors: Sequence[Tensor]  # tensors with a gradient


class Outputs(NamedTuple):
    """What a library function gives."""

    answers: Sequence[Tensor]  # with a gradient
    others: Sequence[Tensor] = ()  # without one; the backward pass reads them, too
    saved: Sequence[Tensor] = ()  # for the backward pass alone


class LibraryFunction(ABC, Generic[O]):
    """A function of the library, with its derivative.

    A subclass says what a call does. Calling its one instance runs it for PyTorch, with a gradient where one is wanted.
    """

    name: ClassVar[str]  # of the operator
    num_answers: ClassVar[int] = 1
    options_type: type[O]

    def __init__(self) -> None:
        self.operator = self._register()

    @abstractmethod
    def forward(self, inputs: Inputs[O], keep: bool) -> Outputs:
        """Run the function; fill in `saved` if `keep`."""

    @abstractmethod
    def backward(
        self, inputs: Inputs[O], saved: Sequence[Tensor], grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """The gradient of each of the inputs' tensors, from those of the answers; `saved` begins with `others`."""

    @abstractmethod
    def empty(self, inputs: Inputs[O]) -> Outputs:
        """The answers and others, not filled in."""

    def __call__(self, options: O, data: Sequence[Tensor | None], *tensors: Tensor) -> list[Tensor]:
        """The answers and others."""
        if torch.compiler.is_compiling():
            return self._run_operator(options, data, tensors)
        inputs = Inputs(options, contiguous(data), contiguous(tensors))
        if not torch.is_grad_enabled() or not any([tensor.requires_grad for tensor in tensors]):
            answers, others, _ = self.forward(inputs, keep=False)
            return [*answers, *others]
        try:
            # Straight to the library: a registered operator's dispatch takes longer than a batch of one.
            return list(_Eager.apply(self, options, inputs.data, *inputs.tensors))
        except RuntimeError:
            # Inside torch.func's transforms, on tensors that none of them concerns, only an operator may run.
            return self._run_operator(options, data, tensors)

    def _run_operator(self, options: O, data: Sequence[Tensor | None], tensors: Sequence[Tensor]) -> list[Tensor]:
        outputs: list[Tensor] = self.operator(tensors, data, options.numbers())
        return outputs

    def _inputs(self, tensors: Sequence[Tensor], data: Sequence[Tensor | None], numbers: Sequence[float]) -> Inputs[O]:
        return Inputs(self.options_type.from_numbers(numbers), contiguous(data), contiguous(tensors))

    def _register(self) -> Any:
        """The function as an operator, which torch.compile and torch.export see as one node of their graph."""

        def forward(tensors: Sequence[Tensor], data: Sequence[Tensor | None], numbers: Sequence[float]) -> list[Tensor]:
            answers, others, _ = self.forward(self._inputs(tensors, data, numbers), keep=False)
            return [*answers, *others]

        def backward(
            grads: Sequence[Tensor | None],
            tensors: Sequence[Tensor],
            data: Sequence[Tensor | None],
            others: Sequence[Tensor],
            numbers: Sequence[float],
        ) -> list[Tensor]:
            inputs = self._inputs(tensors, data, numbers)
            # How much there is to save may not be known before: then the forward pass is run again.
            saved = others or self.forward(inputs, keep=True).saved
            gradients = self.backward(inputs, saved, contiguous(grads))
            return [torch.zeros_like(t) if grad is None else grad for t, grad in zip(tensors, gradients, strict=True)]

        def fake(tensors, data, numbers):  # type: ignore[no-untyped-def]
            answers, others, _ = self.empty(Inputs(self.options_type.from_numbers(numbers), data, tensors))
            return [*answers, *others]

        operator = torch.library.custom_op(f"raytraced::{self.name}", forward, mutates_args=())
        backward_operator = torch.library.custom_op(f"raytraced::{self.name}_backward", backward, mutates_args=())
        operator.register_fake(fake)
        backward_operator.register_fake(lambda grads, tensors, *_: [torch.empty_like(t).contiguous() for t in tensors])

        def setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
            tensors, data, ctx.numbers = inputs
            others = output[self.num_answers :]
            ctx.sizes = [len(tensors), len(data), len(others)]
            ctx.save_for_backward(*tensors, *data, *others)

        def operator_gradient(ctx, grads):  # type: ignore[no-untyped-def]
            stored = iter(ctx.saved_tensors)
            tensors, data, others = ([next(stored) for _ in range(size)] for size in ctx.sizes)
            gradients = backward_operator(grads[: self.num_answers], tensors, data, others, ctx.numbers)
            # PyTorch takes a list with a None in it for one argument that is no tensor.
            no_gradients = None if any(one is None for one in data) else [None] * len(data)
            return gradients, no_gradients, None

        operator.register_autograd(operator_gradient, setup_context=setup_context)
        return operator


def contiguous(tensors: Sequence[Any]) -> list[Any]:
    """The tensors, each in one piece of memory; None stays None."""
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


class _Eager(torch.autograd.Function):
    """One library call forward, one backward."""

    @staticmethod
    def forward(ctx, function, options, data, *tensors):  # type: ignore[no-untyped-def]
        answers, others, saved = function.forward(Inputs(options, data, tensors), keep=True)
        ctx.function, ctx.options, ctx.data, ctx.num_tensors = function, options, data, len(tensors)
        ctx.save_for_backward(*tensors, *others, *saved)
        ctx.mark_non_differentiable(*others)
        ctx.set_materialize_grads(False)
        return *answers, *others

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        stored = ctx.saved_tensors  # once: checkpointing computes them when asked, and refuses to be asked again
        tensors, saved = stored[: ctx.num_tensors], stored[ctx.num_tensors :]

        def gradients(*grads):  # type: ignore[no-untyped-def]
            # A parameter is kept itself, and may have been given other memory since.
            inputs = Inputs(ctx.options, ctx.data, contiguous(tensors))
            return ctx.function.backward(inputs, saved, contiguous(grads[: ctx.function.num_answers]))

        return None, None, None, *first_derivatives(gradients, grads, tensors)


def first_derivatives(
    gradients: Callable[..., Sequence[Tensor | None]], grads: Sequence[Tensor | None], tensors: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """gradients(*grads), which are those of `tensors`; a derivative of these is refused, not taken for zero."""
    if not torch.is_grad_enabled():
        return gradients(*grads)
    found: tuple[Tensor | None, ...] = _FirstDerivatives.apply(gradients, len(grads), *grads, *tensors)
    return found


class _FirstDerivatives(torch.autograd.Function):
    """First derivatives without second ones: marked once-differentiable, they would be constants in silence."""

    @staticmethod
    def forward(ctx, gradients, num_grads, *grads_and_tensors):  # type: ignore[no-untyped-def]
        return tuple(gradients(*grads_and_tensors[:num_grads]))

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        raise NotImplementedError(
            "second derivatives: the compiled kernels have none; "
            'run the layer inside `with raytraced.kernels.use("plain")`'
        )
