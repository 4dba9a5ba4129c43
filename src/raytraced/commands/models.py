"""`raytraced models`: every model with its reference and what it costs. Importing this file does not import torch."""

from dataclasses import asdict
from json import dumps
from typing import Literal

from raytraced.words import check_seed


def models(sizes: Literal["mnist", "cifar10", "digits"] = "mnist", seed: int = 0, json: bool = False) -> None:
    """Every model: where it comes from, its parameters, what an image costs, whether it adapts and answers along the way.

    Args:
        sizes: Of images, classes and the expert grid.
        seed: Of the weights.
    """
    check_seed(seed)
    import torch
    from rich.console import Console

    from raytraced.cost import measure
    from raytraced.models.table import MODELS, build
    from raytraced.training.tables import make_table

    torch.set_num_threads(1)  # at these sizes threads only wait for each other
    shape = {"mnist": (1, 28, 28), "cifar10": (3, 32, 32), "digits": (1, 8, 8)}[sizes]
    images = torch.rand(256, *shape, generator=torch.Generator().manual_seed(seed))
    every, rows = {}, []
    with torch.random.fork_rng(devices=[]):
        for name, info in MODELS.items():
            torch.manual_seed(seed)
            cost = measure(build(name, image_shape=shape, num_classes=10), images)
            flags = {"adaptive": info.adaptive, "anytime": info.anytime}
            every[name] = {"reference": info.reference} | asdict(cost) | flags
            about = "≈ " if info.adaptive else ""
            row = {"model": name, "reference": info.reference, "parameters": cost.parameters}
            row |= {"multiply-adds": f"{about}{cost.multiply_adds:,.0f}"}
            row |= {"experts": f"{about}{cost.experts:.1f}" if info.adaptive else f"{cost.experts:.0f}"}
            rows.append(row | {flag: "yes" if holds else "" for flag, holds in flags.items()})
    if json:
        print(dumps(every, indent=2, ensure_ascii=False))
        return
    console = Console()
    table = make_table(rows, {"multiply-adds": "", "experts": ""}, ("model", "parameters", "multiply-adds"))
    table.show_edge = False
    console.print(table)
    told = f"Multiply-adds and experts of one image at {sizes} sizes, routing included."
    console.print(
        f"{told}\n≈: before training, on random images; how much to run is learnt.", style="dim", highlight=False
    )
