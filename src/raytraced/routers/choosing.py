"""What rivals share: the k largest, a softmax over the chosen alone, and losses that even out the load.

Axes: B batch, N experts a layer.
"""

import torch
from torch import Tensor, distributed


def top_mask(scores_BN: Tensor, k: int) -> Tensor:
    """Which are the k largest of a row, as booleans (B, N)."""
    mask_BN = torch.zeros_like(scores_BN, dtype=torch.bool)
    return mask_BN.scatter(-1, scores_BN.topk(k, -1).indices, True)


def softmax_over(logits_BN: Tensor, mask_BN: Tensor) -> Tensor:
    """The softmax over the masked entries of a row alone; 0 elsewhere."""
    return logits_BN.masked_fill(~mask_BN, float("-inf")).softmax(-1)


def global_load(active_BN: Tensor) -> Tensor:
    """How many samples each expert got (N,), over all processes that train together."""
    load_N = active_BN.detach().sum(0)
    if distributed.is_available() and distributed.is_initialized():
        distributed.all_reduce(load_N)
    return load_N


def balance_loss(probs_BN: Tensor, active_BN: Tensor, num_null: int = 0) -> Tensor:
    """N·Σᵢ fᵢ·Pᵢ (Switch, GShard): f the share of the load that expert i got, P its mean probability; 1 if uniform.

    The load is that of all processes, so that the mean of their losses is the loss of one process with the whole batch.
    The last `num_null` do nothing and share their mean load: among them nothing needs balance.
    """
    load_N = global_load(active_BN.to(probs_BN.dtype))
    if num_null:
        load_N[-num_null:] = load_N[-num_null:].mean()
    share_N = load_N / load_N.sum().clamp_min(1)
    mean_probs_N = probs_BN.sum(0) / max(probs_BN.shape[0], 1)
    return probs_BN.shape[1] * (share_N * mean_probs_N).sum()
