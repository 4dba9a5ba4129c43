"""multi-exit: an MLP with an output layer after each layer, which stops where it is sure (BranchyNet, Teerapittayanon 2016).

Axes: B batch, D width, Y classes, L hidden layers, n the rows that go on.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from raytraced.layer import Look, Looks, Work
from raytraced.models.classifier import InputBlock
from raytraced.models.output import Judge, LookAt, Model, Output, linear_work
from raytraced.models.sure import answer_when_sure
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

    def run(
        self,
        inputs: Tensor,
        *,
        select: Select | None = None,
        max_experts: int | None = None,
        budgets: tuple[int, ...] = (),
        looks: bool = False,
        judge: Judge | None = None,
        generator: torch.Generator | None = None,
        rows: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Output:
        require(select in (None, "greedy"), "select", repr(select), "must be greedy: nothing is drawn here")
        check_budget(max_experts)
        hidden_BD = self.input_block(inputs)

        def answer(budget: int | None, judge: Judge | None = None) -> Output:
            if self.training:
                return self.run_all(hidden_BD, budget, mask, judge)
            return answer_when_sure(self.exits(hidden_BD, budget), self.layer.confidence, mask)

        return answer(max_experts, judge)._replace(answers=tuple(answer(budget) for budget in budgets))

    def prefixes(
        self, inputs: Tensor, most: int | None = None, *, mask: Tensor | None = None, **options: Any
    ) -> Iterator[Output]:
        hidden_BD = self.input_block(inputs)
        for budget in range(self.num_run(most) + 1):
            out = answer_when_sure(self.exits(hidden_BD, budget), self.layer.confidence, mask)
            yield out
            if not bool((out.num_experts == budget).any()):
                return

    def looks(self, inputs: Tensor, look: LookAt = "layer", **options: Any) -> Looks[Output]:
        require(look == "layer", "look", look, "must be layer: there is an answer after each")
        return self.exits(self.input_block(inputs), options.get("max_experts"))

    def exits(self, hidden_nD: Tensor, budget: int | None) -> Looks[Output]:
        """The answers of one exit after the other, of the rows that go on."""
        active_nL1, num_layers = self.no_layer(hidden_nD), self.num_run(budget)
        for layer in range(num_layers + 1):
            if layer:
                hidden_nD, active_nL1 = self.step(layer - 1, hidden_nD), active_nL1.clone()
                active_nL1[:, layer - 1] = 1
            ended_n = torch.full_like(hidden_nD[:, 0], layer == num_layers, dtype=torch.bool)
            kept_n = yield Look(self.output(self.answer(layer, hidden_nD), active_nL1), ended_n)
            if kept_n is not None:
                hidden_nD, active_nL1 = hidden_nD[kept_n], active_nL1[kept_n]

    def run_all(
        self, hidden_BD: Tensor, budget: int | None, mask_B: Tensor | None = None, judge: Judge | None = None
    ) -> Output:
        """Every exit on every row; the answer is the last one's."""
        num_layers = self.num_run(budget)
        answers = [self.answer(0, hidden_BD)]
        for layer in range(num_layers):
            hidden_BD = self.step(layer, hidden_BD)
            answers.append(self.answer(layer + 1, hidden_BD))
        active_BL1, rows_n, early = self.no_layer(hidden_BD), self.rows(hidden_BD, mask_B), answers[:-1]
        active_BL1[rows_n, :num_layers] = 1
        loss = None
        if judge is not None and early:
            total = sum((judge(answer_BY)[rows_n].sum() for answer_BY in early), hidden_BD.new_zeros(()))
            loss = total / max(len(rows_n), 1)
        return self.output(answers[-1], active_BL1)._replace(loss=loss)

    def rows(self, hidden_BD: Tensor, mask_B: Tensor | None) -> Tensor:
        """The rows that are not padding (n,)."""
        return torch.arange(len(hidden_BD), device=hidden_BD.device) if mask_B is None else mask_B.nonzero()[:, 0]

    def num_run(self, budget: int | None) -> int:
        """How many layers a budget allows."""
        return self.layer.num_blocks if budget is None else min(self.layer.num_blocks, budget)

    def step(self, layer: int, hidden_BD: Tensor) -> Tensor:
        """The stream after one more hidden layer."""
        update_BD = self.layer.run_block(layer, hidden_BD)
        return hidden_BD + update_BD if self.layer.stream == "residual" else update_BD

    def answer(self, exit_index: int, hidden_BD: Tensor) -> Tensor:
        """The logits of one exit (B, Y)."""
        logits_BY: Tensor = self.heads[exit_index](torch.relu(hidden_BD))
        return logits_BY

    def no_layer(self, hidden_BD: Tensor) -> Tensor:
        """A mask of no layer (B, L, 1); at least float32, as masks everywhere."""
        dtype = torch.promote_types(hidden_BD.dtype, torch.float32)
        return hidden_BD.new_zeros(len(hidden_BD), self.layer.num_blocks, 1, dtype=dtype)

    def output(self, logits_BY: Tensor, active_BL1: Tensor) -> Output:
        """An answer and the layers that it took."""
        return Output(logits_BY, (Route(active_BL1, None, active_BL1.sum((-1, -2)).long(), None),))

    def work(self, inputs: Tensor, out: Output) -> dict[str, Work]:
        head = linear_work(self.heads[0])  # type: ignore[arg-type]
        # Answers that were not sure enough; the one that was is the head.
        tried_B = out.num_experts
        routing = Work(tried_B * head.multiply_adds, tried_B * head.parameters)
        return {"input": self.input_block.work(), **self.layer.work(out.routes[0]), "routing": routing, "head": head}
