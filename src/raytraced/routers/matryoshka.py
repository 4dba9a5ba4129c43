"""matryoshka: top-k trained with a random k, so that k can be chosen after training (Wang et al. 2025, Matryoshka MoE).

Axes: B batch, N experts per layer, D width.
"""

from torch import Tensor

from raytraced.errors import require
from raytraced.router import Choice, Draws
from raytraced.routers.choosing import softmax_over
from raytraced.routers.top_k import TopK, Total


class MatryoshkaTopK(TopK):
    """Run k experts per layer. In training k is drawn anew, uniformly, for every vector and layer (the "layer-wise" form).

    Args:
        dim: Width of the hidden vectors.
        num_layers: Number of expert layers.
        num_experts: Number of experts per layer.
        k: Number of experts that run in each layer in evaluation. Set `router.k` to change it after training.
        most: Largest number that is drawn in training; the smallest is 1. Default: `num_experts`.
        balance: Weight of the auxiliary load-balancing loss of Switch and GShard, in training only.
        total: Sum of the weights of the chosen experts: "one", or "count" for their number, as in raytraced experts.

    Returns (from ``route``):
        Choice with ``active`` (B, N), ``weights`` (B, N) and, with `balance` in training, ``loss``.
    """

    def __init__(
        self,
        dim: int,
        num_layers: int,
        num_experts: int,
        *,
        k: int = 2,
        most: int | None = None,
        balance: float = 0.0,
        total: Total = "one",
    ) -> None:
        super().__init__(dim, num_layers, num_experts, k=k, balance=balance, total=total)
        self.most = num_experts if most is None else most
        require(1 <= self.most <= num_experts, "most", self.most, f"must lie in 1 … num_experts={num_experts}")

    def route(self, step: int, hidden_BD: Tensor, draws: Draws) -> Choice:
        """Choose for one step; see `raytraced.router.Router.route`."""
        logits_BN = self.gate_logits(step, hidden_BD)
        rank_BN = logits_BN.detach().argsort(dim=-1, descending=True, stable=True).argsort(-1)
        count_B1 = rank_BN.new_full((rank_BN.shape[0], 1), self.k)
        if self.training:
            count_B1 = (1 + draws.uniform(step) * self.most).long().clamp_max(self.most)[:, None]
        chosen_BN = draws.recall(step, rank_BN < count_B1)
        count_B1 = chosen_BN.sum(-1, keepdim=True)
        # One expert alone has the probability among all, as in top-1: the softmax over it is the constant 1.
        weights_BN = softmax_over(logits_BN, chosen_BN)
        weights_BN = weights_BN.where(count_B1 > 1, logits_BN.softmax(-1) * chosen_BN)
        if self.total == "count":
            weights_BN = weights_BN * count_B1
        return self.with_balance(logits_BN, chosen_BN, weights_BN)
