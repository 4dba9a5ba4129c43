"""Simulations that check the theory: rays forwarded at random until they are absorbed, and exponential waiting times.

Axes: B batch, L layers, N experts per layer, O = N + 1 outlets of a gate (the next layer's N nodes, then the output node),
M = L·N nodes, K = M + 1 places (the nodes, then the output node), R rays. Where gates are conditioned on the input, every
function takes what they add to their logits (B, L − 1, N, O), as `RoutingNetwork.forward` does.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from raytraced.routing import RoutingNetwork


class Waiting(NamedTuple):
    """The order and the times in which nodes activate."""

    nodes: Tensor  # (B, M), padded with -1
    times: Tensor  # (B, M), padded with inf
    stop_time: Tensor  # (B,): when the output node activated


def _pick(probs_RO: Tensor, generator: torch.Generator | None) -> Tensor:
    """One outlet per ray (R,)."""
    return torch.multinomial(probs_RO, 1, generator=generator)[:, 0]


@torch.no_grad()
def simulate(
    routing: RoutingNetwork,
    entry: Tensor,
    active: Tensor,
    num_rays: int,
    generator: torch.Generator | None = None,
    input_logits: Tensor | None = None,
) -> Tensor:
    """Forward rays at random through active nodes until each is absorbed.

    A gate's split depends on the rates that reach it, so these rates are the routing network's; the rays check where they
    lead.

    Args:
        routing: The routing network.
        entry: Rates that enter the first layer (B, N).
        active: Active set (B, L, N), 0 or 1.
        num_rays: Number of rays per sample.
        generator: Source of the draws; None uses PyTorch's own.
        input_logits: What input-conditioned gates add to their logits (B, L − 1, N, O).

    Returns:
        How many rays ended at each place (B, K).
    """
    if num_rays < 1:
        raise ValueError(f"num_rays={num_rays}: must be at least 1")
    (B, N), L, M = entry.shape, routing.num_layers, routing.num_nodes
    counts_BK = torch.zeros(B, M + 1, dtype=torch.int64)
    splits = gate_splits(routing, entry, active, input_logits)
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


def gate_splits(
    routing: RoutingNetwork, entry: Tensor, active: Tensor, input_logits: Tensor | None = None
) -> list[Tensor]:
    """Compute how the gates divide what reaches them.

    Args:
        routing: The routing network.
        entry: Rates that enter the first layer (B, N).
        active: Active set (B, L, N), 0 or 1.
        input_logits: What input-conditioned gates add to their logits (B, L − 1, N, O).

    Returns:
        For each layer but the last, the shares (B, N, O) that its gates forward to each outlet; they sum to 1.
    """
    inputs_BNK = entry[:, :, None]
    splits = []
    for layer in range(routing.num_layers - 1):
        logits_BNO = torch.einsum("nok,bnk->bno", routing.gate_weight(layer).to(entry), inputs_BNK)
        if input_logits is not None:
            logits_BNO = logits_BNO + input_logits[:, layer].to(entry)
        splits.append(logits_BNO.softmax(-1))
        sent_BNO = (inputs_BNK.sum(-1) * active[:, layer])[:, :, None] * splits[-1]
        inputs_BNK = sent_BNO[:, :, :-1].transpose(1, 2)
    return splits


def sent_rates(
    routing: RoutingNetwork, entry: Tensor, active: Tensor, input_logits: Tensor | None = None
) -> list[Tensor]:
    """Compute the firing rate that every node sends to every outlet.

    Args:
        routing: The routing network.
        entry: Rates that enter the first layer (B, N).
        active: Active set (B, L, N), 0 or 1; inactive nodes send nothing.
        input_logits: What input-conditioned gates add to their logits (B, L − 1, N, O).

    Returns:
        For each layer the rates (B, N, O); the last layer's nodes send all to the output node.
    """
    num = routing.num_experts
    to_output_BNO = torch.eye(num + 1)[-1].to(entry).expand(len(entry), num, -1)
    splits = [*gate_splits(routing, entry, active, input_logits), to_output_BNO]
    passed_BLN = routing(entry, active, input_logits).nodes * active
    return [
        passed_BN[:, :, None] * split_BNO for passed_BN, split_BNO in zip(passed_BLN.unbind(1), splits, strict=True)
    ]


@torch.no_grad()
def waiting_times(
    routing: RoutingNetwork,
    entry: Tensor,
    generator: torch.Generator | None = None,
    input_logits: Tensor | None = None,
) -> Waiting:
    """Let every node wait an exponential time with its firing rate as the rate, which grows as nodes above activate.

    A node activates when the rate that it has gathered over time reaches a threshold, drawn for each node from Exp(1). The
    process ends when the output node activates.

    Args:
        routing: The routing network.
        entry: Rates that enter the first layer (B, N).
        generator: Source of the thresholds; None uses PyTorch's own.
        input_logits: What input-conditioned gates add to their logits (B, L − 1, N, O).

    Returns:
        The nodes in order of activation and the times at which they activated.
    """
    (B, N), L, M = entry.shape, routing.num_layers, routing.num_nodes
    thresholds_BK = torch.empty(B, M + 1, dtype=torch.float64).exponential_(generator=generator)
    gathered_BK = torch.zeros_like(thresholds_BK)
    active_BM = torch.zeros(B, M, dtype=torch.float64)
    nodes_BM = torch.full((B, M), -1)
    times_BM = torch.full((B, M), torch.inf, dtype=torch.float64)
    now_B, running_B = torch.zeros(B, dtype=torch.float64), torch.ones(B, dtype=torch.bool)
    for step in range(M + 1):
        rates = routing(entry.double(), active_BM.view(B, L, N), input_logits)
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
