"""The tables of what was measured, whether it meets the aims, and a picture of reads and computation."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from experiments import BENCHMARKS, ROOT
from experiments.store.contenders import CONTENDERS, PlannedBytes
from experiments.store.measure import DRAWN_LIMIT, LIMITS, load_records
from experiments.store.traces import Sizes, load_sizes
from raytraced.tables import markdown_table

BEST = "planned, Belady"
DRAWN = ("LRU on demand", "LRU + previous token's experts", "LRU + one block ahead, never wrong", BEST)
DRAWN_FROM, DRAWN_TOKENS = 6, 4  # which tokens after the first prompt that counts
GUESSERS = [contender.name for contender in CONTENDERS if contender.guesses]


class Result:
    """What was measured of one contender at one limit, in all rounds."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows, self.name, self.limit = rows, rows[0]["name"], rows[0]["limit"]

    def mean(self, field: str) -> float:
        """The mean over rounds of a number."""
        return float(np.mean([row[field] for row in self.rows]))

    def each(self, field: str) -> list[float]:
        """The values of all rounds, one after the other."""
        return [value for row in self.rows for value in row[field]]

    @property
    def total(self) -> float:
        """Seconds of a round."""
        return float(sum(self.each("seconds") + self.each("first")) / len(self.rows))

    @property
    def reading(self) -> float:
        """Seconds that the disk needs for what a round reads."""
        return float(np.mean([row["bytes_read"] / row["bandwidth"] for row in self.rows]))

    @property
    def times_bound(self) -> list[float]:
        """Of each round: its seconds over the larger of computing and reading."""
        return [
            float((sum(row["seconds"]) + sum(row["first"])) / max(row["compute"], row["bytes_read"] / row["bandwidth"]))
            for row in self.rows
        ]

    @property
    def tokens_per_second(self) -> float:
        return float(1 / np.mean(self.each("seconds")))

    @property
    def wasted(self) -> float:
        """Reads of a round that nothing was computed with."""
        # What is left unused at the end may have been read before the measurement began.
        return min(self.mean("num_wasted") + self.mean("unused"), self.mean("num_reads"))

    @property
    def peak_share(self) -> float:
        """Peak resident memory above the limit and what was resident before, as a share of these; of the worst round."""
        return float(max(row["peak"] / (row["memory"] + row["resident"]) - 1 for row in self.rows))


def compute_key(row: dict[str, Any]) -> Any:
    """What is computed: the choices of a decoder, and what a deadline leaves of them at a limit."""
    contender = next(each for each in CONTENDERS if each.name == row["name"])
    return (contender.traces, row["limit"]) if contender.policy is PlannedBytes else contender.traces


def group(rows: list[dict[str, Any]]) -> dict[tuple[str, float], Result]:
    """The records by contender and limit, in the order of contenders.

    Other processes can only lengthen a computation: the seconds that tokens compute are the least that were measured for them.
    """
    least: dict[Any, float] = {}
    for row in rows:
        least[compute_key(row)] = min(row["compute"], least.get(compute_key(row), row["compute"]))
    rows = [row | {"compute": least[compute_key(row)]} for row in rows]
    names = [contender.name for contender in CONTENDERS]
    found: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: (row["limit"], names.index(row["name"]), row["round"])):
        found.setdefault((row["name"], row["limit"]), []).append(row)
    return {key: Result(each) for key, each in found.items()}


def speed_row(result: Result, sizes: Sizes) -> dict[str, str]:
    """How fast a contender is at one limit."""
    median, slow, fast = np.percentile(1 / np.array(result.each("seconds")), [50, 5, 95])
    is_mapped, ratios = result.name.startswith("mmap"), result.times_bound
    return {
        "contender": result.name,
        "tokens/s": f"{result.tokens_per_second:.2f}",
        "median (5 % … 95 %)": f"{median:.2f} ({slow:.2f} … {fast:.2f})",
        "prompt, s": f"{np.mean(result.each('first')):.2f}",
        "stalled, s": "–" if is_mapped else f"{result.mean('stall_seconds'):.1f}",
        "took, s": f"{result.total:.1f}",
        "compute, s": f"{result.mean('compute'):.1f}",
        "reading, s": f"{result.reading:.1f}",
        "times the bound": f"{np.median(ratios):.2f} ({min(ratios):.2f} … {max(ratios):.2f})",
    }


def read_row(result: Result, sizes: Sizes) -> dict[str, str]:
    """What a contender reads at one limit."""
    num_tokens = (len(result.each("seconds")) + len(result.each("first")) * sizes.prefill) / len(result.rows)
    reads, useful = result.mean("num_reads"), result.mean("num_reads") - result.wasted
    return {
        "contender": result.name,
        "MB/token": f"{result.mean('bytes_read') / 1e6 / num_tokens:.1f}",
        "useful reads": f"{useful:.0f}",
        "wasted reads": f"{result.wasted:.0f}",
        "hit rate": f"{max(0, 1 - useful / result.mean('num_uses')):.1%}",
        "queue depth": f"{result.mean('num_queued') / reads:.1f}" if result.mean("num_queued") and reads else "–",
        "peak memory, MB": f"{max(row['peak'] for row in result.rows) / 1e6:,.0f}",
        "above limit + resident": f"{result.peak_share:+.1%}",
        "disk, MB/s": f"{result.mean('bandwidth') / 1e6:,.0f}",
    }


def check_aims(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Each aim of aims-store.md at each limit: what was found, and whether it is met."""
    found, lines = group(rows), []
    for limit in LIMITS[:-1]:
        best = found.get((BEST, limit))
        guessers = [found[name, limit] for name in GUESSERS if (name, limit) in found]
        if best is None or len(guessers) < len(GUESSERS):
            continue
        nearest = max(guessers, key=lambda result: result.tokens_per_second)
        ratio, ahead = float(np.median(best.times_bound)), best.tokens_per_second / nearest.tokens_per_second
        aims = (
            ("1. wasted reads", f"{best.wasted:g}", "0", best.wasted == 0),
            ("2. times the bound", f"{ratio:.2f}", "≤ 1.15", ratio <= 1.15),
            (f"3. tokens/s over the best guesser ({nearest.name})", f"{ahead:.2f} ×", "> 1", ahead > 1),
            ("4. peak memory", f"{best.peak_share:+.1%}", "within 5 %", best.peak_share <= 0.05),
        )
        lines += [[f"{limit:g} %", *words, "met" if is_met else "missed"] for *words, is_met in aims]
    return lines


def as_table(rows: list[dict[str, str]]) -> str:
    return "\n".join(markdown_table(list(rows[0]), [list(row.values()) for row in rows], "---:"))


def report(folder: Path, benchmarks: Path = BENCHMARKS, picture: Path = ROOT / "docs/lab/store.png") -> None:
    """Write the tables and the records that they are of, and draw the timeline."""
    rows, sizes = load_records(folder), load_sizes(folder)
    speeds = np.array([row["bandwidth"] for row in rows]) / 1e6
    aims = markdown_table(["limit", "aim", "found", "wanted", ""], check_aims(rows))
    count = sizes.num_prompts
    others = np.array([row["others"] for row in rows])
    num_rounds = len({row["round"] for row in rows})
    parts = [
        "# Experts read from disk\n\nWritten by `python -m experiments.store report`; [aims-store.md](aims-store.md) says what "
        "is measured, and was written before.\n",
        f"Each round: {count} prompts of {sizes.prefill} tokens and {sizes.decoded} tokens after each, one by one, one thread "
        f"that computes and four that read. Rounds: {num_rounds}; contenders take turns. Speeds and percentiles are of the "
        "tokens of all rounds, seconds and reads the mean of a round, the times of the bound the median of the rounds "
        "(least … most). *Compute* is the same run with all experts in memory, the least of all rounds; *reading* is the "
        "bytes read over the disk's bandwidth (4 threads, whole experts in random order, past the page cache), measured "
        f"before each row: median {np.median(speeds):,.0f} MB/s, from {speeds.min():,.0f} to {speeds.max():,.0f}. The *bound* "
        "is the larger of the two. *Prompt* is the time until a prompt was computed: the time to the first token. *Queue "
        "depth* is how many reads are in progress when one begins, itself included. mmap does not say how long it waits. "
        f"Other processes used {others.max():.2f} cores at most during a run (median {np.median(others):.2f}).\n",
        "## The aims\n\n" + "\n".join(aims) + "\n",
    ]
    results = group(rows)
    for limit in LIMITS:
        found = [result for (_, its), result in results.items() if its == limit]
        if found:
            tables = [as_table([make(result, sizes) for result in found]) for make in (speed_row, read_row)]
            parts.append(f"## {limit:g} % of the experts in memory\n\n" + "\n\n".join(tables) + "\n")
    (benchmarks / "store.md").write_text("\n".join(parts))
    kept = [{key: value for key, value in row.items() if key != "timeline"} for row in rows]
    (benchmarks / "store.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    drawn = {
        row["name"]: row for row in rows if "timeline" in row and row["limit"] == DRAWN_LIMIT and row["round"] == 0
    }
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
        axis.set_title(
            f"{row['name']}: {Result([row]).tokens_per_second:.1f} tokens/s in this round", loc="left", fontsize=10
        )
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
