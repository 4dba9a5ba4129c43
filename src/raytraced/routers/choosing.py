"""Functions that several baselines use: the k largest scores, a softmax over chosen experts, the load-balancing loss.

Axes: B batch, N experts per layer.
"""

import torch
from torch import Tensor, distributed


def top_mask(scores_BN: Tensor, k: int) -> Tensor:
    """Mark the k largest scores of each row: booleans (B, N)."""
    mask_BN = torch.zeros_like(scores_BN, dtype=torch.bool)
    return mask_BN.scatter(-1, scores_BN.topk(k, -1).indices, True)


def softmax_over(logits_BN: Tensor, mask_BN: Tensor) -> Tensor:
    """The softmax over the entries of each row where the mask is True (B, N); 0 elsewhere, also in a row without any."""
    # Not −inf: a recorded route may leave a layer out, and a softmax over nothing is NaN.
    lowest = torch.finfo(logits_BN.dtype).min
    return logits_BN.masked_fill(~mask_BN, lowest).softmax(-1).masked_fill(~mask_BN, 0.0)


def global_load(active_BN: Tensor) -> Tensor:
    """The number of samples of each expert (N,), summed over all processes that train together."""
    load_N = active_BN.detach().sum(0)
    if distributed.is_available() and distributed.is_initialized():
        distributed.all_reduce(load_N)
    return load_N


def balance_loss(probs_BN: Tensor, active_BN: Tensor, num_null: int = 0) -> Tensor:
    """The auxiliary loss of Switch and GShard: N·Σᵢ fᵢ·Pᵢ, with the share fᵢ of the load and the mean probability Pᵢ.

    The load is summed over all processes, so that the mean of their losses is the loss of one process with the whole batch.

    Args:
        probs_BN: Probabilities of the experts (B, N).
        active_BN: 1 where an expert was chosen, else 0 (B, N).
        num_null: Number of null experts, the last ones. Each counts with their mean load: they need no balance.

    Returns:
        A scalar; 1 for a uniform load.
    """
    load_N = global_load(active_BN.to(probs_BN.dtype))
    if num_null:
        load_N[-num_null:] = load_N[-num_null:].mean()
    share_N = load_N / load_N.sum().clamp_min(1)
    mean_probs_N = probs_BN.sum(0) / max(probs_BN.shape[0], 1)
    return probs_BN.shape[1] * (share_N * mean_probs_N).sum()
