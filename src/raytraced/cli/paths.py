"""`raytraced paths`: the table of paths of a language model; torch is imported only when the command runs."""

import os
from collections.abc import Sequence
from json import dumps
from pathlib import Path
from typing import Any, Literal

from raytraced.cli.budgets import check_budget_options
from raytraced.cli.training import find_source
from raytraced.errors import printable, require

FIRST_ROWS = 20  # of a table that is printed


def paths(
    run: str,
    output: str | None = None,
    text: str | None = None,
    max_experts: int | None = None,
    stop: float | None = None,
    experts: float | None = None,
    effort: float | None = None,
    weights: Literal["last", "best"] = "last",
    memory: str | None = None,
    runs_dir: str = "runs",
    json: bool = False,
) -> None:
    """Print the table of paths of a language model: which experts each word of its vocabulary runs, in which order.

    A path is a list of block:expert pairs in order of activation, numbered from 1. The table exists for models whose paths
    depend on tokens alone; such a model reads its paths from the table. Where a path depends on two tokens (path_tokens=2), a
    row is the path of a token that follows itself; --text has the paths of its tokens as they follow each other.

    Args:
        run: A run folder of a language model, its name in the runs folder, a model file, or a shipped model.
        output: File to write the whole table into: .csv for a row per token, .npz for arrays (default: only print).
        text: Print the paths of the tokens of this text, instead of the first rows.
        max_experts: Largest number of experts per token, all blocks together.
        json: Print the whole table as JSON, or that of --text, one object per line.
    """
    require(text != "", "text", "''", "must have at least one character; leave it out for the first rows")
    path = None if output is None else Path(output)
    if path is not None:
        require(path.suffix in (".csv", ".npz"), "output", output, "must end in .csv or .npz")
        require(path.parent.is_dir(), "output", output, f"folder {str(path.parent)!r} does not exist")
    source = find_source(run, runs_dir, weights)
    import torch

    from raytraced.io.saving import load
    from raytraced.models.gpt import GPT
    from raytraced.models.paths import path_words
    from raytraced.tables import make_table, print_table
    from raytraced.tasks.text.tokens import Codec

    model = load(source, memory=memory)
    if not isinstance(model, GPT):
        reason = "an image has no token, so its path is known only when it is run"
        raise ValueError(f"{run}: is {model.name}, which is not a language model; {reason}")
    check_budget_options(model, source, stop=stop, experts=experts, effort=effort)
    budget: dict[str, Any] = {"stop": stop, "experts": experts, "effort": effort, "max_experts": max_experts}
    table, codec = model.paths(**budget), Codec(model)
    words = [repr(content)[1:] for content in codec.bytes_of]
    tokens = list(range(model.vocab_size))
    shown, all_steps = table, table.steps()
    steps_shown = all_steps
    if text is not None:
        tokens = codec.encode_prompt("text", os.fsencode(text))
        shown = model.plan(torch.tensor(tokens), **budget)
        steps_shown = shown.steps()
    if path is not None:
        table.save(path, words)
    num_shown = len(tokens) if json or text is not None else FIRST_ROWS
    figures = zip(tokens, shown.num_active.tolist(), shown.macs.tolist(), strict=True)
    rows = [{"token": token, "text": words[token], "experts": num, "macs": macs} for token, num, macs in figures]
    pairs = list(zip(rows, steps_shown, strict=True))[:num_shown]
    if json:
        for row, steps in pairs:
            print(dumps(row | {"path": [[block + 1, expert + 1] for block, expert in steps]}))
        return
    print_table(make_table([row | {"path": path_words(steps)} for row, steps in pairs]))
    print(describe_table(all_steps, len(pairs) if text is None else None))
    if model.path_tokens > 1 and text is None:
        print("a row is the path of a token that follows itself: blocks 2, 4, … take those of the token before")
    if path is not None:
        print(printable(path))


def describe_table(steps: Sequence[Sequence[object]], num_shown: int | None) -> str:
    """How many paths a table has, how long they are, and how many of its rows are printed; None: rows of a text."""
    mean = f"their mean, each token counted once, is {sum(map(len, steps)) / len(steps):.2f} experts"
    known = f"{len(steps):,} tokens have {len(set(map(tuple, steps))):,} different paths; {mean}"
    return known if num_shown in (None, len(steps)) else f"{known}; the first {num_shown} are shown"
