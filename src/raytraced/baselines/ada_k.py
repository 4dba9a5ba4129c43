"""ada-k: top-k with a small allocator a layer that draws k for each sample, trained by policy gradient (Yue et al. 2025).

Axes: B batch, L layers, N experts a layer (and choices of k), D width.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raytraced.baselines.routed import Choice, Draws, RoutedExperts, require, softmax_over
from raytraced.classifier import Output, RoutedClassifier
from raytraced.layer import LayerOutput


class Decision(NamedTuple):
    """What the allocator of a layer drew, and what its judge expected (B,)."""

    num_experts: Tensor
    log_ratio: Tensor  # log π(k) − log π_old(k), 0 where nothing was learnt since the draw
    entropy: Tensor
    value: Tensor


class AdaKExperts(RoutedExperts):
    """The k likeliest experts of a layer, k drawn in training by the allocator as it was when last copied, else its mode.

    PPO: `policy_steps` batches are drawn under one copy (π_old) and each moves the allocator once, its ratio clipped to
    1 ± `clip`. The reward is −(task loss) − `expert_cost`·(experts run); a linear critic a layer predicts it, `entropy`
    weighs a bonus for staying undecided. Neither allocator nor critic sends a gradient into the hidden vectors.
    """

    old_weight: Tensor  # (L, N, D)
    old_bias: Tensor  # (L, N)
    num_calls: Tensor

    def __init__(
        self,
        dim: int,
        num_layers: int,
        num_experts: int,
        *,
        clip: float = 0.2,
        policy_steps: int = 4,
        entropy: float = 0.01,
        expert_cost: float = 0.0,
        **grid: Any,
    ) -> None:
        super().__init__(dim, num_layers, num_experts, **grid)
        require(clip > 0, "clip", clip, "must be positive")
        require(policy_steps >= 1, "policy_steps", policy_steps, "must be at least 1")
        require(entropy >= 0, "entropy", entropy, "must not be negative")
        require(expert_cost >= 0, "expert_cost", expert_cost, "must not be negative")
        self.clip, self.policy_steps, self.entropy, self.expert_cost = clip, policy_steps, entropy, expert_cost
        bound = dim**-0.5
        self.allocator_weight = nn.Parameter(torch.empty(num_layers, num_experts, dim).uniform_(-bound, bound))
        self.allocator_bias = nn.Parameter(torch.zeros(num_layers, num_experts))
        self.critic_weight = nn.Parameter(torch.zeros(num_layers, dim))
        self.critic_bias = nn.Parameter(torch.zeros(num_layers))
        # Buffers, not attributes: a resumed run must go on with the same π_old.
        self.register_buffer("old_weight", self.allocator_weight.detach().clone())
        self.register_buffer("old_bias", self.allocator_bias.detach().clone())
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))
        self.decisions: list[Decision] = []

    def forward(self, hidden: Tensor, **options: Any) -> LayerOutput:
        self.decisions = []
        if self.training:
            if int(self.num_calls) % self.policy_steps == 0:
                self.old_weight.copy_(self.allocator_weight.detach())
                self.old_bias.copy_(self.allocator_bias.detach())
            self.num_calls += 1
        return super().forward(hidden, **options)

    def route(self, step: int, hidden_BD: Tensor, draws: Draws) -> Choice:
        logits_BN = self.gate_logits(step, hidden_BD)
        index_B = self.draw(step, hidden_BD.detach(), draws) if self.training else self.mode(step, hidden_BD)
        rank_BN = logits_BN.detach().argsort(-1, descending=True).argsort(-1)
        chosen_BN = rank_BN <= index_B[:, None]
        weights_BN = softmax_over(logits_BN, chosen_BN)
        return Choice(weights_BN, chosen_BN.to(weights_BN.dtype))

    def mode(self, layer: int, hidden_BD: Tensor) -> Tensor:
        """The likeliest k − 1 (B,)."""
        return F.linear(hidden_BD, self.allocator_weight[layer], self.allocator_bias[layer]).argmax(-1)

    def draw(self, layer: int, hidden_BD: Tensor, draws: Draws) -> Tensor:
        """k − 1 (B,) drawn from π_old; the decision is noted for the policy loss."""
        dtype = torch.promote_types(hidden_BD.dtype, torch.float32)
        old_logits_BN = F.linear(hidden_BD, self.old_weight[layer], self.old_bias[layer]).to(dtype)
        reached_BN = old_logits_BN.softmax(-1).double().cumsum(-1)
        index_B = (reached_BN < draws.uniform(layer)[:, None] * reached_BN[:, -1:]).sum(-1)
        logits_BN = F.linear(hidden_BD, self.allocator_weight[layer], self.allocator_bias[layer]).to(dtype)
        log_probs_BN = logits_BN.log_softmax(-1)
        log_ratio_B = (log_probs_BN - old_logits_BN.log_softmax(-1)).gather(-1, index_B[:, None])[:, 0]
        entropy_B = -(log_probs_BN.exp() * log_probs_BN).sum(-1)
        value_B = (hidden_BD @ self.critic_weight[layer] + self.critic_bias[layer]).to(dtype)
        self.decisions.append(Decision(index_B + 1, log_ratio_B, entropy_B, value_B))
        return index_B

    def policy_loss(self, task_losses_B: Tensor) -> Tensor:
        """PPO's loss for the decisions of the last training call, given what they led to."""
        if not self.decisions:
            raise ValueError("policy_loss: no decisions to judge; call the layer in training mode first, once a loss")
        decisions = Decision(*(torch.stack(field, -1) for field in zip(*self.decisions, strict=True)))
        self.decisions = []
        reward_B = -task_losses_B.detach() - self.expert_cost * decisions.num_experts.sum(-1)
        advantage_BL = reward_B[:, None] - decisions.value.detach()
        ratio_BL = decisions.log_ratio.exp()
        clipped_BL = ratio_BL.clamp(1 - self.clip, 1 + self.clip)
        gain_BL = torch.minimum(ratio_BL * advantage_BL, clipped_BL * advantage_BL)
        critic_BL = (decisions.value - reward_B[:, None]) ** 2 / 2
        loss_BL = critic_BL - gain_BL - self.entropy * decisions.entropy
        return loss_BL.sum() / max(loss_BL.numel(), 1)

    @property
    def routing_multiply_adds(self) -> int:
        return super().routing_multiply_adds + self.allocator_weight.numel()

    @property
    def routing_parameters(self) -> int:
        # The critic is needed in training only.
        return super().routing_parameters + self.allocator_weight.numel() + self.allocator_bias.numel()

    def extra_repr(self) -> str:
        return (
            f"clip={self.clip}, policy_steps={self.policy_steps}, entropy={self.entropy}, "
            f"expert_cost={self.expert_cost}, stream={self.stream}"
        )


class AdaKClassifier(RoutedClassifier):
    """A classifier whose allocators learn from the loss of each sample."""

    layer: AdaKExperts

    def label_loss(self, out: Output, labels_B: Tensor) -> Tensor:
        """What training adds to the loss of the answers, once it knows the labels (the mean over samples)."""
        return self.layer.policy_loss(F.cross_entropy(out.logits.detach(), labels_B, reduction="none"))
