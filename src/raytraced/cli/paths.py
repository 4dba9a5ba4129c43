"""`raytraced paths`: the table of paths of a language model; torch is imported only when the command runs."""

import os
from json import dumps
from pathlib import Path
from typing import Literal

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

    A path is a list of block:expert pairs in order of activation, numbered from 1. The table exists for models whose path
    depends on the token alone; such a model reads its paths from the table.

    Args:
        run: A run folder of a language model, its name in the runs folder, a model file, or a shipped model.
        output: File to write the whole table into: .csv for a row per token, .npz for arrays (default: only print).
        text: Print the rows of the tokens of this text, instead of the first rows.
        max_experts: Largest number of experts per token, all blocks together.
        json: Print the whole table as JSON, or that of --text, one object per line.
    """
    require(text != "", "text", "''", "must have at least one character; leave it out for the first rows")
    path = None if output is None else Path(output)
    if path is not None:
        require(path.suffix in (".csv", ".npz"), "output", output, "must end in .csv or .npz")
        require(path.parent.is_dir(), "output", output, f"folder {str(path.parent)!r} does not exist")
    source = find_source(run, runs_dir, weights)
    from raytraced.io.saving import load
    from raytraced.models.gpt import GPT
    from raytraced.models.paths import path_words
    from raytraced.tables import make_table, print_table
    from raytraced.tasks.text.tokens import Codec

    model = load(source, memory=memory)
    if not isinstance(model, GPT):
        reason = "an image has no token, so its path is known only when it is run"
        raise ValueError(f"{run}: is {model.name}, which is not a language model; {reason}")
    table = model.paths(stop=stop, experts=experts, effort=effort, max_experts=max_experts)
    codec = Codec(model)
    words = [repr(content)[1:] for content in codec.bytes_of]
    if path is not None:
        table.save(path, words)
    steps, nums, macs = table.steps(), table.num_active.tolist(), table.macs.tolist()
    tokens = range(model.vocab_size) if text is None else codec.encode_prompt("text", os.fsencode(text))
    shown = list(tokens) if json or text is not None else list(tokens)[:FIRST_ROWS]
    rows = [{"token": token, "text": words[token], "experts": nums[token], "macs": macs[token]} for token in shown]
    if json:
        for row, token in zip(rows, shown, strict=True):
            print(dumps(row | {"path": [[block + 1, expert + 1] for block, expert in steps[token]]}))
        return
    lines = [row | {"path": path_words(steps[token])} for row, token in zip(rows, shown, strict=True)]
    print_table(make_table(lines))
    mean, num = sum(nums) / len(nums), len(set(map(tuple, steps)))
    known = (
        f"{len(nums):,} tokens have {num:,} different paths; their mean, each token counted once, is {mean:.2f} experts"
    )
    print(known if text is not None or len(shown) == len(nums) else f"{known}; the first {len(shown)} are shown")
    if path is not None:
        print(printable(path))
