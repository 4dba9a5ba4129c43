"""The tables of what was measured, whether it meets the aims, and a picture of reads and computation."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from experiments import BENCHMARKS, ROOT
from experiments.store.contenders import CONTENDERS
from experiments.store.measure import DRAWN_LIMIT, LIMITS, load_records
from experiments.store.traces import Sizes, load_sizes
from raytraced.tables import markdown_table

BEST = "planned, Belady"
DRAWN = ("LRU on demand", "LRU + previous token's experts", "LRU + one block ahead, never wrong", BEST)
DRAWN_FROM, DRAWN_TOKENS = 6, 4  # which tokens after the first prompt that counts
GUESSERS = [contender.name for contender in CONTENDERS if contender.guesses]


def total_seconds(row: dict[str, Any]) -> float:
    return float(sum(row["seconds"]) + sum(row["first"]))


def bound_seconds(row: dict[str, Any]) -> float:
    """The larger of computing and reading."""
    return float(max(row["compute"], row["bytes_read"] / row["bandwidth"]))


def tokens_per_second(row: dict[str, Any]) -> float:
    return float(len(row["seconds"]) / sum(row["seconds"]))


def peak_share(row: dict[str, Any]) -> float:
    """Peak resident memory above the limit and what was resident before, as a share of these."""
    return float(row["peak"] / (row["memory"] + row["resident"]) - 1)


def speed_row(row: dict[str, Any], sizes: Sizes) -> dict[str, str]:
    """How fast a contender is at one limit."""
    median, slow, fast = np.percentile(1 / np.array(row["seconds"]), [50, 5, 95])
    reading, total = row["bytes_read"] / row["bandwidth"], total_seconds(row)
    is_mapped = row["name"].startswith("mmap")
    return {
        "contender": row["name"],
        "tokens/s": f"{tokens_per_second(row):.2f}",
        "median (5 % … 95 %)": f"{median:.2f} ({slow:.2f} … {fast:.2f})",
        "prompt, s": f"{np.mean(row['first']):.2f}",
        "stalled, s": "–" if is_mapped else f"{row['stall_seconds']:.1f}",
        "took, s": f"{total:.1f}",
        "compute, s": f"{row['compute']:.1f}",
        "reading, s": f"{reading:.1f}",
        "times the bound": f"{total / bound_seconds(row):.2f}",
    }


def read_row(row: dict[str, Any], sizes: Sizes) -> dict[str, str]:
    """What a contender reads at one limit."""
    num_tokens = len(row["seconds"]) + len(row["first"]) * sizes.prefill
    wasted, reads = row["num_wasted"] + row["unused"], row["num_reads"]
    return {
        "contender": row["name"],
        "MB/token": f"{row['bytes_read'] / 1e6 / num_tokens:.1f}",
        "useful reads": str(reads - wasted),
        "wasted reads": str(wasted),
        "hit rate": f"{max(0, 1 - (reads - wasted) / row['num_uses']):.1%}",
        "queue depth": f"{row['num_queued'] / reads:.1f}" if row["num_queued"] and reads else "–",
        "peak memory, MB": f"{row['peak'] / 1e6:,.0f}",
        "above limit + resident": f"{peak_share(row):+.1%}",
        "disk, MB/s": f"{row['bandwidth'] / 1e6:,.0f}",
    }


def judge(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Each aim of aims-store.md at each limit: what was found, and whether it is met."""
    found = {(row["name"], row["limit"]): row for row in rows}
    lines = []
    for limit in LIMITS[:-1]:
        best = found.get((BEST, limit))
        guessers = [found[name, limit] for name in GUESSERS if (name, limit) in found]
        if best is None or len(guessers) < len(GUESSERS):
            continue
        wasted = best["num_wasted"] + best["unused"]
        ratio = total_seconds(best) / bound_seconds(best)
        nearest = max(guessers, key=tokens_per_second)
        ahead = tokens_per_second(best) / tokens_per_second(nearest)
        share = peak_share(best)
        lines += [
            [f"{limit:g} %", "1. wasted reads", str(wasted), "0", "met" if wasted == 0 else "missed"],
            [f"{limit:g} %", "2. times the bound", f"{ratio:.2f}", "≤ 1.15", "met" if ratio <= 1.15 else "missed"],
            [
                f"{limit:g} %",
                f"3. tokens/s over the best guesser ({nearest['name']})",
                f"{ahead:.2f} ×",
                "> 1",
                "met" if ahead > 1 else "missed",
            ],
            [f"{limit:g} %", "4. peak memory", f"{share:+.1%}", "within 5 %", "met" if share <= 0.05 else "missed"],
        ]
    return lines


def as_table(rows: list[dict[str, str]]) -> str:
    return "\n".join(markdown_table(list(rows[0]), [list(row.values()) for row in rows], "---:"))


def report(folder: Path, benchmarks: Path = BENCHMARKS, picture: Path = ROOT / "docs/lab/store.png") -> None:
    """Write the tables and the records that they are of, and draw the timeline."""
    rows, sizes = load_records(folder), load_sizes(folder)
    speeds = np.array([row["bandwidth"] for row in rows]) / 1e6
    aims = markdown_table(["limit", "aim", "found", "wanted", ""], judge(rows))
    count = sizes.num_prompts
    parts = [
        "# Experts read from disk\n\nWritten by `python -m experiments.store report`; [aims-store.md](aims-store.md) says what "
        "is measured, and was written before.\n",
        f"Each row: {count} prompts of {sizes.prefill} tokens and {sizes.decoded} tokens after each, one by one, one thread "
        "that computes and four that read. *Compute* is the same run with all experts in memory, *reading* the bytes read "
        f"over the disk's bandwidth, measured before each row: median {np.median(speeds):,.0f} MB/s (from {speeds.min():,.0f} "
        f"to {speeds.max():,.0f}; 4 threads, whole experts in random order, past the page cache). The *bound* is the larger "
        "of the two. *Prompt* is the time until a prompt was computed: the time to the first token. *Queue depth* is how many "
        "reads are in progress when one begins, itself included. mmap does not say how long it waits.\n",
        "## The aims\n\n" + "\n".join(aims) + "\n",
    ]
    for limit in LIMITS:
        found = [row for row in rows if row["limit"] == limit]
        if found:
            tables = [as_table([make(row, sizes) for row in found]) for make in (speed_row, read_row)]
            parts.append(f"## {limit:g} % of the experts in memory\n\n" + "\n\n".join(tables) + "\n")
    (benchmarks / "store.md").write_text("\n".join(parts))
    kept = [{key: value for key, value in row.items() if key != "timeline"} for row in rows]
    (benchmarks / "store.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    drawn = {row["name"]: row for row in rows if "timeline" in row and row["limit"] == DRAWN_LIMIT}
    if all(name in drawn for name in DRAWN):
        draw([drawn[name] for name in DRAWN], sizes, picture)


def draw(rows: list[dict[str, Any]], sizes: Sizes, path: Path) -> None:
    """The reads and the computation of some tokens, one panel for each contender, on one scale of time."""
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    figure, axes = plt.subplots(len(rows), 1, figsize=(10, 1.9 * len(rows) + 0.8), sharex=True, layout="constrained")
    longest = 0.0
    for axis, row in zip(axes, rows, strict=True):
        longest = max(longest, draw_row(axis, row, sizes))
        axis.set_title(f"{row['name']}: {tokens_per_second(row):.1f} tokens/s", loc="left", fontsize=10)
    axes[-1].set_xlim(0, longest)
    axes[-1].set_xlabel(f"milliseconds; {DRAWN_TOKENS} tokens of one text, a black line where each begins")
    patches = [Patch(color=colour(block, sizes), label=f"block {block + 1}") for block in range(sizes.depth)]
    patches.append(Patch(facecolor="white", edgecolor="black", hatch="/////", label="waits for a read"))
    figure.legend(handles=patches, loc="outside lower center", ncols=5, fontsize=9, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    print(path)


def colour(block: int, sizes: Sizes) -> Any:
    """A block's colour: from dark to light, so that it reads without hues too."""
    import matplotlib as mpl

    return mpl.colormaps["viridis"](block / max(1, sizes.depth - 1))


def draw_row(axis: Any, row: dict[str, Any], sizes: Sizes) -> float:
    """One panel; returns its milliseconds."""
    line, depth = row["timeline"], sizes.depth
    # The first entries are of the prompt.
    first = depth * min(DRAWN_FROM, sizes.decoded - DRAWN_TOKENS)
    blocks = line["blocks"][first : first + depth * DRAWN_TOKENS]
    start, end = blocks[0][0], blocks[-1][1]

    def bar(began: float, ended: float, bottom: float, **style: Any) -> None:
        began, ended = max(began, start), min(ended, end)
        if began < ended:
            axis.broken_barh([(1000 * (began - start), 1000 * (ended - began))], (bottom, 0.85), **style)

    lanes: list[float] = []
    for began, ended, expert in sorted(line["reads"]):
        lane = next((number for number, free in enumerate(lanes) if free <= began), len(lanes))
        lanes[lane : lane + 1] = [ended]
        bar(
            began,
            ended,
            1.2 + lane,
            facecolor=colour(expert // sizes.num_experts, sizes),
            edgecolor="white",
            linewidth=0.4,
        )
    for began, ended, block in blocks:
        bar(began, ended, 0, facecolor=colour(block, sizes), linewidth=0)
    for began, ended in line["stalls"]:
        bar(began, ended, 0, facecolor="white", edgecolor="black", hatch="/////", linewidth=0.3)
    for token in range(DRAWN_TOKENS):
        axis.axvline(1000 * (blocks[token * depth][0] - start), color="black", linewidth=1)
    axis.set_yticks([0.4, *[1.6 + lane for lane in range(len(lanes))]])
    axis.set_yticklabels(["compute", *[f"read {lane + 1}" for lane in range(len(lanes))]], fontsize=8)
    axis.set_ylim(-0.1, 1.2 + len(lanes))
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    return float(1000 * (end - start))
