"""Other libraries' top-2 mixtures, four layers on a residual stream, with experts of the same multiply-adds as ours.

Axes: B batch, G groups, S samples of a group (B = G·S), E experts, D width.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from raytraced.benchmark.workloads import NUM_EXPERTS, NUM_LAYERS, ExpertSize
from raytraced.experts import MLPExperts

# mixture-of-experts and st-moe-pytorch give each expert so many places in every group: the cost of handing rows out grows
# with the square of a group. One group keeps the most rows, eight groups are quicker.
GROUPS = (1, 8)


class Peer(NamedTuple):
    """A stack of another library's layers, and the ways it can be called: by name, hidden (B, D) -> (B, D)."""

    stack: nn.Module
    variants: dict[str, Callable[[Tensor], Tensor]]


class Stack(nn.Module):
    """Layers of a peer, each added to the residual stream as ours are."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(NUM_LAYERS))

    def forward(self, hidden_BD: Tensor, num_groups: int = 1) -> Tensor:
        stream_GSD = hidden_BD.view(num_groups, -1, hidden_BD.shape[-1])
        for layer in self.layers:
            result: Any = layer(stream_GSD)
            stream_GSD = stream_GSD + (result if isinstance(result, Tensor) else result[0])
        return stream_GSD.view(hidden_BD.shape)


class StackedMLPs(nn.Module):
    """Our expert's widths for `mixture-of-experts`, which hands over (E, n, D) and knows one hidden layer only."""

    def __init__(self, size: ExpertSize) -> None:
        super().__init__()
        self.experts = MLPExperts(1, NUM_EXPERTS, size.dim, size.hidden, size.num_hidden)

    def forward(self, x_EnD: Tensor) -> Tensor:
        pairs = zip(self.experts.weights, self.experts.biases, strict=True)
        for index, (weight, bias) in enumerate(pairs):
            x_EnD = torch.baddbmm(bias[0][:, None], x_EnD.relu() if index else x_EnD, weight[0].mT)
        return x_EnD


def grouped(stack: Stack) -> dict[str, Callable[[Tensor], Tensor]]:
    """One way of calling for each number of groups."""
    return {f"{groups} groups" if groups > 1 else "1 group": partial(stack, num_groups=groups) for groups in GROUPS}


def mixture_of_experts(size: ExpertSize) -> Peer:
    """`MoE` with its defaults: some second choices and all rows past an expert's capacity are dropped."""
    from mixture_of_experts import MoE

    def layer() -> nn.Module:
        experts = StackedMLPs(size) if size.num_hidden != 1 else None
        return MoE(size.dim, num_experts=NUM_EXPERTS, hidden_dim=size.hidden, experts=experts)

    stack = Stack(layer)
    return Peer(stack, grouped(stack))


def st_moe(size: ExpertSize) -> Peer:
    """`MoE` with its defaults; its own gated expert of the same multiply-adds where ours has one hidden layer."""
    from st_moe_pytorch import MoE

    def mlp() -> nn.Module:
        modules: list[nn.Module] = [nn.Linear(size.dim, size.hidden), nn.ReLU()]
        for _ in range(size.num_hidden - 1):
            modules += [nn.Linear(size.hidden, size.hidden), nn.ReLU()]
        return nn.Sequential(*modules, nn.Linear(size.hidden, size.dim))

    def layer() -> nn.Module:
        experts = nn.ModuleList(mlp() for _ in range(NUM_EXPERTS)) if size.num_hidden != 1 else None
        multiple = size.hidden / size.dim
        return MoE(size.dim, num_experts=NUM_EXPERTS, gating_top_n=2, expert_hidden_mult=multiple, experts=experts)

    stack = Stack(layer)
    return Peer(stack, grouped(stack))


def mixtral(size: ExpertSize) -> Peer:
    """`MixtralSparseMoeBlock`, its inner width chosen for the same multiply-adds: its experts have three matrices."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    inner = round(size.multiply_adds / (3 * size.dim)) // 4 * 4  # grouped_mm wants rows of 16 bytes
    config = MixtralConfig(
        hidden_size=size.dim, intermediate_size=inner, num_local_experts=NUM_EXPERTS, num_experts_per_tok=2
    )
    config._experts_implementation = "eager"
    stack = Stack(lambda: MixtralSparseMoeBlock(config))
    for parameter in stack.parameters():  # the block alone leaves them empty
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)

    def call(implementation: str) -> Callable[[Tensor], Tensor]:
        def run(hidden_BD: Tensor) -> Tensor:
            config._experts_implementation = implementation
            result: Tensor = stack(hidden_BD)
            return result

        return run

    # its third, batched_mm, copies an expert's weights for every sample: slower at width 16, gigabytes at 512
    return Peer(stack, {implementation: call(implementation) for implementation in ("eager", "grouped_mm")})


PEERS: dict[str, Callable[[ExpertSize], Peer]] = {
    "mixture-of-experts": mixture_of_experts,
    "st-moe-pytorch": st_moe,
    "mixtral (transformers)": mixtral,
}


def open_peer(name: str, size: ExpertSize) -> Peer | str:
    """A peer that was seen to run forward and backward at this size, without the variants that do not; else why not."""
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            peer = PEERS[name](size)
    except Exception as error:  # whatever another library raises is the finding
        return f"{type(error).__name__}: {error}".splitlines()[0]
    working, reason = {}, ""
    for variant, run in peer.variants.items():
        hidden_BD = torch.randn(256, size.dim, requires_grad=True)
        try:
            run(hidden_BD).backward(torch.randn(256, size.dim))
        except Exception as error:
            reason = f"{variant}: {type(error).__name__}: {error}".splitlines()[0]
        else:
            working[variant] = run
        peer.stack.zero_grad(set_to_none=True)
    return Peer(peer.stack, working) if working else reason
