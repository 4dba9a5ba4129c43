"""Other libraries' top-2 mixtures, four layers on a residual stream, with experts of the same multiply-adds as ours.

Axes: B batch, G groups, S samples of a group (B = G·S), D width.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from raytraced.benchmark.model_workloads import BATCH_SIZE, seeded
from raytraced.benchmark.timing import Contender

NUM_LAYERS, NUM_EXPERTS = 4, 8
# mixture-of-experts and st-moe-pytorch give each expert so many places in every group: the cost of handing rows out grows
# with the square of a group. One group keeps the most rows, eight groups are quicker.
GROUPS = {"1 group": 1, "8 groups": 8}


class ExpertSize(NamedTuple):
    """Widths of an expert with one hidden layer: dim → hidden → dim."""

    dim: int
    hidden: int

    def __str__(self) -> str:
        return f"{self.dim}→{self.hidden}→{self.dim}"


class LayerStep:
    """Forward and backward of a layer inside a network: its input wants a gradient too."""

    def __init__(self, owner: nn.Module, dim: int, run: Callable[[Tensor], Tensor] | None = None) -> None:
        self.owner, self.run = owner.train(), run or owner
        self.hidden_BD, self.gradient_BD = torch.randn(2, BATCH_SIZE, dim, generator=seeded())

    def __call__(self) -> None:
        self.run(self.hidden_BD.detach().requires_grad_()).backward(self.gradient_BD)
        self.owner.zero_grad(set_to_none=True)


# A stack of another library's layers, and the ways it can be called: by name, hidden (B, D) -> (B, D).
Peer = tuple[nn.Module, dict[str, Callable[[Tensor], Tensor]]]


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


def mixture_of_experts(size: ExpertSize) -> Peer:
    """`MoE` with its defaults: some second choices and all rows past an expert's capacity are dropped."""
    from mixture_of_experts import MoE

    stack = Stack(lambda: MoE(size.dim, num_experts=NUM_EXPERTS, hidden_dim=size.hidden))
    return stack, {name: partial(stack, num_groups=groups) for name, groups in GROUPS.items()}


def st_moe(size: ExpertSize) -> Peer:
    """`MoE` with its defaults, which drop too; its experts are gated, and narrower for the same multiply-adds."""
    from st_moe_pytorch import MoE

    options = {"num_experts": NUM_EXPERTS, "gating_top_n": 2, "expert_hidden_mult": size.hidden / size.dim}
    stack = Stack(lambda: MoE(size.dim, **options))
    return stack, {name: partial(stack, num_groups=groups) for name, groups in GROUPS.items()}


def mixtral(size: ExpertSize) -> Peer:
    """`MixtralSparseMoeBlock`, its inner width chosen for the same multiply-adds: its experts have three matrices."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    sizes = {"hidden_size": size.dim, "intermediate_size": 2 * size.hidden // 12 * 4}  # for rows of 16 bytes
    config = MixtralConfig(num_local_experts=NUM_EXPERTS, num_experts_per_tok=2, **sizes)
    config._experts_implementation = "grouped_mm"  # the fastest of its three here
    stack = Stack(lambda: MixtralSparseMoeBlock(config))
    for parameter in stack.parameters():  # the block alone leaves them empty
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return stack, {"grouped_mm": stack}


PEERS: dict[str, Callable[[ExpertSize], Peer]] = {
    "mixture-of-experts": mixture_of_experts,
    "st-moe-pytorch": st_moe,
    "Mixtral (transformers)": mixtral,
}


def peer_steps(name: str, size: ExpertSize) -> list[Contender] | str:
    """A step of a peer for each of its variants, all seen to run forward and backward at this size; else why not."""
    try:
        stack, variants = PEERS[name](size)
        steps = {variant: LayerStep(stack, size.dim, run) for variant, run in variants.items()}
        for step in steps.values():
            step()
    except ImportError as error:
        return f"not installed ({error}): pip install 'raytraced[bench]'"
    except Exception as error:  # whatever another library raises is the finding
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return [Contender(f"{name}, {variant}, {size}", step, experts=8) for variant, step in steps.items()]
