"""What the routed rivals share: a grid of experts whose layers are routed one after the other.

Axes: B batch (any leading shape, flattened), L layers, S steps (layers, times the rounds of each), N experts a layer, D width.
"""

from collections.abc import Callable
from typing import NamedTuple, get_args

import torch
from torch import Tensor, distributed, nn

from raytraced.draws import new_seed, uniform
from raytraced.experts import MLPExperts, ModuleExperts, Stream, run_stream, update_active
from raytraced.layer import LayerOutput


class Choice(NamedTuple):
    """What a router decided for the samples of one layer."""

    weights: Tensor  # (B, N): how much an expert's output counts, 0 where it does not run
    active: Tensor  # (B, N): 0 or 1
    loss: Tensor | None = None  # weighted


class Draws:
    """Uniform numbers for the rows of one call; a seed is taken from the generator only if a number is asked for."""

    def __init__(self, generator: torch.Generator | None, rows_B: Tensor) -> None:
        self.generator, self.rows_B = generator, rows_B
        self.seed: Tensor | None = None

    def uniform(self, step: int) -> Tensor:
        """(B,), a pure function of the seed, the row and the step."""
        if self.seed is None:
            self.seed = new_seed(self.generator, self.rows_B.device)
        return uniform(self.seed, self.rows_B, step)


class RoutedExperts(nn.Module):
    """A grid of experts with a gate a layer; `route` is what the rivals differ in. Only active experts run, in training too."""

    def __init__(
        self,
        dim: int,
        num_layers: int,
        num_experts: int,
        *,
        expert: Callable[[], nn.Module] | None = None,
        stream: Stream = "residual",
        num_outlets: int | None = None,
        num_rounds: int = 1,
    ) -> None:
        super().__init__()
        for name, value in (("dim", dim), ("num_layers", num_layers), ("num_experts", num_experts)):
            require(value >= 1, name, value, "must be at least 1")
        require(stream in get_args(Stream), "stream", repr(stream), f"must be one of {', '.join(get_args(Stream))}")
        self.dim, self.num_layers, self.num_experts = dim, num_layers, num_experts
        self.stream, self.num_rounds = stream, num_rounds
        outlets = num_experts if num_outlets is None else num_outlets
        self.gates = nn.ModuleList(nn.Linear(dim, outlets) for _ in range(num_layers * num_rounds) if outlets)
        self.experts = (
            MLPExperts(num_layers, num_experts, dim)
            if expert is None
            else ModuleExperts(num_layers, num_experts, expert)
        )

    def route(self, step: int, hidden_BD: Tensor, draws: Draws) -> Choice:
        """Who runs at a step, and with which weight."""
        raise NotImplementedError

    def forward(
        self, hidden: Tensor, *, generator: torch.Generator | None = None, rows: Tensor | None = None
    ) -> LayerOutput:
        """Route and run layer by layer: the choice of a layer needs what the experts above it computed."""
        hidden_BD = flat_rows(hidden, self.dim)
        num_rows = hidden_BD.shape[0]
        draws = Draws(generator, torch.arange(num_rows, device=hidden.device) if rows is None else rows.reshape(-1))
        choices: list[Choice] = []
        experts = self.experts.unstacked()

        def update(step: int, stream_BD: Tensor) -> Tensor:
            choice = self.route(step, stream_BD, draws)
            choices.append(choice)
            return update_active(experts, step // self.num_rounds, stream_BD, choice.weights, choice.active)

        hidden_BD = run_stream(self.stream, self.num_layers * self.num_rounds, hidden_BD, update)
        active_BSN = torch.stack([choice.active for choice in choices], 1)
        losses = [choice.loss for choice in choices if choice.loss is not None]
        return LayerOutput(
            hidden_BD.view(hidden.shape),
            active_BSN.view(*hidden.shape[:-1], *active_BSN.shape[1:]),
            loss=torch.stack(losses).sum() if losses else None,
        )

    def gate_logits(self, step: int, hidden_BD: Tensor) -> Tensor:
        """What the gate of a step says (B, outlets), at least in float32."""
        logits_BN: Tensor = self.gates[step](hidden_BD)
        return logits_BN.to(torch.promote_types(logits_BN.dtype, torch.float32))

    @property
    def routing_multiply_adds(self) -> int:
        """Multiply-adds that the routing of one sample takes, whatever it chooses."""
        return sum(gate.weight.numel() for gate in self.gates if isinstance(gate, nn.Linear))

    @property
    def routing_parameters(self) -> int:
        """Parameters that the routing of one sample needs at inference."""
        return sum(parameter.numel() for parameter in self.gates.parameters())


def require(holds: bool, name: str, value: object, rule: str) -> None:
    """Refuse an option, naming it, its value and the rule."""
    if not holds:
        raise ValueError(f"{name}={value}: {rule}")


def flat_rows(hidden: Tensor, dim: int) -> Tensor:
    """Hidden vectors (..., D) as rows (B, D)."""
    if hidden.ndim == 0 or hidden.shape[-1] != dim:
        raise ValueError(f"hidden has shape {tuple(hidden.shape)}: the last axis must be dim={dim}")
    return hidden.reshape(-1, dim)


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


def balance_loss(probs_BN: Tensor, active_BN: Tensor) -> Tensor:
    """N·Σᵢ fᵢ·Pᵢ (Switch, GShard): f the share of the load that expert i got, P its mean probability; 1 if uniform.

    The load is that of all processes, so that the mean of their losses is the loss of one process with the whole batch.
    """
    load_N = global_load(active_BN.to(probs_BN.dtype))
    share_N = load_N / load_N.sum().clamp_min(1)
    mean_probs_N = probs_BN.sum(0) / max(probs_BN.shape[0], 1)
    return probs_BN.shape[1] * (share_N * mean_probs_N).sum()
