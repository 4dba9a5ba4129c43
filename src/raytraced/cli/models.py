"""`raytraced models`: every model with its reference and cost. Importing this file does not import torch."""

from dataclasses import asdict
from json import dumps
from typing import Literal

from raytraced.errors import check_seed


def models(sizes: Literal["mnist", "cifar10", "digits"] = "mnist", seed: int = 0, json: bool = False) -> None:
    """List all models: reference, parameters, macs per image, whether it adapts its compute and answers along the way.

    Args:
        sizes: Data set whose image size and number of classes are used.
        seed: Seed of the weights.
    """
    check_seed(seed)
    import torch
    from rich.console import Console

    from raytraced.cost import measure
    from raytraced.models.registry import build, find_model, model_names
    from raytraced.tables import make_table, print_table

    torch.set_num_threads(1)  # At these sizes more threads are slower.
    shape = {"mnist": (1, 28, 28), "cifar10": (3, 32, 32), "digits": (1, 8, 8)}[sizes]
    images = torch.rand(256, *shape, generator=torch.Generator().manual_seed(seed))
    every, rows = {}, []
    with torch.random.fork_rng(devices=[]):
        for name in model_names():
            _, info = find_model(name)
            torch.manual_seed(seed)
            cost = measure(build(name, image_shape=shape, num_classes=10), images)
            flags = {"adaptive": info.adaptive, "anytime": info.anytime}
            every[name] = {"reference": info.reference} | asdict(cost) | flags
            about = "≈ " if info.adaptive else ""
            row = {"model": name, "reference": info.reference, "parameters": cost.parameters}
            row |= {"macs": f"{about}{cost.macs:,.0f}"}
            row |= {"experts": f"{about}{cost.experts:.1f}" if info.adaptive else f"{cost.experts:.0f}"}
            rows.append(row | {flag: "yes" if holds else "" for flag, holds in flags.items()})
    if json:
        print(dumps(every, indent=2))
        return
    table = make_table(rows, {"macs": "", "experts": ""}, ("model", "parameters", "macs"))
    table.show_edge = False
    print_table(table)
    note = f"macs (multiply-adds) and experts of one image at {sizes} sizes, routing included."
    Console().print(
        f"{note}\n≈: before training, on random images; how much to run is learnt.", style="dim", highlight=False
    )
