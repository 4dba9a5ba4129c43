"""What drafts give when a model writes one text: accepted drafts, and seconds beside those without drafts.

    raytraced train --data shakespeare --model gpt-mre --anytime-loss 0.25 --epochs 6 --threads 1 --name anytime
    raytraced train --data shakespeare --model gpt-mre --epochs 6 --threads 1 --name usual
    python -m experiments.drafting runs/anytime runs/usual      # writes benchmarks/drafting.md; some minutes

Each text is 96 bytes after 32 bytes of the validation text, one text at a time, one thread, temperature 0; the texts with
drafts are compared with those without, byte by byte and in their experts. All ways are timed in turns, text after text; the
ratio is that of the sums over all texts, its range that of single texts. *Bytes per check*: bytes per pass with the
full budget. *Accepted*: accepted drafts in percent of all drafts.
"""

import argparse
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from experiments import BENCHMARKS
from experiments.reproduce.tables import Table
from raytraced import GPT, load
from raytraced.tasks.text.loading import bundled

PROMPT, LENGTH, TEXTS = 32, 96, 6
DRAFT_EXPERTS, DRAFT_TOKENS = (0, 1, 2, 3), (2, 4)
Way = tuple[int, int] | None


def write_text(model: GPT, prompt_1T: torch.Tensor, way: Way) -> tuple[float, list[tuple[int, int]], int]:
    """The seconds of a text, its bytes with their experts, and how many were accepted drafts."""
    options: dict[str, Any] = {} if way is None else {"draft_experts": way[0], "draft_tokens": way[1]}
    began = perf_counter()
    drawn = list(model.generate(prompt_1T, LENGTH, temperature=0.0, **options))
    seconds = perf_counter() - began
    return seconds, [(int(one.tokens), int(one.num_experts)) for one in drawn], sum(one.drafted for one in drawn)


def measure(name: str, model: GPT, prompts: list[torch.Tensor]) -> list[list[str]]:
    """The rows of a model."""
    ways: list[Way] = [None, *((experts, tokens) for experts in DRAFT_EXPERTS for tokens in DRAFT_TOKENS)]
    seconds: dict[Way, list[float]] = {way: [] for way in ways}
    accepted = dict.fromkeys(ways, 0)
    num_experts = list[int]()
    for way in ways:
        write_text(model, prompts[0], way)  # warm up
    for prompt in prompts:
        expected = list[tuple[int, int]]()
        for way in ways:
            took, text, drafted = write_text(model, prompt, way)
            seconds[way].append(took)
            accepted[way] += drafted
            expected = expected or text
            if text != expected:
                raise SystemExit(f"experiments.drafting: {name} with {way} writes another text")
        num_experts += [num for _, num in expected]
    num, plain = LENGTH * len(prompts), seconds[None]
    mean = sum(num_experts) / len(num_experts)
    rows = [[name, f"{mean:.1f}, no drafts", "", "1.0", "", f"{num / sum(plain):.0f}", "1.00"]]
    for way in ways[1:]:
        assert way is not None
        checks = num - accepted[way]
        drafts = (checks - len(prompts)) * way[1]  # the pass over a prompt checks none; the last drafts may be fewer
        ratios = [one / other for one, other in zip(seconds[way], plain, strict=True)]
        ratio = f"{sum(seconds[way]) / sum(plain):.2f} ({min(ratios):.2f} … {max(ratios):.2f})"
        share = f"{100 * accepted[way] / drafts:.0f} %"
        speed = f"{num / sum(seconds[way]):.0f}"
        rows.append([name, str(way[0]), str(way[1]), f"{num / checks:.1f}", share, speed, ratio])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    text = bundled().tolist()
    held = text[int(0.9 * len(text)) : int(0.95 * len(text))]
    starts = range(0, len(held) - PROMPT, (len(held) - PROMPT) // TEXTS)
    prompts = [torch.tensor([held[start : start + PROMPT]]) for start in starts][:TEXTS]
    rows = []
    for run in args.runs:
        model = load(run)
        assert isinstance(model, GPT)
        rows += measure(run.name, model, prompts)
    note = (__doc__ or "").partition("drafting.md; some minutes\n\n")[2].strip()
    header = ["run", "draft experts", "draft tokens", "bytes per check", "accepted", "bytes per second", "time"]
    table = Table("Drafts with a small budget", header, rows, note + " *Time*: over that without drafts.")
    source = "Written by `python -m experiments.drafting`."
    (BENCHMARKS / "drafting.md").write_text(
        "\n".join([table.markdown().replace("###", "#", 1), source, ""]), encoding="utf-8"
    )
    print(table.markdown())


if __name__ == "__main__":
    main()
