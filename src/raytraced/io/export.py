"""Classifiers as graphs for other runtimes: ONNX, where a sequence is one Loop, and torch.export.

A graph chooses its experts itself, or runs those of a route that it is given.

Axes: B batch, L layers, S steps of a layer, N experts per layer, M = L·N nodes, K = M + 1 candidates,
D width, H an expert's inner width, F = N·H, Y classes.
"""

import io
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raytraced import kernels
from raytraced.errors import NOT_FINITE, install_extra, require, require_one_of
from raytraced.experts import MLPExperts, run_stream, update_dense
from raytraced.files import write_file
from raytraced.io.onnx_graph import accept_empty_batches
from raytraced.io.saving import has_finite_weights
from raytraced.models.classifier import Classifier
from raytraced.models.output import Model
from raytraced.routers.raytraced import RaytracedExperts
from raytraced.routing import Rates, RoutingNetwork
from raytraced.sequence import Route, Stop, apply_stop, check_stop, expert_weights

Format = Literal["onnx", "torch"]
Pixels = Literal["uint8", "float"]
OPSETS = range(18, 24)  # versions that torch writes directly; its version converter breaks Loop nodes
EXAMPLES = 7  # images that a graph is traced with; a size that the code does not use, so that it stands for any size


# The outputs of every graph: logits (B, Y), of all prefixes (B, M + 1, Y), num_experts (B,) and active (B, S, N), 0 or 1.
OUTPUTS = ("logits", "num_experts", "active")


class GreedyRoute(NamedTuple):
    """The end of a greedy activation sequence."""

    active: Tensor  # (B, L, N), 0 or 1
    rates: Rates  # the firing rates under that set
    prefixes: Tensor  # (B, M + 1, …), the output after 0, 1, … M experts; (B, 0) where it was not asked for


def follow(
    routing: RoutingNetwork,
    entry_BN: Tensor,
    max_experts: Tensor,
    *,
    stop: Stop,
    input_logits_BLNO: Tensor | None = None,
    read_out: Callable[[Tensor, Rates], Tensor] | None = None,
) -> GreedyRoute:
    """Algorithm 1, greedy, as one loop of a graph.

    Args:
        routing: The routing network.
        entry_BN: Firing rates that enter the first layer (B, N).
        max_experts: The budget (), an input of the graph; a negative one counts as 0.
        stop: When a sequence ends, as for `RaytracedExperts`.
        input_logits_BLNO: What the input adds to the gates' logits (B, L − 1, N, N + 1).
        read_out: Computes an output (B, …) from the active set (B, L, N) and its rates; called for every prefix.

    Returns:
        The final set, its rates, and the outputs of all prefixes; after the end of a sequence the last one is repeated.
    """
    B, L, N, M = entry_BN.shape[0], routing.num_layers, routing.num_experts, routing.num_nodes
    candidates_K = torch.arange(M + 1, device=entry_BN.device)

    def continues(step: Tensor, active_BM: Tensor, running_B: Tensor, *_: Tensor) -> Tensor:
        return (step < max_experts) & (step < M) & running_B.any()

    def activate(
        step: Tensor, active_BM: Tensor, running_B: Tensor, nodes_BLN: Tensor, output_B: Tensor, prefixes: Tensor
    ) -> tuple[Tensor, ...]:
        probs_BK = torch.cat((nodes_BLN.flatten(1) * (1 - active_BM), output_B[:, None]), -1)
        choice_B = apply_stop(probs_BK, stop).argmax(-1)
        draw_BK = (choice_B[:, None] == candidates_K).to(probs_BK) * running_B[:, None]
        active_BM = active_BM + draw_BK[:, :M]
        rates = routing(entry_BN, active_BM.unflatten(1, (L, N)), input_logits_BLNO)
        if read_out is not None:
            from_here_K = (candidates_K > step).view(-1, *[1] * (prefixes.ndim - 2))
            output = read_out(active_BM.unflatten(1, (L, N)), rates)
            prefixes = torch.where(from_here_K, output[:, None], prefixes)
        return step + 1, active_BM, running_B & (choice_B < M), rates.nodes, rates.output, prefixes.clone()

    active_BM = entry_BN.new_zeros(B, M)
    rates = routing(entry_BN, active_BM.unflatten(1, (L, N)), input_logits_BLNO)
    prefixes = entry_BN.new_zeros(B, 0)
    if read_out is not None:
        first = read_out(active_BM.unflatten(1, (L, N)), rates)[:, None]
        prefixes = first.expand(B, M + 1, *first.shape[2:]).contiguous()
    step, running_B = torch.zeros_like(max_experts), torch.ones_like(entry_BN[:, 0], dtype=torch.bool)
    # A loop of the graph, not M copies of its body: a third of the time to export, a tenth of the nodes.
    _, active_BM, _, nodes_BLN, output_B, prefixes = torch.while_loop(
        continues, activate, (step, active_BM, running_B, *rates, prefixes)
    )
    return GreedyRoute(active_BM.unflatten(1, (L, N)), Rates(nodes_BLN, output_B), prefixes)


def update_folded(experts: MLPExperts, layer: int, hidden_BD: Tensor, weights_BN: Tensor) -> Tensor:
    """As `update_dense` (B, D), in two large products: into all experts of a layer, and, weighted, out of all of them.

    To run each expert on its own rows is slower for small experts and small batches: docs/lab/export.md has the figures.
    """
    first_NHD, *inner, last_NDH = [weight[layer] for weight in experts.weights]
    first_NH, *inner_biases, last_ND = [bias[layer] for bias in experts.biases]
    x_BNH = F.linear(hidden_BD, first_NHD.flatten(0, 1), first_NH.flatten()).unflatten(1, first_NH.shape)
    for weight_NHH, bias_NH in zip(inner, inner_biases, strict=True):
        x_BNH = (F.relu(x_BNH).transpose(0, 1) @ weight_NHH.mT + bias_NH[:, None]).transpose(0, 1)
    weighted_BF = (F.relu(x_BNH) * weights_BN[:, :, None]).flatten(1)
    return F.linear(weighted_BF, last_NDH.transpose(0, 1).flatten(1)) + weights_BN @ last_ND


class RaytracedGraph(nn.Module):
    """The graph of a raytraced classifier.

    Args:
        model: The classifier.
        prefixes: Whether `logits` are those after 0, 1, … M experts (B, M + 1, Y) instead of the last ones (B, Y).
        stop: When a sequence ends, a constant of the graph. Default: the model's own rule.
    """

    inputs: tuple[str, ...] = ("images", "max_experts")

    def __init__(self, model: Classifier, prefixes: bool, stop: Stop | None = None) -> None:
        super().__init__()
        assert isinstance(model.layer, RaytracedExperts)
        self.model, self.layer, self.prefixes = model, model.layer, prefixes
        self.stop: Stop = model.layer.router.config.stop if stop is None else stop

    def forward(self, images: Tensor, max_experts: Tensor) -> dict[str, Tensor]:
        """Images (B, C, H, W) and a budget () -> `logits`, `num_experts` (B,) and `active` (B, L, N) by name."""
        router, hidden_BD = self.layer.router, self.model.input_block(images)
        active_BLN, rates, prefixes_BKY = follow(
            router.routing,
            router.entry(hidden_BD),
            max_experts,
            stop=self.stop,
            input_logits_BLNO=router.input_logits(hidden_BD),
            read_out=partial(self.answer, hidden_BD) if self.prefixes else None,
        )
        logits = prefixes_BKY if self.prefixes else self.answer(hidden_BD, active_BLN, rates)
        return by_name(logits, active_BLN)

    def answer(self, hidden_BD: Tensor, active_BLN: Tensor, rates: Rates) -> Tensor:
        """The logits (B, Y) of vectors (B, D), an active set (B, L, N) and the rates under it."""
        layer, config = self.layer, self.layer.router.config
        weights_BLN = expert_weights(config.weighting, active_BLN, rates.nodes, config.weight_scale)

        def update(index: int, stream_BD: Tensor) -> Tensor:
            if isinstance(layer.experts, MLPExperts):
                return update_folded(layer.experts, index, stream_BD, weights_BLN[:, index])
            return update_dense(layer.experts, index, stream_BD, weights_BLN[:, index])

        logits_BY: Tensor = self.model.head(run_stream(layer.stream, layer.router.num_layers, hidden_BD, update))
        return logits_BY


class RaytracedReplayGraph(RaytracedGraph):
    """The graph of a raytraced classifier that runs the experts of a given route."""

    inputs = ("images", "route")

    def forward(self, images: Tensor, route: Tensor) -> dict[str, Tensor]:
        """Images (B, C, H, W) and the experts to run (B, L, N) -> as `RaytracedGraph`, with the rates of this set."""
        router, hidden_BD = self.layer.router, self.model.input_block(images)
        active_BLN = (route != 0).to(hidden_BD.dtype)
        rates = router.routing(router.entry(hidden_BD), active_BLN, router.input_logits(hidden_BD))
        return by_name(self.answer(hidden_BD, active_BLN, rates), active_BLN)


class BaselineGraph(nn.Module):
    """The graph of any other classifier."""

    inputs: tuple[str, ...] = ("images",)

    def __init__(self, model: Classifier) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Images (B, C, H, W) -> `logits`, `num_experts` and `active` by name."""
        out = self.model(images)
        return dict(zip(OUTPUTS, (out.logits, out.num_experts, out.routes[0].active), strict=True))


class BaselineReplayGraph(nn.Module):
    """The graph of any other classifier that runs the experts of a given route, weighted by the router's own rule."""

    inputs = ("images", "route")

    def __init__(self, model: Classifier) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, route: Tensor) -> dict[str, Tensor]:
        """Images (B, C, H, W) and the experts to run (B, S, N) -> as `BaselineGraph`."""
        active_BSN = (route != 0).to(route.dtype)
        out = self.model(images, routes=Route(active_BSN, None, active_BSN.sum((1, 2)).long(), None))
        return by_name(out.logits, out.routes[0].active)


Graph = RaytracedGraph | BaselineGraph | BaselineReplayGraph


def by_name(logits: Tensor, active_BSN: Tensor) -> dict[str, Tensor]:
    """The outputs of a graph."""
    return dict(zip(OUTPUTS, (logits, active_BSN.sum((1, 2)).long(), active_BSN), strict=True))


def export(
    model: Model,
    path: str | Path,
    format: Format = "onnx",
    *,
    pixels: Pixels = "uint8",
    prefixes: bool = False,
    route: bool = False,
    stop: float | None = None,
    opset: int = 20,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Write a classifier as a graph for another runtime; a crash leaves no part of a file.

    The graph takes batches of any size, also empty ones. A raytraced model's graph has a second input, `max_experts` (),
    the largest number of experts per image; a negative number counts as 0.

    Args:
        model: A classifier made by `raytraced.build` or `raytraced.load`, in float32 and in evaluation mode.
        path: The file to write.
        format: "onnx", or "torch" for a file of `torch.export`.
        pixels: Kind of the images: "uint8" for bytes, "float" for fractions in 0 … 1. The graph normalises them itself.
        prefixes: Whether the logits are those after 0, 1, … experts, (B, M + 1, Y); for raytraced models only.
        route: Whether the graph runs the experts of a route instead of its own choice. Its second input is then `route`
            (B, S, N), float32: 1 for each expert that runs, as `Route.active` and the output `active` of a graph.
        stop: How much the output node's rate counts when the next node is chosen; a constant of the graph, which its card
            states. Default: the model's own. Only for raytraced models.
        opset: Version of ONNX's operators.

    Returns:
        The names of the graph's inputs and those of its outputs: logits (B, Y), num_experts (B,) and active (B, S, N).
    """
    path = Path(path)
    require_one_of("format", format, get_args(Format))
    require_one_of("pixels", pixels, get_args(Pixels))
    _check_home(path)
    if format == "onnx":
        is_known = isinstance(opset, int) and opset in OPSETS
        require(is_known, "opset", repr(opset), f"must lie in {OPSETS[0]} … {OPSETS[-1]}: a loop needs that")
        missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
        require(not missing, "format", format, f"needs {' and '.join(missing)}; {install_extra('onnx')}")
    graph = _graph(model, prefixes, route, stop)
    program = trace(graph, pixels)
    stated = model.card if stop is None else replace(model.card, options=model.card.options | {"stop": stop})
    card = json.dumps(asdict(stated), default=lambda value: type(value).__name__)
    try:
        content = _as_onnx(program, graph.inputs, opset, card) if format == "onnx" else _as_torch(program, card)
    except Exception as error:
        lines = str(error).splitlines()
        first = lines[0] if lines else type(error).__name__
        reason = next((line for line in lines if "No ONNX function" in line), first)
        raise ValueError(
            f"{model.name}: cannot be exported as {format} ({reason.partition('>: ')[2] or reason:.150})"
        ) from error
    write_file(path, content)
    return graph.inputs, OUTPUTS


def trace(graph: Graph, pixels: Pixels = "uint8") -> torch.export.ExportedProgram:
    """Trace a graph with torch.export, for batches of any size."""
    images = torch.rand(EXAMPLES, *graph.model.input_block.image_shape)
    router, batch = graph.model.layer.router, {0: torch.export.Dim("batch", min=1)}
    known: dict[str, tuple[Tensor, dict[int, torch.export.Dim] | None]] = {
        "images": (images if pixels == "float" else (images * 255).byte(), batch),
        "max_experts": (torch.tensor(EXAMPLES), None),
        "route": (torch.ones(EXAMPLES, router.num_steps, router.num_experts), batch),
    }
    examples, sizes = zip(*(known[name] for name in graph.inputs), strict=True)
    try:
        with kernels.use("plain"), torch.no_grad(), _quiet():
            return torch.export.export(graph, examples, dynamic_shapes=sizes)
    except Exception as error:  # torch.export raises errors of many kinds
        reason = " ".join(str(error).split(".")[0].split())
        raise ValueError(f"{graph.model.name}: cannot be exported, torch cannot trace it ({reason:.150})") from error


def _graph(model: Model, prefixes: bool, route: bool, stop: float | None) -> Graph:
    """The graph of a model; a ValueError says why a model has none."""
    if not isinstance(model, Classifier):
        name = model.name if isinstance(model, Model) else type(model).__name__
        raise ValueError(f"{name}: cannot be exported; only classifiers of images with one answer per image can")
    if not (model.card and model.card.model):
        raise ValueError(f"{type(model).__name__}: has no card with a name; make it with raytraced.build or load")
    if not has_finite_weights(model):
        raise ValueError(f"{model.name}: {NOT_FINITE}")
    dtypes = {parameter.dtype for parameter in model.parameters()}
    require(
        dtypes == {torch.float32}, "model", model.name, "must be in float32 to be exported; convert it with .float()"
    )
    require(not model.training, "model", model.name, "is in training mode; call .eval() first")
    if route:
        require(not prefixes, "prefixes", prefixes, "must be left out with route, which has one answer")
        require(stop is None, "stop", stop, "must be left out with route, which says what runs")
        _check_follows(model)
    if stop is not None:
        check_stop(stop)
    layer = model.layer
    # A subclass may have a pass of its own: it is traced as it is.
    if isinstance(layer, RaytracedExperts) and layer.fuses and layer.router.fuses:
        return RaytracedReplayGraph(model, False) if route else RaytracedGraph(model, prefixes, stop)
    require(stop is None, "stop", stop, f"{model.name} has no dial; for raytraced models")
    require(not prefixes, "prefixes", prefixes, f"{model.name} has one answer only; for raytraced models")
    return BaselineReplayGraph(model) if route else BaselineGraph(model)


@torch.no_grad()
def _check_follows(model: Classifier) -> None:
    """Refuse a model whose router does not follow a route; a graph could not report it."""
    router = model.layer.router
    half_SN = torch.arange(router.num_steps * router.num_experts).view(router.num_steps, router.num_experts) % 2
    active_BSN = torch.stack((half_SN, 1 - half_SN)).float()  # two sets of which no router chooses both by itself
    images = torch.zeros(2, *model.input_block.image_shape)
    try:
        model(images, routes=Route(active_BSN, None, active_BSN.sum((1, 2)).long(), None))
    except ValueError as error:
        raise ValueError(f"route=True: {model.name} cannot follow a route ({error})") from error


def _as_onnx(program: torch.export.ExportedProgram, inputs: tuple[str, ...], opset: int, card: str) -> bytes:
    """A traced graph as the bytes of an ONNX file, with the card in its metadata."""
    with _quiet():
        from onnx_ir.passes.common import RemoveUnusedNodesPass
        from onnxscript import opset18 as op

        def sort(values, stable=None, dim=-1, descending=False):  # type: ignore[no-untyped-def]
            """A stable sort: TopK keeps equal values in their order."""
            size = op.Shape(values, start=dim, end=dim + 1 if dim != -1 else None)
            return op.TopK(values, size, axis=dim, largest=int(descending), sorted=1)

        written = torch.onnx.export(
            program,
            input_names=inputs,
            output_names=OUTPUTS,
            opset_version=opset,
            dynamic_shapes=[None if name == "max_experts" else {0: "batch"} for name in inputs],  # runtimes show it
            custom_translation_table={torch.ops.aten.sort.stable: sort},  # torch has no translation of it
            dynamo=True,
            verbose=False,
        )
        assert written is not None
        RemoveUnusedNodesPass()(written.model)  # the optimiser leaves unused constants in the loop
        written.model.metadata_props["card"] = card
        model = written.model_proto
        accept_empty_batches(model)
        return model.SerializeToString()


def _as_torch(program: torch.export.ExportedProgram, card: str) -> bytes:
    """A traced graph as the bytes of a file of torch.export, with the card in card.json."""
    stream = io.BytesIO()
    with _quiet():
        torch.export.save(program, stream, extra_files={"card.json": card})
    return stream.getvalue()


def _check_home(path: Path) -> None:
    """Refuse a path that cannot be written to, before a minute of work."""
    if path.is_dir():
        raise ValueError(f"{path}: is a folder; give the name of a file")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}; create it first")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"{path}: the folder {path.parent} cannot be written to; choose another")


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide what torch and its exporter print; failures are exceptions."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
