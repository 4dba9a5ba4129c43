"""Activation sequences as a picture: for a few images the grid of nodes, who fired when, and the answer after each step.

L layers, N experts a layer, O = N + 1 outlets of a gate (the next layer's nodes, then the output node), T steps.
"""

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import NamedTuple, TypeGuard

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from raytraced.colours import BLUE, FAINT, INK, ORANGE
from raytraced.models.classifier import Classifier
from raytraced.models.output import Model
from raytraced.rays import gate_splits
from raytraced.routers.raytraced import RaytracedExperts
from raytraced.routing import RoutingNetwork
from raytraced.stopping import anytime
from raytraced.tasks.images.dataset import Split

EDGE = "#C4C8CE"
MARKS = {True: ("✓", BLUE), False: ("✗", ORANGE), None: ("", INK)}  # right, wrong, not known


class Trace(NamedTuple):
    """All that is drawn of one image."""

    image: np.ndarray  # (H, W) or (H, W, 3), 0 … 1
    label: str | None  # the right answer, if it is known
    nodes: list[int]  # in order of activation
    answers: list[str]  # after 0, 1, … experts
    entry: Tensor  # (N,)
    sent: list[Tensor]  # of each layer (N, O): the firing rate that every node sends to every outlet
    title: str = ""


@torch.no_grad()
def draw_sequences(model: Classifier, split: Split, path: Path, num_images: int = 5, num_searched: int = 500) -> None:
    """Draw images of a split that use few experts, many, and numbers between, as a PNG."""
    names = model.card.spec["class_names"]
    model = model.cpu().eval()
    images = split.images[:num_searched].cpu()
    out, first = model(images), model(images, max_experts=0)
    answer_B, first_B, labels_B = out.logits.argmax(-1), first.logits.argmax(-1), split.labels[:num_searched].cpu()
    # of two images with as many experts, rather one that is answered well in the end, and not so from the start
    merit_B = 2 * (answer_B == labels_B) + (first_B != answer_B)
    chosen = evenly(out.num_experts, merit_B, num_images)
    traces = [trace_image(model, images[index], names[int(labels_B[index])], names) for index in chosen]
    draw_traces(traces, path)


def evenly(values_B: Tensor, merit_B: Tensor, num: int) -> list[int]:
    """Indices whose values run evenly from the smallest to the largest; among equal values those of the most merit."""
    distinct, ordered = values_B.unique(), values_B.sort().values
    pool = distinct if len(distinct) >= num else ordered
    chosen: list[int] = []
    for place in torch.linspace(0, len(pool) - 1, min(num, len(pool))).round().long():
        equal = [index for index in (values_B == pool[place]).nonzero().flatten().tolist() if index not in chosen]
        chosen.append(max(equal, key=lambda index: int(merit_B[index])))
    return chosen


def has_sequences(model: Model) -> TypeGuard[Classifier]:
    """Whether a model is a raytraced classifier."""
    return isinstance(model, Classifier) and isinstance(model.layer, RaytracedExperts)


def trace_image(
    model: Classifier, image: Tensor, label: str | None, class_names: Sequence[str], title: str = ""
) -> Trace:
    """Follow one image (C, H, W), in bytes, through the model."""
    assert isinstance(model.layer, RaytracedExperts)
    (route,), router = model(image[None]).routes, model.layer.router
    answers = [class_names[int(step.logits.argmax())] for step in anytime(model, image[None])]
    nodes = [int(node) for node in route.nodes[0] if node >= 0]
    entry_N = router.entry(model.input_block(image[None]))[0]
    sent = sent_rates(router.routing, entry_N, route.active[0])
    shown = (image[0] if len(image) == 1 else image.permute(1, 2, 0)) / 255
    return Trace(shown.numpy(), label, nodes, answers[: len(nodes) + 1], entry_N, sent, title)


def sent_rates(routing: RoutingNetwork, entry_N: Tensor, active_LN: Tensor) -> list[Tensor]:
    """What every node of each layer sends to each outlet (N, O); inactive nodes send nothing."""
    entry_1N, active_1LN, num = entry_N[None], active_LN[None], routing.num_experts
    to_output_NO = torch.eye(num + 1)[-1].expand(num, -1)  # the last layer's nodes send all they have there
    splits = [*(split_1NO[0] for split_1NO in gate_splits(routing, entry_1N, active_1LN)), to_output_NO]
    passed_LN = routing(entry_1N, active_1LN).nodes[0] * active_LN
    return [passed_N[:, None] * split_NO for passed_N, split_NO in zip(passed_LN, splits, strict=True)]


def draw_traces(traces: list[Trace], path: Path) -> None:
    """One panel an image, side by side."""
    num_layers, num_experts = len(traces[0].sent), len(traces[0].entry)
    width = max(2.1, 0.28 * num_experts)
    height = 0.5 + width * (9.4 + 1.6 * num_layers) / (num_experts + 0.8)
    with matplotlib.rc_context({"font.size": 9, "text.color": INK}):
        figure = Figure(figsize=(width * len(traces), height), facecolor="white", layout="constrained")
        title = "Activation sequences: each image lights its own experts, one after the other; lines are firing rates"
        figure.suptitle("\n".join(wrap(title, round(12 * width * len(traces)))), fontsize=10)
        panels = figure.subplots(1, len(traces), squeeze=False)[0]
        for axes, one in zip(panels, traces, strict=True):
            draw_trace(axes, one, num_layers, num_experts)
        for number, name in enumerate([*(f"layer {layer + 1}" for layer in range(num_layers)), "output node"]):
            place = (-0.75, -1.6 * number + 0.5)
            panels[0].text(*place, name, fontsize=6.5, color=FAINT, ha="left", va="center", zorder=5)
        figure.savefig(path, dpi=130)


def draw_trace(axes: Axes, one: Trace, num_layers: int, num_experts: int) -> None:
    """The image above, the grid of nodes below it from the first layer down to the output node, then the answers."""
    axes.set_axis_off()
    axes.set_aspect("equal")
    middle, top, bottom = (num_experts - 1) / 2, 1.5, -1.6 * (num_layers - 1) - 1.6
    side = 1.5  # half the image's side
    extent = (middle - side, middle + side, top, top + 2 * side)
    axes.imshow(one.image, cmap="gray_r", vmin=0, vmax=1, extent=extent, zorder=2)
    frame = Rectangle((middle - side, top), 2 * side, 2 * side, fill=False, edgecolor=EDGE, linewidth=0.7, zorder=3)
    axes.add_patch(frame)
    told = one.title if one.label is None else f"is\n“{one.label}”"
    axes.text(middle + side + 0.35, top + side, told, va="center", ha="left", fontsize=8)
    place = {(layer, expert): (expert, -1.6 * layer) for layer in range(num_layers) for expert in range(num_experts)}
    for expert, rate in enumerate(one.entry.tolist()):
        draw_edge(axes, (middle, top), place[0, expert], rate)
    for layer, sent_NO in enumerate(one.sent):
        for expert, row in enumerate(sent_NO.tolist()):
            for outlet, rate in enumerate(row):
                end = place.get((layer + 1, outlet), (middle, bottom))  # the last outlet is the output node
                draw_edge(axes, place[layer, expert], end, rate)
    order = {divmod(node, num_experts): number for number, node in enumerate(one.nodes, start=1)}
    colours = matplotlib.colormaps["viridis"](np.linspace(0.1, 0.85, max(2, len(order))))
    for key, (x, y) in place.items():
        number = order.get(key)
        face = "white" if number is None else colours[number - 1]
        axes.scatter(x, y, s=85, facecolor=face, edgecolor=EDGE if number is None else INK, linewidth=0.7, zorder=3)
        if number is not None:
            shade = "black" if number > 0.62 * len(order) and len(order) > 1 else "white"
            axes.text(x, y - 0.03, str(number), ha="center", va="center", fontsize=6.5, color=shade, zorder=4)
    axes.scatter(middle, bottom, s=60, marker="s", facecolor=INK, zorder=3)
    draw_answers(axes, one, middle, bottom - 0.9)
    axes.set_xlim(-0.9, num_experts - 0.1)
    axes.set_ylim(bottom - 3.6, top + 2 * side + 0.1)


def draw_edge(axes: Axes, start: tuple[float, float], end: tuple[float, float], rate: float) -> None:
    """A line as wide as its firing rate; hardly anything is left out."""
    if rate > 0.01:
        axes.plot(*zip(start, end, strict=True), color="#5B6470", linewidth=0.5 + 3.5 * rate, alpha=0.35 + 0.5 * rate)


def draw_answers(axes: Axes, one: Trace, middle: float, y: float) -> None:
    """The answer with no expert, each change of mind, and the last word; blue and ✓ is right, orange and ✗ wrong."""
    last = len(one.answers) - 1
    told = [k for k in range(last) if k == 0 or one.answers[k] != one.answers[k - 1]]
    for row, number in enumerate([*told[:1], *told[1:][-2:], last] if last else [0]):
        answer = one.answers[number]
        when = "no expert" if number == 0 else f"after {number}"
        right = None if one.label is None else answer == one.label
        text = f"{when}: {answer} {MARKS[right][0]}"
        colour, weight = MARKS[right][1], "bold" if number == last else "normal"
        axes.text(middle, y - 0.68 * row, text, ha="center", va="top", fontsize=7.5, color=colour, weight=weight)
