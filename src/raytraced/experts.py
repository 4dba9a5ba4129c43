"""The grid of experts, and the stream that carries hidden vectors through it. An expert whose weight is 0 need not run.

Axes: B batch, L layers, N experts per layer, D width, H inner width of an expert, n rows of one expert.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

StreamName = Literal["residual", "skip-sum", "last"]
Unbind = Callable[[Tensor], Sequence[Tensor]]


class MLPExperts(nn.Module):
    """The paper's experts: MLPs D → H → … → D with ReLU between, their weights stacked over the grid.

    Args:
        num_layers: Number of expert layers.
        num_experts: Number of experts per layer.
        dim: Width D of the input and output vectors.
        hidden: Inner width H. Default: `dim`.
        num_hidden: Number of hidden layers of each expert.
    """

    def __init__(
        self, num_layers: int, num_experts: int, dim: int, hidden: int | None = None, num_hidden: int = 2
    ) -> None:
        super().__init__()
        hidden = dim if hidden is None else hidden
        for name, value in (("dim", dim), ("hidden", hidden), ("num_hidden", num_hidden)):
            if value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        self.num_layers, self.num_experts = num_layers, num_experts
        self.widths = (dim, *[hidden] * num_hidden, dim)
        self.num_weights = sum(K * O for K, O in pairwise(self.widths))  # of one expert: its MACs for one row
        self.num_parameters = self.num_weights + sum(self.widths[1:])
        grid = (num_layers, num_experts)
        shapes = list(zip(self.widths[1:], self.widths[:-1], strict=True))
        self.weights = nn.ParameterList(torch.empty(*grid, *shape) for shape in shapes)
        self.biases = nn.ParameterList(torch.empty(*grid, out) for out, _ in shapes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """PyTorch's default for a linear layer: uniform within ±1/√(number of inputs)."""
        for weight, bias in zip(self.weights, self.biases, strict=True):
            bound = weight.shape[-1] ** -0.5
            nn.init.uniform_(weight, -bound, bound)
            nn.init.uniform_(bias, -bound, bound)

    def run_layer(self, layer: int, hidden_BD: Tensor) -> Tensor:
        """Run all experts of a layer on all rows.

        Args:
            layer: Number of the layer, from 0.
            hidden_BD: Input vectors (B, D).

        Returns:
            The output of each expert (B, N, D).
        """
        return _run_mlps([weight[layer] for weight in self.weights], [bias[layer] for bias in self.biases], hidden_BD)

    def run_expert(self, layer: int, expert: int, hidden_nD: Tensor) -> Tensor:
        """Run one expert on its rows.

        Args:
            layer: Number of the layer, from 0.
            expert: Number of the expert in its layer, from 0.
            hidden_nD: Input vectors (n, D).

        Returns:
            Output vectors (n, D).
        """
        for index, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            hidden_nD = F.linear(F.relu(hidden_nD) if index else hidden_nD, weight[layer, expert], bias[layer, expert])
        return hidden_nD

    def stacks(self) -> tuple[list[Tensor], list[Tensor]]:
        """The weights (L, N, O, K) and biases (L, N, O) of each linear layer."""
        # Hot path at batch size 1: a loop over a ParameterList is slower, it formats every name.
        weights, biases = self._modules["weights"], self._modules["biases"]
        return [*weights._parameters.values()], [*biases._parameters.values()]  # type: ignore[union-attr]

    def unstacked(self, unbind: Unbind = torch.unbind) -> list["MLPLayer"]:
        """The same experts layer by layer, for the duration of one call."""
        weights, biases = self.stacks()
        apart, biases_apart = [unbind(weight) for weight in weights], [bias.unbind(0) for bias in biases]
        return [MLPLayer(apart, biases_apart, layer) for layer in range(self.num_layers)]

    def extra_repr(self) -> str:
        return f"{self.num_layers} layers of {self.num_experts}, widths {'-'.join(map(str, self.widths))}"


def _run_mlps(weights: Sequence[Tensor], biases: Sequence[Tensor], hidden_BD: Tensor) -> Tensor:
    """All experts of a layer on all rows (B, N, D)."""
    x_NBD = hidden_BD.expand(len(weights[0]), *hidden_BD.shape)
    for index, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        x_NBD = torch.baddbmm(bias[:, None], F.relu(x_NBD) if index else x_NBD, weight.mT)
    return x_NBD.transpose(0, 1)


class MLPLayer:
    """One layer of MLP experts as a grid of its own, made of parameters that are unbound once for a whole call.

    The gradient of a slice weight[layer, expert] would be a whole stack of zeros with one slice filled in.
    """

    num_layers = 1

    def __init__(self, weights: Sequence[Sequence[Tensor]], biases: Sequence[Sequence[Tensor]], layer: int) -> None:
        self.all_weights, self.layer = weights, layer
        self.weights, self.biases = [weight[layer] for weight in weights], [bias[layer] for bias in biases]
        self._apart: list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = []

    def stacks(self) -> tuple[list[Tensor], list[Tensor]]:
        """The weights (N, O, K) and biases (N, O) of each linear layer."""
        return self.weights, self.biases

    def unstacked(self) -> list["MLPLayer"]:
        return [self]

    def idle_parameters(self, ran: Collection[int]) -> list[Tensor]:
        """The parameters without a gradient when only these experts ran: none, since a stack holds all experts of a layer."""
        return [] if ran else [*self.weights, *self.biases]

    def run_layer(self, layer: int, hidden_BD: Tensor) -> Tensor:
        return _run_mlps(self.weights, self.biases, hidden_BD)

    def run_expert(self, layer: int, expert: int, hidden_nD: Tensor) -> Tensor:
        if not self._apart:
            self._apart = [(w.unbind(0), b.unbind(0)) for w, b in zip(self.weights, self.biases, strict=True)]
        for index, (weights_N, biases_N) in enumerate(self._apart):
            hidden_nD = F.linear(F.relu(hidden_nD) if index else hidden_nD, weights_N[expert], biases_N[expert])
        return hidden_nD


class ModuleExperts(nn.Module):
    """Custom experts: one module per node, each of which maps (n, D) to (n, D).

    Args:
        num_layers: Number of expert layers.
        num_experts: Number of experts per layer.
        factory: Called once per node; must return a new module each time.
    """

    def __init__(self, num_layers: int, num_experts: int, factory: Callable[[], nn.Module]) -> None:
        super().__init__()
        if isinstance(factory, nn.Module) or not callable(factory):
            name = type(factory).__name__
            raise ValueError(f"expert={name}(…): must be a factory, called once per node; give lambda: {name}(…)")
        self.num_layers, self.num_experts = num_layers, num_experts
        nodes = [factory() for _ in range(num_layers * num_experts)]
        for made in nodes:
            if not isinstance(made, nn.Module):
                raise ValueError(f"expert: its factory gave {made!r}; must give an nn.Module, a new one for each node")
        if len({id(node) for node in nodes}) < len(nodes):
            name = type(nodes[0]).__name__
            raise ValueError(
                f"expert: its factory returned one {name} for several nodes; must return a new one each time"
            )
        self.nodes = nn.ModuleList(nodes)

    def run_layer(self, layer: int, hidden_BD: Tensor) -> Tensor:
        return torch.stack([self.run_expert(layer, expert, hidden_BD) for expert in range(self.num_experts)], 1)

    def run_expert(self, layer: int, expert: int, hidden_nD: Tensor) -> Tensor:
        result_nD: Tensor = self.nodes[layer * self.num_experts + expert](hidden_nD)
        if result_nD.shape != hidden_nD.shape:
            raise ValueError(
                f"an expert turned {tuple(hidden_nD.shape)} into {tuple(result_nD.shape)}: "
                "must keep the shape; project inside the expert"
            )
        return result_nD

    def unstacked(self, unbind: Unbind = torch.unbind) -> list["ModuleLayer"]:
        return [ModuleLayer(self, layer) for layer in range(self.num_layers)]

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters()) // len(self.nodes)


class ModuleLayer:
    """One layer of custom experts as a grid of its own."""

    num_layers = 1

    def __init__(self, experts: ModuleExperts, layer: int) -> None:
        self.experts, self.layer = experts, layer

    def unstacked(self) -> list["ModuleLayer"]:
        return [self]

    def idle_parameters(self, ran: Collection[int]) -> list[Tensor]:
        """The parameters without a gradient when only these experts ran."""
        N = self.experts.num_experts
        idle = (self.experts.nodes[self.layer * N + i] for i in range(N) if i not in ran)
        return [parameter for node in idle for parameter in node.parameters()]

    def run_layer(self, layer: int, hidden_BD: Tensor) -> Tensor:
        return self.experts.run_layer(self.layer, hidden_BD)

    def run_expert(self, layer: int, expert: int, hidden_nD: Tensor) -> Tensor:
        return self.experts.run_expert(self.layer, expert, hidden_nD)


# A whole grid; one layer of it, which is a grid too, for the duration of a call.
Experts = MLPExperts | ModuleExperts
Layer = MLPLayer | ModuleLayer
Grid = Experts | Layer
MLPS = (MLPExperts, MLPLayer)


def make_grid(
    dim: int,
    num_layers: int,
    num_experts: int,
    expert: Callable[[], nn.Module] | None = None,
    hidden: int | None = None,
    num_hidden: int = 2,
) -> Experts:
    """The experts of a routed layer: the paper's MLPs, or custom modules."""
    if expert is None:
        return MLPExperts(num_layers, num_experts, dim, hidden, num_hidden)
    if hidden is not None or num_hidden != 2:
        raise ValueError(f"hidden={hidden}, num_hidden={num_hidden}: are for the default MLP, not with `expert`")
    return ModuleExperts(num_layers, num_experts, expert)


class Plan(NamedTuple):
    """The rows of each expert, sorted by layer, expert and row; known before any expert runs."""

    rows: Tensor  # (pairs,)
    counts: list[list[int]]  # rows of each expert, (L, N)

    @classmethod
    def of(cls, active_BLN: Tensor) -> "Plan":
        pairs = active_BLN.detach().permute(1, 2, 0).nonzero()
        counts_LN = active_BLN.detach().count_nonzero(0)
        return cls(pairs[:, 2], counts_LN.tolist())

    def layer(self, layer: int) -> Iterator[tuple[int, Tensor]]:
        """Each expert of a layer that has rows, with its rows."""
        start = sum(map(sum, self.counts[:layer]))
        for expert, count in enumerate(self.counts[layer]):
            if count:
                yield expert, self.rows[start : start + count]
            start += count


def update_dense(experts: Grid, layer: int, hidden_BD: Tensor, weights_BN: Tensor) -> Tensor:
    """The weighted sum of a layer's experts, each run on every row: every weight gets a gradient."""
    return torch.einsum("bn,bnd->bd", weights_BN.to(hidden_BD.dtype), experts.run_layer(layer, hidden_BD).to(hidden_BD))


def update_sparse(
    layer: Layer,
    hidden_BD: Tensor,
    weights_BN: Tensor,
    rows: Iterable[tuple[int, Tensor]],
    idle_gradients: bool = False,
) -> Tensor:
    """The weighted sum of a layer's experts (B, D), each run on its own rows only, added in the experts' order.

    `idle_gradients`: parameters of experts without rows get a gradient of zeros instead of None.
    """
    # The sum starts from no rows of `hidden` times no weights: without a single active expert, both still get a gradient,
    # which is zero, and so does all that they are computed from, the router too.
    no_rows = torch.empty(0, dtype=torch.int64, device=hidden_BD.device)
    none_0D = (hidden_BD[:0] * weights_BN[:0, :1]).to(hidden_BD.dtype)
    update_BD = torch.zeros_like(hidden_BD).index_add(0, no_rows, none_0D)
    ran = set()
    for expert, rows_n in rows:
        ran.add(expert)
        result_nD = layer.run_expert(0, expert, hidden_BD[rows_n])
        weight_n1 = weights_BN[rows_n, expert, None]
        update_BD = update_BD.index_add(0, rows_n, (result_nD * weight_n1).to(hidden_BD.dtype))
    if idle_gradients:
        # Experts without rows add none of their numbers to the sum.
        none = [idle.reshape(-1)[:0] for idle in layer.idle_parameters(ran) if idle.requires_grad]
        if none:
            none_0D = torch.cat(none).view(0, hidden_BD.shape[-1]).to(hidden_BD.dtype)
            update_BD = update_BD.index_add(0, no_rows, none_0D)
    return update_BD


class StreamState(NamedTuple):
    """Hidden vectors on their way through the layers of a grid."""

    hidden: Tensor  # (B, D), the input of the next layer
    answer: Tensor  # (B, D), what the layers so far return


class Stream(StrEnum):
    """How hidden vectors pass from one layer of experts to the next, and what the whole grid returns.

    With u_l the weighted sum of the outputs of layer l's experts:

    residual: h_l = h_{l-1} + u_l; the grid returns h_L.
    skip-sum: h_l = u_l; the grid returns the sum of all h_l, as the routing network's skip connections do.
    last: h_l = u_l; the grid returns h_L, as the paper's equation is written.
    """

    RESIDUAL = "residual"
    SKIP_SUM = "skip-sum"
    LAST = "last"

    @property
    def adds_input(self) -> bool:
        """Whether the grid's input is part of what it returns."""
        return self is Stream.RESIDUAL

    @property
    def within_layer(self) -> "Stream":
        """The stream with which one layer alone turns its input into the input of the next layer."""
        return Stream.RESIDUAL if self.adds_input else Stream.LAST

    @property
    def skips_empty_layers(self) -> bool:
        """Whether a layer in which no expert runs leaves the answer as it is."""
        return self is not Stream.LAST

    def start(self, hidden_BD: Tensor) -> StreamState:
        """The state before the first layer."""
        return StreamState(hidden_BD, hidden_BD if self.adds_input else torch.zeros_like(hidden_BD))

    def step(self, state: StreamState, update_BD: Tensor) -> StreamState:
        """The state after a layer whose experts' weighted sum is `update_BD` (B, D)."""
        if self is Stream.SKIP_SUM:
            return StreamState(update_BD, state.answer + update_BD)
        hidden_BD = state.hidden + update_BD if self.adds_input else update_BD
        return StreamState(hidden_BD, hidden_BD)

    def combine(self, layer_outputs: Sequence[Tensor]) -> Tensor:
        """What the grid returns, given the input of every layer but the first and the last layer's output, (B, D) each."""
        if self is not Stream.SKIP_SUM:
            return layer_outputs[-1]
        total_BD = layer_outputs[0]
        for output_BD in layer_outputs[1:]:
            total_BD = total_BD + output_BD
        return total_BD


def run_stream(
    stream: Stream, num_layers: int, hidden_BD: Tensor, update: Callable[[int, Tensor], Tensor], exits: bool = False
) -> Tensor:
    """Pass hidden vectors (B, D) through all layers, where update(layer, hidden) is the weighted sum of a layer's experts.

    Returns the answer (B, D), or with `exits` the answers after no layer, after the first, the second, … (L + 1, B, D).
    """
    state = stream.start(hidden_BD)
    answers = [state.answer]
    for layer in range(num_layers):
        state = stream.step(state, update(layer, state.hidden))
        answers.append(state.answer)
    return torch.stack(answers) if exits else answers[-1]


def run_dense(
    experts: Grid,
    hidden_BD: Tensor,
    active_BLN: Tensor,
    weights_BLN: Tensor,
    stream: Stream,
    exits: bool = False,
    needs_inactive: bool = False,
) -> Tensor:
    """All experts on all rows, each weighted; inactive experts get a gradient for their mask only if `needs_inactive`."""
    if not needs_inactive:
        weights_BLN = weights_BLN * active_BLN.detach()  # as if they did not run

    def update(layer: int, hidden_BD: Tensor) -> Tensor:
        return update_dense(experts, layer, hidden_BD, weights_BLN[:, layer])

    return run_stream(stream, experts.num_layers, hidden_BD, update, exits)


def run_sparse(
    experts: Grid, hidden_BD: Tensor, active_BLN: Tensor, weights_BLN: Tensor, stream: Stream, exits: bool = False
) -> Tensor:
    """Each expert on its own rows only."""
    plan, layers = Plan.of(active_BLN), experts.unstacked()
    # DDP waits for the gradient of every parameter. A batch in which no expert ran must have gradients in one process, too.
    is_shared = torch.distributed.is_available() and torch.distributed.is_initialized()
    idle_gradients = torch.is_grad_enabled() and (is_shared or not len(plan.rows))

    def update(layer: int, hidden_BD: Tensor) -> Tensor:
        return update_sparse(layers[layer], hidden_BD, weights_BLN[:, layer], plan.layer(layer), idle_gradients)

    return run_stream(stream, experts.num_layers, hidden_BD, update, exits)
