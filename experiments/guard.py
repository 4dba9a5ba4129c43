"""Record training losses, weights and logits, and compare them bit for bit with those of another version of the code.

    python -m experiments.guard before.json                            # on the code before a change
    python -m experiments.guard after.json --against before.json      # on the code after it

The digests depend on the machine and on PyTorch's version: compare files that were made on one machine.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from raytraced.errors import did_you_mean
from raytraced.models.registry import SHIPPED_IMAGES

NUM_STEPS = 50
# One step per epoch, so that metrics.jsonl holds the loss of every step.
RUNS = {
    "mre": ["--data", "digits", "--model", "mre", "--batch-size", "2000"],
    "mre-paper": ["--data", "digits", "--model", "mre-paper", "--preset", "paper", "--batch-size", "2000"],
    "top-k": ["--data", "digits", "--model", "top-k", "--batch-size", "2000"],
    "gpt-mre": ["--data", "shakespeare", "--model", "gpt-mre", "--data-options.steps", "1",
                "--data-options.eval_tokens", "64"],
}  # fmt: skip


def digest(arrays: Iterable[Any]) -> str:
    """SHA-256 of the bytes of some NumPy arrays."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(array.tobytes())
    return found.hexdigest()


def record_training(name: str, num_steps: int = NUM_STEPS) -> dict[str, Any]:
    """The losses of the first steps of a model with seed 0, and a digest of the weights after them."""
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        options = ["--epochs", str(num_steps), "--seed", "0", "--runs-dir", folder, "--name", name, "--quiet"]
        command = [sys.executable, "-m", "raytraced", "train", *RUNS[name], *options]
        ended = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if ended.returncode:
            raise RuntimeError(f"{' '.join(command[1:])}: ended with code {ended.returncode}: {ended.stderr.strip()}")
        run = Path(folder) / name
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        tensors = load_file(run / "model.safetensors")
    weights = digest(tensors[key].numpy() for key in sorted(tensors))
    return {"losses": [line["train_loss"] for line in lines], "weights": weights}


def record_answers(name: str) -> dict[str, Any]:
    """Digests of a shipped model's logits for 64 images of noise: with one and two threads, one image, and budgets."""
    import torch

    import raytraced as rt

    model = rt.load(name)
    generator = torch.Generator().manual_seed(0)
    shape = (64, *model.card.spec["image_shape"])
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    found: dict[str, Any] = {}
    with torch.no_grad():
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            out = model(images)
            found[f"{num_threads} threads"] = digest((out.logits.numpy(), out.routes[0].active.numpy()))
        torch.set_num_threads(1)
        found["one image"] = digest([model(images[:1]).logits.numpy()])
        found["budgets"] = [digest([model(images, max_experts=budget).logits.numpy()]) for budget in range(4)]
    return found


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The names of all parts of a recording that another one does not have in exactly the same form."""
    return [
        f"{name}: {part}"
        for name, parts in before.items()
        for part in parts
        if after.get(name, {}).get(part) != parts[part]
    ]


def main(arguments: list[str] | None = None) -> int:
    """Record all models, or some; compare with an earlier recording if there is one."""
    names = [*(f"train {name}" for name in RUNS), *(f"answer {name}" for name in sorted(SHIPPED_IMAGES))]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="the JSON file to write")
    parser.add_argument("--against", type=Path, help="a file that another version of the code wrote on this machine")
    parser.add_argument(
        "--only", default=",".join(names), help="some parts, separated by commas (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    chosen = options.only.split(",")
    for name in chosen:
        if name not in names:
            parser.error(f"--only {name}: no such part; {did_you_mean(name, names)}")
    before = json.loads(options.against.read_text(encoding="utf-8")) if options.against else {}
    found = {}
    for name in chosen:
        kind, _, model = name.partition(" ")
        found[name] = record_training(model) if kind == "train" else record_answers(model)
    options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if not options.against:
        return 0
    differing = compare({name: before[name] for name in before if name in chosen}, found)
    print("\n".join(["differs:", *differing]) if differing else "all recorded values are equal")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
