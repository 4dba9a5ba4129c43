"""How experts are used: how evenly, and what that does to the answers along the sequence.

Axes: L layers, N experts a layer, K budgets (0, 1, … experts).
"""

import math

import torch
from torch import Tensor


def load_entropy(load_LN: Tensor) -> float:
    """How evenly the load lies within layers: the entropy of each layer's shares, 1 if even, averaged by the layer's load.

    Weighted by load, so that a layer that hardly anyone reaches says little about the balance of the whole.
    """
    load_LN = load_LN.double()
    num_experts, total = load_LN.shape[1], float(load_LN.sum())
    if num_experts == 1 or total == 0:
        return 1.0
    layer_L1 = load_LN.sum(1, keepdim=True)
    share_LN = load_LN / layer_L1.clamp_min(1e-300)
    entropy_L = -torch.special.xlogy(share_LN, share_LN).sum(1) / math.log(num_experts)
    return float((entropy_L * layer_L1[:, 0]).sum() / total)


def grid_entropy(load_LN: Tensor) -> float:
    """How evenly the load lies over the whole grid: 1 if every expert gets as much as any other."""
    return load_entropy(load_LN.reshape(1, -1))


def num_dead(load_LN: Tensor, least: float = 1e-3) -> int:
    """How many experts fewer than one sample in a thousand activates."""
    return int((load_LN < least).sum())


def largest_fall(accuracy_K: list[float]) -> float:
    """How far accuracy ever falls below what fewer experts had already reached; 0 if it only rises."""
    best, fall = accuracy_K[0], 0.0
    for accuracy in accuracy_K:
        best = max(best, accuracy)
        fall = max(fall, best - accuracy)
    return fall


def correlation(first: list[float], second: list[float]) -> float:
    """Pearson's correlation of two lists; 0 where one of them does not vary."""
    pair = torch.tensor([first, second], dtype=torch.float64)
    centred = pair - pair.mean(1, keepdim=True)
    norms = centred.norm(dim=1)
    return float((centred[0] * centred[1]).sum() / norms.prod()) if bool((norms > 1e-12).all()) else 0.0
