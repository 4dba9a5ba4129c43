"""`raytraced models`: every model with its reference and what it costs. Importing this file does not import torch."""

from typing import Literal


def models(sizes: Literal["mnist", "cifar10", "digits"] = "mnist", seed: int = 0, json: bool = False) -> None:
    """Every model: where it comes from, its parameters, what an image costs, whether it adapts and answers along the way.

    Args:
        sizes: Of images, classes and the expert grid.
        seed: Of the weights.
        json: Print JSON instead of a table.
    """
    from dataclasses import asdict

    import torch

    from raytraced.cost import measure
    from raytraced.models.table import MODELS, build

    torch.set_num_threads(1)  # at these sizes threads only wait for each other
    shape = {"mnist": (1, 28, 28), "cifar10": (3, 32, 32), "digits": (1, 8, 8)}[sizes]
    images = torch.rand(256, *shape, generator=torch.Generator().manual_seed(seed))
    costs = {}
    with torch.random.fork_rng(devices=[]):
        for name in MODELS:
            torch.manual_seed(seed)
            costs[name] = measure(build(name, image_shape=shape, num_classes=10), images)

    if json:
        from json import dumps

        flags = {name: {"adaptive": info.adaptive, "anytime": info.anytime} for name, info in MODELS.items()}
        rows = {name: {"reference": MODELS[name].reference} | asdict(costs[name]) | flags[name] for name in MODELS}
        print(dumps(rows, indent=2, ensure_ascii=False))
        return

    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("model", no_wrap=True)
    table.add_column("reference")
    for column in ("parameters", "multiply-adds", "experts"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("adaptive", "anytime"):
        table.add_column(column, justify="center")
    for name, info in MODELS.items():
        cost = costs[name]
        about = "≈ " if info.adaptive else ""
        table.add_row(
            name,
            info.reference,
            f"{cost.parameters:,}",
            f"{about}{cost.multiply_adds:,.0f}",
            f"{about}{cost.experts:.1f}" if info.adaptive else f"{cost.experts:.0f}",
            "yes" if info.adaptive else "",
            "yes" if info.anytime else "",
        )
    console = Console()
    console.print(table)
    console.print(
        f"Multiply-adds and experts of one image at {sizes} sizes, routing included.\n"
        "≈: before training, on random images; how much to run is learnt.",
        style="dim",
        highlight=False,
    )
