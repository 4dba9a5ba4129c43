"""The theory made visible: rays forwarded at random until they are absorbed, and nodes that wait for their first ray.

Axes: B batch, L layers, N experts a layer, M = L·N nodes, K = M + 1 places (the nodes, then the output node), R rays.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from raytraced.routing import RoutingNetwork


class Waiting(NamedTuple):
    """In which order and when nodes activate: (B, M) padded with -1 and inf, and when the output node ended it (B,)."""

    nodes: Tensor
    times: Tensor
    stop_time: Tensor


def _pick(probs_RO: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.multinomial(probs_RO, 1, generator=generator)[:, 0]


@torch.no_grad()
def simulate(
    routing: RoutingNetwork,
    entry: Tensor,
    active: Tensor,
    num_rays: int,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Forward rays through active nodes by their gates until each is absorbed; how many ended at each place (B, K).

    A gate's split depends on the rates that reach it, so the rates are the routing's own; the rays check where they lead.
    """
    if num_rays < 1:
        raise ValueError(f"num_rays={num_rays}: must be at least 1")
    (B, N), L, M = entry.shape, routing.num_layers, routing.num_nodes
    counts_BK = torch.zeros(B, M + 1, dtype=torch.int64)
    splits = gate_splits(routing, entry, active)
    for sample in range(B):
        at_R = _pick(entry[sample].expand(num_rays, N), generator)  # the node of this layer where each ray is
        for layer in range(L):
            passes_R = active[sample, layer, at_R] > 0
            counts_BK[sample, :M] += torch.bincount(layer * N + at_R[~passes_R], minlength=M)
            at_R = at_R[passes_R]
            if layer == L - 1 or len(at_R) == 0:
                counts_BK[sample, M] += len(at_R)
                break
            outlet_R = _pick(splits[layer][sample, at_R], generator)
            counts_BK[sample, M] += int((outlet_R == N).sum())
            at_R = outlet_R[outlet_R < N]
    return counts_BK


def gate_splits(routing: RoutingNetwork, entry: Tensor, active: Tensor) -> list[Tensor]:
    """The probabilities (B, N, N + 1) with which the gates of each layer but the last forward a ray."""
    inputs_BNK = entry[:, :, None]
    splits = []
    for layer in range(routing.num_layers - 1):
        split_BNO = torch.einsum("nok,bnk->bno", routing.gate_weight(layer).to(entry), inputs_BNK).softmax(-1)
        splits.append(split_BNO)
        sent_BNO = (inputs_BNK.sum(-1) * active[:, layer])[:, :, None] * split_BNO
        inputs_BNK = sent_BNO[:, :, :-1].transpose(1, 2)
    return splits


@torch.no_grad()
def waiting_times(routing: RoutingNetwork, entry: Tensor, generator: torch.Generator | None = None) -> Waiting:
    """Let every node wait an exponential time with its firing rate as the rate, which grows as nodes above activate.

    A node activates when the rate it has gathered over time reaches a threshold ~ Exp(1) of its own; all ends when the
    output node does.
    """
    (B, N), L, M = entry.shape, routing.num_layers, routing.num_nodes
    thresholds_BK = torch.empty(B, M + 1, dtype=torch.float64).exponential_(generator=generator)
    gathered_BK = torch.zeros_like(thresholds_BK)
    active_BM = torch.zeros(B, M, dtype=torch.float64)
    nodes_BM = torch.full((B, M), -1)
    times_BM = torch.full((B, M), torch.inf, dtype=torch.float64)
    now_B, running_B = torch.zeros(B, dtype=torch.float64), torch.ones(B, dtype=torch.bool)
    for step in range(M + 1):
        rates = routing(entry.double(), active_BM.view(B, L, N))
        rates_BK = torch.cat((rates.nodes.flatten(1) * (1 - active_BM), rates.output[:, None]), -1)
        left_BK = torch.where(rates_BK > 0, (thresholds_BK - gathered_BK) / rates_BK, torch.inf)
        wait_B, next_B = left_BK.min(-1)
        now_B = torch.where(running_B, now_B + wait_B, now_B)
        running_B = running_B & (next_B < M)
        if not bool(running_B.any()):
            break
        gathered_BK = gathered_BK + rates_BK * wait_B[:, None]
        nodes_BM[running_B, step], times_BM[running_B, step] = next_B[running_B], now_B[running_B]
        active_BM[running_B, next_B[running_B]] = 1.0
    return Waiting(nodes_BM, times_BM, now_B)
