"""Routes as files: which experts ran for every sample of a data set, in which order.

A safetensors file of the format "raytraced-routes-1" with the tensors

    active   (n, bytes) uint8: the experts that ran, a bit each, packed along the flattened axes (T, S, N), lowest bit first
    nodes    (n, T, order) int16 or int32: the nodes l·N + i in order of activation, padded with −1; not for baselines
    ids      (n,) int64: the position of each sample in its split

and a JSON text "routes": model (its name), model_sha256 (of its weights), data, split, shape [T, S, N] (T: tokens of a sample,
0 where a sample has one route), num_samples. Axes: n samples, T tokens, S steps of the layer, N experts per layer.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from raytraced.errors import printable
from raytraced.files import DamagedFileError
from raytraced.io.saving import checksum, read_tensors, write_tensors
from raytraced.models.output import Model
from raytraced.sequence import Route

ROUTES_FORMAT = "raytraced-routes-1"


class SavedRoutes(NamedTuple):
    """Routes of the samples of a split."""

    active: Tensor  # (n, S, N) or (n, T, S, N), bool: S steps, N experts per layer
    nodes: Tensor | None  # (n, order) or (n, T, order), in order of activation, padded with −1; None: no order
    about: dict[str, Any]  # the model, the data set and the split that they belong to

    def of(self, rows: Tensor) -> Route:
        """The route of some samples.

        Args:
            rows: Positions of the samples in the split (B,).

        Returns:
            Route with `active`, `nodes` and `num_active`, on the device of `rows`; it has no rates.
        """
        active = self.active[rows.to(self.active.device)].to(rows.device)
        nodes = None if self.nodes is None else self.nodes[rows.to(self.nodes.device)].to(rows.device)
        return Route(active, nodes, active.flatten(-2).sum(-1), None)


def model_digest(model: Model) -> str:
    """SHA-256 of a model's weights."""
    return checksum({name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}, model.name)


def save_routes(
    path: str | Path, model: Model, data: str, split: str, recorded: list[tuple[Tensor, Route]], num_samples: int
) -> None:
    """Write the routes of a split.

    Args:
        path: The file to write.
        model: The model that took them.
        data: Name of the data set.
        split: Its part.
        recorded: Positions of samples in the split (B,) and their route, batch by batch.
        num_samples: Number of samples in the split.
    """
    ids_n = torch.cat([rows.cpu() for rows, _ in recorded])
    order_n = ids_n.argsort()
    active = torch.cat([(route.active.detach() != 0).cpu() for _, route in recorded])[order_n]
    *tokens, num_steps, num_experts = active.shape[1:]
    bits = np.packbits(active.flatten(1).numpy(), axis=1, bitorder="little")
    tensors = {"active": torch.from_numpy(bits), "ids": ids_n[order_n]}
    if all(route.nodes is not None for _, route in recorded):
        nodes = [route.nodes.cpu() for _, route in recorded if route.nodes is not None]
        longest = max(int((one >= 0).sum(-1).max()) if one.numel() else 0 for one in nodes)
        # One more than the longest: the first −1 is the draw of the output node.
        width = min(longest + 1, max(one.shape[-1] for one in nodes))
        padded = [
            torch.nn.functional.pad(one, (0, max(0, width - one.shape[-1])), value=-1)[..., :width] for one in nodes
        ]
        kind = torch.int16 if num_steps * num_experts < 2**15 else torch.int32
        tensors["nodes"] = torch.cat(padded)[order_n].to(kind)
    about = {
        "model": model.name,
        "model_sha256": model_digest(model),
        "data": data,
        "split": split,
        "shape": [tokens[0] if tokens else 0, num_steps, num_experts],
        "num_samples": num_samples,
    }
    write_tensors(Path(path), tensors, ROUTES_FORMAT, "routes", json.dumps(about))


def unpack(tensors: Mapping[str, Tensor], shape: tuple[int, ...], num_samples: int) -> tuple[Tensor, Tensor | None]:
    """The active sets (n, T, S, N) and the order of activation (n, T, order) of a file; refuses tensors that do not fit."""
    size, bits = math.prod(shape), tensors["active"]
    # What the file claims is compared with what it holds before anything of that size is made.
    fits = min(shape) >= 1 and bits.dtype == torch.uint8 and tuple(bits.shape) == (num_samples, -(-size // 8))
    if not fits or not torch.equal(tensors["ids"], torch.arange(num_samples)):
        raise ValueError("its tensors do not fit each other")
    active = torch.from_numpy(np.unpackbits(bits.numpy(), axis=1, count=size, bitorder="little").astype(bool))
    active = active.unflatten(1, shape)
    if "nodes" not in tensors:
        return active, None
    nodes, num_nodes = tensors["nodes"], shape[-2] * shape[-1]
    is_order = nodes.dtype in (torch.int16, torch.int32) and nodes.shape[:-1] == active.shape[:-2]
    if not is_order or bool(((nodes < -1) | (nodes >= num_nodes)).any()):
        raise ValueError("its nodes do not fit its grid")
    nodes = nodes.long()
    named = torch.zeros(*nodes.shape[:-1], num_nodes + 1, dtype=torch.bool).scatter(-1, nodes % (num_nodes + 1), True)
    if not torch.equal(named[..., :num_nodes], active.flatten(-2)):  # −1 is the last column
        raise ValueError("its nodes are not its active experts")
    return active, nodes


def load_routes(path: str | Path, model: Model, data: str, split: str, num_samples: int) -> SavedRoutes:
    """Read routes that `save_routes` wrote, for the same model and data.

    Args:
        path: The file.
        model: The model that is to follow them.
        data: Name of the data set.
        split: Its part.
        num_samples: Number of samples in the split.

    Returns:
        The routes.

    Raises:
        ValueError: The file is damaged, or its routes are those of another grid or of other samples.
    """
    tensors, text = read_tensors(Path(path), ROUTES_FORMAT, "routes")
    try:
        about = json.loads(text)
        num_tokens, num_steps, num_experts = (int(size) for size in about["shape"])
        found = (str(about["data"]), str(about["split"]), int(about["num_samples"]))
        shape = (*((num_tokens,) if num_tokens else ()), num_steps, num_experts)
        active, nodes = unpack(tensors, shape, found[2])
    except RecursionError as error:
        raise DamagedFileError(f"{path}: is not a file of routes: its text is nested too deeply") from error
    except (ValueError, TypeError, KeyError, RuntimeError, IndexError, OverflowError) as error:
        raise DamagedFileError(
            f"{path}: is not a file of routes ({printable(' '.join(str(error).split()))})"
        ) from error
    if found != (data, split, num_samples):
        of = f"{found[2]} samples of {found[0]}, {found[1]}"
        raise ValueError(f"{path}: has routes of {printable(of)}; must be of {num_samples} of {data}, {split}")
    if about.get("model") != model.name:
        known = printable(about.get("model"))
        raise ValueError(f"{path}: has routes of the model {known}; this one is {model.name}")
    router = next((layer.router for layer in model.routed_layers()), None)
    grid = None if router is None else (router.num_steps, router.num_experts)
    if grid != (num_steps, num_experts):
        own = "no grid" if grid is None else f"a grid of {grid[0]} × {grid[1]}"
        rule = f"{model.name} has {own}"
        raise ValueError(f"{path}: has routes of a grid of {num_steps} × {num_experts} experts; {rule}")
    return SavedRoutes(active, nodes, about)
