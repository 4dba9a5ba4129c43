"""How experts are used: by whom, how evenly, and what that does to the answers along the sequence.

Axes: B samples, L layers, N experts a layer, C classes, K budgets (0, 1, … experts).
"""

import math

import torch
from torch import Tensor


def expert_load(active_BLN: Tensor) -> Tensor:
    """The share of the samples that activated each expert (L, N)."""
    return active_BLN.double().mean(0)


def load_by_class(active_BLN: Tensor, labels_B: Tensor, num_classes: int) -> Tensor:
    """The share of each class's samples that activated each expert (C, L, N); 0 for a class without samples."""
    sums = torch.zeros(num_classes, *active_BLN.shape[1:], dtype=torch.float64)
    sums.index_add_(0, labels_B, active_BLN.double())
    counts_C = torch.bincount(labels_B, minlength=num_classes).clamp_min(1)
    return sums / counts_C[:, None, None]


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


def largest_over_mean(load_LN: Tensor) -> float:
    """The load of the busiest expert of a layer over the layer's mean, the worst layer that is used at all."""
    load_LN = load_LN[load_LN.sum(1) > 0].double()
    return float((load_LN.amax(1) / load_LN.mean(1)).max()) if len(load_LN) else 1.0


def accuracy_by_length(correct_BK: Tensor, num_active_B: Tensor) -> dict[int, list[float]]:
    """For each sequence length the accuracy after 0, 1, … experts, up to that length.

    correct_BK tells whether the answer with at most k experts was right, for k = 0 … K - 1.
    """
    curves = {}
    for length in sorted(set(num_active_B.tolist())):
        curve_K = correct_BK[num_active_B == length].double().mean(0)
        curves[int(length)] = curve_K[: int(length) + 1].tolist()
    return curves


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
