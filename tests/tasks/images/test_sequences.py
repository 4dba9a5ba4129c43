"""The pictures show what happened: rates as the routing network's, images from few experts to many."""

import numpy as np
import torch
from PIL import Image

from raytraced import RoutingNetwork, build
from raytraced.tasks.images.loading import load
from raytraced.tasks.images.sequences import draw_sequences, evenly, sent_rates
from raytraced.tasks.images.task import ImageTask


def test_edges_carry_the_firing_rates_of_the_routing_network():
    torch.manual_seed(0)
    routing = RoutingNetwork(4, 3)
    entry = torch.rand(1, 3).softmax(-1)
    active = torch.tensor([[[1.0, 0, 1], [0, 1, 1], [1, 1, 0], [0, 0, 1]]])
    rates = routing(entry, active)
    sent = sent_rates(routing, entry[0], active[0])
    for layer in range(3):
        torch.testing.assert_close(sent[layer][:, :3].sum(0), rates.nodes[0, layer + 1])
    torch.testing.assert_close(sum(rows[:, 3].sum() for rows in sent), rates.output[0])
    assert not sent[0][1].any()  # an inactive node sends nothing


def test_images_run_from_few_experts_to_many_and_merit_decides_between_equals():
    values = torch.tensor([5, 1, 1, 9, 3, 3, 7])
    merit = torch.tensor([0, 0, 1, 0, 1, 0, 0])
    assert evenly(values, merit, 5) == [2, 4, 0, 6, 3]
    assert evenly(torch.tensor([2, 2, 2]), torch.tensor([0, 1, 0]), 5) == [1, 0, 2]


def test_picture_is_drawn_for_any_grid(tmp_path):
    digits = load("digits")
    model = build("mre", **ImageTask().spec(digits), dim=4, num_layers=2, num_experts=2)
    draw_sequences(model, digits.test, tmp_path / "tiny.png", num_images=3, num_searched=40)
    with Image.open(tmp_path / "tiny.png") as image:
        pixels = np.array(image.convert("RGB")).reshape(-1, 3)
    assert len(np.unique(pixels, axis=0)) > 100
    assert (pixels == 255).all(1).mean() > 0.3  # on white, so that it can be read on a dark page too
