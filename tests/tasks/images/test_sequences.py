"""The pictures show what happened: rates as the routing network's, images from few experts to many."""

import numpy as np
import pytest
import torch
from PIL import Image

from raytraced import RoutingNetwork, build
from raytraced import load as load_model
from raytraced.rays import sent_rates
from raytraced.tasks.images.loading import load
from raytraced.tasks.images.sequences import draw_sequences, draw_traces, evenly, trace_image
from raytraced.tasks.images.task import ImageTask


def test_edges_carry_the_firing_rates_of_the_routing_network():
    torch.manual_seed(0)
    routing = RoutingNetwork(4, 3)
    entry = torch.rand(1, 3).softmax(-1)
    active = torch.tensor([[[1.0, 0, 1], [0, 1, 1], [1, 1, 0], [0, 0, 1]]])
    for input_logits in (None, torch.randn(1, 3, 3, 4)):
        rates = routing(entry, active, input_logits)
        sent = sent_rates(routing, entry, active, input_logits)
        for layer in range(3):
            torch.testing.assert_close(sent[layer][:, :, :3].sum(1), rates.nodes[:, layer + 1])
        torch.testing.assert_close(sum(rows[0, :, 3].sum() for rows in sent), rates.output[0])
        assert not sent[0][0, 1].any()  # an inactive node sends nothing


def test_edges_of_a_model_with_input_conditioned_gates_are_the_rates_it_routed_by():
    model, digits = load_model("mre-digits"), load("digits")
    assert model.layer.router.sight_in is not None
    with torch.no_grad():
        for image in digits.test.images[:5]:
            (route,) = model(image[None], select="greedy").routes
            assert route.rates is not None
            trace = trace_image(model, image, None, digits.class_names)
            for layer in range(len(trace.sent) - 1):
                received = trace.sent[layer][:, :-1].sum(0)
                torch.testing.assert_close(received, route.rates.nodes[0, layer + 1], rtol=1e-4, atol=1e-6)
            arrived = sum(rows[:, -1].sum() for rows in trace.sent)
            torch.testing.assert_close(arrived, route.rates.output[0], rtol=1e-4, atol=1e-6)


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


@pytest.mark.parametrize("options", [{"confidence": 0.9}, {"confidence": 0.5}, {"max_experts": 2}, {}])
def test_only_experts_that_ran_are_traced(options):
    model, digits = load_model("mre-digits"), load("digits")
    for image in digits.test.images[:8]:
        with torch.no_grad():
            out = model(image[None], **options)
        trace = trace_image(model, image, None, digits.class_names, options=options)
        assert len(trace.nodes) == int(out.num_experts)
        assert out.routes[0].active[0].flatten()[trace.nodes].all()
        assert trace.answers[-1] == (len(trace.nodes), digits.class_names[int(out.logits.argmax())])
        ran = torch.zeros(32)
        ran[trace.nodes] = 1
        for layer, sent in enumerate(trace.sent):
            assert not sent[ran.view(4, 8)[layer] == 0].any()


@pytest.mark.parametrize("name", ["50$_$100", "a$\\frac{$", "esc\x1b[31m", "日本", "caf\\xe9"])
def test_any_class_name_can_be_drawn(tmp_path, name):
    digits = load("digits")
    names = (name, *digits.class_names[1:])
    model = build("mre", **ImageTask().spec(digits) | {"class_names": list(names)}, dim=4, num_layers=2, num_experts=2)
    draw_sequences(model, digits.test, tmp_path / "named.png", num_images=3, num_searched=40)
    draw_traces([trace_image(model, digits.test.images[0], None, names, name)], tmp_path / "titled.png")
    assert {path.name for path in tmp_path.iterdir()} == {"named.png", "titled.png"}
