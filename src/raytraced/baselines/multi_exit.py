"""multi-exit: an MLP with an output layer after each layer, which stops where it is sure (BranchyNet, Teerapittayanon 2016).

Axes: B batch, C channels, H × W pixels, D width, Y classes, L hidden layers, E = L + 1 exits, n the rows that go on.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raytraced.baselines.mlp import MLPLayers
from raytraced.baselines.routed import require
from raytraced.classifier import Output
from raytraced.experts import Stream


class MultiExitClassifier(nn.Module):
    """An answer after the input block and after every hidden layer; evaluation takes the first that reaches `confidence`.

    In training every sample runs to the end and every exit is trained (`label_loss`).
    """

    def __init__(
        self,
        input_block: nn.Module,
        dim: int,
        num_layers: int,
        num_classes: int,
        *,
        confidence: float = 0.9,
        stream: Stream = "residual",
    ) -> None:
        super().__init__()
        require(0 <= confidence <= 1, "confidence", confidence, "must lie in 0 … 1, it is a probability")
        require(num_classes >= 1, "num_classes", num_classes, "must be at least 1")
        require(
            stream != "skip-sum", "stream", repr(stream), "must be last or residual: an exit sees one layer's output"
        )
        self.confidence = confidence
        self.input_block = input_block
        self.layer = MLPLayers(dim, num_layers, stream=stream)
        self.heads = nn.ModuleList(nn.Linear(dim, num_classes) for _ in range(num_layers + 1))
        self.answers: Tensor | None = None

    def forward(
        self,
        images: Tensor,
        *,
        select: str | None = None,
        max_experts: int | None = None,
        generator: torch.Generator | None = None,
        rows: Tensor | None = None,
    ) -> Output:
        """Classify normalised images (B, C, H, W), with at most `max_experts` hidden layers a sample."""
        require(select in (None, "greedy"), "select", repr(select), "must be greedy: nothing is drawn here")
        num_layers = self.layer.num_blocks
        if max_experts is not None:
            require(max_experts >= 0, "max_experts", max_experts, "must be at least 0, or None for no budget")
            num_layers = min(num_layers, max_experts)
        hidden_BD = self.input_block(images)
        return self.run_all(hidden_BD, num_layers) if self.training else self.run_until_sure(hidden_BD, num_layers)

    def run_all(self, hidden_BD: Tensor, num_layers: int) -> Output:
        """Every exit on every row; the answer is the last one's."""
        answers = [self.answer(0, hidden_BD)]
        for layer in range(num_layers):
            hidden_BD = self.step(layer, hidden_BD)
            answers.append(self.answer(layer + 1, hidden_BD))
        self.answers = torch.stack(answers, 1)
        active_BL1 = self.no_layer(hidden_BD)
        active_BL1[:, :num_layers] = 1
        return Output(answers[-1], torch.relu(hidden_BD), active_BL1)

    def run_until_sure(self, hidden_BD: Tensor, num_layers: int) -> Output:
        """Each row as far as it takes: rows that are sure leave, the others go on."""
        logits_BY = self.answer(0, hidden_BD)
        active_BL1 = self.no_layer(hidden_BD)
        rows_n = torch.arange(len(hidden_BD), device=hidden_BD.device)
        for layer in range(num_layers):
            rows_n = rows_n[logits_BY[rows_n].softmax(-1).amax(-1) < self.confidence]
            if not len(rows_n):
                break
            hidden_nD = self.step(layer, hidden_BD[rows_n])
            hidden_BD = hidden_BD.index_copy(0, rows_n, hidden_nD)
            logits_BY = logits_BY.index_copy(0, rows_n, self.answer(layer + 1, hidden_nD))
            active_BL1[rows_n, layer] = 1
        return Output(logits_BY, torch.relu(hidden_BD), active_BL1)

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

    def label_loss(self, out: Output, labels_B: Tensor) -> Tensor:
        """What training adds to the loss of the last answer: that of all earlier ones (the mean over samples)."""
        if self.answers is None:
            raise ValueError("label_loss: no answers to judge; call the model in training mode first, once a loss")
        early_BEY, self.answers = self.answers[:, :-1], None
        targets_BE = labels_B[:, None].expand(early_BEY.shape[:2])
        return F.cross_entropy(early_BEY.flatten(0, 1), targets_BE.flatten(), reduction="sum") / max(len(labels_B), 1)

    def extra_repr(self) -> str:
        return f"confidence={self.confidence}"
