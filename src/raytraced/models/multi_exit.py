"""multi-exit: an MLP with an output layer after each layer, which stops where it is sure (BranchyNet, Teerapittayanon 2016).

Axes: B batch, D width, Y classes, L hidden layers, n the rows that go on.
"""

from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from raytraced.layer import Call, Look, Looks, Work
from raytraced.models.classifier import InputBlock
from raytraced.models.output import Judge, LookAt, Model, Output, linear_work
from raytraced.models.sure import answer_when_sure, uncompiled
from raytraced.routers.dense import MLPLayers
from raytraced.sequence import Route, Select
from raytraced.words import check_budget, require


class MultiExit(MLPLayers):
    """The hidden layers of such a model, and how sure an answer must be."""

    def __init__(self, dim: int, num_layers: int = 8, *, confidence: float = 0.9, stream: str = "residual") -> None:
        require(0 <= confidence <= 1, "confidence", confidence, "must lie in 0 … 1, it is a probability")
        require(
            stream in ("last", "residual"), "stream", repr(stream), "must be last or residual: an exit sees one layer"
        )
        super().__init__(dim, num_layers, stream=stream)  # type: ignore[arg-type]
        self.confidence = confidence


class MultiExitClassifier(Model):
    """An answer after the input block and after every hidden layer; evaluation takes the first that is sure enough.

    In training every sample runs to the end, and the model's own loss is that of all earlier answers.
    """

    answers_along_the_way = True

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

    def answer(self, encoded: Tensor, call: Call, mask: Tensor | None = None, judge: Judge | None = None) -> Output:
        self.check_select(call.select)
        check_budget(call.max_experts)
        if not self.training:
            out: Output = uncompiled(self.stopped)(encoded, call.max_experts, mask)
            return out
        *early, last_BY = self.exits(encoded, self.num_run(call.max_experts))
        rows_n = torch.arange(len(encoded), device=encoded.device) if mask is None else mask.nonzero()[:, 0]
        loss = None
        if judge is not None and early:
            total = sum((judge(logits_BY)[rows_n].sum() for logits_BY in early), encoded.new_zeros(()))
            loss = total / max(len(rows_n), 1)
        num_B = torch.zeros(len(encoded), dtype=torch.int64, device=encoded.device)
        num_B[rows_n] = len(early)
        return Output(last_BY, (self.route(num_B, encoded.dtype),), loss)

    def stopped(self, hidden_BD: Tensor, budget: int | None, mask: Tensor | None) -> Output:
        """The first answer of each sample that is as sure as the model asks."""
        first: Output = answer_when_sure(self.answers(hidden_BD, budget), self.own_sure, mask)
        return first

    def looks(self, inputs: Tensor, look: LookAt = "layer", **options: Any) -> Looks[Output]:
        require(look == "layer", "look", look, "must be layer: there is an answer after each")
        self.check_select(options.get("select"))
        return self.answers(self.encode(inputs), options.get("max_experts"))

    def answers(self, hidden_BD: Tensor, budget: int | None) -> Looks[Output]:
        """What each exit says, and the layers that it took."""
        num_layers, kept_n = self.num_run(budget), None
        exits = self.exits(hidden_BD, num_layers)
        for layer in range(num_layers + 1):
            logits_nY = exits.send(kept_n)
            num_n = torch.full((len(logits_nY),), layer, device=logits_nY.device)
            out = Output(logits_nY, (self.route(num_n, hidden_BD.dtype),))
            kept_n = yield Look(out, num_n == num_layers)

    def exits(self, hidden_nD: Tensor, num_layers: int) -> Generator[Tensor, Tensor | None, None]:
        """The logits (n, Y) of one exit after the other, of the rows that go on: sent after each, None for all."""
        for layer in range(num_layers + 1):
            if layer:
                update_nD = self.layer.run_block(layer - 1, hidden_nD)
                hidden_nD = hidden_nD + update_nD if self.layer.stream == "residual" else update_nD
            kept_n = yield self.heads[layer](torch.relu(hidden_nD))
            if kept_n is not None:
                hidden_nD = hidden_nD[kept_n]

    @property
    def own_sure(self) -> float:
        return self.layer.confidence

    def check_select(self, select: Select | None) -> None:
        require(select in (None, "greedy"), "select", repr(select), "must be greedy: nothing is drawn here")

    def num_run(self, budget: int | None) -> int:
        """How many layers a budget allows."""
        return self.layer.num_blocks if budget is None else min(self.layer.num_blocks, budget)

    def route(self, num_n: Tensor, dtype: torch.dtype) -> Route:
        """Rows that ran their first so many layers; the mask (n, L, 1) is at least float32, as masks everywhere."""
        ran_nL = torch.arange(self.layer.num_blocks, device=num_n.device) < num_n[:, None]
        return Route(ran_nL[..., None].to(torch.promote_types(dtype, torch.float32)), None, num_n, None)

    def work(self, inputs: Tensor, out: Output) -> dict[str, Work]:
        head = linear_work(self.heads[0])  # type: ignore[arg-type]
        # Answers that were not sure enough; the one that was is the head.
        tried_B = out.num_experts
        routing = Work(tried_B * head.multiply_adds, tried_B * head.parameters)
        return {"input": self.input_block.work(), **self.layer.work(out.routes[0]), "routing": routing, "head": head}
