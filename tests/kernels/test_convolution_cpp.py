"""The convolutions' kernel gives what convolution, ReLU and pooling give one after the other: values, gradients, any size.

Axes: B batch, C channels, H × W pixels, D width.
"""

import copy
import ctypes
import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from raytraced import kernels
from raytraced.kernels import cpp_convolution, cpp_library

pytestmark = pytest.mark.skipif(not kernels.available(), reason=f"compiled kernels {kernels.why_not()}")
TOLERANCE = 1e-5


class Stages(nn.Module):
    """Convolution, ReLU and pooling, several times."""

    def __init__(self, channels: list[int]) -> None:
        super().__init__()
        convolutions = [nn.Conv2d(*pair, 3, padding=1) for pair in itertools.pairwise(channels)]
        self.weights = nn.ParameterList(convolution.weight for convolution in convolutions)
        self.biases = nn.ParameterList(convolution.bias for convolution in convolutions)

    def forward(self, images: Tensor) -> Tensor:
        return kernels.convolution(images, list(self.weights), list(self.biases))


def whole_numbers(block: nn.Module, seed: int) -> None:
    """Weights -1, 0 and 1: all sums are exact, and maxima are often shared."""
    g = torch.Generator().manual_seed(seed)
    for parameter in block.parameters():
        parameter.data = torch.randint(-1, 2, parameter.shape, generator=g).to(parameter.dtype)


def images_and_grad(block: nn.Module, shape: tuple[int, ...], *, whole: bool, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)

    def numbers(shape: tuple[int, ...]) -> Tensor:
        return torch.randint(-2, 3, shape, generator=g).float() if whole else torch.randn(shape, generator=g)

    images = numbers(shape)
    return images, numbers(plain(block, images).shape)


def plain(block: nn.Module, images: Tensor) -> Tensor:
    with kernels.use("plain"):
        return block(images)


def outcome(block: nn.Module, images: Tensor, grad: Tensor) -> list[Tensor]:
    """The answer, and the gradients of images and parameters."""
    images = images.detach().requires_grad_()
    out = block(images)
    return [out.detach(), *torch.autograd.grad(out, [images, *block.parameters()], grad)]


def truth(block: nn.Module, images: Tensor, grad: Tensor) -> list[Tensor]:
    with kernels.use("plain"):
        return outcome(copy.deepcopy(block).double(), images.double(), grad.double())


def near_ties(block: nn.Module, images: Tensor) -> Tensor:
    """Which samples (B,) have a maximum that rounding may give to another pixel, or to ReLU."""
    close_B = torch.zeros(len(images), dtype=torch.bool)
    h = images.double()
    for weight, bias in zip(block.weights, block.biases, strict=True):
        h = F.conv2d(h, weight.detach().double(), bias.detach().double(), padding=1)
        H, W = h.shape[2:]
        four = h[:, :, : H // 2 * 2, : W // 2 * 2].unflatten(2, (-1, 2)).unflatten(4, (-1, 2)).movedim(3, 4)
        top = four.flatten(4).topk(2).values
        close = ((top[..., 0] - top[..., 1] < 1e-5) & (top[..., 0] > -1e-5)) | (top[..., 0].abs() < 1e-5)
        close_B |= close.flatten(1).any(1)
        h = F.max_pool2d(h.relu(), 2)
    return close_B


def assert_equal(these: list[Tensor], those: list[Tensor]) -> None:
    for this, that in zip(these, those, strict=True):
        torch.testing.assert_close(this.double(), that.double(), rtol=0, atol=0, equal_nan=True)


@pytest.fixture
def runs(monkeypatch):
    """A list that grows with every use of the kernel."""
    seen: list[int] = []
    cpp, *others = kernels.convolution.implementations
    counted = replace(cpp, run=lambda *args: seen.append(1) or cpp.run(*args))
    monkeypatch.setattr(kernels.convolution, "implementations", (counted, *others))
    return seen


@pytest.fixture
def set_threads():
    usual = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(usual)


@given(
    st.integers(0, 19),
    st.lists(st.integers(1, 5), min_size=2, max_size=4),
    st.integers(8, 33),
    st.integers(8, 33),
    st.integers(0, 9),
)
def test_whole_numbers_give_exactly_what_the_plain_path_gives(B, channels, H, W, seed):
    block = Stages(channels)
    whole_numbers(block, seed)
    images, grad = images_and_grad(block, (B, channels[0], H, W), whole=True, seed=seed)
    assert_equal(outcome(block, images, grad), truth(block, images, grad))


@pytest.mark.parametrize("shape", [(1, 3, 32, 32), (7, 2, 9, 33), (256, 3, 32, 32), (41, 5, 24, 15), (5, 3, 130, 67)])
def test_values_and_gradients_equal_the_plain_path(runs, shape):
    block = Stages([shape[1], 4, 8, 16])
    images, grad = images_and_grad(block, shape, whole=False)
    grad[near_ties(block, images)] = 0
    found = outcome(block, images, grad)
    assert runs
    for got, exact in zip(found, truth(block, images, grad), strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=0, atol=TOLERANCE * float(exact.abs().max()))


@pytest.mark.parametrize("name", ["baseline", "avx2"])
def test_every_instruction_set_gives_the_same(name):
    set_instructions = cpp_library.cpu.raytraced_set_instructions
    cpp_library.cpu.raytraced_instructions.restype = ctypes.c_char_p
    usual = cpp_library.cpu.raytraced_instructions()
    block = Stages([3, 4, 5])
    whole_numbers(block, 1)
    images, grad = images_and_grad(block, (43, 3, 17, 22), whole=True)
    try:
        if set_instructions(name.encode()):
            pytest.skip(f"this machine has no {name}")
        assert_equal(outcome(block, images, grad), truth(block, images, grad))
    finally:
        set_instructions(usual)


def test_threads_change_no_bit(set_threads):
    block = Stages([3, 4, 8, 16])
    images, grad = images_and_grad(block, (300, 3, 16, 16), whole=False)
    set_threads(1)
    alone = outcome(block, images, grad)
    for num_threads in (2, 5):
        set_threads(num_threads)
        assert_equal(outcome(block, images, grad), alone)


def test_a_sample_gets_the_same_alone_and_in_a_batch():
    block = Stages([3, 4, 8, 16])
    images, grad = images_and_grad(block, (75, 3, 19, 16), whole=False)
    out, grad_images, *_ = outcome(block, images, grad)
    for row in (0, 6, 33, 74):
        alone = outcome(block, images[row : row + 1], grad[row : row + 1])
        assert_equal(alone[:2], [out[row : row + 1], grad_images[row : row + 1]])


def test_of_equal_pixels_the_first_gets_the_gradient():
    block = Stages([1, 1])
    block.weights[0].data = torch.tensor([0.0, 0, 0, 0, 1, 0, 0, 0, 0]).view(1, 1, 3, 3)
    block.biases[0].data.zero_()
    _, grad_images, *_ = outcome(block, torch.full((2, 1, 8, 8), 3.0), torch.full((2, 1, 4, 4), 5.0))
    expected = torch.zeros(8, 8)
    expected[::2, ::2] = 5
    assert_equal([*grad_images[:, 0]], [expected, expected])


@pytest.mark.parametrize("bias", [-1000.0, 0.0])
def test_where_nothing_is_above_zero_there_is_no_gradient(bias):
    block = Stages([3, 4])
    block.biases[0].data.fill_(bias)
    images = torch.randn(9, 3, 10, 10) if bias else torch.zeros(9, 3, 10, 10)
    for found in outcome(block, images, torch.ones(9, 4, 5, 5)):
        assert not found.any()


def test_nan_goes_through_and_touches_no_other_sample():
    block = Stages([3, 4, 5])
    whole_numbers(block, 3)
    images, grad = images_and_grad(block, (10, 3, 16, 13), whole=True)
    images[4, 1, 6, 7] = float("nan")
    images[6, 2, 0, 0] = float("inf")
    found = outcome(block, images, grad)
    assert_equal(found, truth(block, images, grad))
    assert found[0][4].isnan().any()
    assert not found[0][5].isnan().any()


def test_without_gradients_the_answer_is_the_same(runs):
    block = Stages([3, 4, 8])
    images = torch.randn(11, 3, 12, 20)
    expected = block(images)
    with torch.no_grad():
        assert torch.equal(block(images), expected)
    with torch.inference_mode():
        assert torch.equal(block(images), expected)
    assert len(runs) == 3
    block.requires_grad_(False)
    assert not block(images).requires_grad


def test_any_strides_will_do(runs):
    block = Stages([3, 4, 8])
    images = torch.randn(6, 3, 12, 20)
    grad = torch.randn(6, 8, 3, 5)
    expected = outcome(block, images, grad)
    last = copy.deepcopy(block).to(memory_format=torch.channels_last)
    assert_equal(outcome(last, images.to(memory_format=torch.channels_last), grad), expected)
    assert_equal(outcome(block, images.mT.contiguous().mT, grad.mT.contiguous().mT), expected)
    assert len(runs) == 3


def test_weights_changed_before_the_backward_pass_are_refused():
    block = Stages([3, 4])
    out = block(torch.randn(2, 3, 8, 8))
    with torch.no_grad():
        block.weights[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_second_derivative_is_refused():
    block = Stages([3, 4])
    images = torch.randn(2, 3, 8, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(block(images).square().sum(), images, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives: the compiled kernels have none"):
        grad.sum().backward()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # PyTorch's own, of forward derivatives
def test_what_the_library_cannot_do_runs_on_the_plain_path(runs):
    block, images = Stages([3, 4, 8]), torch.randn(5, 3, 12, 12)
    expected = plain(block, images)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert block(images).dtype == torch.bfloat16
    torch.testing.assert_close(torch.func.vmap(block)(images[:, None])[:, 0], expected)
    torch.testing.assert_close(torch.compile(block, backend="aot_eager", fullgraph=True)(images), expected)
    with forward_ad.dual_level():
        assert forward_ad.unpack_dual(block(forward_ad.make_dual(images, images))).tangent is not None
    assert copy.deepcopy(block).double()(images.double()).dtype == torch.float64
    torch.testing.assert_close(block(images[0]), expected[0])
    assert not runs
    with pytest.raises(RuntimeError, match="to have 3 channels, but got 4 channels"):
        block(torch.randn(5, 4, 12, 12))
    with pytest.raises(RuntimeError, match="Output size is too small"):
        block(torch.randn(5, 3, 12, 3))
    block.weights[1].data = block.weights[1].data[:, :3]
    with pytest.raises(RuntimeError, match="to have 3 channels, but got 4 channels"):
        block(images)


def test_the_operator_passes_pytorchs_checks():
    tensors = [torch.randn(2, 3, 8, 9), *Stages([3, 4, 8]).parameters()]
    torch.library.opcheck(cpp_convolution.call.operator, (tensors, [], [1]))


def test_the_count_of_multiply_adds_is_the_plain_path_s():
    block = Stages([3, 4, 8, 16])
    stages = 32 * 32 * 27 * 4 + 16 * 16 * 36 * 8 + 8 * 8 * 72 * 16
    assert kernels.count_macs(lambda: block(torch.randn(1, 3, 32, 32))) == stages
