"""engine.js run by node, and its results compared with PyTorch's."""

import json
import shutil
import subprocess
import zlib
from base64 import b85decode
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raytraced.cost import sample_cost
from raytraced.explore.packing import deflated, pack_model
from raytraced.models.output import Model

ENGINE = Path(__file__).parents[2] / "src/raytraced/explore/engine.js"
NODE = shutil.which("node")
LOGITS = 1e-4


def run_engine(model: Model, inputs: Tensor, options: list[dict[str, Any]], folder: Path) -> list[Any]:
    """The results of engine.js for images (B, C, H, W) or tokens (B, T): a list of B results per entry of options."""
    is_image = inputs.dtype == torch.uint8
    case = {
        "pack": pack_model("model", model),
        "inputs": deflated(inputs.numpy().tobytes()) if is_image else inputs.tolist(),
        "options": options,
    }
    (folder / "case.json").write_text(json.dumps(case))
    runner = Path(__file__).parent / "run_engine.js"
    done = subprocess.run(
        [NODE, runner, ENGINE, folder / "case.json"], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    results: list[Any] = json.loads(done.stdout)
    return results


def inflated(text: str) -> bytes:
    """The bytes that `deflated` was called with."""
    return zlib.decompress(b85decode(text.replace(",", "<")))


def model_arguments(option: dict[str, Any]) -> dict[str, Any]:
    """Options of engine.js as arguments of the model's call."""
    names = {"maxExperts": "max_experts", "confidence": "confidence", "stop": "stop"}
    arguments = {name: option.get(key) for key, name in names.items()}
    return {key: value for key, value in arguments.items() if value is not None}


def compare_images(model: Model, images: Tensor, option: dict[str, Any], results: list[Any]) -> None:
    """Every image has PyTorch's nodes, in their order, and its exits, logits and multiply-adds."""
    with torch.no_grad():
        out = model(images, **model_arguments(option))
        cost = sample_cost(model, images, out)
    assert [each["ran"] for each in results] == out.num_experts.tolist()
    if out.num_exits is not None:
        assert [each["num_exits"] for each in results] == out.num_exits.tolist()
    if out.routes[0].nodes is not None:
        compare_nodes(out.routes[0].nodes, out.num_exits, results)
    for each in results:
        assert each["ended"] == expected_end(each, model.layer.router.routing.num_nodes, option.get("maxExperts"))
    torch.testing.assert_close(torch.tensor([each["logits"] for each in results]), out.logits, atol=LOGITS, rtol=0)
    assert [each["macs"] for each in results] == cost.macs.tolist()


def compare_nodes(nodes_BT: Tensor, num_exits_B: Tensor | None, results: list[Any]) -> None:
    """The same nodes in the same order; PyTorch does not route a sample that exits before layer 1."""
    routed = [True] * len(results) if num_exits_B is None else (num_exits_B > 1).tolist()
    for row, each, is_routed in zip(nodes_BT.tolist(), results, routed, strict=True):
        if is_routed:
            assert each["nodes"] == [node for node in row if node >= 0]


def expected_end(result: Any, num_nodes: int, budget: int | None) -> str:
    """What ended a sequence, by its length."""
    num = len(result["nodes"])
    if result["ran"] < num:
        return "confidence"
    if num == num_nodes:
        return "all"
    return "budget" if num == budget else "output"
