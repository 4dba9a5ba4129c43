"""multi-exit: an MLP with an output layer after each layer and early exit (BranchyNet, Teerapittayanon et al. 2016).

Axes: B batch, D width, Y classes, L hidden layers, n rows that have not left yet.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from raytraced import early_exit
from raytraced.early_exit import ExitEvery, ExitPolicy
from raytraced.errors import check_budget, require
from raytraced.experts import StreamName
from raytraced.layer import Exit
from raytraced.models.classifier import InputBlock
from raytraced.models.output import Model, Output, SampleLossFn, check_select, linear_cost
from raytraced.router import Call, Cost
from raytraced.routers.dense import MLPLayers
from raytraced.sequence import Route


class MultiExit(MLPLayers):
    """The hidden layers of a multi-exit model, and its confidence threshold.

    Args:
        dim: Width of the hidden layers.
        num_layers: Number of hidden layers; there is an exit before the first and after each.
        confidence: In evaluation a sample leaves at the first exit whose largest class probability reaches this.
        stream: "residual" or "last"; see `raytraced.experts.Stream`.
    """

    def __init__(
        self, dim: int, num_layers: int = 8, *, confidence: float = 0.9, stream: StreamName = "residual"
    ) -> None:
        require(0 <= confidence <= 1, "confidence", confidence, "must lie in 0 … 1, it is a probability")
        require(
            stream in ("last", "residual"), "stream", repr(stream), "must be last or residual: an exit reads one layer"
        )
        super().__init__(dim, num_layers, stream=stream)
        self.confidence = confidence


class MultiExitClassifier(Model):
    """An exit after the input block and after every hidden layer; evaluation takes the first that is confident enough.

    In training every sample runs to the end, and the model's own loss is the sum of the losses of all earlier exits.
    """

    answers_along_the_way = True
    samples_paths = False

    def __init__(
        self,
        make_layer: Callable[[], MultiExit],
        dim: int,
        image_shape: tuple[int, int, int],
        num_classes: int,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        require(num_classes >= 1, "num_classes", num_classes, "must be at least 1")
        self.input_block, self.layer = InputBlock(image_shape, dim, mean, std), make_layer()
        self.heads = nn.ModuleList(nn.Linear(dim, num_classes) for _ in range(self.layer.num_blocks + 1))

    def encode(self, inputs: Tensor) -> Tensor:
        hidden_BD: Tensor = self.input_block(inputs)
        return hidden_BD

    def answer(
        self, encoded: Tensor, call: Call, mask: Tensor | None = None, sample_loss_fn: SampleLossFn | None = None
    ) -> Output:
        self.check_call(call)
        check_budget(call.max_experts)
        if not self.training:
            out: Output = early_exit.uncompiled(self.exit_at_own_confidence)(encoded, call, mask)
            return out
        *early, last_BY = self.head_logits(encoded, self.num_run(call.max_experts))
        rows_n = torch.arange(len(encoded), device=encoded.device) if mask is None else mask.nonzero()[:, 0]
        loss = None
        if sample_loss_fn is not None and early:
            total = sum((sample_loss_fn(logits_BY)[rows_n].sum() for logits_BY in early), encoded.new_zeros(()))
            loss = total / max(len(rows_n), 1)
        num_B = torch.zeros(len(encoded), dtype=torch.int64, device=encoded.device)
        num_B[rows_n] = len(early)
        return Output(last_BY, (self.route(num_B, encoded.dtype),), loss)

    def exit_at_own_confidence(self, hidden_BD: Tensor, call: Call, mask: Tensor | None) -> Output:
        """The first answer of each sample that reaches the model's own confidence threshold."""
        policy = ExitPolicy(self.own_confidence, call.max_experts)
        first: Output = early_exit.run(lambda: self.exits_of(hidden_BD, "layer", call), policy, mask)
        return first

    def exits_of(self, encoded: Tensor, exit_every: ExitEvery, call: Call, rerun: bool = False) -> "HeadExits":
        require(exit_every == "layer", "exit_every", exit_every, "must be layer: there is an exit after each")
        self.check_call(call)
        return HeadExits(self, encoded, self.num_run(call.max_experts))

    def head_logits(self, hidden_BD: Tensor, num_layers: int) -> list[Tensor]:
        """The logits of every exit (B, Y), after 0, 1, … `num_layers` layers."""
        state, stream = self.layer.stream.start(hidden_BD), self.layer.stream
        found = [self.read_head(0, hidden_BD)]
        for layer in range(num_layers):
            state = stream.step(state, self.layer.run_block(layer, state.hidden))
            found.append(self.read_head(layer + 1, state.hidden))
        return found

    def read_head(self, number: int, hidden_nD: Tensor) -> Tensor:
        """The logits (n, Y) of one exit."""
        logits_nY: Tensor = self.heads[number](torch.relu(hidden_nD))
        return logits_nY

    @property
    def own_confidence(self) -> float:
        return self.layer.confidence

    def check_call(self, call: Call) -> None:
        """Refuse options that only raytraced layers support."""
        check_select(self, call.select)
        if call.stop is not None:
            raise ValueError(f"stop: {self.name} has no activation sequence to end; leave it out, or use confidence=")

    def num_run(self, budget: int | None) -> int:
        """How many layers a budget allows."""
        return self.layer.num_blocks if budget is None else min(self.layer.num_blocks, budget)

    def route(self, num_n: Tensor, dtype: torch.dtype) -> Route:
        """The route of rows that ran their first `num_n` layers; the mask (n, L, 1) is at least float32, as everywhere."""
        ran_nL = torch.arange(self.layer.num_blocks, device=num_n.device) < num_n[:, None]
        return Route(ran_nL[..., None].to(torch.promote_types(dtype, torch.float32)), None, num_n, None)

    def cost(self, inputs: Tensor, out: Output) -> dict[str, Cost]:
        head = linear_cost(self.heads[0])  # type: ignore[arg-type]
        # The heads of exits that were not taken count as routing; the one that was taken is the head.
        tried_B = out.num_experts
        routing = Cost(tried_B * head.macs, tried_B * head.parameters)
        return {"input": self.input_block.cost(), **self.layer.cost(out.routes[0]), "routing": routing, "head": head}


class HeadExits:
    """The exits of a multi-exit model, one after the other; see `raytraced.early_exit.Exits`."""

    def __init__(self, model: MultiExitClassifier, hidden_BD: Tensor, num_layers: int) -> None:
        self.model, self.num_layers, self.layer = model, num_layers, 0
        self.state = model.layer.stream.start(hidden_BD)
        self.current = self._exit()

    def advance(self, rows: Tensor | None = None) -> None:
        """Run the next layer for some of the current rows (numbers, default: all)."""
        hidden_nD, answer_nD = self.state
        if rows is not None:
            self.state = self.state._replace(hidden=hidden_nD[rows], answer=answer_nD[rows])
        block, stream = self.model.layer.run_block, self.model.layer.stream
        self.state = stream.step(self.state, block(self.layer, self.state.hidden))
        self.layer += 1
        self.current = self._exit()

    def _exit(self) -> Exit[Output]:
        hidden_nD = self.state.hidden
        num_n = torch.full((len(hidden_nD),), self.layer, device=hidden_nD.device)
        out = Output(self.model.read_head(self.layer, hidden_nD), (self.model.route(num_n, hidden_nD.dtype),))
        return Exit(out, num_n == self.num_layers)
