"""Experts of a grid shared out over processes: each owns some of every layer, and rows travel to the experts they chose.

The whole path of a row is known before any expert runs. So one exchange of counts plans all layers, where routing layer by
layer needs one in each and waits for it. Rows go in three thirds, in turn. While experts compute for one, the results of the
one before travel home, and the one before that is already on its way to the experts of the next layer. (A row itself cannot be
sent before its layer above is done: a node gets a firing rate only from active nodes of that layer.)

Axes: B rows of this process, L layers, N experts per layer, E processes that share them, n = N / E experts of each, D width,
H = 3 thirds of the rows, P pairs (row, expert).
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from raytraced.experts import MLPExperts, Stream, run_stream

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

THIRDS = (0, 1, 2)


class _Handle:
    """A collective under way: its splits, then the work to wait for, in the forward and in the backward pass."""

    def __init__(self, sent: list[int], received: list[int], group: Any) -> None:
        self.sent, self.received, self.group = sent, received, group
        self.work: Any = None
        self.gradient: Tensor | None = None

    def start(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        out = rows.new_empty(sum(received), *rows.shape[1:])
        self.work = dist.all_to_all_single(out, rows.contiguous(), received, sent, group=self.group, async_op=True)
        return out


class _Start(torch.autograd.Function):
    """Begin to send rows; in the backward pass, wait for their gradients."""

    @staticmethod
    def forward(ctx, rows, handle):  # type: ignore[no-untyped-def]
        ctx.handle = handle
        return handle.start(rows, handle.sent, handle.received)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        ctx.handle.work.wait()
        return ctx.handle.gradient, None


class _Finish(torch.autograd.Function):
    """Wait for rows; in the backward pass, begin to send their gradients back."""

    @staticmethod
    def forward(ctx, rows, handle):  # type: ignore[no-untyped-def]
        ctx.handle = handle
        handle.work.wait()
        # another tensor than what the work wrote to: autograd would take one for a view of the other
        return rows.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        handle = ctx.handle
        handle.gradient = handle.start(grad, handle.received, handle.sent)
        return grad, None  # of the shape that autograd expects; what arrives meanwhile is in the handle


class Exchange:
    """Which rows go to which process in all layers, and how many come from each: planned in one exchange of counts."""

    def __init__(self, active_BLN: Tensor, mesh: "DeviceMesh") -> None:
        self.group, self.num_processes = mesh.get_group(), mesh.size()
        runs_LNB = (active_BLN.detach() > 0).permute(1, 2, 0)
        (L, _, B), H = runs_LNB.shape, len(THIRDS)
        starts, stops = ([B * (third + more) // H for third in THIRDS] for more in (0, 1))
        self.rows = [stop - start for start, stop in zip(starts, stops, strict=True)]
        row_B = torch.arange(B, device=active_BLN.device)
        third_HB = torch.stack([(row_B >= start) & (row_B < stop) for start, stop in zip(starts, stops, strict=True)])
        runs_LHNB = runs_LNB[:, None] & third_HB[:, None]
        sent_ELHn = runs_LHNB.sum(-1).view(L, H, self.num_processes, -1).permute(2, 0, 1, 3).contiguous()
        received_ELHn = torch.empty_like(sent_ELHn)
        dist.all_to_all_single(received_ELHn, sent_ELHn, group=self.group)
        self.sent, self.received = torch.stack([sent_ELHn, received_ELHn]).tolist()  # the only host synchronisation
        # The pairs (row within its third, expert) of each layer and third, sorted by expert (so by owner), then row.
        sizes = [sum(sum(each[layer][third]) for each in self.sent) for layer in range(L) for third in THIRDS]
        parts = torch.nonzero_static(runs_LHNB, size=sum(sizes)).split(sizes)
        pairs = [(part[:, 3] - starts[index % H], part[:, 2]) for index, part in enumerate(parts)]
        self.pairs = [pairs[H * layer : H * (layer + 1)] for layer in range(L)]

    def handle(self, layer: int, third: int, back: bool = False) -> _Handle:
        """For the rows of one third on their way to their experts, or for results on their way home."""
        sent, received = ([sum(each[layer][third]) for each in way] for way in (self.sent, self.received))
        return _Handle(received, sent, self.group) if back else _Handle(sent, received, self.group)

    def pieces(self, layer: int, third: int) -> list[list[int]]:
        """How many rows of a third came from each process for each of this one's experts (E, n)."""
        return [each[layer][third] for each in self.received]


class ShardedExperts(nn.Module):
    """MLP experts of which this process owns a part of every layer; the parameters are DTensors, sharded by expert."""

    def __init__(self, experts: MLPExperts, mesh: "DeviceMesh") -> None:
        super().__init__()
        if mesh.ndim != 1 or experts.num_experts % mesh.size():
            raise ValueError(
                f"{experts.num_experts} experts per layer on a mesh of shape {tuple(mesh.shape)}: "
                "must be a mesh of one dimension that divides them; take a part of it, or other experts"
            )
        self.mesh, self.widths = mesh, experts.widths
        self.num_layers, self.num_experts = experts.num_layers, experts.num_experts
        self.num_weights, self.num_parameters = experts.num_weights, experts.num_parameters
        weights, biases = experts.stacks()
        # Under the names that they have in one process: a checkpoint of one layout is a checkpoint of any.
        self.weights = nn.ParameterList(nn.Parameter(_shard(weight, mesh)) for weight in weights)
        self.biases = nn.ParameterList(nn.Parameter(_shard(bias, mesh)) for bias in biases)

    def forward(
        self,
        hidden_BD: Tensor,
        active_BLN: Tensor,
        mix_BLN: Tensor,
        stream: Stream,
        exits: bool,
        only: int | None = None,
    ) -> Tensor:
        """What `raytraced.experts.run_sparse` computes; every process of the mesh must call it, with rows or without.

        `only`: the number of one layer, which is run alone; the mask and the weights are then (B, 1, N).
        """
        plan = Exchange(active_BLN, self.mesh)
        local = [
            [part.unbind(0) for part in _local(stack, plan.num_processes)] for stack in (self.weights, self.biases)
        ]
        first, num_layers = (0, self.num_layers) if only is None else (only, 1)

        hidden, mix = list(hidden_BD.split(plan.rows)), mix_BLN.split(plan.rows)
        travelling: dict[int, tuple[Tensor, _Handle]] = {}  # by third
        updates: list[list[Tensor]] = [[] for _ in range(num_layers)]

        def send(layer: int, third: int) -> None:
            rows_P, _ = plan.pairs[layer][third]
            handle = plan.handle(layer, third)
            travelling[third] = _Start.apply(hidden[third][rows_P], handle), handle

        def work(layer: int, third: int) -> None:
            weights, biases = ([part[first + layer] for part in stack] for stack in local)
            arrived_PD = _Finish.apply(*travelling[third])
            result_PD = run_local(weights, biases, arrived_PD, plan.pieces(layer, third))
            handle = plan.handle(layer, third, back=True)
            travelling[third] = _Start.apply(result_PD, handle), handle

        def combine(layer: int, third: int) -> None:
            rows_P, experts_P = plan.pairs[layer][third]
            home_PD, before_BD = _Finish.apply(*travelling[third]), hidden[third]
            mix_P1 = mix[third][rows_P, layer, experts_P, None].to(home_PD.dtype)
            update_BD = torch.zeros_like(before_BD).index_add(0, rows_P, (home_PD * mix_P1).to(before_BD.dtype))
            hidden[third] = before_BD + update_BD if stream.adds_input else update_BD
            updates[layer].append(update_BD)

        for third in THIRDS:
            send(0, third)
        turns = [(layer, third) for layer in range(num_layers) for third in THIRDS]
        for index, turn in enumerate(turns):
            work(*turn)
            if index:  # what the turn before found came home meanwhile; its rows leave for the next layer
                layer, third = turns[index - 1]
                combine(layer, third)
                if layer + 1 < num_layers:
                    send(layer + 1, third)
        combine(*turns[-1])
        return run_stream(stream, num_layers, hidden_BD, lambda layer, _: torch.cat(updates[layer]), exits)

    def run_layer(self, layer: int, hidden_BD: Tensor) -> Tensor:
        raise ValueError("experts on several processes: cannot run on every row; use mask_gradient=active")

    def unstacked(self, *args: Any) -> list["ShardedLayer"]:
        return [ShardedLayer(self, layer) for layer in range(self.num_layers)]

    def extra_repr(self) -> str:
        return f"{self.num_layers} layers of {self.num_experts}, on {self.mesh.size()} processes"


class ShardedLayer:
    """One layer of sharded experts as a grid of its own, for a decoder, whose attention runs between two layers."""

    num_layers = 1

    def __init__(self, experts: ShardedExperts, layer: int) -> None:
        self.experts, self.layer = experts, layer

    def run_layer(self, layer: int, hidden_BD: Tensor) -> Tensor:
        return self.experts.run_layer(self.layer, hidden_BD)


def _shard(parameter: Tensor, mesh: "DeviceMesh") -> Tensor:
    # a second of its own: not for those who have one process
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(parameter.detach(), mesh, [Shard(1)])


def _local(parameters: nn.ParameterList, num_processes: int) -> list[Tensor]:
    """This process's part, whose gradient is a mean over the processes: it holds what the rows of all of them ask."""
    local: list[Tensor] = [parameter.to_local() for parameter in parameters]
    for part in local:
        if part.requires_grad:
            part.register_hook(lambda grad: grad / num_processes)
    return local


def run_local(weights: list[Tensor], biases: list[Tensor], arrived_PD: Tensor, pieces: list[list[int]]) -> Tensor:
    """This process's experts of one layer on rows that arrived in pieces (E, n), with the results in the same order.

    An expert without rows runs on none: its parameters get a gradient of zero, for which other processes may wait.
    """
    E, n = len(pieces), len(pieces[0])
    split = arrived_PD.split([count for source in pieces for count in source])
    found: list[tuple[Tensor, ...]] = []
    for expert in range(n):
        x_nD = torch.cat(split[expert::n])
        for index, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            x_nD = F.linear(F.relu(x_nD) if index else x_nD, weight[expert], bias[expert])
        found.append(x_nD.split([source[expert] for source in pieces]))
    return torch.cat([found[expert][source] for source in range(E) for expert in range(n)])


def unsupported_reason(experts: Any, *args: Any, **options: Any) -> str | None:
    """Why these experts are no matter of several processes."""
    return None if isinstance(experts, ShardedExperts | ShardedLayer) else "all experts are in this process"


def run(
    experts: Any, hidden_BD: Tensor, active_BLN: Tensor, weights_BLN: Tensor, stream: Stream, exits: bool = False
) -> Tensor:
    """Through the module's own entrance, before which FSDP gathers its parameters."""
    if isinstance(experts, ShardedLayer):
        experts, only = experts.experts, experts.layer
    else:
        only = None
    result: Tensor = experts(hidden_BD, active_BLN, weights_BLN, stream, exits, only)
    return result
