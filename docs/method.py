"""Draw the figure of the method, three moments of one activation sequence: `python docs/method.py`.

Axes: N experts per layer, L layers, O = N + 1 outlets of a gate.
"""

from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch
from torch import Tensor

from raytraced.rays import gate_splits
from raytraced.routers.raytraced import activation_sequence
from raytraced.routing import RoutingNetwork

# Okabe and Ito's palette, which colour-blind readers can distinguish.
RAY, ACTIVE, CANDIDATE, IDLE, INK = "#E69F00", "#0072B2", "#009E73", "#B8B8B8", "#222222"


def draw_method(path: Path) -> None:
    """Write the figure of the README: what enters, what is drawn, when it ends."""
    torch.manual_seed(4)
    routing = RoutingNetwork(3, 4).double()
    entry_BN = torch.tensor([[0.42, 0.14, 0.33, 0.11]], dtype=torch.float64)
    route = activation_sequence(routing, entry_BN, select="greedy")
    nodes = [int(k) for k in route.nodes[0] if k >= 0]  # type: ignore[index]
    moments = [
        (0, "Rays enter the first layer. A node\nabsorbs what reaches it: its firing rate."),
        (len(nodes) // 2, "A candidate is drawn by its rate and turns\nactive: it forwards what it absorbed."),
        (len(nodes), f"The output node is drawn: stop. {len(nodes)} of {routing.num_nodes}\nexperts run, in this order."),
    ]  # fmt: skip
    figure = Figure(figsize=(11, 3.9), facecolor="white", layout="constrained")
    axes = figure.subplots(1, 3)
    for ax, (count, title) in zip(axes, moments, strict=True):
        _draw_moment(ax, routing, entry_BN, nodes[:count], ended=count == len(nodes))
        ax.set_title(title, fontsize=10.5, color=INK, loc="left")
    figure.savefig(path, dpi=160)


@torch.no_grad()
def _draw_moment(ax: Axes, routing: RoutingNetwork, entry_BN: Tensor, nodes: list[int], ended: bool) -> None:
    L, N = routing.num_layers, routing.num_experts
    active_BLN = torch.zeros(1, L * N, dtype=torch.float64)
    active_BLN[0, nodes] = 1
    active_BLN = active_BLN.view(1, L, N)
    rates, splits = routing(entry_BN, active_BLN), gate_splits(routing, entry_BN, active_BLN)
    place = {(l, i): (l + 1.0, (N - 1) / 2 - i) for l in range(L) for i in range(N)}
    start, end = (0.0, 0.0), (L + 1.0, 0.0)

    def ray(a: tuple[float, float], b: tuple[float, float], rate: float, bend: float = 0.0) -> None:
        if rate > 0.002:
            arc = f"arc3,rad={bend}"
            ax.add_patch(
                FancyArrowPatch(
                    a, b, connectionstyle=arc, arrowstyle="-", color=RAY, lw=0.6 + 14 * rate, alpha=0.75, zorder=1
                )
            )

    for i in range(N):
        ray(start, place[0, i], float(entry_BN[0, i]))
    for l in range(L):
        for i in range(N):
            passed = float(rates.nodes[0, l, i] * active_BLN[0, l, i])
            if l == L - 1:
                ray(place[l, i], end, passed)
                continue
            for j in range(N):
                ray(place[l, i], place[l + 1, j], passed * float(splits[l][0, i, j]))
            # Around the layers between, not through their nodes.
            ray(place[l, i], end, passed * float(splits[l][0, i, N]), bend=-0.75 if i < N / 2 else 0.75)
    for (l, i), (x, y) in place.items():
        rate, order = float(rates.nodes[0, l, i]), l * N + i
        if order in nodes:
            face, edge, text, ink = ACTIVE, ACTIVE, str(nodes.index(order) + 1), "white"
        elif rate > 0:
            face, edge, text, ink = "white", CANDIDATE, f"{100 * rate:.0f}%", INK
        else:
            face, edge, text, ink = "white", IDLE, "", INK
        ax.scatter([x], [y], s=620, c=face, edgecolors=edge, linewidths=2.2, zorder=3)
        ax.text(
            x,
            y,
            text,
            ha="center",
            va="center",
            fontsize=9,
            color=ink,
            zorder=4,
            weight="bold" if ink == "white" else None,
        )
    ax.text(
        *start,
        "input",
        ha="center",
        va="center",
        fontsize=9,
        color=INK,
        zorder=4,
        bbox={"boxstyle": "round", "fc": "white", "ec": RAY, "lw": 2},
    )
    output = f"output\n{100 * float(rates.output[0]):.0f}%"
    colours = {
        "fc": ACTIVE if ended else "white",
        "ec": ACTIVE if ended else CANDIDATE if rates.output[0] > 0 else IDLE,
    }
    ax.text(
        *end,
        output,
        ha="center",
        va="center",
        fontsize=9,
        color="white" if ended else INK,
        zorder=4,
        bbox={"boxstyle": "round", "lw": 2, **colours},
    )
    for l in range(L):
        ax.text(l + 1, -(N - 1) / 2 - 0.75, f"layer {l + 1}", ha="center", fontsize=9, color=INK)
    ax.set(xlim=(-0.45, L + 1.5), ylim=(-(N - 1) / 2 - 0.95, (N - 1) / 2 + 1.1))
    ax.axis("off")


if __name__ == "__main__":
    draw_method(Path(__file__).with_suffix(".png"))
