"""Print tables of docs/lab/gpu.md: operations and memory traffic of the sequence kernels per sample, least times.

Untrained gates find sequences on the CPU, then the kernels' loops are counted, block by block. Axes: B batch, T steps,
L layers, N experts per layer, P the next power of two, R rows of a block.
"""

from typing import NamedTuple

import torch

from raytraced import activation_sequence
from raytraced.kernels.triton_sequence import launch
from raytraced.routing import RoutingNetwork

GRIDS, BATCH = ((4, 8), (8, 16), (8, 32), (8, 64)), 128
# How sequences are found, and whether they are drawn.
WAYS = {"Greedy, without gradients of draws, input-conditioned gates": False, "Drawn, with reinmax": True}
# Single-precision operations and bytes of memory a second, from NVIDIA's data sheets (SXM, 80 GB).
GPUS = {"A100": (19.5e12, 2.0e12), "H100": (67e12, 3.35e12)}


class Counted(NamedTuple):
    """For one sample: floating-point operations, bytes of device memory, bytes that caches serve."""

    kernels: float
    memory: float
    cache: float


def count(L: int, N: int, drawn: bool) -> tuple[float, dict[str, Counted]]:
    """The mean number of active nodes, and what forward and backward take."""
    torch.manual_seed(0)
    routing, size = RoutingNetwork(L, N), launch(L, N)
    entry_BN = torch.randn(BATCH, N).softmax(-1)
    with torch.no_grad():
        select = "sample" if drawn else "greedy"
        route = activation_sequence(routing, entry_BN, select=select, generator=torch.Generator().manual_seed(1))
    P, R, T = size.P, size.R, L * N
    tile = R * P * P
    flops, cache, seen = ({"forward": 0, "backward": 0} for _ in range(3))
    for block in range(0, BATCH, R):
        nodes_RT, num_R = route.nodes[block : block + R], route.num_active[block : block + R]
        last = int(num_R.max())
        for step in range(last + 1):
            taken = nodes_RT[:, :step]
            senders_L = [len(set(taken[taken // N == layer].tolist())) for layer in range(L)]
            deep = max([layer + 1 for layer in range(L) if senders_L[layer]], default=0)
            for name, gated in (("forward", min(deep, L - 1)), ("backward", min(deep + 1, L - 1))):
                if name == "backward" and step < last and not drawn:
                    continue  # one pass, under the final set
                splits, sends = gated, sum(senders_L[: max(min(gated, L - 2), 0)])
                # softmax: largest, difference, power, sum, quotient; then times the rate, and the sum over senders
                flops[name] += splits * 7 * tile + sends * 3 * tile
                cache[name] += sends * 4 * N * (N + 1)
                if name == "backward":
                    gates = sum(senders_L[1:gated])
                    flops[name] += splits * 6 * tile + gates * 7 * tile
                    cache[name] += splits * 3 * 4 * tile + gates * 3 * 4 * N * (N + 1)
                if not drawn:  # added to the logits; backward, its gradient is read and written
                    input_logits = splits * R * N * (N + 1)
                    flops[name] += input_logits * (1 if name == "forward" else 2)
                    cache[name] += 4 * input_logits if step < last else 0
                    seen[name] += 4 * input_logits * (1 if name == "forward" else 3) if step == last else 0
    once = 4 * N + 2 * 4 * L * N + 4 + 8  # entry, two of (L, N), the output's rate, the count
    memory = {"forward": once + 2 * 8 * T, "backward": once + 4 * N + 8 * float(route.num_active.float().mean())}
    if not drawn:
        memory["backward"] += 4 * (L - 1) * N * (N + 1)  # zeros for gates that were not used
    memory = {name: each + seen[name] / BATCH for name, each in memory.items()}
    found = {name: Counted(flops[name] / BATCH, memory[name], cache[name] / BATCH) for name in flops}
    return float(route.num_active.float().mean()), found


def lines() -> list[str]:
    """The tables in Markdown."""
    head = "| grid | nodes | pass | operations | memory, bytes | caches, bytes |" + "".join(
        f" {gpu}, ns |" for gpu in GPUS
    )
    found = []
    for way, drawn in WAYS.items():
        found += [f"{way}:", "", head, "|---|---:|---|---:|---:|---:|" + "---:|" * len(GPUS)]
        for L, N in GRIDS:
            nodes, passes = count(L, N, drawn)
            for name, one in passes.items():
                least = (1e9 * max(one.kernels / speed, one.memory / width) for speed, width in GPUS.values())
                times = "".join(f" {_short(time)} |" for time in least)
                amounts = f"{_short(one.kernels)} | {_short(one.memory)} | {_short(one.cache)}"
                found.append(f"| {L}×{N} | {nodes:.0f} | {name} | {amounts} |{times}")
        found.append("")
    return found[:-1]


def _short(number: float) -> str:
    for unit, letter in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= unit:
            return f"{number / unit:.2g}{letter}" if number < 100 * unit else f"{number / unit:.0f}{letter}"
    return f"{number:.0f}" if number >= 10 else f"{number:.1f}"


if __name__ == "__main__":
    print("\n".join(lines()))
