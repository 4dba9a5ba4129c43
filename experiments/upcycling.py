"""Write benchmarks/upcycling.md: train a small GPT-2, replace its MLP blocks by raytraced experts, and continue training.

Every continuation of a seed starts from the same dense weights and trains on the same windows at the same learning rates.
They take their steps in turns in one process, so that other load on the machine slows all of them alike.
"""

import argparse
import math
import os
import platform
import time
from copy import deepcopy
from pathlib import Path
from statistics import mean, pstdev

import torch
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

import raytraced as rt
from experiments import BENCHMARKS
from raytraced.integrations.replace import FeedForward
from raytraced.tasks.text.loading import bundled

CONTEXT, BATCH = 128, 16
CONTINUATIONS = {
    "dense": {},
    "1 × 4 experts, upcycled": {"num_layers": 1, "num_experts": 4, "upcycle": True},
    "2 × 4 experts, upcycled": {"num_layers": 2, "num_experts": 4, "upcycle": True},
    "2 × 4 experts, fresh": {"num_layers": 2, "num_experts": 4},
}


def windows(text: Tensor, num: int, generator: torch.Generator) -> Tensor:
    """Windows (num, CONTEXT) with random starts."""
    starts = torch.randint(len(text) - CONTEXT, (num, 1), generator=generator)
    return text[starts + torch.arange(CONTEXT)]


def loss_of(model: GPT2LMHeadModel, tokens_BT: Tensor) -> Tensor:
    """The mean loss over all next bytes, in nats."""
    return cross_entropy(model(tokens_BT[:, :-1]).logits.flatten(0, 1), tokens_BT[:, 1:].flatten())


@torch.no_grad()
def evaluate_bits(model: GPT2LMHeadModel, held_BT: Tensor) -> tuple[float, float]:
    """Bits per byte on held-out windows, and the mean number of experts per byte and block."""
    losses, experts = [], []
    for tokens_BT in held_BT.split(BATCH):
        losses.append(float(loss_of(model.eval(), tokens_BT)) / math.log(2))
        blocks = [part for part in model.modules() if isinstance(part, FeedForward)]
        experts += [float(block.active.sum((-1, -2)).mean()) for block in blocks]
    return mean(losses), mean(experts) if experts else float("nan")


def step(model: GPT2LMHeadModel, optimizer: torch.optim.Optimizer, tokens_BT: Tensor, rate: float) -> float:
    """Take one step; return its processor time."""
    started = time.process_time()
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad()
    loss_of(model.train(), tokens_BT).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return time.process_time() - started


def adamw(model: GPT2LMHeadModel) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), weight_decay=0.1)


def measure(seed: int, num_dense: int, num_more: int) -> dict[str, dict[str, float]]:
    """Measure each continuation of one seed."""
    torch.manual_seed(seed)
    order = torch.Generator().manual_seed(seed)
    text = torch.from_numpy(bundled().copy()).long()
    text, held = text[: -len(text) // 10], text[-len(text) // 10 :]
    held_BT = held[: len(held) // CONTEXT * CONTEXT].view(-1, CONTEXT)[::4]
    shape = GPT2Config(
        vocab_size=256, n_positions=CONTEXT, n_embd=96, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None
    )
    dense = GPT2LMHeadModel(shape)
    optimizer = adamw(dense)
    for number in range(num_dense):
        step(dense, optimizer, windows(text, BATCH, order), 3e-3 * min(1, (number + 1) / 50))
    before, _ = evaluate_bits(dense, held_BT)

    models, found = {}, {}
    for name, options in CONTINUATIONS.items():
        models[name] = deepcopy(dense)
        if options:
            rt.replace_feed_forward(models[name], "transformer.h.*.mlp", **options)
        found[name] = {"before": before, "replaced": evaluate_bits(models[name], held_BT)[0], "seconds": 0.0}
        found[name]["parameters"] = sum(parameter.numel() for parameter in models[name].parameters())
    optimizers = {name: adamw(model) for name, model in models.items()}
    for number in range(num_more):
        tokens_BT, rate = windows(text, BATCH, order), 1e-3 * (1 + math.cos(math.pi * number / num_more)) / 2
        for name, model in models.items():
            found[name]["seconds"] += step(model, optimizers[name], tokens_BT, rate)
    for name, model in models.items():
        found[name]["after"], found[name]["experts"] = evaluate_bits(model, held_BT)
    return found


def write_page(found: list[dict[str, dict[str, float]]], num_dense: int, num_more: int) -> str:
    """The text of the page."""

    def bits(name: str, key: str) -> str:
        values = [one[name][key] for one in found]
        return f"{mean(values):.3f} ({pstdev(values):.3f})"

    rows = []
    for name in CONTINUATIONS:
        ratio = mean(one[name]["seconds"] / one["dense"]["seconds"] for one in found)
        experts = mean(one[name]["experts"] for one in found)
        cells = [name, bits(name, "before"), bits(name, "replaced"), bits(name, "after")]
        cells += ["" if math.isnan(experts) else f"{experts:.1f}", f"{found[0][name]['parameters']:,}", f"{ratio:.1f}"]
        rows.append(f"| {' | '.join(cells)} |")
    largest = max(abs(one[name]["replaced"] - one[name]["before"]) for one in found for name in one if "up" in name)
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
    return "\n".join(
        [
            "# Experts that start from a dense block",
            "",
            "Written by `python -m experiments.upcycling`. A GPT-2 of two blocks, 96 wide, is trained on the bundled",
            f"plays, byte by byte, for {num_dense} steps of {BATCH} windows of {CONTEXT} bytes. Then its MLP blocks are",
            f"replaced, and it is trained for {num_more} steps more: the same windows and learning rates in every row.",
            "Upcycled: each expert starts from the block that it replaces. Fresh: as wide, with random weights.",
            "All other options of the layer are its defaults.",
            "",
            f"Bits per byte on held-out text, mean (standard deviation) over {len(found)} seeds; less is better. Replacing",
            f"changes them by {largest:.1e} at most where experts are upcycled. Experts: the mean number per byte and block.",
            "Step: processor time on one thread, dense = 1, in one process.",
            "",
            f"{versions}, raytraced {rt.__version__}; load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores.",
            "",
            "| continued as | before | replaced | trained on | experts | parameters | step |",
            "|---|---:|---:|---:|---:|---:|---:|",
            *rows,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", default=str(BENCHMARKS / "upcycling.md"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--dense", type=int, default=600, help="steps before the blocks are replaced")
    parser.add_argument("--more", type=int, default=300, help="steps after that")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for seed in range(asked.seeds):
        found.append(measure(seed, asked.dense, asked.more))
        print(seed, {name: round(one["after"], 3) for name, one in found[-1].items()}, flush=True)
    Path(asked.output).write_text(write_page(found, asked.dense, asked.more), encoding="utf-8")


if __name__ == "__main__":
    main()
