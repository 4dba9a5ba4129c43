"""`raytraced generate`: a language model continues a text; torch is imported only when the command runs."""

import codecs
import json as json_format
import os
import sys
from collections.abc import Iterator
from math import inf
from typing import Literal

from raytraced.cli.budgets import check_budget_options
from raytraced.cli.training import find_source
from raytraced.errors import check_seed, require

RAMP = (
    (1, "0-1", 244), (2, "2", 39), (3, "3", 43), (4, "4", 76), (6, "5-6", 148),
    (8, "7-8", 220), (12, "9-12", 208), (inf, "13+", 197),
)  # fmt: skip
"""largest number of experts per block, its label, and its colour (one of a terminal's 256): from cold to hot"""


def generate(
    run: str,
    prompt: str,
    length: int = 500,
    temperature: float = 0.8,
    top_p: float = 1.0,
    seed: int = 0,
    max_experts: int | None = None,
    stop: float | None = None,
    experts: float | None = None,
    effort: float | None = None,
    weights: Literal["last", "best"] = "last",
    device: str = "auto",
    memory: str | None = None,
    max_bytes: str | None = None,
    max_ms: float | None = None,
    draft_experts: int | None = None,
    draft_tokens: int = 4,
    runs_dir: str = "runs",
    json: bool = False,
) -> None:
    """Continue a text with a language model; in a terminal, colours show how many experts each byte ran.

    Args:
        run: A run folder of a language model, its name in the runs folder, or a model.safetensors file.
        prompt: The text to continue; "" starts at a new line.
        length: Number of bytes to add (tokens, for a model with a tokenizer).
        temperature: Below 1 likely bytes become more likely, above 1 less; 0 takes the most likely.
        top_p: Draw among the most likely bytes that together have this probability.
        seed: Seed of the draws.
        max_experts: Largest number of experts per byte, all blocks together.
        max_bytes: Of a store: the most bytes that a byte or token may read, such as 20MB; further experts are left out.
        max_ms: Of a store: milliseconds that a pass waits for experts; those that have not arrived by then are left out.
        draft_experts: Draft with at most this many experts per byte, check several drafts in one pass; default: no drafts.
        draft_tokens: Number of bytes or tokens that are drafted before each check.
        json: Print the text and the experts of each byte as JSON at the end.
    """
    require(length >= 0, "length", length, "must not be negative")
    check_seed(seed)
    source = find_source(run, runs_dir, weights)
    import torch

    from raytraced.io.saving import load
    from raytraced.models.gpt import GPT
    from raytraced.store.reader import parse_size
    from raytraced.tasks.text.tokens import Codec
    from raytraced.training.world import choose_device

    model = load(source, memory=memory)
    if not isinstance(model, GPT):
        raise ValueError(
            f"{run}: is {model.name}, which is not a language model; generate needs a model of the family gpt"
        )
    check_budget_options(model, source, max_experts=max_experts, stop=stop, experts=experts, effort=effort)
    codec, place = Codec(model), choose_device(device, model)
    tokens = codec.encode_prompt("prompt", os.fsencode(prompt))
    drawn = model.to(place).generate(
        torch.tensor([tokens], device=place),
        length,
        temperature=temperature,
        top_p=top_p,
        max_experts=max_experts,
        stop=stop,
        experts=experts,
        effort=effort,
        generator=torch.Generator(place).manual_seed(seed),
        max_bytes=None if max_bytes is None else parse_size("max_bytes", max_bytes),
        max_ms=max_ms,
        draft_experts=draft_experts,
        draft_tokens=draft_tokens,
    )
    parts = ((codec.bytes_of[int(one.tokens)], int(one.num_experts)) for one in drawn)
    if json:
        found = list(parts)
        text = b"".join(part for part, _ in found)
        result = {"prompt": prompt, "text": text.decode(errors="replace"), "experts": [num for _, num in found]}
        print(json_format.dumps(result))
    else:
        print_along(prompt, parts, len(model.blocks), in_colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ)


def print_along(prompt: str, parts: Iterator[tuple[bytes, int]], num_blocks: int, in_colour: bool) -> None:
    """Print a text as it is generated; a character of several bytes has the colour of its last one.

    Control characters, which a terminal would obey, are shown as \ufffd; --json keeps them.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for number, (content, num) in enumerate(parts):
        if number == 0:  # a prompt that is refused is not printed first
            print(without_controls(prompt), end="", flush=True)
        text = without_controls(decoder.decode(content))
        if text and in_colour:
            text = paint(text, next(colour for most, _, colour in RAMP if num / num_blocks <= most))
        print(text, end="", flush=True)
    print(decoder.decode(b"", final=True))
    if in_colour:
        print("experts per block:", *(paint(words, colour) for _, words, colour in RAMP), file=sys.stderr)


def without_controls(text: str) -> str:
    """The same text with \ufffd for each control character but line breaks and tabs."""
    return "".join(one if one.isprintable() or one in "\n\t" else "\ufffd" for one in text)


def paint(text: str, colour: int) -> str:
    """A text in one of a terminal's colours."""
    return f"\033[38;5;{colour}m{text}\033[0m"
