"""engine.js run by node, beside PyTorch."""

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
    """What engine.js makes of images (B, C, H, W) or tokens (B, T) under each of the options."""
    is_image = inputs.dtype == torch.uint8
    case = {
        "pack": pack_model("model", model),
        "inputs": deflated(inputs.numpy().tobytes()) if is_image else inputs.tolist(),
        "options": options,
    }
    (folder / "case.json").write_text(json.dumps(case))
    runner = Path(__file__).parent / "run_engine.js"
    done = subprocess.run([NODE, runner, ENGINE, folder / "case.json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)
    return found


def inflated(text: str) -> bytes:
    """What `deflated` was given."""
    return zlib.decompress(b85decode(text.replace(",", "<")))


def call_of(option: dict[str, Any]) -> dict[str, Any]:
    """An option of engine.js as arguments of a model's call."""
    call: dict[str, Any] = {"max_experts": option.get("maxExperts"), "sure": option.get("sure")}
    if option.get("sample"):
        call |= {"select": "sample", "generator": torch.Generator().manual_seed(option["seed"])}
    return {key: value for key, value in call.items() if value is not None}


def compare_images(model: Model, images: Tensor, option: dict[str, Any], found: list[Any]) -> None:
    """Every image's nodes, in their order, its logits and its multiply-adds are PyTorch's."""
    # draws are of a row: the page has one image, so every image is row 0 here
    rows = torch.zeros(len(images), dtype=torch.int64)
    with torch.no_grad():
        out = model(images, rows=rows, **call_of(option))
        cost = sample_cost(model, images, out)
    nodes = out.routes[0].nodes
    assert [each["ran"] for each in found] == out.num_experts.tolist()
    if nodes is not None:
        looked = out.num_looks if out.num_looks is not None else torch.full_like(out.num_experts, 2)
        expected = [[node for node in row if node >= 0] for row in nodes.tolist()]
        # who was sure before any layer has no sequence in PyTorch
        pairs = zip(found, expected, looked.tolist(), strict=True)
        assert [each["nodes"] for each, _, looks in pairs if looks > 1] == [
            row for row, looks in zip(expected, looked.tolist(), strict=True) if looks > 1
        ]
    for each in found:
        num, most = len(each["nodes"]), model.layer.router.routing.num_nodes
        by_path = "all" if num == most else "budget" if num == option.get("maxExperts") else "output"
        assert each["why"] == ("sure" if each["ran"] < num else by_path)
    if out.num_looks is not None:
        assert [each["num_looks"] for each in found] == out.num_looks.tolist()
    torch.testing.assert_close(torch.tensor([each["logits"] for each in found]), out.logits, atol=LOGITS, rtol=0)
    assert [each["multiply_adds"] for each in found] == cost.multiply_adds.tolist()
