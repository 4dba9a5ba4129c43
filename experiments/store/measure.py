"""Tokens through a decoder whose experts are in a store, timed: one record for each contender and limit.

Axes: T tokens, L blocks, N experts per block, D width.
"""

import copy
import json
import mmap
import os
import random
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from experiments.store.contenders import CONTENDERS, Contender, MappedPool, PlannedBytes, Policy
from experiments.store.traces import STORE, Sizes, load_sizes, load_traces
from raytraced import kernels
from raytraced.experts import MLPExperts, Stream
from raytraced.models.attention import Attention
from raytraced.models.caches import KVCache
from raytraced.store.experts import StoredExperts
from raytraced.store.layout import StoreFile, open_store
from raytraced.store.pool import ExpertPool
from raytraced.store.reader import ExpertReader, aligned_memory

LIMITS = (12.5, 25.0, 50.0, 100.0)
MOST_OTHERS = 0.5  # cores that other processes may use during a run; else it is repeated, at most so often:
MOST_TRIES = 2
ROUNDS = 3  # a disk that others use too is not equally fast all the time: every contender runs in each round
DRAWN_LIMIT = 25.0  # of which the picture is
RECORDS = "measured.jsonl"


class Blocks(nn.Module):
    """The attention of a decoder, with random numbers."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norms = nn.ModuleList(nn.LayerNorm(sizes.dim) for _ in range(2 * sizes.depth))
        self.attention = nn.ModuleList(Attention(sizes.dim, 8) for _ in range(sizes.depth))


class Seconds(NamedTuple):
    """How long parts of a run took, and when blocks began and ended."""

    first: list[float]  # seconds of each prompt
    tokens: list[float]  # seconds of each token after a prompt
    blocks: list[tuple[float, float, int]]  # the computation of each block

    @property
    def total(self) -> float:
        return sum(self.first) + sum(self.tokens)


class Decoder:
    """The blocks of a decoder around experts in a store, of which a policy says what is read ahead."""

    def __init__(self, sizes: Sizes, blocks: Blocks, pool: Any, policy: type[Policy], traces: Any, slots: int) -> None:
        like = MLPExperts(1, 1, sizes.dim, sizes.hidden, 1)
        like.num_layers, like.num_experts = sizes.depth, sizes.num_experts
        self.sizes, self.blocks = sizes, blocks
        self.experts = StoredExperts(pool, 0, like)
        self.policy = policy(self.experts, traces, slots)

    def run(self, prompts: Iterable[int]) -> Seconds:
        """Every prompt at once, then its continuation token by token."""
        times, prefill = Seconds([], [], []), self.sizes.prefill
        for prompt in prompts:
            cache = KVCache()
            for start in (0, *range(prefill, prefill + self.sizes.decoded)):
                place = slice(0, prefill) if start == 0 else slice(start, start + 1)
                began = time.perf_counter()
                self.decode(prompt, place, cache, times)
                (times.tokens if start else times.first).append(time.perf_counter() - began)
        return times

    @torch.no_grad()
    def decode(self, prompt: int, place: slice, cache: KVCache, times: Seconds) -> None:
        """One prompt, or one token after it, through all blocks."""
        blocks, policy = self.blocks, self.policy
        active_TLN = torch.from_numpy(policy.traces["active"][prompt, place]).float()
        generator = torch.Generator().manual_seed(place.start)
        x_1TD = torch.randn(1, len(active_TLN), self.sizes.dim, generator=generator)
        positions_T = torch.arange(place.start, place.stop)
        context, active_TLN = policy.begin(active_TLN, prompt, place)
        with context:
            for block, layer in enumerate(self.experts.unstacked()):
                began = time.perf_counter()
                policy.before(block)
                x_1TD = x_1TD + blocks.attention[block](blocks.norms[2 * block](x_1TD), positions_T, None, cache, block)
                active_T1N = active_TLN[:, block : block + 1]
                weights_T1N = active_T1N / active_T1N.sum(-1, keepdim=True).clamp(min=1)
                hidden_TD = blocks.norms[2 * block + 1](x_1TD)[0]
                x_1TD = x_1TD + kernels.experts(layer, hidden_TD, active_T1N, weights_T1N, Stream.LAST)  # type: ignore[arg-type]
                times.blocks.append((began, time.perf_counter(), block))
        policy.end()


def disk_bandwidth(reader: ExpertReader, num_threads: int = 4, num_reads: int = 200) -> float:
    """Bytes per second of reads of whole experts in random order, past the page cache."""
    file = reader.file
    num_reads = min(num_reads, len(file.runs))
    order = iter(random.Random(0).sample(range(len(file.runs)), num_reads))
    lock = threading.Lock()

    def work() -> None:
        target = memoryview(aligned_memory(file.run_bytes))
        target[:: mmap.PAGESIZE] = bytes(len(target[:: mmap.PAGESIZE]))  # the system gives memory at the first write
        while True:
            with lock:
                expert = next(order, None)
            if expert is None:
                return
            os.preadv(reader.descriptors[0], [target], file.runs[expert].offset)

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


class OtherProcesses:
    """How many cores other processes use, from the moment when this is made: they make a measurement worthless."""

    def __init__(self) -> None:
        self.began, self.busy = time.perf_counter(), self.busy_seconds()

    @staticmethod
    def busy_seconds() -> float:
        """Seconds that the cores worked for processes other than this one; time that a hypervisor took is not among them."""
        user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split()[1:9])
        own = os.times()
        return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK") - own.user - own.system

    def cores(self) -> float:
        """Their mean number since then."""
        return (self.busy_seconds() - self.busy) / (time.perf_counter() - self.began)


class Bench:
    """A prepared folder, whose store was compared with its checksums."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.sizes = folder, load_sizes(folder)
        self.blocks = Blocks(self.sizes)
        self.file: StoreFile = open_store(folder / STORE)
        self.reader = ExpertReader(self.file, direct=True)
        target = memoryview(aligned_memory(self.file.run_bytes))
        for expert in range(len(self.file.runs)):
            self.reader.read(expert, target)
        self.computed: dict[Any, float] = {}  # seconds, by the decoder's choices and what a deadline leaves of them

    def open_pool(self, slots: int, mapped: bool, belady: bool) -> Any:
        """Memory for so many experts, nothing in it."""
        reader = ExpertReader(self.file, direct=not mapped)
        reader._checked[:] = self.reader._checked  # checksums cost time at the first read only
        memory = slots * self.file.run_bytes
        return MappedPool(reader, memory) if mapped else ExpertPool(reader, memory, belady=belady)

    def run_alone(self, contender: Contender, limit: float) -> dict[str, Any]:
        """The same as `run_one`; a run that other processes disturb is repeated, and the least disturbed one counts."""
        tries: list[dict[str, Any]] = []
        while not tries or (tries[-1]["others"] > MOST_OTHERS and len(tries) < MOST_TRIES):
            tries.append(self.run_one(contender, limit))
        return min(tries, key=lambda record: float(record["others"])) | {"tries": len(tries)}

    def run_one(self, contender: Contender, limit: float) -> dict[str, Any]:
        """One contender at one limit: the first prompt warms up, the others count."""
        name, which, policy, mapped, _ = contender
        bandwidth = disk_bandwidth(self.reader)
        slots = int(len(self.file.runs) * limit / 100)
        traces = load_traces(self.folder, which)
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        resident = memory_now("VmRSS")
        pool = self.open_pool(slots, mapped, policy.belady)
        decoder = Decoder(self.sizes, self.blocks, pool, policy, traces, slots)
        prompts = range(self.sizes.num_prompts)
        if limit == 100.0:
            decoder.run(prompts)  # everything that is used is in memory afterwards
        cold = decoder.run([0]).first[0]
        before = copy.copy(pool.stats)
        line, others = None if mapped else pool.record(), OtherProcesses()
        times = decoder.run([*prompts[1:], 0])
        disturbed = others.cores()
        after, peak = copy.copy(pool.stats), memory_now("VmHWM")
        record = {"name": name, "limit": limit, "seconds": times.tokens, "first": times.first, "cold_first": cold}
        record |= {"peak": peak, "resident": resident, "memory": slots * self.file.run_bytes, "bandwidth": bandwidth}
        record |= {field: getattr(after, field) - getattr(before, field) for field in vars(after)}
        record["others"] = disturbed
        record["unused"] = 0 if mapped else len(pool._pool.unused)
        if line is not None and limit == DRAWN_LIMIT:
            record["timeline"] = {"reads": line.reads, "stalls": line.stalls, "blocks": times.blocks}
        pool.close()
        del decoder, pool
        key = (which, slots) if policy is PlannedBytes else which  # the others compute the same at every limit
        if key not in self.computed:
            self.computed[key] = self.compute_seconds(policy if policy is PlannedBytes else Policy, traces, slots)
        return record | {"compute": self.computed[key]}

    def compute_seconds(self, policy: type[Policy], traces: Any, slots: int) -> float:
        """Seconds that the same tokens take with all experts in memory, none of them read ahead."""
        pool = self.open_pool(len(self.file.runs), mapped=False, belady=True)
        decoder = Decoder(self.sizes, self.blocks, pool, policy, traces, slots)
        prompts = range(self.sizes.num_prompts)
        decoder.run(prompts)
        total = decoder.run([*prompts[1:], 0]).total
        pool.close()
        return total


def measure(folder: Path, limits: Iterable[float], minutes: float = float("inf"), rounds: int = ROUNDS) -> None:
    """Measure what was not measured yet, and note each record as soon as it is there."""
    began, records = time.monotonic(), folder / RECORDS
    torch.set_num_threads(1)
    known = {(each["name"], each["limit"], each["round"]) for each in load_records(folder)}
    wanted = [
        (contender, limit, number)
        for number in range(rounds)
        for limit in limits
        for contender in CONTENDERS
        if (contender.name, limit, number) not in known
    ]
    if not wanted:
        print("everything is measured")
        return
    bench = Bench(folder)
    for done, (contender, limit, number) in enumerate(wanted):
        if time.monotonic() - began > 60 * minutes:
            print(f"{len(wanted) - done} records are missing: run the command again")
            return
        record = bench.run_alone(contender, limit) | {"round": number}
        with records.open("a") as stream:
            stream.write(json.dumps(record) + "\n")
        speed = len(record["seconds"]) / sum(record["seconds"])
        total = sum(record["seconds"]) + sum(record["first"])
        bound = max(record["compute"], record["bytes_read"] / record["bandwidth"])
        words = f"{speed:.2f} tokens/s, {total / bound:.2f} of the bound, disk {record['bandwidth'] / 1e6:,.0f} MB/s"
        print(f"{contender.name}, {limit:g} %, round {number + 1}: {words}", flush=True)


def load_records(folder: Path) -> list[dict[str, Any]]:
    """What was measured in a folder."""
    path = folder / RECORDS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
