"""Activation sequences as a picture: for a few images the grid of nodes, the order of activation, and the answers.

Axes: B batch, L layers, N experts per layer, O = N + 1 outlets of a gate (the next layer's nodes, then the output node).
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple, TypeGuard

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from raytraced.colours import BLUE, FAINT, INK, ORANGE
from raytraced.errors import printable
from raytraced.models.anytime import anytime
from raytraced.models.classifier import Classifier
from raytraced.models.output import Model
from raytraced.rays import sent_rates
from raytraced.routers.raytraced import RaytracedExperts
from raytraced.tasks.images.dataset import Split

EDGE = "#C4C8CE"
MARKS = {True: ("✓", BLUE), False: ("✗", ORANGE), None: ("", INK)}  # right, wrong, unknown


class Trace(NamedTuple):
    """All that is drawn of one image."""

    image: np.ndarray  # (H, W) or (H, W, 3), 0 … 1
    label: str | None  # the right answer, if it is known
    nodes: list[int]  # those that ran, in order of activation
    answers: list[tuple[int, str]]  # number of experts that had run, and the answer then
    entry: Tensor  # (N,)
    sent: list[Tensor]  # of each layer (N, O): the firing rate that every node sends to every outlet
    title: str = ""


@torch.no_grad()
def draw_sequences(model: Classifier, split: Split, path: Path, num_images: int = 5, num_searched: int = 500) -> None:
    """Draw the activation sequences of some images, from few experts to many.

    Args:
        model: A raytraced classifier.
        split: The images to choose from.
        path: The PNG file to write.
        num_images: Number of images to draw.
        num_searched: Number of images of the split among which they are chosen.
    """
    names = model.card.spec["class_names"]
    model = model.cpu().eval()
    images = split.images[:num_searched].cpu()
    out, first = model(images), model(images, max_experts=0)
    answer_B, first_B, labels_B = out.logits.argmax(-1), first.logits.argmax(-1), split.labels[:num_searched].cpu()
    # Between images with the same number of experts, prefer one whose answer changes and is right in the end.
    merit_B = 2 * (answer_B == labels_B) + (first_B != answer_B)
    chosen = evenly(out.num_experts, merit_B, num_images)
    traces = [trace_image(model, images[index], names[int(labels_B[index])], names) for index in chosen]
    draw_traces(traces, path)


def evenly(values_B: Tensor, merit_B: Tensor, num: int) -> list[int]:
    """Choose indices whose values are evenly spread from the smallest to the largest; the most merit decides ties."""
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


@torch.no_grad()
def trace_image(
    model: Classifier,
    image: Tensor,
    label: str | None,
    class_names: Sequence[str],
    title: str = "",
    options: dict[str, Any] | None = None,
) -> Trace:
    """Follow one image through the model.

    Args:
        model: A raytraced classifier.
        image: Pixels (C, H, W) in uint8.
        label: The right class, if it is known.
        class_names: Names of the classes.
        title: Shown beside the image where there is no label.
        options: Options of the model (max_experts, confidence); only experts that run with them are part of the trace.

    Returns:
        What there is to draw.
    """
    assert isinstance(model.layer, RaytracedExperts)
    router, options, image_1CHW = model.layer.router, options or {}, image[None]
    out = model(image_1CHW, **options)
    (route,) = out.routes
    ran_M = route.active[0].flatten().tolist()
    order = [] if route.nodes is None else route.nodes[0].tolist()
    nodes = [node for node in order if node >= 0 and ran_M[node]]
    if options.get("confidence") is None:
        steps = anytime(model, image_1CHW, max_experts=options.get("max_experts"))
        answers = [(step.budget, step.logits) for step in steps][: len(nodes) + 1]
    else:  # it exits between layers: these are the answers that it compared with the threshold
        answers = [(0, model(image_1CHW, max_experts=0).logits), (len(nodes), out.logits)][: len(nodes) + 1]
    hidden_1D = model.input_block(image_1CHW)
    entry_1N, input_logits_1LNO = router.entry(hidden_1D), router.input_logits(hidden_1D)
    sent = [sent_1NO[0] for sent_1NO in sent_rates(router.routing, entry_1N, route.active, input_logits_1LNO)]
    shown = (image[0] if len(image) == 1 else image.permute(1, 2, 0)) / 255
    named = [(number, class_names[int(logits.argmax())]) for number, logits in answers]
    return Trace(shown.numpy(), label, nodes, named, entry_1N[0], sent, title)


def draw_traces(traces: list[Trace], path: Path) -> None:
    """Draw one panel per image, side by side.

    Args:
        traces: What there is to draw, of models with the same grid.
        path: The PNG file to write.
    """
    num_layers, num_experts = len(traces[0].sent), len(traces[0].entry)
    width = max(2.1, 0.28 * num_experts)
    height = 0.5 + width * (9.4 + 1.6 * num_layers) / (num_experts + 0.8)
    # Class names may hold "$": they are not formulas.
    with (
        matplotlib.rc_context({"font.size": 9, "text.color": INK, "text.parse_math": False}),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # the font does not have every script
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
    """Draw the image, below it the grid of nodes from the first layer to the output node, then the answers."""
    axes.set_axis_off()
    axes.set_aspect("equal")
    middle, top, bottom = (num_experts - 1) / 2, 1.5, -1.6 * (num_layers - 1) - 1.6
    side = 1.5  # half the image's side
    extent = (middle - side, middle + side, top, top + 2 * side)
    axes.imshow(one.image, cmap="gray_r", vmin=0, vmax=1, extent=extent, zorder=2)
    frame = Rectangle((middle - side, top), 2 * side, 2 * side, fill=False, edgecolor=EDGE, linewidth=0.7, zorder=3)
    axes.add_patch(frame)
    caption = printable(one.title) if one.label is None else f"is\n“{printable(one.label)}”"
    axes.text(middle + side + 0.35, top + side, caption, va="center", ha="left", fontsize=8)
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
    """Draw a line as wide as its firing rate; rates below 1 % are left out."""
    if rate > 0.01:
        axes.plot(*zip(start, end, strict=True), color="#5B6470", linewidth=0.5 + 3.5 * rate, alpha=0.35 + 0.5 * rate)


def draw_answers(axes: Axes, one: Trace, middle: float, y: float) -> None:
    """Write the answer without experts, each change, and the last answer; blue and ✓ is right, orange and ✗ wrong."""
    answers, last = one.answers, len(one.answers) - 1
    changes = [k for k in range(last) if k == 0 or answers[k][1] != answers[k - 1][1]]
    for row, place in enumerate([*changes[:1], *changes[1:][-2:], last] if last else [0]):
        number, answer = answers[place]
        when = "no expert" if number == 0 else f"after {number}"
        right = None if one.label is None else answer == one.label
        text = f"{when}: {printable(answer)} {MARKS[right][0]}"
        colour, weight = MARKS[right][1], "bold" if place == last else "normal"
        axes.text(middle, y - 0.68 * row, text, ha="center", va="top", fontsize=7.5, color=colour, weight=weight)
