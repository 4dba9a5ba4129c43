"""Experts that do not fit into memory: what knowing the path beforehand is worth, against guessing it.

    python -m experiments.store prepare FOLDER      # trains two small decoders, writes a store of 2.1 GB
    python -m experiments.store measure FOLDER --limits 12.5 25     # each contender at these limits, on an idle machine
    python -m experiments.store measure FOLDER --limits 50 100
    python -m experiments.store report FOLDER       # benchmarks/store.md, docs/lab/store.png; the aims are in aims-store.md

Which experts a token runs is what small decoders chose after a short training on Python sources, on text that they did not
see. The store's experts have the size of a larger model's and random numbers. Axes: T tokens, L blocks, N experts per block.
"""

import argparse
import copy
import json
import mmap
import os
import random
import shutil
import sysconfig
import threading
import time
from collections import OrderedDict
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from experiments import BENCHMARKS
from raytraced import build, kernels
from raytraced.experts import MLPExperts, Stream
from raytraced.models.gpt import Attention, KVCache
from raytraced.store.budget import ByteBudget
from raytraced.store.experts import StoredExperts
from raytraced.store.layout import GridShape, open_store, write_store
from raytraced.store.pool import ExpertPool, ReadStats, Timeline
from raytraced.store.reader import ExpertReader
from raytraced.tables import markdown_table

DEPTH, NUM_EXPERTS, DIM, HIDDEN = 8, 32, 512, 2048
VOCABULARY, CONTEXT, STEPS, BATCH = 2048, 64, 200, 16
NUM_PROMPTS, PREFILL, DECODED = 4, 8, 20
LIMITS = (12.5, 25.0, 50.0, 100.0)
MAX_READS = 2  # experts that a token may read under the deadline in bytes
DRAWN_LIMIT, DRAWN_TOKENS = 25.0, 4


# Which experts run: traces of two trained decoders


def read_sources() -> tuple[str, str]:
    """Python's own library: most files to train on, and every tenth to take prompts from."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    return "\n".join(t for n, t in enumerate(texts) if n % 10), "\n".join(texts[::10])


def tokenise(training: str, held_out: str) -> tuple[Tensor, Tensor]:
    """Both texts as numbers of words of one BPE."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([training], VOCABULARY, show_progress=False)
    encoded = [torch.tensor(tokenizer.encode(text).ids) for text in (training, held_out)]
    return encoded[0], encoded[1]


def train_small(name: str, tokens: Tensor, **options: Any) -> Any:
    """A small decoder of the same grid, after a short training."""
    torch.manual_seed(0)
    sizes = {"dim": 64, "hidden": 128, "depth": DEPTH, "num_experts": NUM_EXPERTS, "num_heads": 4}
    model: Any = build(name, **sizes, context=CONTEXT, vocab_size=VOCABULARY, **options).train()
    routing = {id(each) for each in [*model.layer.router.parameters(), *model.routing_parameters()]}
    slow = [each for each in model.parameters() if id(each) in routing and name == "gpt-mre"]
    fast = [each for each in model.parameters() if each not in set(slow)]
    optimizer = torch.optim.AdamW([{"params": fast}, {"params": slow, "lr": 2e-4}], 2e-3)
    for step in range(STEPS):
        starts = torch.randint(0, len(tokens) - CONTEXT - 1, (BATCH,))
        rows = torch.stack([tokens[start : start + CONTEXT + 1] for start in starts])
        out = model(rows[:, :-1])
        loss = nn.functional.cross_entropy(out.logits.flatten(0, 1), rows[:, 1:].flatten())
        total = loss if out.loss is None else loss + out.loss
        optimizer.zero_grad()
        total.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == STEPS - 1:
            print(
                f"{name} step {step}: loss {float(loss.detach()):.3f}, {float(out.num_experts.float().mean()):.1f} experts"
            )
    return model.eval()


@torch.no_grad()
def trace(model: Any, prompts_PT: Tensor) -> dict[str, np.ndarray]:
    """Which experts each token of the prompts runs (P, T, L, N), their order, and what a guesser would expect.

    The guess for a block is what its gate says to the input of the block before it.
    """
    router, seen = model.layer.router, []
    route = type(router).route

    def record(self: Any, step: int, hidden_BD: Tensor, draws: Any) -> Any:
        seen.append(hidden_BD)
        return route(self, step, hidden_BD, draws)

    type(router).route = record
    try:
        out = model(prompts_PT)
    finally:
        type(router).route = route
    found = out.routes[0]
    traces = {"active": found.active.bool().numpy()}
    if found.nodes is not None:
        traces["nodes"] = found.nodes.numpy()
    if seen:
        k = router.k
        guesses = [router.gate_logits(block + 1, hidden).topk(k, -1).indices for block, hidden in enumerate(seen[:-1])]
        guess_PTLN = np.zeros_like(traces["active"])
        for block, indices in enumerate(guesses):
            flat = np.zeros((indices.shape[0], NUM_EXPERTS), bool)
            np.put_along_axis(flat, indices.numpy(), True, 1)
            guess_PTLN[:, :, block + 1] = flat.reshape(*prompts_PT.shape, NUM_EXPERTS)
        traces["guess"] = guess_PTLN
    return traces


def prepare(folder: Path) -> None:
    """Train both decoders, note which experts run, and write the store."""
    folder.mkdir(parents=True, exist_ok=True)
    training, held_out = tokenise(*read_sources())
    starts = np.linspace(0, len(held_out) - CONTEXT - 1, NUM_PROMPTS).astype(int)
    prompts = torch.stack([held_out[start : start + CONTEXT] for start in starts])
    traces = {"planned": trace(train_small("gpt-mre", training), prompts)}
    traces["top-k"] = trace(train_small("gpt-top-k", training, k=1), prompts)
    for name, arrays in traces.items():
        np.savez_compressed(folder / f"{name}.npz", **arrays)
        print(name, "experts per token:", arrays["active"].sum((2, 3)).mean())
    num_numbers = MLPExperts(1, 1, DIM, HIDDEN, 1).num_parameters

    def expert(grid: str, layer: int, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(layer * NUM_EXPERTS + number)
        return torch.randn(num_numbers, generator=generator) * DIM**-0.5

    write_store(folder / "store.safetensors", {}, {"experts": GridShape(DEPTH, NUM_EXPERTS)}, expert, "")
    print((folder / "store.safetensors").stat().st_size / 1e9, "GB")


# What decodes: the blocks of a decoder around experts in a store


class Blocks(nn.Module):
    """The attention of a decoder, with random numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2 * DEPTH))
        self.attention = nn.ModuleList(Attention(DIM, 8) for _ in range(DEPTH))


class Seconds(NamedTuple):
    """When parts of a run began and ended."""

    first: list[float]  # seconds of each prompt
    tokens: list[float]  # seconds of each token after a prompt
    blocks: list[tuple[float, float, int]]  # the computation of each block


class Policy:
    """Reads nothing ahead: each block waits for its experts."""

    belady = False

    def __init__(self, experts: StoredExperts, traces: dict[str, np.ndarray]) -> None:
        self.experts, self.traces = experts, traces
        self.plans: list[Any] = []

    def begin(self, active_TLN: Tensor, prompt: int, place: slice) -> tuple[Any, Tensor]:
        """Before the first block: what surrounds the token, and the experts that it runs."""
        return nullcontext(), active_TLN

    def before(self, block: int) -> None:
        """Before each block."""

    def end(self) -> None:
        """After the last block."""
        for plan in self.plans:
            plan.close()
        self.plans = []


class Previous(Policy):
    """Expects each token to run the experts of the token before it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.last: list[int] = []

    def begin(self, active_TLN: Tensor, prompt: int, place: slice) -> tuple[Any, Tensor]:
        if place.start:  # of a new prompt there is no token before
            self.plans.append(self.experts.pool.expect(self.last))
        self.last = self.experts.order(active_TLN[-1:])
        return nullcontext(), active_TLN


class NextBlock(Policy):
    """Knows or guesses the next block's experts when a block begins."""

    guesses = False

    def begin(self, active_TLN: Tensor, prompt: int, place: slice) -> tuple[Any, Tensor]:
        ahead = self.traces["guess"][prompt, place] if self.guesses else active_TLN.numpy()
        self.ahead_LN = ahead.any(0)
        return nullcontext(), active_TLN

    def before(self, block: int) -> None:
        for plan in self.plans[:-1]:
            plan.close()
        self.plans = self.plans[-1:]
        if block + 1 < DEPTH:
            first = (block + 1) * NUM_EXPERTS
            self.plans.append(self.experts.pool.expect([first + e for e in np.flatnonzero(self.ahead_LN[block + 1])]))


class NextGate(NextBlock):
    """Expects of the next block what its gate says to this block's input: right for some experts, wrong for others."""

    guesses = True


class Planned(Policy):
    """Knows the whole path when the token is known; the least recently used expert leaves."""

    def begin(self, active_TLN: Tensor, prompt: int, place: slice) -> tuple[Any, Tensor]:
        return self.experts.reading(active_TLN), active_TLN


class PlannedBelady(Planned):
    """The same, and experts that the path still needs stay."""

    belady = True


class PlannedBytes(PlannedBelady):
    """The same, with a deadline in bytes for each token after a prompt."""

    def begin(self, active_TLN: Tensor, prompt: int, place: slice) -> tuple[Any, Tensor]:
        pool = self.experts.pool
        if place.start == 0:
            self.budget = ByteBudget(MAX_READS * pool.file.run_bytes, pool.file, pool.num_slots)
            for token in range(place.stop):  # a prompt has no deadline, but what it reads is there afterwards
                self.budget.num_reads = len(pool.file.runs)
                self.budget.admit(self.path(prompt, token))
            self.budget.num_reads = MAX_READS
        else:
            kept = self.budget.admit(self.path(prompt, place.start))
            active_TLN = torch.zeros_like(active_TLN)
            active_TLN.view(-1)[kept] = 1
        return self.experts.reading(active_TLN), active_TLN

    def path(self, prompt: int, token: int) -> list[int]:
        nodes = self.traces["nodes"][prompt, token]
        return nodes[nodes >= 0].tolist()


class MappedPool:
    """The whole file mapped into memory, read by the page cache, which is held to the limit expert by expert.

    The kernel offers no limit for one file's pages here: the least recently used expert's pages are given back instead.
    """

    def __init__(self, reader: ExpertReader, memory: int) -> None:
        self.file, self.reader, self.num_slots = reader.file, reader, memory // reader.file.run_bytes
        self.memory = mmap.mmap(reader.descriptor, 0, access=mmap.ACCESS_COPY)
        self.view, self.stats = memoryview(self.memory), ReadStats()
        self.recent: OrderedDict[int, None] = OrderedDict()
        os.posix_fadvise(reader.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def expect(self, order: Any) -> Any:
        return SimpleNamespace(close=lambda: None, covers=lambda experts: True)

    def acquire(self, experts: list[int], plan: Any = None, until: float | None = None) -> list[int]:
        for expert in experts:
            self.stats.num_uses += 1
            if expert not in self.recent:
                self.stats.num_reads += 1
                self.stats.bytes_read += self.file.run_bytes
            self.recent[expert] = None
            self.recent.move_to_end(expert)
            if len(self.recent) > self.num_slots:
                gone = self.file.runs[self.recent.popitem(last=False)[0]].offset
                self.memory.madvise(mmap.MADV_DONTNEED, gone, self.file.run_bytes)
                os.posix_fadvise(self.reader.descriptor, gone, self.file.run_bytes, os.POSIX_FADV_DONTNEED)
        return list(experts)

    def release(self, experts: Any) -> None:
        """Nothing is pinned."""

    def slot(self, expert: int) -> memoryview:
        offset = self.file.runs[expert].offset
        return self.view[offset : offset + self.file.run_bytes]

    def close(self) -> None:
        self.reader.close()


CONTENDERS = {
    "mmap, page cache": ("planned", Policy),
    "LRU on demand": ("planned", Policy),
    "LRU + previous token's experts": ("planned", Previous),
    "LRU + one block ahead, never wrong": ("planned", NextBlock),
    "planned, LRU": ("planned", Planned),
    "planned, Belady": ("planned", PlannedBelady),
    f"planned, Belady, {MAX_READS} reads per token": ("planned", PlannedBytes),
    "top-k: LRU on demand": ("top-k", Policy),
    "top-k: LRU + previous token's experts": ("top-k", Previous),
    "top-k: LRU + next block's gate": ("top-k", NextGate),
}
AT_FULL = ("LRU on demand", "planned, Belady", "top-k: LRU on demand")


@torch.no_grad()
def decode(
    blocks: Blocks, experts: StoredExperts, policy: Policy, times: Seconds, prompt: int, place: slice, cache: KVCache
) -> None:
    """One prompt, or one token after it, through all blocks."""
    active_TLN = torch.from_numpy(policy.traces["active"][prompt, place]).float()
    x_1TD = torch.randn(1, len(active_TLN), DIM, generator=torch.Generator().manual_seed(place.start))
    positions_T = torch.arange(place.start, place.stop)
    layers = experts.unstacked()
    around, active_TLN = policy.begin(active_TLN, prompt, place)
    with around:
        for block in range(DEPTH):
            began = time.perf_counter()
            policy.before(block)
            x_1TD = x_1TD + blocks.attention[block](blocks.norms[2 * block](x_1TD), positions_T, None, cache, block)
            active_T1N = active_TLN[:, block : block + 1]
            weights_T1N = active_T1N / active_T1N.sum(-1, keepdim=True).clamp(min=1)
            hidden_TD = blocks.norms[2 * block + 1](x_1TD)[0]
            x_1TD = x_1TD + kernels.experts(layers[block], hidden_TD, active_T1N, weights_T1N, Stream.LAST)  # type: ignore[arg-type]
            times.blocks.append((began, time.perf_counter(), block))
    policy.end()


def run(blocks: Blocks, experts: StoredExperts, policy: Policy, prompts: list[int]) -> Seconds:
    """Every prompt at once, then its continuation token by token."""
    times = Seconds([], [], [])
    for prompt in prompts:
        cache = KVCache()
        for start in (0, *range(PREFILL, PREFILL + DECODED)):
            place = slice(0, PREFILL) if start == 0 else slice(start, start + 1)
            began = time.perf_counter()
            decode(blocks, experts, policy, times, prompt, place, cache)
            (times.tokens if start else times.first).append(time.perf_counter() - began)
    return times


def disk_bandwidth(reader: ExpertReader, num_threads: int = 4, num_reads: int = 200) -> float:
    """Bytes per second of reads of whole experts in random order, past the page cache."""
    file = reader.file
    order = iter(random.Random(0).sample(range(len(file.runs)), num_reads))
    lock = threading.Lock()

    def work() -> None:
        target = memoryview(mmap.mmap(-1, file.run_bytes))
        while True:
            with lock:
                expert = next(order, None)
            if expert is None:
                return
            os.preadv(reader.descriptor, [target], file.runs[expert].offset)

    threads = [threading.Thread(target=work) for _ in range(num_threads)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return num_reads * file.run_bytes / (time.perf_counter() - began)


def memory_now(name: str) -> int:
    """Bytes that the kernel counts for this process: VmRSS, or VmHWM, the most since it was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def measure_one(folder: Path, name: str, limit: float, blocks: Blocks, checked: bytearray) -> dict[str, Any]:
    """One contender at one limit: the first prompt warms up, the others count."""
    which, make = CONTENDERS[name]
    file = open_store(folder / "store.safetensors")
    memory = int(len(file.runs) * limit / 100) * file.run_bytes
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    resident = memory_now("VmRSS")
    is_mapped = name.startswith("mmap")
    reader = ExpertReader(file, direct=not is_mapped)
    reader._checked[:] = checked  # the file was compared with its checksums before
    pool: Any = MappedPool(reader, memory) if is_mapped else ExpertPool(reader, memory, belady=make.belady)
    like = MLPExperts(1, 1, DIM, HIDDEN, 1)
    like.num_layers, like.num_experts = DEPTH, NUM_EXPERTS
    experts = StoredExperts(pool, 0, like)
    with np.load(folder / f"{which}.npz") as arrays:
        policy = make(experts, dict(arrays))
    if limit == 100.0:
        run(blocks, experts, policy, list(range(NUM_PROMPTS)))  # everything that is used is in memory afterwards
    cold = run(blocks, experts, policy, [0]).first[0]
    before = copy.copy(pool.stats)
    line: Timeline | None = None
    if limit == DRAWN_LIMIT and not is_mapped:
        line = pool.record()
    times = run(blocks, experts, policy, [*range(1, NUM_PROMPTS), 0])
    after, peak = copy.copy(pool.stats), memory_now("VmHWM")
    unused = 0 if is_mapped else len(pool._pool.unused)
    found = {field: getattr(after, field) - getattr(before, field) for field in vars(after)}
    result = {"name": name, "limit": limit, "seconds": times.tokens, "first": times.first, "cold_first": cold}
    result |= {"peak": peak, "resident": resident, "memory": memory, "unused": unused, **found}
    if line is not None:
        result["timeline"] = {"reads": line.reads, "stalls": line.stalls, "blocks": times.blocks}
    pool.close()
    return result


def measure(folder: Path, limits: list[float]) -> None:
    """Measure all contenders at some limits, and the bandwidth of the disk first."""
    torch.set_num_threads(1)
    file = open_store(folder / "store.safetensors")
    reader = ExpertReader(file, direct=True)
    target = memoryview(mmap.mmap(-1, file.run_bytes))
    for expert in range(len(file.runs)):
        reader.read(expert, target)
    blocks, checked = Blocks(), reader._checked
    rows = [{"name": "disk", "limits": limits, "bandwidth": disk_bandwidth(reader)}]
    print(rows[0], flush=True)
    for limit in limits:
        for name in CONTENDERS if limit < 100 else AT_FULL:
            row = measure_one(folder, name, limit, blocks, checked)
            print(name, limit, f"{len(row['seconds']) / sum(row['seconds']):.1f} tokens/s", flush=True)
            rows.append(row)
    rows.append({"name": "disk", "limits": limits, "bandwidth": disk_bandwidth(reader)})
    print(rows[-1], flush=True)
    reader.close()
    with (folder / "measured.jsonl").open("a") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)


# What was found


def summarise(row: dict[str, Any], bandwidth: float, compute: float) -> dict[str, Any]:
    """The figures of one contender at one limit."""
    seconds = np.array(row["seconds"])
    total, num = float(seconds.sum() + sum(row["first"])), len(seconds)
    prompts = len(row["first"])
    bound = max(compute * prompts, row["bytes_read"] / bandwidth)
    speeds = np.percentile(1 / seconds, [50, 5, 95])
    wasted = row["num_wasted"] + row["unused"]
    return {
        "contender": row["name"],
        "tokens/s": f"{num / seconds.sum():.1f}",
        "median (5 % … 95 %)": f"{speeds[0]:.1f} ({speeds[1]:.1f} … {speeds[2]:.1f})",
        "first token, ms": f"{1000 * np.mean(row['first']):.0f}",
        "stalled": "–" if row["name"].startswith("mmap") else f"{row['stall_seconds'] / total:.0%}",
        "MB/token": f"{row['bytes_read'] / 1e6 / (num + prompts * PREFILL):.1f}",
        "reads": row["num_reads"],
        "wasted": wasted,
        "hit rate": f"{1 - row['num_reads'] / row['num_uses']:.1%}",
        "in progress": f"{row['num_queued'] / max(1, row['num_reads']):.1f}" if row["num_queued"] else "–",
        "times the bound": f"{total / bound:.2f}",
        "peak over limit + resident": f"{row['peak'] / (row['memory'] + row['resident']) - 1:+.1%}",
    }


def report(folder: Path) -> None:
    """Write the tables and draw the timeline."""
    rows = [json.loads(line) for line in (folder / "measured.jsonl").read_text().splitlines()]
    bandwidth = float(np.median([row["bandwidth"] for row in rows if row["name"] == "disk"]))
    rows = [row for row in rows if row["name"] != "disk"]
    full = next(row for row in rows if row["limit"] == 100.0 and row["name"] == "planned, Belady")
    compute = (sum(full["seconds"]) + sum(full["first"])) / len(full["first"])
    parts = [
        "# Experts read from disk\n\nWritten by `python -m experiments.store report`; what the runs are judged by is in "
        "[aims-store.md](aims-store.md).\n",
        f"Disk: {bandwidth / 1e6:,.0f} MB/s (4 threads, whole experts in random order, past the page cache, before and after "
        f"the runs, median). All in memory: {1000 * compute / (DECODED + 1):.1f} ms per token or prompt, one thread.\n",
    ]
    for limit in LIMITS:
        found = [summarise(row, bandwidth, compute) for row in rows if row["limit"] == limit]
        if found:
            table = markdown_table(list(found[0]), [[str(value) for value in row.values()] for row in found], "---:")
            parts.append("\n".join([f"## {limit:g} % of the experts in memory", "", *table, ""]))
    (BENCHMARKS / "store.md").write_text("\n".join(parts))
    draw([row for row in rows if "timeline" in row and row["limit"] == DRAWN_LIMIT])


def draw(rows: list[dict[str, Any]]) -> None:
    """The reads and the computation of some tokens, one panel per contender."""
    import matplotlib.pyplot as plt

    shown = [
        row for row in rows if row["name"] in ("LRU on demand", "LRU + one block ahead, never wrong", "planned, Belady")
    ]
    figure, axes = plt.subplots(len(shown), 1, figsize=(9, 5.5), sharex=True, layout="constrained")
    colours, ends = plt.get_cmap("viridis"), []
    for axis, row in zip(np.atleast_1d(axes), shown, strict=True):
        line = row["timeline"]
        # from the sixth token after the first prompt on
        first = DEPTH * 6
        blocks = line["blocks"][first : first + DEPTH * DRAWN_TOKENS]
        start, end = blocks[0][0], blocks[-1][1]
        ends.append(1000 * (end - start))
        lanes: list[float] = []
        for began, ended, expert in sorted(line["reads"]):
            if ended < start or began > end:
                continue
            lane = next((n for n, free in enumerate(lanes) if free <= began), len(lanes))
            lanes[lane : lane + 1] = [ended]
            place = [(1000 * (max(began, start) - start), 1000 * (min(ended, end) - max(began, start)))]
            axis.broken_barh(place, (1.2 + lane, 0.8), color=colours(expert // NUM_EXPERTS / DEPTH))
        for began, ended, block in blocks:
            axis.broken_barh([(1000 * (began - start), 1000 * (ended - began))], (0, 0.9), color=colours(block / DEPTH))
        for began, ended in line["stalls"]:
            if began >= start and ended <= end:
                axis.broken_barh(
                    [(1000 * (began - start), 1000 * (ended - began))], (0, 0.9), color="white", hatch="////"
                )
        for number in range(DRAWN_TOKENS):
            axis.axvline(1000 * (blocks[number * DEPTH][0] - start), color="black", linewidth=0.8)
        axis.set_yticks(
            [0.45, *[1.6 + lane for lane in range(4)]], ["blocks", *[f"read {lane + 1}" for lane in range(4)]]
        )
        axis.set_ylim(-0.1, 5.3)
        axis.set_title(
            f"{row['name']}: {len(row['seconds']) / sum(row['seconds']):.1f} tokens/s", loc="left", fontsize=10
        )
    axes[-1].set_xlabel(
        f"milliseconds; {DRAWN_TOKENS} tokens, black lines; colour: block 1 … {DEPTH}; hatched: waiting for a read"
    )
    axes[-1].set_xlim(0, max(ends))
    path = BENCHMARKS.parent / "docs/lab/store.png"
    figure.savefig(path, dpi=110)
    print(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["prepare", "measure", "report", "remove"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--limits", type=float, nargs="+", default=list(LIMITS))
    arguments = parser.parse_args()
    if arguments.action == "prepare":
        prepare(arguments.folder)
    elif arguments.action == "measure":
        measure(arguments.folder, arguments.limits)
    elif arguments.action == "report":
        report(arguments.folder)
    else:
        shutil.rmtree(arguments.folder)


if __name__ == "__main__":
    main()
