"""Exported graphs return what the model returns, at any batch size and budget; a model without a graph is refused."""

import json
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import forked
import raytraced as rt
from raytraced.__main__ import main
from raytraced.experts import MLPExperts, update_dense
from raytraced.io import export as exporting
from raytraced.io.export import BaselineGraph, export, follow, trace, update_folded
from raytraced.layer import routed_layer
from raytraced.models.registry import MODELS
from raytraced.router import Choice, Router
from raytraced.routing import RoutingNetwork
from raytraced.sequence import Route, unroll

SIZES = (1, 7, 50)
TINY = {"dim": 8, "num_layers": 2, "num_experts": 3}
GREY, COLOUR = (1, 6, 6), (3, 8, 8)
REPLAYED = [name for name in MODELS if not name.startswith(("mre", "mlp")) and name not in ("dense", "multi-exit")]
BASELINES = [name for name in MODELS if not name.startswith("mre") and name != "multi-exit"]


def make(name="mre", image_shape=GREY, **options):
    torch.manual_seed(1)
    channels = image_shape[0]
    model = rt.build(
        name, image_shape=image_shape, num_classes=4, mean=[0.4] * channels, std=[0.3] * channels, **options
    )
    return model.eval().requires_grad_(False)


def pictures(num, image_shape=GREY):
    return torch.randint(0, 256, (num, *image_shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(num))


def run_onnx(session, images, *budget):
    names = [one.name for one in session.get_inputs()]
    inputs = dict(zip(names, (images.numpy(), *map(np.int64, budget)), strict=True))
    found = session.run(None, {name: np.asarray(value) for name, value in inputs.items()})
    return {one.name: torch.from_numpy(value) for one, value in zip(session.get_outputs(), found, strict=True)}


def open_onnx(path):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options)


def assert_answer(found, expected, logits=None):
    torch.testing.assert_close(found["logits"], expected.logits if logits is None else logits, rtol=0, atol=1e-4)
    assert torch.equal(found["num_experts"], expected.num_experts)
    assert torch.equal(found["active"], expected.routes[0].active)


def all_prefixes(model, images, budget):
    num = model.layer.router.routing.num_nodes
    return torch.stack([model(images, max_experts=min(k, budget)).logits for k in range(num + 1)], 1)


def python_loop(continues, step, carried):
    """The definition of torch.while_loop, without the seconds that torch takes to trace it."""
    while bool(continues(*carried)):
        carried = step(*carried)
    return carried


@given(
    st.integers(1, 4), st.integers(1, 4), st.integers(0, 18), st.sampled_from(("drawn", "dominant", 0.3)),
    st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_the_loop_of_a_graph_is_the_greedy_sequence(num_layers, num_experts, budget, stop, conditioned, seed):
    torch.manual_seed(seed)
    routing = RoutingNetwork(num_layers, num_experts, output_logit_offset=seed % 10).double().requires_grad_(False)
    entry_BN = torch.randn(9, num_experts, dtype=torch.float64).softmax(-1)
    input_logits_BLNO = torch.randn(9, num_layers - 1, num_experts, num_experts + 1).double() if conditioned else None

    def definition(num_steps):
        return unroll(
            routing, entry_BN, stop=stop, estimator="none", temperature=1.0, num_steps=num_steps, seed=None, rows_B=None,
            input_logits_BLNO=input_logits_BLNO,
        )  # fmt: skip

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "while_loop", python_loop)
        active_BLN, rates, prefixes_BKX = follow(
            routing, entry_BN, torch.tensor(budget), stop=stop, input_logits_BLNO=input_logits_BLNO,
            read_out=lambda active_BLN, rates: torch.cat((active_BLN.flatten(1), rates.nodes.flatten(1)), -1),
        )  # fmt: skip
    num_nodes = num_layers * num_experts
    expected = definition(min(budget, num_nodes))
    assert torch.equal(active_BLN, expected.active)
    assert torch.equal(rates.nodes, expected.rates.nodes)
    assert torch.equal(rates.output, expected.rates.output)
    for k in range(num_nodes + 1):
        prefix = definition(min(k, budget, num_nodes))
        assert torch.equal(prefixes_BKX[:, k], torch.cat((prefix.active.flatten(1), prefix.rates.nodes.flatten(1)), -1))


def test_relative_weights_are_exported():
    model, images = make(weighting="relative", weight_scale=2.0, stop=0.1, num_experts=4), pictures(9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "while_loop", python_loop)
        found = exporting.RaytracedGraph(model, False)(images, torch.tensor(99))
    assert_answer(found, model(images))
    other = make(weighting="rates-to-one", stop=0.1, num_experts=4)(images).logits
    assert float((found["logits"] - other).abs().max()) > 1e-3


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.integers(0, 6))
def test_folded_experts_are_the_dense_ones(num_experts, hidden, num_hidden, num):
    experts = MLPExperts(2, num_experts, 3, hidden, num_hidden).double().requires_grad_(False)
    hidden_BD, weights_BN = torch.randn(num, 3).double(), torch.rand(num, num_experts).double()
    found = update_folded(experts, 1, hidden_BD, weights_BN)
    torch.testing.assert_close(found, update_dense(experts, 1, hidden_BD, weights_BN), rtol=0, atol=1e-12)


@pytest.fixture(scope="session")
def saved(tmp_path_factory) -> Path:
    """A model of grey images in a file."""
    path = tmp_path_factory.mktemp("export") / "tiny.safetensors"
    rt.save(make(**TINY), path)
    return path


@pytest.fixture(scope="session")
def exported(saved) -> Path:
    """The answers of all its prefixes as ONNX, by the command line."""
    path = saved.with_suffix(".onnx")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["raytraced", "export", str(saved), "--prefixes", "--output", str(path)])
        assert main() == 0
    return path


@pytest.mark.parametrize("num", SIZES)
def test_all_prefixes_in_onnx_are_those_of_the_model(exported, num):
    model, session, images = make(**TINY), open_onnx(exported), pictures(num)
    assert len({*model(pictures(50)).num_experts.tolist()}) > 1
    for budget in (0, 2, 99):
        logits = all_prefixes(model, images, budget)
        assert_answer(run_onnx(session, images, budget), model(images, max_experts=budget), logits)


def test_an_empty_batch_has_empty_outputs_in_onnx(exported):
    """In a process of its own: without padding inside the graph, ONNX Runtime ends the process."""
    code = (
        "import sys, numpy as np, onnxruntime\n"
        "session = onnxruntime.InferenceSession(sys.argv[1])\n"
        f"images = np.zeros((0, *{GREY}), np.uint8)\n"
        "found = session.run(None, {'images': images, 'max_experts': np.array(9)})\n"
        "print([value.shape for value in found])"
    )
    done = forked.run(forked.program, code, exported)
    assert (done.returncode, done.stdout) == (0, "[(0, 7, 4), (0,), (0, 2, 3)]\n"), done.stderr


def test_a_negative_budget_counts_as_none_in_onnx(exported):
    session, images = open_onnx(exported), pictures(7)
    none, negative = (run_onnx(session, images, budget) for budget in (0, -5))
    assert all(torch.equal(none[name], negative[name]) for name in exporting.OUTPUTS)
    assert not negative["num_experts"].any()
    (budget,) = [one for one in onnx.load(exported).graph.input if one.name == "max_experts"]
    assert "a negative number counts as 0" in budget.doc_string


def test_an_onnx_file_is_valid_and_holds_its_card(exported, saved):
    onnx.checker.check_model(onnx.load(exported), full_check=True)
    session = open_onnx(exported)
    inputs = {one.name: (one.type, one.shape) for one in session.get_inputs()}
    assert inputs == {"images": ("tensor(uint8)", ["batch", *GREY]), "max_experts": ("tensor(int64)", [])}
    outputs = {one.name: one.shape for one in session.get_outputs()}
    assert outputs == {"logits": ["batch", 7, 4], "num_experts": ["batch"], "active": ["batch", 2, 3]}
    assert json.loads(session.get_modelmeta().custom_metadata_map["card"])["spec"]["image_shape"] == list(GREY)
    graph = onnx.load(exported).graph
    assert [node.op_type for node in graph.node].count("Loop") == 1
    assert {path for path in saved.parent.iterdir() if path.is_file()} == {saved, exported}


def test_a_budget_is_a_constant_of_the_graph_and_stands_in_its_card(tmp_path, monkeypatch):
    model, images, path = rt.load("mre-digits"), pictures(40, (1, 8, 8)), tmp_path / "eight.onnx"
    monkeypatch.setattr(sys, "argv", ["raytraced", "export", "mre-digits", "--experts", "8", "--output", str(path)])
    assert main() == 0
    session = open_onnx(path)
    expected = model(images, experts=8.0)
    assert expected.num_experts.sum() > model(images).num_experts.sum()
    assert_answer(run_onnx(session, images, 99), expected)
    card = json.loads(session.get_modelmeta().custom_metadata_map["card"])
    assert card["options"]["stop"] == model.resolve_budget(None, 8.0, None)
    assert model.card.options["stop"] == "drawn"


@pytest.fixture(scope="session")
def replaying(saved) -> Path:
    """The same model as ONNX, with a route as its input, by the command line."""
    path = saved.parent / "replay" / "tiny.onnx"
    path.parent.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["raytraced", "export", str(saved), "--route", "--output", str(path)])
        assert main() == 0
    return path


def some_route(num, steps, experts):
    """A set of experts for each image that no router would choose."""
    active = (torch.rand(num, steps, experts, generator=torch.Generator().manual_seed(num)) < 0.5).float()
    return Route(active, None, active.sum((1, 2)).long(), None)


def replay_onnx(session, images, active):
    found = session.run(None, {"images": images.numpy(), "route": active.float().numpy()})
    return {one.name: torch.from_numpy(value) for one, value in zip(session.get_outputs(), found, strict=True)}


@pytest.mark.parametrize("num", SIZES)
def test_a_route_is_replayed_in_onnx_as_in_the_library(replaying, num):
    model, session, images = make(**TINY), open_onnx(replaying), pictures(num)
    chosen = model(images)
    assert_answer(replay_onnx(session, images, chosen.routes[0].active), chosen)
    other = some_route(num, 2, 3)
    assert not torch.equal(other.active, chosen.routes[0].active)
    assert_answer(replay_onnx(session, images, other.active), model(images, routes=other))


def test_a_route_in_onnx_does_not_depend_on_the_batch(replaying):
    model, session, images, route = make(**TINY), open_onnx(replaying), pictures(50), some_route(50, 2, 3)
    expected = model(images, routes=route)
    for size in (1, 7):
        parts = zip(images.split(size), route.active.split(size), strict=True)
        found = [replay_onnx(session, *part) for part in parts]
        assert_answer({name: torch.cat([one[name] for one in found]) for name in exporting.OUTPUTS}, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_route_of_another_precision_is_replayed_in_onnx(replaying, dtype):
    model, session, images = make(**TINY, stop=0.3), open_onnx(replaying), pictures(50)
    chosen = make(**TINY, stop=0.3).to(dtype)(images).routes[0]
    again = model(images, routes=chosen)
    assert torch.equal(again.routes[0].active, (chosen.active != 0).float())
    assert_answer(replay_onnx(session, images, chosen.active != 0), again)


def test_an_empty_batch_of_routes_has_empty_outputs_in_onnx(replaying):
    code = (
        "import sys, numpy as np, onnxruntime\n"
        "session = onnxruntime.InferenceSession(sys.argv[1])\n"
        f"images, route = np.zeros((0, *{GREY}), np.uint8), np.zeros((0, 2, 3), np.float32)\n"
        "found = session.run(None, {'images': images, 'route': route})\n"
        "print([value.shape for value in found])"
    )
    done = forked.run(forked.program, code, replaying)
    assert (done.returncode, done.stdout) == (0, "[(0, 4), (0,), (0, 2, 3)]\n"), done.stderr


def test_a_graph_that_replays_says_what_it_takes_and_has_no_loop(replaying):
    written = onnx.load(replaying)
    onnx.checker.check_model(written, full_check=True)
    assert "Loop" not in [node.op_type for node in written.graph.node]
    inputs = {one.name: (one.type, one.shape) for one in open_onnx(replaying).get_inputs()}
    assert inputs == {"images": ("tensor(uint8)", ["batch", *GREY]), "route": ("tensor(float)", ["batch", 2, 3])}
    (route,) = [one for one in written.graph.input if one.name == "route"]
    assert route.doc_string.startswith("The experts that run: 1 for each of them")


@pytest.mark.parametrize(
    "name", ["top-k", *(pytest.param(name, marks=pytest.mark.slow) for name in REPLAYED if name != "top-k")]
)
def test_baselines_replay_a_route_in_a_graph(name, tmp_path):
    model = make(name, **TINY)
    assert export(model, tmp_path / "one.pt2", "torch", route=True)[0] == ("images", "route")
    run = torch.export.load(tmp_path / "one.pt2").module()
    for num in (0, *SIZES):
        route = some_route(num, model.layer.router.num_steps, 3)
        with torch.no_grad():
            expected = model(pictures(num), routes=route)
        found = run(pictures(num), route.active)
        assert_answer(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mre-paper", *REPLAYED])
def test_every_model_replays_a_route_in_onnx(name, tmp_path):
    model = make(name, **TINY)
    export(model, tmp_path / "one.onnx", route=True)
    session = open_onnx(tmp_path / "one.onnx")
    for num in SIZES:
        route = some_route(num, model.layer.router.num_steps, 3)
        with torch.no_grad():
            assert_answer(replay_onnx(session, pictures(num), route.active), model(pictures(num), routes=route))


class Stubborn(Router):
    """A router that does not know of recorded routes."""

    def route(self, step, hidden_BD, draws):
        active_BN = (self.gate_logits(step, hidden_BD) > 0).float()
        return Choice(active_BN, active_BN)


def test_a_model_that_cannot_follow_a_route_is_refused_before_it_is_traced(tmp_path):
    path = tmp_path / "one.onnx"
    model = make(**TINY)
    model.layer = routed_layer(Stubborn, **TINY)
    with pytest.raises(ValueError, match=r"^route=True: mre cannot follow a route \(route: Stubborn did not follow it"):
        export(model, path, route=True)
    with pytest.raises(ValueError, match=r"^prefixes=True: must be left out with route, which has one answer$"):
        export(make(**TINY), path, route=True, prefixes=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "options",
    [
        {"num_layers": 1, "num_experts": 2},
        pytest.param(
            TINY | {"stop": "dominant", "weighting": "rates", "input_rank": 2, "stream": "skip-sum"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["small", "every option"],
)
def test_a_torch_file_gives_the_answers_of_the_model(tmp_path, options):
    model = make(image_shape=COLOUR, **{"dim": 4} | options)
    if model.layer.router.sight_in is not None:
        torch.nn.init.normal_(model.layer.router.sight_out)
    assert export(model, tmp_path / "one.pt2", "torch", pixels="float") == (
        ("images", "max_experts"),
        exporting.OUTPUTS,
    )
    run = torch.export.load(tmp_path / "one.pt2").module()
    for num in (0, *SIZES):
        images = pictures(num, COLOUR) / 255
        for budget in (0, 2, 99):
            assert_answer(run(images, torch.tensor(budget)), model(images, max_experts=budget))
    assert [path.name for path in tmp_path.iterdir()] == ["one.pt2"]


def check_baseline(name):
    options = {} if "mlp" in name or name == "dense" else TINY
    model = make(name, **options)
    run = trace(BaselineGraph(model)).module()
    for num in SIZES:
        assert_answer(run(pictures(num)), model(pictures(num)))


@pytest.mark.parametrize("name", ["top-k", "dense"])
def test_baselines_are_exported(name):
    check_baseline(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in BASELINES if name not in ("top-k", "dense")])
def test_every_baseline_is_exported(name):
    check_baseline(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", BASELINES)
def test_every_baseline_is_exported_to_onnx(name, tmp_path):
    model = make(name)
    assert export(model, tmp_path / "one.onnx")[0] == ("images",)
    session = open_onnx(tmp_path / "one.onnx")
    for num in SIZES:
        assert_answer(run_onnx(session, pictures(num)), model(pictures(num)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["mre-digits", "mre-mnist", "mre-fashion-mnist", "mre-paper-fashion-mnist", "mre-cifar10"]
)
def test_every_shipped_model_is_exported(name, tmp_path):
    model = rt.load(name).requires_grad_(False)
    shape, pixels = model.input_block.image_shape, "float" if name == "mre-cifar10" else "uint8"
    export(model, tmp_path / "one.onnx", pixels=pixels)
    session = open_onnx(tmp_path / "one.onnx")
    for num in SIZES:
        images = pictures(num, shape) / 255 if pixels == "float" else pictures(num, shape)
        for budget in (0, 3, 99):
            assert_answer(run_onnx(session, images, budget), model(images, max_experts=budget))


@pytest.mark.slow
@pytest.mark.parametrize("opset", [exporting.OPSETS[0], exporting.OPSETS[-1]])
def test_the_oldest_and_the_newest_opset_run(opset, tmp_path):
    model, images = make(**TINY), pictures(7)
    export(model, tmp_path / "one.onnx", opset=opset)
    assert {one.version for one in onnx.load(tmp_path / "one.onnx").opset_import if not one.domain} == {opset}
    assert_answer(run_onnx(open_onnx(tmp_path / "one.onnx"), images, 3), model(images, max_experts=3))


@pytest.mark.data
def test_the_whole_test_set_has_the_same_labels(tmp_path):
    from raytraced.tasks.images.loading import load

    model = rt.load("mre-fashion-mnist").requires_grad_(False)
    images = load("fashion-mnist").test.images
    export(model, tmp_path / "one.onnx")
    session = open_onnx(tmp_path / "one.onnx")
    for size in (1, 7, 1000):
        for batch in images.split(size):
            found, expected = run_onnx(session, batch, 99), model(batch)
            assert torch.equal(found["logits"].argmax(-1), expected.logits.argmax(-1))
            assert_answer(found, expected)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--opset", "11"], "opset=11: must lie in 18 … 23"),
        (["--opset", "99"], "opset=99: must lie in 18 … 23"),
        (["--output", "{folder}"], "{folder}: is a folder; give the name of a file"),
        (["--output", "{folder}/none/one.onnx"], "{folder}/none/one.onnx: there is no folder {folder}/none; create it first"),
        (["--format", "tflite"], "format=tflite: must be one of onnx, torch"),
        (["--pixels", "int"], "pixels=int: must be one of uint8, float"),
        (["--stop", "0"], "stop=0.0: must be"),
        (["--stop", "0.5", "--route"], "stop=0.5: must be left out with --route, which says what runs"),
        (["--experts", "3"], "experts=3.0: the card of mre has no table of budgets; run `raytraced calibrate"),
        (["--stop", "0.5", "--effort", "1"], "effort=1.0: give either stop or a budget, not both"),
    ],
)  # fmt: skip
def test_bad_options_are_refused_in_one_line(words, message, saved, tmp_path, monkeypatch, capsys):
    words = [word.format(folder=tmp_path) for word in words]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["raytraced", "export", str(saved), *words])
    assert main() == 2
    line = capsys.readouterr().err
    assert message.format(folder=tmp_path) in line
    assert line.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_exported_is_refused_and_nothing_is_written(tmp_path):
    path, tokens = tmp_path / "one.onnx", {"context": 8, "num_heads": 2, "dim": 8, "num_experts": 3}
    cases = {
        "multi-exit: cannot be exported; only classifiers": make("multi-exit"),
        "gpt-mre: cannot be exported; only classifiers": rt.build("gpt-mre", vocab_size=9, **tokens),
        "Linear: cannot be exported; only classifiers": torch.nn.Linear(2, 2),
        "must be in float32": make(**TINY).double(),
        "is in training mode": make(**TINY).train(),
    }
    for message, model in cases.items():
        with pytest.raises(ValueError, match=message):
            export(model, path)
    for opset in ("18", 18.0):
        with pytest.raises(ValueError, match=f"^opset={opset!r}: must lie in 18 … 23"):
            export(make(**TINY), path, opset=opset)
    with pytest.raises(ValueError, match="prefixes=True: top-k has one answer only"):
        export(make("top-k"), path, prefixes=True)
    with pytest.raises(ValueError, match=r"stop=0.5: top-k has no dial; for raytraced models"):
        export(make("top-k"), path, stop=0.5)
    nameless = make(**TINY)
    nameless.card = None
    with pytest.raises(ValueError, match="Classifier: has no card with a name; make it with raytraced"):
        export(nameless, path)
    diverged = make(**TINY)
    next(diverged.parameters()).data[0] = float("nan")
    with pytest.raises(ValueError, match="mre: its weights are not finite: training diverged"):
        export(diverged, path)
    assert not list(tmp_path.iterdir())


def test_a_model_that_torch_cannot_trace_is_refused_in_one_line(tmp_path, capfd):
    class Exits(torch.nn.Module):
        def forward(self, hidden_BD):
            return hidden_BD * 2 if float(hidden_BD.sum()) > 0 else hidden_BD

    model = make("top-k", expert=Exits, **TINY)
    with pytest.raises(ValueError, match=r"^top-k: cannot be exported, torch cannot trace it \(.*\)$"):
        export(model, tmp_path / "one.onnx")
    assert not list(tmp_path.iterdir())
    assert capfd.readouterr() == ("", "")


def test_an_operator_that_onnx_lacks_is_named_in_one_line(tmp_path):
    class Bessel(torch.nn.Module):
        def forward(self, hidden_BD):
            return torch.special.bessel_j0(hidden_BD)

    model = make("dense", dim=4, num_blocks=1, expert=Bessel)
    with pytest.raises(ValueError, match=r"^dense: cannot be exported as onnx \(.*bessel_j0.*\)$"):
        export(model, tmp_path / "one.onnx")
    assert not list(tmp_path.iterdir())


def test_without_the_extra_the_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"^format=onnx: needs onnx and onnxscript; pip install '.\[onnx\]' in a clone of raytraced$"
    ):
        export(make(**TINY), tmp_path / "one.onnx")
    assert not list(tmp_path.iterdir())
