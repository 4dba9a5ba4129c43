"""`raytraced generate`: a language model goes on with a text; torch is imported only when it begins."""

import codecs
import json as json_format
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from raytraced.commands.training import find_source
from raytraced.words import check_seed

if TYPE_CHECKING:
    from raytraced.models.gpt import GPT

RAMP = ((1, 244), (2, 39), (3, 43), (4, 76), (6, 148), (8, 220), (12, 208), (1 << 30, 197))
"""experts a block, up to so many, and the colour of a terminal's 256 that stands for them: from cold to hot"""


def generate(
    run: str,
    prompt: str,
    length: int = 500,
    temperature: float = 0.8,
    top_p: float = 1.0,
    seed: int = 0,
    max_experts: int | None = None,
    weights: Literal["last", "best"] = "last",
    device: str = "auto",
    output: str = "runs",
    json: bool = False,
) -> None:
    """Let a trained language model go on with a text; in a terminal each byte has the colour of the experts it took.

    Args:
        prompt: The text to go on with; "" begins at a new line.
        length: How many bytes (of a model with a tokenizer: tokens) to add.
        temperature: Below 1 likely bytes become likelier, above 1 less so; 0 takes the likeliest.
        top_p: Draw among the likeliest bytes that together have this probability.
        seed: Of the draws.
        max_experts: At most so many experts a byte in each block.
        json: Print the text and the experts of each byte as JSON, at the end.
    """
    if length < 0:
        raise ValueError(f"length={length}: must not be negative")
    check_seed(seed)
    source = find_source(run, output, weights)
    from raytraced.models.gpt import GPT
    from raytraced.saving import load
    from raytraced.training.world import choose_device

    model = load(source)
    if not isinstance(model, GPT):
        raise ValueError(f"{run}: is {model.name}, which knows no text; generate needs a model of the family gpt")
    if max_experts is not None and not model.answers_along_the_way:
        raise ValueError(f"max_experts={max_experts}: only for models that answer along the way, {model.name} does not")
    parts = go_on(model.to(choose_device(device)), prompt, length, temperature, top_p, seed, max_experts)
    if json:
        found = list(parts)
        text = b"".join(part for part, _ in found)
        told = {"prompt": prompt, "text": text.decode(errors="replace"), "experts": [num for _, num in found]}
        print(json_format.dumps(told))
    else:
        show(prompt, parts, len(model.blocks), in_colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ)


def go_on(
    model: "GPT",
    prompt: str,
    length: int,
    temperature: float,
    top_p: float,
    seed: int,
    max_experts: int | None,
) -> Iterator[tuple[bytes, int]]:
    """The bytes of each new token, and how many experts it took, as they come."""
    import torch

    from raytraced.tasks.text.tokens import Codec

    codec, device = Codec(model), model.embedding.weight.device
    tokens = codec.encode(os.fsencode(prompt)) or codec.encode(b"\n")
    if len(tokens) > model.context:
        unit = "bytes" if model.tokenizer is None else "tokens"
        raise ValueError(f"prompt: has {len(tokens):,} {unit}; {model.name} looks at {model.context:,}: give fewer")
    drawn = model.generate(
        torch.tensor([tokens], device=device),
        length,
        temperature=temperature,
        top_p=top_p,
        max_experts=max_experts,
        generator=torch.Generator(device).manual_seed(seed),
    )
    for token_1, num_1 in drawn:
        yield codec.bytes_of[int(token_1)], int(num_1)


def show(prompt: str, parts: Iterator[tuple[bytes, int]], num_blocks: int, in_colour: bool) -> None:
    """Print a text as it comes; a character of several bytes has the colour of its last one."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    started = False
    for content, num in parts:
        if not started:  # a prompt that is refused is not printed first
            print(prompt, end="", flush=True)
            started = True
        text = decoder.decode(content)
        if text and in_colour:
            # a byte that a terminal would obey is shown as one that it cannot show
            text = "".join(one if one.isprintable() or one in "\n\t" else "\ufffd" for one in text)
            text = f"\033[38;5;{colour_of(num / num_blocks)}m{text}\033[0m"
        print(text, end="", flush=True)
    print(decoder.decode(b"", final=True))
    if in_colour:
        starts = [0, *(most + 1 for most, _ in RAMP)]
        names = [
            str(first) if first >= most else f"{first}-{most}" for first, (most, _) in zip(starts, RAMP, strict=False)
        ]
        names[-1] = f"{starts[-2]}+"
        told = " ".join(f"\033[38;5;{code}m{name}\033[0m" for name, (_, code) in zip(names, RAMP, strict=True))
        print(f"experts a block: {told}", file=sys.stderr)


def colour_of(experts: float) -> int:
    """The number of a terminal's colour."""
    return next(code for most, code in RAMP if experts <= most)
