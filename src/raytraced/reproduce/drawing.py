"""From records to picture files: which figures belong to a part, and where they go."""

from collections.abc import Iterator
from pathlib import Path

from matplotlib.figure import Figure

from raytraced.reproduce.figures import (
    class_figure,
    epochs_figure,
    gallery_figure,
    sequence_figure,
    validation_figure,
)
from raytraced.reproduce.frontier_figure import frontier_figure
from raytraced.reproduce.records import Results

# Every figure by its file's name, with what it shows.
CAPTIONS = {
    "fig2": "Figure 2, our recipe: accuracy after 0, 1, … experts, a line for each sequence length; how many experts are used.",
    "fig2-paper": "Figure 2, as in the paper: the same for the recipe of the text.",
    "fig3": "Figure 3: test accuracy of a run against the epochs until its validation accuracy was within 0.5 of its best.",
    "fig5": "Figure 5: for each class the share of its test images that activate each expert (rows: layers).",
    "fig6": "Figure 6: validation accuracy over the epochs, mean and range over seeds.",
    "fig7": "Figure 7: correctly classified test images, the first ones of each number of experts used (left).",
    "frontier": "The frontier: test accuracy (mean and deviation over seeds) against multiply-adds.",
    "union": "The frontier on the union of the three data sets: 30 classes, width 64, 64-wide experts.",
}  # fmt: skip


def caption_of(name: str) -> str:
    """The caption of a figure file, for one data set or for all."""
    known = [key for key in CAPTIONS if name == key or name.startswith(f"{key}-")]
    return CAPTIONS[max(known, key=len)] if known else name


def draw_part(
    part: str, results: Results, data_names: list[str], data_root: str | None, quick: bool
) -> Iterator[tuple[str, Figure | None]]:
    """The figures of a part by file name; None where nothing was run for it."""
    several = [data for data in data_names if data != "union"]
    if part == "fig2":
        yield "fig2", sequence_figure(results, several, "mre", quick)
        yield "fig2-paper", sequence_figure(results, several, "mre-paper", quick)
    elif part == "fig3":
        yield "fig3", epochs_figure(results, several, quick)
    elif part == "fig6":
        yield "fig6", validation_figure(results, several, quick)
    elif part in ("fig5", "fig7"):
        yield from draw_examples(part, results, several, data_root, quick)
    elif part == "frontier":
        yield "frontier", frontier_figure(results, several, quick)
    elif part == "union":
        yield "union", frontier_figure(results, ["union"], quick)


def draw_examples(
    part: str, results: Results, data_names: list[str], data_root: str | None, quick: bool
) -> Iterator[tuple[str, Figure | None]]:
    """The figures of one trained model, seed 0, on each data set."""
    from raytraced.data import load

    for data in data_names:
        for record in results.of(data, "mre")[:1]:
            dataset = load(data, data_root)
            if part == "fig5":
                yield f"fig5-{data}", class_figure(record, dataset.class_names, quick)
            else:
                yield f"fig7-{data}", gallery_figure(record, dataset.test.images.numpy(), quick)


def save_figures(
    parts: list[str], results: Results, data_names: list[str], folder: Path, data_root: str | None, quick: bool
) -> list[Path]:
    """Draw the figures of some parts into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for part in parts:
        for name, figure in draw_part(part, results, data_names, data_root, quick):
            if figure is not None:
                path = folder / f"{name}.png"
                figure.savefig(path, dpi=150, metadata={"Software": None})
                written.append(path)
    return written
