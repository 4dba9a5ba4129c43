"""Models without routing: mlp is a plain MLP, dense is the expert network with one expert per layer."""

import pytest
import torch
from torch import nn

from raytraced import build
from raytraced.experts import Stream
from raytraced.routers.dense import DenseBlocks
from reference import stack_of_one


def test_mlp_total_is_the_plain_mlp_of_the_paper():
    model = build("mlp-total", image_shape=(1, 28, 28), num_classes=10)
    layers = [model.input_block.linear, *(block[1] for block in model.layer.experts.nodes)]
    plain = nn.Sequential(nn.Flatten(), *(module for layer in layers for module in (layer, nn.ReLU())), model.head)
    images = torch.randn(5, 1, 28, 28)
    torch.testing.assert_close(model(images).logits, plain(images), rtol=0, atol=0)
    widths = [(layer.in_features, layer.out_features) for layer in plain if isinstance(layer, nn.Linear)]
    assert widths == [(784, 36), *[(36, 36)] * 8, (36, 10)]


def test_an_mlp_with_a_residual_stream_adds_each_layer_to_its_input():
    model = build("mlp-avg", image_shape=(1, 4, 4), num_classes=3, dim=6, num_layers=2, stream="residual").double()
    images = torch.randn(5, 1, 4, 4, dtype=torch.float64)
    hidden = model.input_block(images)
    for block in model.layer.experts.nodes:
        hidden = hidden + block[1](hidden.relu())
    torch.testing.assert_close(model(images).logits, model.head(hidden.relu()))


@pytest.mark.parametrize("stream", list(Stream))
def test_dense_blocks_equal_a_loop_over_samples_with_one_expert_per_layer(stream):
    layer = DenseBlocks(5, 3, stream=stream).double()
    hidden = torch.randn(2, 4, 5, dtype=torch.float64)
    expected = [stack_of_one(layer.experts, row, [[1.0]] * 3, stream) for row in hidden.flatten(0, 1)]
    out = layer(hidden)
    torch.testing.assert_close(out.hidden.flatten(0, 1), torch.stack(expected), rtol=1e-12, atol=1e-12)
    assert out.route.active.tolist() == [[[[1.0]] * 3] * 4] * 2


def test_dense_takes_custom_experts():
    layer = DenseBlocks(5, 2, expert=lambda: nn.Linear(5, 5))
    hidden = torch.randn(3, 5)
    first = hidden + layer.experts.nodes[0](hidden)
    torch.testing.assert_close(layer(hidden).hidden, first + layer.experts.nodes[1](first))
