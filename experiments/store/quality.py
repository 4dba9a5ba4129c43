"""What a deadline in bytes costs: bits per byte of the shipped language model when a byte may read so many experts."""

import json
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from experiments import BENCHMARKS, ROOT
from raytraced import load, save
from raytraced.io.routes import model_digest
from raytraced.models.gpt import GPT
from raytraced.store.layout import open_store
from raytraced.tables import markdown_table
from raytraced.tasks.registry import catalogued_data, find_task
from raytraced.training.evaluation import evaluate, predict_batch
from raytraced.training.world import World

MODEL = "mre-text"
LIMITS, READS = (12.5, 25.0, 50.0), (0, 1, 2, 4, 8)
QUOTED_LIMIT = 25.0
PAGE = ROOT / "docs/lab/store.md"
BEGIN, END = "<!-- quality: `python -m experiments.store quality` writes these lines -->", "<!-- /quality -->"


def measure_quality(
    model: GPT, limits: Sequence[float] = LIMITS, reads: Sequence[int] = READS, **data_options: Any
) -> dict[str, Any]:
    """Bits per byte and experts per byte on test data, without a deadline and at each limit and number of reads.

    Args:
        model: A shipped language model, in memory.
        limits: Percent of its experts that fit into memory.
        reads: Experts that a byte may read.
        data_options: `eval_tokens`: how many test bytes are read.
    """
    name = catalogued_data(model.card)
    assert name is not None
    task = find_task(name)
    data: Any = task.load_for(model, name, None, **data_options)

    def figures(asked: GPT, **options: int) -> dict[str, float]:
        def predict(*words: Any, **given: Any) -> Any:
            return predict_batch(asked, *words, **given, **options)

        found = evaluate(task, data, "test", predict, World(0, 1, torch.device("cpu")), batch_size=64)
        return {"bits": found["bits_per_byte"], "experts": found["mean_experts"]}

    rows = []
    with TemporaryDirectory() as folder:
        path = Path(folder) / "store.safetensors"
        save(model, path, store=True)
        run_bytes, num_experts = open_store(path).run_bytes, len(open_store(path).runs)
        for limit in limits:
            stored: Any = load(path, memory=int(limit / 100 * num_experts) * run_bytes)
            rows += [{"limit": limit, "reads": num} | figures(stored, max_bytes=num * run_bytes) for num in reads]
            stored.layer.experts.pool.close()
    about = {"model": model.name, "sha256": model_digest(model), "data": name, "expert_bytes": run_bytes}
    about |= {"num_experts": num_experts, "window": data.splits["test"].context, "windows": len(data.splits["test"])}
    return about | {"all": figures(model), "rows": rows}


def quality_page(found: dict[str, Any]) -> str:
    """The table of what was measured."""
    reads = sorted({row["reads"] for row in found["rows"]})
    lines = []
    for limit in sorted({row["limit"] for row in found["rows"]}):
        cells = {
            row["reads"]: f"{row['bits']:.3f} ({row['experts']:.2f})" for row in found["rows"] if row["limit"] == limit
        }
        slots = int(limit / 100 * found["num_experts"])
        lines.append([f"{limit:g} % ({slots} experts)", *(cells[num] for num in reads), all_cell(found)])
    head = ["in memory", *(f"{num} reads" if num != 1 else "1 read" for num in reads), "no deadline"]
    return (
        "# A deadline in bytes: what it costs\n\n"
        "Written by `python -m experiments.store quality`.\n\n"
        f"Bits per byte of the shipped `{MODEL}` on test bytes of `{found['data']}` (experts per byte in brackets), when each "
        f"byte may read so many of the {found['num_experts']} experts (`max_bytes`; {found['expert_bytes']:,} bytes each). "
        f"Every text of {found['window']} bytes begins with no expert in memory; there are {found['windows']} texts.\n\n"
        + "\n".join(markdown_table(head, lines, "---:"))
        + f"\n\nWeights: SHA-256 `{found['sha256']}`.\n"
    )


def all_cell(found: dict[str, Any]) -> str:
    """The figures without a deadline."""
    return f"{found['all']['bits']:.3f} ({found['all']['experts']:.2f})"


def quality_words(found: dict[str, Any]) -> str:
    """Two sentences with the figures of one limit, as docs/lab/store.md quotes them."""
    rows = [row for row in found["rows"] if row["limit"] == QUOTED_LIMIT]
    bits, nums = (
        " / ".join(each) for each in ([f"{row['bits']:.2f}" for row in rows], [str(row["reads"]) for row in rows])
    )
    text = (
        f"- **What a deadline in bytes costs.** With {QUOTED_LIMIT:g} % of its experts in memory, the shipped `{MODEL}` takes "
        f"{bits} bits per byte when a byte may read {nums} experts, and {found['all']['bits']:.2f} without a deadline "
        f"({found['all']['experts']:.1f} experts per byte of {found['num_experts']}). "
        "The other limits are in [benchmarks/store-quality.md](../../benchmarks/store-quality.md)."
    )
    return textwrap.fill(text, 100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def with_words(page: str, found: dict[str, Any]) -> str:
    """A page with the sentences between its two comments replaced."""
    between = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    return between.sub(lambda _: f"{BEGIN}\n{quality_words(found)}\n{END}", page)


def quality(benchmarks: Path = BENCHMARKS, page: Path = PAGE) -> None:
    """Measure the shipped model; write the table, its figures, and the sentences of the page."""
    torch.set_num_threads(1)
    model: Any = load(MODEL)
    found = measure_quality(model)
    (benchmarks / "store-quality.json").write_text(json.dumps(found, indent=2) + "\n")
    (benchmarks / "store-quality.md").write_text(quality_page(found))
    page.write_text(with_words(page.read_text(encoding="utf-8"), found), encoding="utf-8")
    print(benchmarks / "store-quality.md")
