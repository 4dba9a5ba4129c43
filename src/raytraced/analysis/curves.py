"""Loss, accuracy and experts over the epochs, for one run or several; needs no torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

# Okabe and Ito's colours: told apart by colour-blind eyes too, on white and on dark
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999")

PANELS = (
    ("loss", "train_loss", "validation_loss", 1),
    ("accuracy (%)", "train_accuracy", "validation_accuracy", 100),
    ("experts", "train_experts", "validation_experts", 1),
)


def draw_curves(histories: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Draw each run's epochs as a PNG: training dashed, validation solid."""
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(10, 3.2), layout="constrained")
        for axes, (title, train, validation, scale) in zip(figure.subplots(1, 3), PANELS, strict=True):
            for number, (name, history) in enumerate(histories.items()):
                colour = COLOURS[number % len(COLOURS)]
                epochs = [epoch["epoch"] for epoch in history]
                marker = "o" if len(epochs) == 1 else None
                for key, style, width in ((train, "--", 1.0), (validation, "-", 1.8)):
                    values = [epoch[key] * scale for epoch in history]
                    label = name if key == validation else None
                    axes.plot(epochs, values, style, color=colour, linewidth=width, label=label, marker=marker)
            axes.set_xlabel("epoch")
            axes.set_title(title, loc="left", fontsize=10)
            axes.grid(alpha=0.25)
        figure.supylabel("dashed: training, solid: validation", fontsize=8)
        if len(histories) > 1:
            figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
        figure.savefig(path, dpi=130)
