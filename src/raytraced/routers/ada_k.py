"""ada-k: top-k with an allocator per layer that chooses k for each sample, trained by policy gradient (Yue et al. 2025).

Axes: B batch, L layers, N experts per layer (and choices of k), D width.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raytraced.errors import require
from raytraced.router import Choice, Cost, Draws, Router
from raytraced.routers.choosing import softmax_over


class Decision(NamedTuple):
    """The draw of one layer's allocator, and what the policy loss needs to know about it (B,)."""

    num_experts: Tensor  # the k that was drawn
    log_ratio: Tensor  # log π(k) − log π_old(k), 0 as long as π is π_old
    entropy: Tensor  # of π
    value: Tensor  # the reward that the critic predicts


class AdaK(Router):
    """Run the k most probable experts per layer; k is drawn by an allocator in training, and its mode in evaluation.

    The allocator is trained with PPO: `policy_steps` batches are drawn from a copy π_old, and each batch updates the
    allocator π once. The reward is −(task loss) − `expert_cost`·(number of experts), which a linear critic per layer
    predicts. Neither the allocator nor the critic sends a gradient into the hidden vectors.

    Args:
        dim: Width of the hidden vectors.
        num_layers: Number of expert layers.
        num_experts: Number of experts per layer.
        clip: The ratio π / π_old is clipped to 1 ± clip.
        policy_steps: Number of training steps per copy of the allocator.
        entropy: Weight of the entropy bonus, which keeps the allocator from deciding too early.
        expert_cost: Reward lost per expert that runs.

    Returns (from ``route``):
        Choice with ``active`` (B, N), ``weights`` (B, N), the softmax over the chosen experts, and, in training, the
        ``decision`` for `policy_loss`.
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
    ) -> None:
        super().__init__(dim, num_layers, num_experts)
        require(clip > 0, "clip", clip, "must be positive")
        require(policy_steps >= 1, "policy_steps", policy_steps, "must be at least 1")
        require(entropy >= 0, "entropy", entropy, "must not be negative")
        require(expert_cost >= 0, "expert_cost", expert_cost, "must not be negative")
        self.clip, self.policy_steps, self.entropy, self.expert_cost = clip, policy_steps, entropy, expert_cost
        self.allocator_weight = nn.Parameter(torch.zeros(num_layers, num_experts, dim))
        self.allocator_bias = nn.Parameter(torch.zeros(num_layers, num_experts))
        self.critic_weight = nn.Parameter(torch.zeros(num_layers, dim))
        self.critic_bias = nn.Parameter(torch.zeros(num_layers))
        # Buffers, not attributes: a resumed run must continue with the same π_old.
        self.register_buffer("old_weight", self.allocator_weight.detach().clone())
        self.register_buffer("old_bias", self.allocator_bias.detach().clone())
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))

    def reset_parameters(self) -> None:
        bound = self.allocator_weight.shape[-1] ** -0.5
        nn.init.uniform_(self.allocator_weight, -bound, bound)
        self.copy_policy()

    @torch.no_grad()
    def copy_policy(self) -> None:
        """Set π_old to the present allocators."""
        self.old_weight.copy_(self.allocator_weight)
        self.old_bias.copy_(self.allocator_bias)

    def route(self, step: int, hidden_BD: Tensor, draws: Draws) -> Choice:
        if self.training and step == 0:
            if int(self.num_calls) % self.policy_steps == 0:
                self.copy_policy()
            self.num_calls += 1
        logits_BN = self.gate_logits(step, hidden_BD)
        # Of a recorded route nothing was decided here.
        decides = self.training and draws.route is None
        decision = self.draw(step, hidden_BD.detach(), draws) if decides else None
        index_B = self.mode(step, hidden_BD) if decision is None else decision.num_experts - 1
        rank_BN = logits_BN.detach().argsort(-1, descending=True).argsort(-1)
        chosen_BN = draws.recall(step, rank_BN <= index_B[:, None])
        weights_BN = softmax_over(logits_BN, chosen_BN)
        return Choice(chosen_BN.to(weights_BN.dtype), weights_BN, decision=decision)

    def mode(self, layer: int, hidden_BD: Tensor) -> Tensor:
        """The most probable k of a layer, minus 1 (B,)."""
        return F.linear(hidden_BD, self.allocator_weight[layer], self.allocator_bias[layer]).argmax(-1)

    def draw(self, layer: int, hidden_BD: Tensor, draws: Draws) -> Decision:
        """Draw k (B,) from π_old."""
        dtype = torch.promote_types(hidden_BD.dtype, torch.float32)
        old_logits_BN = F.linear(hidden_BD, self.old_weight[layer], self.old_bias[layer]).to(dtype)
        reached_BN = old_logits_BN.softmax(-1).double().cumsum(-1)
        index_B = (reached_BN < draws.uniform(layer)[:, None] * reached_BN[:, -1:]).sum(-1)
        logits_BN = F.linear(hidden_BD, self.allocator_weight[layer], self.allocator_bias[layer]).to(dtype)
        log_probs_BN = logits_BN.log_softmax(-1)
        log_ratio_B = (log_probs_BN - old_logits_BN.log_softmax(-1)).gather(-1, index_B[:, None])[:, 0]
        entropy_B = -(log_probs_BN.exp() * log_probs_BN).sum(-1)
        value_B = (hidden_BD @ self.critic_weight[layer] + self.critic_bias[layer]).to(dtype)
        return Decision(index_B + 1, log_ratio_B, entropy_B, value_B)

    def policy_loss(self, decisions: list[Decision], experts_B: Tensor, losses_B: Tensor) -> Tensor:
        """PPO's loss of the decisions of one call.

        Args:
            decisions: The decisions of all layers.
            experts_B: Number of experts that ran for each sample (B,).
            losses_B: Task loss of each sample (B,).

        Returns:
            A scalar, the mean over samples and layers.
        """
        made = Decision(*(torch.stack(field, -1) for field in zip(*decisions, strict=True)))
        reward_B = -losses_B.detach() - self.expert_cost * experts_B
        advantage_BL = reward_B[:, None] - made.value.detach()
        ratio_BL = made.log_ratio.exp()
        clipped_BL = ratio_BL.clamp(1 - self.clip, 1 + self.clip)
        gain_BL = torch.minimum(ratio_BL * advantage_BL, clipped_BL * advantage_BL)
        critic_BL = (made.value - reward_B[:, None]) ** 2 / 2
        loss_BL = critic_BL - gain_BL - self.entropy * made.entropy
        return loss_BL.sum() / max(loss_BL.numel(), 1)

    def step_cost(self) -> Cost:
        gate, weight = super().step_cost(), self.allocator_weight[0].numel()
        # Without the critic, which runs in training only.
        return Cost(gate.macs + weight, gate.parameters + weight + self.allocator_bias[0].numel())
