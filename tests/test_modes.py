"""What a mode must not change: measuring is done as in use, and firing rates are exact under autocast."""

import pytest
import torch

from raytraced import RoutingNetwork, build
from raytraced.cost import measure


@pytest.mark.parametrize("was_training", [True, False])
def test_measuring_is_done_in_evaluation_mode_and_leaves_the_mode_as_it_was(was_training):
    model = build(
        "mre", image_shape=(1, 6, 6), num_classes=3, dim=8, num_layers=3, num_experts=4, train_select="sample"
    )
    images = torch.rand(60, 1, 6, 6)
    with torch.no_grad():
        in_use = float(model.eval()(images).num_experts.double().mean())
        drawn = float(model.train()(images).num_experts.double().mean())
    assert in_use != drawn
    assert measure(model.train(was_training), images).experts == pytest.approx(in_use)
    assert model.training == was_training


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rates_under_autocast_are_those_without_to_the_last_bit(dtype):
    routing, entry = RoutingNetwork(3, 4), torch.randn(9, 4).softmax(-1)
    active = (torch.rand(9, 3, 4) < 0.7).float()
    expected = routing(entry, active)
    with torch.autocast("cpu", dtype):
        found = routing(entry, active)
    for ours, exact in zip(found, expected, strict=True):
        assert torch.equal(ours, exact)


def test_rates_of_meta_tensors_have_their_shapes():
    with torch.device("meta"):
        routing = RoutingNetwork(3, 4)
        rates = routing(torch.empty(9, 4), torch.empty(9, 3, 4))
    assert (rates.nodes.shape, rates.output.shape) == ((9, 3, 4), (9,))
    assert rates.nodes.is_meta
