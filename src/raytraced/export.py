"""Classifiers as graphs for other runtimes: ONNX, where a sequence is one Loop, and torch.export.

Axes: B batch, L layers, S steps of a layer, N experts a layer, M = L·N nodes, K = M + 1 candidates,
D width, H an expert's inner width, F = N·H, Y classes.
"""

import io
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raytraced import operations
from raytraced.files import write_file
from raytraced.grid import MLPExperts, run_stream, update_dense
from raytraced.models.classifier import Classifier
from raytraced.models.output import Model
from raytraced.routers.raytraced import RaytracedExperts
from raytraced.routing import Rates, RoutingNetwork
from raytraced.sequence import WEIGHTINGS, Stop, apply_stop
from raytraced.words import require, require_one_of

Format = Literal["onnx", "torch"]
Pixels = Literal["uint8", "float"]
OPSETS = range(18, 24)  # that torch writes without converting what it wrote: a Loop does not survive that
EXAMPLES = 7  # images that a graph is traced with; no size of a batch in the code, so that it stands for any


# The outputs of every graph: logits (B, Y), of all prefixes (B, M + 1, Y), num_experts (B,) and active (B, S, N), 0 or 1.
OUTPUTS = ("logits", "num_experts", "active")


class Found(NamedTuple):
    """Where a greedy sequence has led to: who is active (B, L, N), the firing rates under that set, what was seen."""

    active: Tensor
    rates: Rates
    seen: Tensor


def follow(
    routing: RoutingNetwork,
    entry_BN: Tensor,
    max_experts: Tensor,
    *,
    stop: Stop,
    sight_BLNO: Tensor | None = None,
    see: Callable[[Tensor, Rates], Tensor] | None = None,
) -> Found:
    """Algorithm 1, greedy, as one loop of a graph; the budget () is a value like any other.

    `see` is shown every prefix, active (B, L, N) and rates, and gives (B, …): seen (B, M + 1, …), the last one repeated.
    """
    B, L, N, M = entry_BN.shape[0], routing.num_layers, routing.num_experts, routing.num_nodes
    candidates_K = torch.arange(M + 1, device=entry_BN.device)

    def goes_on(step: Tensor, active_BM: Tensor, running_B: Tensor, *_: Tensor) -> Tensor:
        return (step < max_experts) & (step < M) & running_B.any()

    def activate(
        step: Tensor, active_BM: Tensor, running_B: Tensor, nodes_BLN: Tensor, output_B: Tensor, seen: Tensor
    ) -> tuple[Tensor, ...]:
        probs_BK = torch.cat((nodes_BLN.flatten(1) * (1 - active_BM), output_B[:, None]), -1)
        choice_B = apply_stop(probs_BK, stop).argmax(-1)
        draw_BK = (choice_B[:, None] == candidates_K).to(probs_BK) * running_B[:, None]
        active_BM = active_BM + draw_BK[:, :M]
        rates = routing(entry_BN, active_BM.unflatten(1, (L, N)), sight_BLNO)
        if see is not None:
            from_here_K = (candidates_K > step).view(-1, *[1] * (seen.ndim - 2))
            seen = torch.where(from_here_K, see(active_BM.unflatten(1, (L, N)), rates)[:, None], seen)
        return step + 1, active_BM, running_B & (choice_B < M), rates.nodes, rates.output, seen.clone()

    active_BM = entry_BN.new_zeros(B, M)
    rates = routing(entry_BN, active_BM.unflatten(1, (L, N)), sight_BLNO)
    seen = entry_BN.new_zeros(B, 0)
    if see is not None:
        first = see(active_BM.unflatten(1, (L, N)), rates)[:, None]
        seen = first.expand(B, M + 1, *first.shape[2:]).contiguous()
    step, running_B = torch.zeros_like(max_experts), torch.ones_like(entry_BN[:, 0], dtype=torch.bool)
    # A loop of the graph, not M copies of its body: a third of the time to export, a tenth of the nodes.
    _, active_BM, _, nodes_BLN, output_B, seen = torch.while_loop(
        goes_on, activate, (step, active_BM, running_B, *rates, seen)
    )
    return Found(active_BM.unflatten(1, (L, N)), Rates(nodes_BLN, output_B), seen)


def update_folded(experts: MLPExperts, layer: int, hidden_BD: Tensor, weights_BN: Tensor) -> Tensor:
    """As `update_dense` in two large products: into all experts of the layer, and out of all, weighted before the last one.

    Each expert on its own rows is slower for small experts in small batches: docs/export.md has the figures.
    """
    first_NHD, *inner, last_NDH = [weight[layer] for weight in experts.weights]
    first_NH, *inner_biases, last_ND = [bias[layer] for bias in experts.biases]
    x_BNH = F.linear(hidden_BD, first_NHD.flatten(0, 1), first_NH.flatten()).unflatten(1, first_NH.shape)
    for weight_NHH, bias_NH in zip(inner, inner_biases, strict=True):
        x_BNH = (F.relu(x_BNH).transpose(0, 1) @ weight_NHH.mT + bias_NH[:, None]).transpose(0, 1)
    weighted_BF = (F.relu(x_BNH) * weights_BN[:, :, None]).flatten(1)
    return F.linear(weighted_BF, last_NDH.transpose(0, 1).flatten(1)) + weights_BN @ last_ND


class RaytracedGraph(nn.Module):
    """Images (B, C, H, W) and a budget () -> the answer, or with `prefixes` those after 0, 1, … M experts."""

    inputs = ("images", "max_experts")

    def __init__(self, model: Classifier, prefixes: bool) -> None:
        super().__init__()
        assert isinstance(model.layer, RaytracedExperts)
        self.model, self.layer, self.prefixes = model, model.layer, prefixes

    def forward(self, images: Tensor, max_experts: Tensor) -> dict[str, Tensor]:
        layer, router = self.layer, self.layer.router
        hidden_BD = self.model.input_block(images)

        def answer(active_BLN: Tensor, rates: Rates) -> Tensor:
            weights_BLN = WEIGHTINGS[router.weighting](active_BLN, rates.nodes)

            def update(index: int, stream_BD: Tensor) -> Tensor:
                if isinstance(layer.experts, MLPExperts):
                    return update_folded(layer.experts, index, stream_BD, weights_BLN[:, index])
                return update_dense(layer.experts, index, stream_BD, weights_BLN[:, index])

            return self.model.head(run_stream(layer.stream, router.num_layers, hidden_BD, update))

        active_BLN, rates, seen_BKY = follow(
            router.routing,
            router.entry(hidden_BD),
            max_experts,
            stop=router.stop,
            sight_BLNO=router.sight(hidden_BD),
            see=answer if self.prefixes else None,
        )
        logits = seen_BKY if self.prefixes else answer(active_BLN, rates)
        return dict(zip(OUTPUTS, (logits, active_BLN.sum((1, 2)).long(), active_BLN), strict=True))


class RivalGraph(nn.Module):
    """Images (B, C, H, W) -> the answer."""

    inputs = ("images",)

    def __init__(self, model: Classifier) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        out = self.model(images)
        return dict(zip(OUTPUTS, (out.logits, out.num_experts, out.routes[0].active), strict=True))


def export(
    model: Model,
    path: str | Path,
    format: Format = "onnx",
    *,
    pixels: Pixels = "uint8",
    prefixes: bool = False,
    opset: int = 20,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Write a classifier as a graph for batches of any size, whole or not at all; returns the names of its inputs and outputs.

    Its images are bytes or, with pixels="float", fractions in 0 … 1; it normalises them itself. `prefixes` asks a raytraced
    model for the answers after 0, 1, … experts in one run. `opset` is the version of ONNX's operators.
    """
    path = Path(path)
    require_one_of("format", format, get_args(Format))
    require_one_of("pixels", pixels, get_args(Pixels))
    _check_home(path)
    if format == "onnx":
        is_known = isinstance(opset, int) and opset in OPSETS
        require(is_known, "opset", repr(opset), f"must lie in {OPSETS[0]} … {OPSETS[-1]}: a loop needs that")
        missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
        require(not missing, "format", format, f"needs {' and '.join(missing)}; pip install 'raytraced[onnx]'")
    graph = _graph(model, prefixes)
    program = trace(graph, pixels)
    card = json.dumps(asdict(model.card), default=lambda value: type(value).__name__)
    try:
        content = _as_onnx(program, graph.inputs, opset, card) if format == "onnx" else _as_torch(program, card)
    except Exception as error:
        lines = str(error).splitlines()
        told = next((line for line in lines if "No ONNX function" in line), lines[0] if lines else type(error).__name__)
        raise ValueError(
            f"{model.name}: cannot be exported as {format} ({told.partition('>: ')[2] or told:.150})"
        ) from error
    write_file(path, content)
    return graph.inputs, OUTPUTS


def trace(graph: "RaytracedGraph | RivalGraph", pixels: Pixels = "uint8") -> torch.export.ExportedProgram:
    """A graph that torch has followed once: for any size of the batch, whatever its examples were."""
    block = graph.model.input_block
    images = torch.rand(EXAMPLES, *block.image_shape)
    examples = (images if pixels == "float" else (images * 255).byte(), torch.tensor(EXAMPLES))[: len(graph.inputs)]
    sizes = ({0: torch.export.Dim("batch", min=1)}, None)[: len(graph.inputs)]
    try:
        with operations.use("plain"), torch.no_grad(), _quiet():
            return torch.export.export(graph, examples, dynamic_shapes=sizes)
    except Exception as error:  # torch has many ways to say that it cannot follow
        told = " ".join(str(error).split(".")[0].split())
        raise ValueError(f"{graph.model.name}: cannot be exported, torch cannot follow it ({told:.150})") from error


def _graph(model: Model, prefixes: bool) -> "RaytracedGraph | RivalGraph":
    """The graph of a model, if it has one."""
    if not isinstance(model, Classifier):
        name = model.name if isinstance(model, Model) else type(model).__name__
        raise ValueError(f"{name}: cannot be exported; only classifiers of images with one answer a sample can")
    if not (model.card and model.card.model):
        raise ValueError(f"{type(model).__name__}: has no card with a name; make it by raytraced.build or load")
    if not all(bool(values.isfinite().all()) for values in model.state_dict().values()):
        raise ValueError(f"{model.name}: its weights are not finite: they diverged, or are damaged; train it anew")
    dtypes = {parameter.dtype for parameter in model.parameters()}
    require(dtypes == {torch.float32}, "model", model.name, "must be in float32 to be exported; convert it by .float()")
    require(not model.training, "model", model.name, "is in training mode; call .eval() first")
    if type(model.layer) is RaytracedExperts:
        return RaytracedGraph(model, prefixes)
    require(not prefixes, "prefixes", prefixes, f"{model.name} has one answer only; for raytraced models")
    return RivalGraph(model)


def _as_onnx(program: torch.export.ExportedProgram, inputs: tuple[str, ...], opset: int, card: str) -> bytes:
    with _quiet():
        from onnx_ir.passes.common import RemoveUnusedNodesPass
        from onnxscript import opset18 as op

        def sort(values, stable=None, dim=-1, descending=False):  # type: ignore[no-untyped-def]
            """A stable sort: of equal values TopK takes the first first."""
            size = op.Shape(values, start=dim, end=dim + 1 if dim != -1 else None)
            return op.TopK(values, size, axis=dim, largest=int(descending), sorted=1)

        written = torch.onnx.export(
            program,
            input_names=inputs,
            output_names=OUTPUTS,
            opset_version=opset,
            dynamic_shapes=({0: "batch"}, None)[: len(inputs)],  # a name that runtimes show
            custom_translation_table={torch.ops.aten.sort.stable: sort},  # torch has none
            dynamo=True,
            verbose=False,
        )
        assert written is not None
        RemoveUnusedNodesPass()(written.model)  # the optimiser forgets constants inside the loop
        written.model.metadata_props["card"] = card
        return written.model_proto.SerializeToString()


def _as_torch(program: torch.export.ExportedProgram, card: str) -> bytes:
    stream = io.BytesIO()
    with _quiet():
        torch.export.save(program, stream, extra_files={"card.json": card})
    return stream.getvalue()


def _check_home(path: Path) -> None:
    """Refuse a path that nothing can be written to, before a minute of work."""
    if path.is_dir():
        raise ValueError(f"{path}: is a folder; give the name of a file")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}; make it first")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"{path}: the folder {path.parent} cannot be written to; choose another")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch and its exporter tell of themselves; what goes wrong is an exception."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
