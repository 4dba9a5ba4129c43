"""seq-top-k: k experts per vector on average, more where gate probabilities are concentrated (SeqTopK, Wen et al. 2025).

The reference takes the T·k largest scores among the T tokens of a text, which later tokens can change; while a text is
written, it compares with the scores of the tokens before. Here the choice is made among all vectors of a training batch, and
evaluation compares with the mean of the smallest scores that were chosen in training: a vector's experts are its own.

Axes: B batch, L layers, N experts per layer, D width.
"""

import torch
from torch import Tensor

from raytraced.router import Choice, Draws
from raytraced.routers.choosing import global_load, softmax_over, top_mask
from raytraced.routers.top_k import TopK, Total

PACE = 0.01  # how much of the running mean a training step replaces


class SeqTopK(TopK):
    """Run k experts per vector and layer on the mean: those with the largest probabilities among all vectors of a batch.

    Args:
        dim: Width of the hidden vectors.
        num_layers: Number of expert layers.
        num_experts: Number of experts per layer.
        k: Mean number of experts per vector in each layer; a vector may run none, or all.
        balance: Weight of the auxiliary load-balancing loss of Switch and GShard, in training only.
        total: Sum of the weights of the chosen experts: "one", or "count" for their number, as in raytraced experts.

    Returns (from ``route``):
        Choice with ``active`` (B, N), ``weights`` (B, N) and, with `balance` in training, ``loss``.
    """

    cut: Tensor  # (L,)

    def __init__(
        self,
        dim: int,
        num_layers: int,
        num_experts: int,
        *,
        k: int = 2,
        balance: float = 0.0,
        total: Total = "one",
    ) -> None:
        super().__init__(dim, num_layers, num_experts, k=k, balance=balance, total=total)
        # A buffer: saved with the model. A gate that is flat at the start has these probabilities.
        self.register_buffer("cut", torch.full((num_layers,), 1 / num_experts))

    def route(self, step: int, hidden_BD: Tensor, draws: Draws) -> Choice:
        """Choose for one step; see `raytraced.router.Router.route`."""
        logits_BN = self.gate_logits(step, hidden_BD)
        probs_BN = logits_BN.softmax(-1)
        if self.training:
            chosen_BN = top_mask(probs_BN.detach().flatten(), self.k * len(probs_BN)).view(probs_BN.shape)
            self.move_cut(step, probs_BN.detach(), chosen_BN)
        else:
            chosen_BN = probs_BN >= self.cut[step]
        chosen_BN = draws.recall(step, chosen_BN)
        count_B1 = chosen_BN.sum(-1, keepdim=True)
        # One expert alone has the probability among all, as in top-1: the softmax over it is the constant 1.
        weights_BN = softmax_over(logits_BN, chosen_BN | (count_B1 == 0)) * chosen_BN
        weights_BN = weights_BN.where(count_B1 > 1, probs_BN * chosen_BN)
        if self.total == "count":
            weights_BN = weights_BN * count_B1
        return self.with_balance(logits_BN, chosen_BN, weights_BN)

    @torch.no_grad()
    def move_cut(self, layer: int, probs_BN: Tensor, chosen_BN: Tensor) -> None:
        """Move the running mean of a layer towards the smallest chosen probability, over all processes with vectors."""
        is_here = len(probs_BN) > 0
        least = probs_BN.masked_fill(~chosen_BN, 1.0).amin() if is_here else probs_BN.new_zeros(())
        total, num = global_load(torch.stack((least, least.new_tensor(float(is_here))))[None]).unbind()
        if num > 0:
            self.cut[layer] += PACE * (total / num - self.cut[layer]).to(self.cut.dtype)
