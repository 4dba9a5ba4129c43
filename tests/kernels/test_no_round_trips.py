"""On a GPU nothing in a layer's hot path waits for the device: on the CPU, every read of a value by the host is counted."""

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from raytraced import PAPER, RaytracedExperts, build, kernels, sequence
from raytraced.integrations.replace import HiddenOnly

HOST_READS = {
    "aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal", "aten::nonzero", "aten::masked_select",
    "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::bincount", "aten::repeat_interleave",
}  # fmt: skip
METHODS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.item, torch.Tensor.__bool__}


class CountHostReads(TorchDispatchMode):
    """The operators that make the host wait, in the order in which they were called."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name
        by_mask = name in ("aten::index", "aten::index_put", "aten::index_put_") and any(
            each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1]
        )
        if name in HOST_READS or by_mask:
            self.found.append(name)
        return function(*args, **(kwargs or {}))


class CountMethods(TorchFunctionMode):
    """Methods that reach the host without an operator."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in METHODS:
            self.found.append(function.__name__)
        return function(*args, **(kwargs or {}))


def host_reads_of(run):
    with CountHostReads() as operators, CountMethods(operators.found):
        run()
    return operators.found


OPTIONS = {
    "ours": {},
    "the paper's": PAPER,
    "drawn": {"train_select": "sample"},
    "dominant": {"stop": "dominant", "input_rank": 2, "estimator": "straight-through"},
    "without draws' gradients": {"estimator": "none"},
}


def make(name="ours"):
    return RaytracedExperts(8, 3, 4, **OPTIONS[name]).train()


def step(layer):
    """Forward and backward, as on a GPU in bfloat16 without triton."""
    with kernels.use(sequence="plain", experts="grouped"):
        out = layer(torch.randn(6, 8))
    (out.hidden.square().sum() + out.route.active.sum()).backward()


@pytest.fixture
def _as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(sequence, "FIXED_STEPS_ON", {"cuda", "cpu"})


@pytest.mark.usefixtures("_as_on_a_gpu")
@pytest.mark.parametrize("name", OPTIONS)
def test_a_training_step_asks_nothing_of_the_device(name):
    layer = make(name)
    assert host_reads_of(lambda: step(layer)) == []


@pytest.mark.usefixtures("_as_on_a_gpu")
def test_inference_asks_nothing_of_the_device():
    layer = make().eval()

    @torch.no_grad()
    def answer():
        with kernels.use(sequence="plain", experts="grouped", raytrace="steps"):
            layer(torch.randn(6, 8))

    assert host_reads_of(answer) == []


@pytest.mark.usefixtures("_as_on_a_gpu")
@pytest.mark.parametrize("name", ["mre", "gpt-mre"])
def test_a_whole_models_step_asks_nothing_of_the_device(name):
    if name == "mre":
        model, inputs = build(name, image_shape=(1, 8, 8), num_classes=10), torch.zeros(3, 1, 8, 8, dtype=torch.uint8)
    else:
        model, inputs = build(name, dim=8, hidden=8, num_heads=2, context=8), torch.arange(16).view(2, 8)

    def step():
        with kernels.use(sequence="plain", experts="grouped"):
            model(inputs).logits.square().sum().backward()

    assert host_reads_of(step) == []


def test_every_host_read_is_counted():
    assert host_reads_of(lambda: step(make())).count("aten::_local_scalar_dense") > 1  # after each step, on a CPU
    values = torch.arange(3.0)
    for read in (
        values.tolist,
        values.sum().item,
        values.nonzero,
        lambda: values[values > 0],
        lambda: bool(values[1]),
    ):
        assert host_reads_of(read), read


@pytest.mark.usefixtures("_as_on_a_gpu")
def test_fixed_steps_give_what_an_early_end_gives(monkeypatch):
    layer = make("drawn")

    def found():
        layer.zero_grad()
        with kernels.use(sequence="plain"):
            out = layer(torch.ones(6, 8), generator=torch.Generator().manual_seed(1))
        (out.hidden.square().sum() + out.route.active.sum()).backward()
        return [out.hidden.detach(), out.route.nodes, *(p.grad for p in layer.parameters() if p.grad is not None)]

    fixed = found()
    monkeypatch.setattr(sequence, "FIXED_STEPS_ON", {"cuda"})
    for one, other in zip(fixed, found(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's, of itself
@pytest.mark.usefixtures("_as_on_a_gpu")
@pytest.mark.parametrize("max_experts", [1, pytest.param(3, marks=pytest.mark.slow)])  # a step takes a second to trace
def test_forward_and_backward_compile_whole(max_experts):
    layer = HiddenOnly(make())
    hidden_BD = torch.randn(6, 8, requires_grad=True)
    sources = [hidden_BD, *layer.parameters()]

    def gradients(run):
        with kernels.use(sequence="plain", experts="dense"):  # grouped products: test_grouped_experts.py
            loss = run(hidden_BD, max_experts=max_experts).square().sum()
        return torch.autograd.grad(loss, sources, allow_unused=True, materialize_grads=True)

    expected = gradients(layer)
    for one, other in zip(gradients(torch.compile(layer, fullgraph=True, backend="aot_eager")), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
