"""Every workload runs, on digits and at tiny size; what it says of itself is checked, no time is."""

import json
import signal
import subprocess
import sys
from itertools import islice, repeat
from pathlib import Path

import pytest
import torch

from experiments.benchmark import command as benchmark
from experiments.benchmark import layer_workloads, model_workloads, results
from experiments.benchmark.layer_workloads import (
    PEERS,
    ExpertSize,
    LayerStep,
    compare_sequences,
    peer_steps,
    raytraced_layer,
    top2_layer,
)
from experiments.benchmark.model_workloads import Bench, TrainingStep, recipe
from experiments.benchmark.results import WORKLOADS, chosen
from experiments.benchmark.timing import SHORT, Timings
from raytraced import kernels
from raytraced.routing import RoutingNetwork
from raytraced.training.interrupt import Interrupted

MEASUREMENTS = model_workloads.MEASUREMENTS | layer_workloads.MEASUREMENTS
TINY = SHORT._replace(rounds=2, least_rounds=1, seconds=0.001, sample_seconds=0.0, latencies=4, train_steps=2)


@pytest.fixture(scope="module")
def bench():
    return Bench(TINY, "digits")


@pytest.fixture
def small(monkeypatch):
    """Costly experts that cost little, and small batches."""
    for name, value in (
        ("COSTLY", ExpertSize(24, 32)),
        ("LIMIT_DIMS", (8, 16)),
        ("PRODUCT", 64),
        ("GRIDS", ((2, 4), (4, 8))),
        ("BATCH_SIZE", 16),
    ):
        monkeypatch.setattr(layer_workloads, name, value)
    monkeypatch.setattr(model_workloads, "BATCH_SIZE", 16)


@pytest.mark.parametrize(
    ("only", "names"),
    [("step", ["step"]), ("latency, step", ["step", "latency"]), ("Core_Limit", ["core-limit"]), ("", list(WORKLOADS))],
)
def test_workloads_are_chosen_by_name_in_the_order_of_the_table(only, names):
    assert chosen(only) == names


def test_an_unknown_workload_is_refused_with_those_there_are():
    with pytest.raises(
        ValueError, match=r"only=step,tsep: tsep is not a workload; must be one or more of step, epoch, "
    ):
        benchmark.benchmark(only="step,tsep")


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"output=.*file.*: .* is a file; name a folder"):
        benchmark.benchmark(output=str(tmp_path / "file"))


def test_the_command_does_not_import_torch_before_it_measures():
    code = "import sys, experiments.benchmark.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=100).returncode == 0


def test_every_workload_of_the_table_has_its_function():
    assert set(MEASUREMENTS) == set(WORKLOADS)


SLOW = ("step", "epoch")  # many models


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())
        for name in WORKLOADS
        if name not in ("gpu", "memory", "peers", "sequence", "tokens")
    ],
)
def test_a_workload_gives_ratios_of_named_contenders(name, bench, small):
    outcome = MEASUREMENTS[name](bench)
    assert outcome.rows
    for row in outcome.rows:
        assert row["ratio"] > 0
        assert row["what"] != row["against"]
    assert len({(row["what"], row["against"]) for row in outcome.rows}) == len(outcome.rows)


def test_what_a_gpu_would_be_asked_runs(bench, monkeypatch):
    monkeypatch.setattr(layer_workloads, "GPU_GRIDS", ((2, 4),))
    monkeypatch.setattr(layer_workloads, "GPU_BATCH", 8)
    monkeypatch.setattr(layer_workloads, "COSTLY", ExpertSize(8, 16))
    monkeypatch.setattr(
        torch, "bfloat16", torch.float32
    )  # some CPUs end the process where oneDNN multiplies in bfloat16
    outcome = layer_workloads.measure_gpu(bench, "cpu")
    assert [row["ratio"] > 0 for row in outcome.rows] == [True] * 6
    assert {"sequence, greedy, 2×4", "sequence, drawn, 2×4"} <= {row["what"] for row in outcome.rows}
    assert all(outcome.conditions.values())


def test_without_a_gpu_its_rows_are_left_out_and_nothing_is_written_if_nothing_else_was_asked(
    tmp_path, small, monkeypatch, capsys
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="only=gpu: no GPU, or a PyTorch without CUDA"):
        benchmark.run(["gpu"], tmp_path, TINY, "digits", fresh=False)
    assert not list(tmp_path.iterdir())
    benchmark.run(["latency", "gpu"], tmp_path, TINY, "digits", fresh=False)
    assert "gpu: left out, no GPU here" in capsys.readouterr().out
    assert list(json.loads((tmp_path / "results.json").read_text())["workloads"]) == ["latency"]


def test_figures_of_one_gpu_are_not_kept_for_another(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    alone = results.describe_machine()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H100")
    assert results.describe_machine() == alone | {"gpu": "H100"}


def test_end_to_end_at_tiny_size(tmp_path, small, monkeypatch, capsys):
    """Two workloads for real, through the file and the report."""
    monkeypatch.setattr(results, "code_hash", lambda root: "1")
    names = ["latency", "sequence"]
    benchmark.run(names, tmp_path, TINY, "digits", fresh=False)
    saved = json.loads((tmp_path / "results.json").read_text())
    assert {"processor", "torch", "compiled_kernels", "images"} <= set(saved["machine"])
    assert list(saved["workloads"]) == names
    assert all(saved["workloads"]["sequence"]["conditions"].values())
    assert 'raytraced.load("mre-digits")' in [row["what"] for row in saved["workloads"]["latency"]["rows"]]
    assert "sequence" in (tmp_path / "results.md").read_text()
    assert "results.json" in capsys.readouterr().out
    benchmark.run(names, tmp_path, TINY, "digits", fresh=False)
    assert "2 of 2 measured before" in capsys.readouterr().out


def test_latency_is_that_of_the_shipped_model_too(bench, monkeypatch):
    loaded = []
    monkeypatch.setattr(model_workloads, "load", lambda name: loaded.append(name) or bench.model("mre", "trained"))
    model_workloads.measure_latency(bench)
    assert loaded == ["mre-digits"]


def test_an_interrupt_while_an_epoch_is_trained_ends_the_benchmark(bench, monkeypatch):
    """Training turns Ctrl-C into a saved run; the benchmark does not resume it."""

    def interrupted(config, **options):
        raise Interrupted(signal.SIGINT, 3, Path(config.runs_dir))

    monkeypatch.setattr(model_workloads, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model_workloads.measure_epoch(bench)


@pytest.mark.slow  # two processes that import PyTorch; test_end_to_end_at_tiny_size measures too
def test_memory_is_what_the_system_counts_or_there_is_a_reason(bench):
    (row,) = model_workloads.measure_memory(bench).rows
    assert row["note"] if row["ratio"] is None else 0 < row["mb"] < row["against_mb"]


def test_the_step_is_the_one_of_the_recipe():
    """The loss of exits, the target, the optimizer and its decay are those of `raytraced train` for this model and data."""
    step = TrainingStep(recipe("mnist", "mre"), *model_workloads.noise(1, 28, 28)[:1], repeat(None))
    assert (step.objective.config.exit_loss, step.objective.config.target_experts) == (0.5, 6.0)
    assert isinstance(step.optimizer, torch.optim.AdamW)
    assert all(group["weight_decay"] == 0.1 and group["fused"] for group in step.optimizer.param_groups)
    assert step.objective.config.batch_size == model_workloads.BATCH_SIZE
    assert recipe("mnist", "top-k").exit_loss == 0


def test_batches_are_bytes_as_the_loader_gives_them(bench):
    first, second = islice(bench.batches(16), 2)
    assert first.inputs.dtype == torch.uint8
    assert first.inputs.shape == (16, *bench.dataset.image_shape)
    assert not first.inputs.equal(second.inputs)


@pytest.mark.parametrize("name", ["mre", "top-k"])
def test_a_step_at_rate_zero_keeps_the_model_but_moves_nothing_else(name, bench):
    model = bench.model(name, "at initialisation")
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    step = TrainingStep(recipe("digits", name), model, bench.batches(16))
    step()
    step()
    assert all(tensor.equal(before[key]) for key, tensor in model.state_dict().items())
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


def test_trained_models_differ_from_new_ones_and_are_trained_once(bench):
    weight = bench.model("mre", "trained").head.weight
    assert not weight.equal(bench.model("mre", "at initialisation").head.weight)
    assert weight.equal(bench.model("mre", "trained").head.weight)


def test_what_is_plain_runs_without_compiled_operations(bench):
    one = model_workloads.forced(model_workloads.Contender("x", lambda: kernels.sequence.allowed()), "plain")
    assert [implementation.name for implementation in one.run()] == ["plain"]
    assert one.name == "x, plain"


def test_the_comparison_sees_other_draws_rates_and_gradients(monkeypatch):
    """A compiled sequence that draws otherwise, and one whose gradient is off by a part in ten thousand, are noticed."""
    routing, entry_BN = RoutingNetwork(2, 3), torch.randn(64, 3).softmax(-1)
    assert all(compare_sequences(routing, entry_BN).values())
    real, calls = layer_workloads.SequenceRun.__call__, []

    def scaled(self):
        calls.append(self)
        route, gradients = real(self)
        return route, [gradient * (1.0001 if len(calls) <= 2 else 1) for gradient in gradients]

    monkeypatch.setattr(layer_workloads.SequenceRun, "__call__", scaled)
    found = compare_sequences(routing, entry_BN)
    assert found["the same draws"]
    assert not found["gradients within 1e-5"]
    monkeypatch.setattr(layer_workloads.SequenceRun, "__call__", real)
    seeds = iter(range(100))
    monkeypatch.setattr(layer_workloads, "fixed_generator", lambda: torch.Generator().manual_seed(next(seeds)))
    assert not compare_sequences(routing, entry_BN)["the same draws"]


def test_multiply_adds_of_a_step_are_three_times_those_of_its_products():
    """Counted by PyTorch on one row, an expert's forward pass is what our account takes thrice for each that runs."""
    size = ExpertSize(8, 32)
    experts = top2_layer(size).experts
    assert kernels.count_macs(lambda: experts.run_expert(0, 0, torch.zeros(1, 8))) == 2 * 8 * 32
    layer = raytraced_layer(size)
    hidden_BD = torch.randn(16, 8)
    work, num_experts = layer_workloads.step_macs(layer, hidden_BD)
    route = layer(hidden_BD).route
    routing = float(layer.cost(route)["routing"].macs.sum())
    assert work == pytest.approx(3 * (16 * num_experts * 2 * 8 * 32 + routing))


def test_a_peer_that_is_not_installed_stands_in_the_table_with_the_remedy(monkeypatch, small, bench):
    for module in ("mixture_of_experts", "st_moe_pytorch", "transformers"):
        monkeypatch.setitem(sys.modules, module, None)
    rows = layer_workloads.measure_peers(bench).rows
    assert [row["ratio"] for row in rows] == [None] * 2 * len(PEERS)
    for row, name in zip(rows, list(PEERS) * 2, strict=True):
        assert row["against"].startswith(name)
        assert row["note"].startswith("not installed (")
        assert row["note"].endswith("pip install '.[bench]'")


def test_a_peer_counts_in_its_fastest_variant_and_one_that_fails_gives_its_reason(monkeypatch, small, bench):
    slow_and_fast = lambda size: (lambda: torch.nn.Linear(24, 24), {"slow": 1, "fast": 2})  # noqa: E731

    def broken(size):
        raise RuntimeError("no such kernel\nand more")

    monkeypatch.setattr(layer_workloads, "NARROW", ExpertSize(24, 8))
    monkeypatch.setattr(layer_workloads, "PEERS", {"two": slow_and_fast, "broken": broken})
    timed = lambda contenders: Timings({one.name: [2.0 if "slow" in one.name else 1.0] for one in contenders})  # noqa: E731
    monkeypatch.setattr(bench, "time", timed, raising=False)
    rows = layer_workloads.measure_peers(bench).rows
    sizes = ("24→8→24", "24→32→24")
    assert [row["against"] for row in rows] == [f"{peer}, {size}" for size in sizes for peer in ("two, fast", "broken")]
    assert rows[1]["note"] == "RuntimeError: no such kernel"


def test_a_peer_has_as_many_multiply_adds_as_ours():
    pytest.importorskip("mixture_of_experts")
    (step, *_) = peer_steps("mixture-of-experts", ExpertSize(16, 64))
    experts = step.run.owner.layers[0].experts
    assert experts.w1[0].numel() + experts.w2[0].numel() == 2 * 16 * 64


def test_a_decoder_is_held_against_itself_with_other_feed_forward_parts(monkeypatch, bench):
    def missing(size):
        raise ImportError("No module named 'peer'")

    linear = lambda size: (lambda: torch.nn.Linear(size.dim, size.dim), {"1 group": 1, "2 groups": 2})  # noqa: E731
    monkeypatch.setattr(layer_workloads, "PEERS", {"linear": linear, "missing": missing})
    monkeypatch.setattr(layer_workloads, "NUM_WINDOWS", 2)
    rows = layer_workloads.measure_tokens(bench).rows
    whats = ["gpt-mre", "gpt-mre, stop 8", "gpt-mre", "gpt-mre"]
    assert [row["what"] for row in rows] == whats
    assert [row["against"].split(",")[0] for row in rows] == ["gpt-top-k", "gpt-top-k", "linear", "missing"]
    assert [row.get("against_experts") for row in rows] == [4, 4, 4, None]  # two blocks, two experts in each
    assert 0 < rows[1]["experts"] < rows[0]["experts"] == rows[2]["experts"]
    assert all(row["ratio"] > 0 for row in rows[:3])
    assert rows[3]["note"].startswith("not installed (")


def test_a_peers_decoder_differs_from_ours_in_its_feed_forward_parts_alone():
    batches = [None]
    ours = layer_workloads.token_step(batches, "gpt-top-k").model
    part = lambda: layer_workloads.PeerPart(lambda: torch.nn.Linear(96, 96), 2)  # noqa: E731
    theirs = layer_workloads.token_step(batches, "gpt-top-k", part).model
    rest = {name: tensor for name, tensor in theirs.state_dict().items() if not name.startswith("layer.")}
    expected = {name: tensor for name, tensor in ours.state_dict().items() if not name.startswith("layer.")}
    assert rest.keys() == expected.keys()
    assert all(tensor.equal(expected[name]) for name, tensor in rest.items())
    assert ours.layer.experts.widths == (layer_workloads.TOKEN.dim, layer_workloads.TOKEN.hidden, 96)
    tokens = torch.arange(6).view(1, 6)
    seen = []
    for node in theirs.layer.experts.nodes:
        node.layer.register_forward_hook(lambda _, given, made: seen.append((given[0].shape, made.shape)))
    theirs(tokens)
    assert seen == [((2, 3, 96), (2, 3, 96))] * 2  # two groups of three bytes, in each of two blocks


def test_a_layers_input_gets_a_gradient_and_its_weights_keep_none():
    layer = torch.nn.Linear(8, 8)
    gradients = []

    def run(hidden_BD):
        hidden_BD.register_hook(gradients.append)
        return layer(hidden_BD)

    LayerStep(layer, 8, run)()
    assert gradients[0].any()
    assert layer.weight.grad is None


def test_the_docs_explain_every_workload():
    text = (Path(__file__).parents[3] / "docs" / "lab" / "speed.md").read_text()
    for name in WORKLOADS:
        assert f"`{name}`" in text, name


def test_what_a_router_moves_by_itself_is_put_back_where_weights_stay(bench, monkeypatch):
    monkeypatch.setattr(model_workloads, "KEEP_STEPS", 4)
    batch = next(bench.batches(16))
    step = TrainingStep(recipe("digits", "relu"), bench.model("relu", "at initialisation"), repeat(batch))
    penalty = step.model.layer.router.penalty
    before = penalty.clone()
    for _ in range(3):
        step()
    assert not torch.equal(penalty, before)
    step()
    assert torch.equal(penalty, before)
