"""Draw the figures of docs/paper/how.md: `python docs/how.py`.

Axes: B images, K places where a ray can end (the nodes, then the output node), Y classes.
"""

from pathlib import Path

import torch
from matplotlib.figure import Figure

import raytraced as rt
from raytraced.rays import simulate
from raytraced.routing import RoutingNetwork
from raytraced.tasks.images.loading import load

LAW, COUNT, INK = "#0072B2", "#E69F00", "#222222"  # of Okabe and Ito's palette
NUM_RAYS = 10_000


def draw_rays(path: Path) -> None:
    """Firing rates beside the share of random rays that end at each place, at three moments of one sequence."""
    torch.manual_seed(4)
    routing = RoutingNetwork(3, 4).double()
    entry = torch.tensor([[0.42, 0.14, 0.33, 0.11]], dtype=torch.float64)
    nodes = rt.activation_sequence(routing, entry, select="greedy").nodes
    assert nodes is not None
    order = [int(node) for node in nodes[0] if node >= 0]
    figure = Figure(figsize=(10, 3), facecolor="white", layout="constrained")
    moments = (0, len(order) // 2, len(order))
    for ax, count in zip(figure.subplots(1, len(moments), sharey=True), moments, strict=True):
        active = torch.zeros(1, routing.num_nodes, dtype=torch.float64)
        active[0, order[:count]] = 1
        active = active.view(1, routing.num_layers, routing.num_experts)
        rates = routing(entry, active)
        waiting_K = torch.cat(((rates.nodes * (1 - active)).flatten(), rates.output)).detach()
        counts_K = simulate(routing, entry, active, NUM_RAYS, torch.Generator().manual_seed(0))[0] / NUM_RAYS
        places = torch.arange(len(waiting_K))
        ax.bar(places - 0.2, waiting_K, 0.4, color=LAW, label="firing rate kept there")
        ax.bar(places + 0.2, counts_K, 0.4, color=COUNT, label=f"share of {NUM_RAYS:,} random rays")
        names = [f"{l + 1}.{i + 1}" for l in range(routing.num_layers) for i in range(routing.num_experts)]
        ax.set_xticks(places, [*names, "out"], fontsize=7, rotation=60)
        ax.set_title(f"{count} of {routing.num_nodes} nodes active", fontsize=10, loc="left", color=INK)
        ax.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=160)


@torch.no_grad()
def draw_answers(path: Path) -> None:
    """Class probabilities after every expert, for the digit with the highest initial confidence and the most changeable one."""
    model, test = rt.load("mre-digits"), load("digits").test
    images = test.images
    steps = list(rt.anytime(model, images))
    probs_BKY = torch.stack([step.logits.softmax(-1) for step in steps], 1)
    lengths_B = steps[-1].num_active
    changes_B = (probs_BKY.argmax(-1).diff(dim=1) != 0).sum(1)
    highest, wavering = int(probs_BKY[:, 0].amax(-1).argmax()), int(changes_B.argmax())
    figure = Figure(figsize=(10, 4.6), facecolor="white", layout="constrained")
    rows = figure.subplots(2, 2, width_ratios=(1, 5))
    for (left, right), each in zip(rows, (highest, wavering), strict=True):
        left.imshow(images[each, 0], cmap="gray_r")
        left.set_title(f"labelled {int(test.labels[each])}", fontsize=10, loc="left", color=INK)
        left.axis("off")
        length = int(lengths_B[each])
        right.imshow(probs_BKY[each, : length + 1].mT, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        right.set_xticks(range(length + 1))
        right.set_yticks(range(10), range(10), fontsize=7)
        right.set(xlabel="experts so far", ylabel="class")
        right.set_title("probability of each class after every expert", fontsize=10, loc="left", color=INK)
    figure.savefig(path, dpi=160)


if __name__ == "__main__":
    draw_rays(Path(__file__).with_name("rays.png"))
    draw_answers(Path(__file__).with_name("answers.png"))
