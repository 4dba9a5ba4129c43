"""The registered operators: what torch.compile and torch.export see of the compiled library."""

import pytest
import torch
from torch import nn

from kernels.both_paths import make_case
from raytraced import activation_sequence, kernels
from raytraced.kernels import cpp_sequence

pytestmark = pytest.mark.skipif(not kernels.available(), reason=f"compiled kernels {kernels.why_not()}")


@pytest.mark.parametrize("select", ["sample", "greedy"])
def test_the_operator_is_registered_as_pytorch_asks(select):
    routing, entry_BN, options = make_case(3, 4, 5, select=select)
    inputs = cpp_sequence.arrange(routing, entry_BN, **options)
    arguments = inputs.tensors, inputs.data, inputs.options.numbers()
    # Eager and fake shapes, schema, and autograd, each against the others.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(cpp_sequence.call.operator, arguments, test_utils=checks)


class Loss(nn.Module):
    """A small model around the sequence, with a gradient through all that it returns."""

    def __init__(self, routing):
        super().__init__()
        self.routing = routing

    def forward(self, logits_BN):
        sequence = activation_sequence(self.routing, logits_BN.softmax(-1), select="greedy")
        return (sequence.active * sequence.rates.nodes.cos()).sum((1, 2)) + sequence.rates.output**2


def test_compiled_in_one_graph_it_gives_the_same_gradients():
    model = Loss(make_case(3, 4, 1).routing)
    logits_BN = torch.randn(6, 4, requires_grad=True)
    sources = [logits_BN, *model.parameters()]
    expected = model(logits_BN)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(logits_BN)
    torch.testing.assert_close(compiled, expected)
    for got, wanted in zip(
        torch.autograd.grad(compiled.sum(), sources), torch.autograd.grad(expected.sum(), sources), strict=True
    ):
        torch.testing.assert_close(got, wanted)


def test_exported_it_runs_at_other_batch_sizes():
    model = Loss(make_case(3, 4, 1).routing)
    batch = torch.export.Dim("batch", min=1)
    program = torch.export.export(model, (torch.randn(6, 4),), dynamic_shapes=({0: batch},))
    assert any("raytraced.activation_sequence" in str(node.target) for node in program.graph.nodes)
    logits_BN = torch.randn(11, 4)
    torch.testing.assert_close(program.module()(logits_BN), model(logits_BN))
