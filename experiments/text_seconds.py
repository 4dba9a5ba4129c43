"""Time language models of a comparison: seconds of a training step and of a generated token, one thread, models in turns.

    python -m experiments.text_seconds          # over bytes: writes results/text/seconds.json
    python -m experiments.text_seconds main     # at the main size: writes results/text-main/seconds.json

Run it alone on an idle machine. A model has the weights of its run with seed 0 where the folder of runs has them, else fresh
ones.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from experiments import RESULTS
from experiments.reproduce.plan import BYTES, OWN_FOLDERS, WINDOWS
from experiments.reproduce.text import SECONDS
from experiments.reproduce.text_aims import TIMED
from experiments.reproduce.variants import PAIR_ROWS, TEXT_ROWS, Variant, more_text_variants
from raytraced.files import write_file
from raytraced.io.saving import load
from raytraced.models.registry import build

NUM_ROUNDS, NUM_TOKENS = 7, 40
VOCAB_SIZES = {"text": 256, "main": 2048}  # of the parts with times
BATCH, CONTEXT = int(BYTES.training["batch_size"]), int(WINDOWS["context"])


def find_weights(variant: Variant, folder: Path) -> Path | None:
    """The trained weights of a model's run with seed 0, if they are there."""
    found = sorted(folder.glob(f"main-enwik8-{variant.label}-s0-*/model.safetensors"))
    return found[-1] if found else None


def make_step(
    variant: Variant, tokens_BT: Tensor, vocab_size: int, weights: Path | None
) -> tuple[Callable[[], None], Callable[[], None]]:
    """A training step and the generation of some tokens, of a model."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"context": CONTEXT, "vocab_size": vocab_size} | BYTES.options | variant.options
    model: Any = load(weights) if weights else build(variant.model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)

    def step() -> None:
        model.train()
        optimizer.zero_grad()
        out = model(tokens_BT[:, :-1])
        loss = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), tokens_BT[:, 1:].flatten())
        (loss if out.loss is None else loss + out.loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def write() -> None:
        model.eval()
        for _ in model.generate(tokens_BT[:1, :8], NUM_TOKENS):
            pass

    return step, write


def measure(
    variants: list[Variant], runs: Path, vocab_size: int = 256, num_rounds: int = NUM_ROUNDS
) -> dict[str, dict[str, float]]:
    """The median seconds of a step and of a token; models take turns, so that a slow minute hits all of them."""
    tokens_BT = torch.randint(vocab_size, (BATCH, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    work = {one.label: make_step(one, tokens_BT, vocab_size, find_weights(one, runs)) for one in variants}
    times: dict[str, dict[str, list[float]]] = {label: {name: [] for name in TIMED} for label in work}
    for number in range(num_rounds + 1):
        for label, parts in work.items():
            for name, run, num in zip(TIMED, parts, (1, NUM_TOKENS), strict=True):
                started = time.perf_counter()
                run()
                if number:  # the first round warms up
                    times[label][name].append((time.perf_counter() - started) / num)
    return {label: {name: median(values) for name, values in each.items()} for label, each in times.items()}


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("experiments.text_seconds", description=__doc__, formatter_class=form)
    parser.add_argument("part", nargs="?", choices=tuple(VOCAB_SIZES), default="text")
    parser.add_argument("--runs", type=Path, help="folder of the trained runs (default: runs beside seconds.json)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = RESULTS / OWN_FOLDERS[options.part]
    runs = options.runs or folder / "runs"
    more = more_text_variants() if options.part == "text" else ()
    variants = [*TEXT_ROWS[options.part](), *more, *PAIR_ROWS[options.part]()]
    found = measure(variants, runs, VOCAB_SIZES[options.part])
    rounded = {label: {name: float(f"{value:.3g}") for name, value in each.items()} for label, each in found.items()}
    about = {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "rounds": NUM_ROUNDS,
        "batch": [BATCH, CONTEXT],
        "fresh": [one.label for one in variants if find_weights(one, runs) is None],
    }
    path = folder / SECONDS
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps({"about": about, "models": rounded}, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
