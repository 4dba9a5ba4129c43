"""A model whose experts are in a store answers as the model itself does, bit for bit, at every limit."""

import copy
import json
import os
import threading
from dataclasses import asdict

import pytest
import torch

import raytraced
from raytraced import kernels
from raytraced.cli.main import main
from raytraced.early_exit import ExitPolicy
from raytraced.experts import MLPExperts, Stream
from raytraced.files import DamagedFileError
from raytraced.models.output import num_parameters
from raytraced.router import Call
from raytraced.routers.raytraced import RaytracedExperts
from raytraced.store.experts import StoredExperts, expert_numbers
from raytraced.store.layout import GridShape, open_store, write_store
from raytraced.store.pool import ExpertPool
from raytraced.store.reader import ExpertReader

L, N, D = 3, 5, 8


def store_of(grid, path):
    write_store(
        path,
        {},
        {"grid": GridShape(grid.num_layers, grid.num_experts)},
        lambda _, *place: expert_numbers(grid, *place),
        "",
    )
    return open_store(path)


def stored(file, grid, slots, threads=2):
    pool = ExpertPool(ExpertReader(file), slots * file.run_bytes, threads)
    return StoredExperts(pool, 0, grid)


@pytest.fixture(params=[torch.float32, torch.float64], ids=["single", "double"])
def grid(request):
    return MLPExperts(L, N, D, 13).to(request.param)


def choose(rows, grid, share=0.4):
    dtype = grid.weights[0].dtype
    active = (torch.rand(rows, L, N) < share).to(dtype)
    return torch.randn(rows, D, dtype=dtype), active, torch.rand(rows, L, N, dtype=dtype) * active


@pytest.mark.skipif(not kernels.available(), reason="the compiled kernels are not built")
@pytest.mark.parametrize("stream", list(Stream))
@pytest.mark.parametrize("slots", [1, 2, 7, L * N])
@torch.no_grad()
def test_a_grid_in_a_store_gives_the_same_bits(grid, tmp_path, stream, slots):
    experts = stored(store_of(grid, tmp_path / "store"), grid, slots)
    for rows in (0, 1, 3, 300):
        for exits in (False, True):
            inputs = choose(rows, grid)
            assert kernels.experts.explain(experts, *inputs, stream, exits).name == "stored"
            assert torch.equal(
                kernels.experts(experts, *inputs, stream, exits), kernels.experts(grid, *inputs, stream, exits)
            )
    experts.pool.close()


@pytest.mark.skipif(not kernels.available(), reason="the compiled kernels are not built")
@pytest.mark.parametrize("threads", [1, 2, 3])
@torch.no_grad()
def test_the_number_of_threads_changes_no_bit(tmp_path, threads):
    grid = MLPExperts(L, N, D, 600)  # large enough to be shared out by experts
    experts = stored(store_of(grid, tmp_path / "store"), grid, 4, threads)
    inputs = choose(50, grid)
    expected = kernels.experts(grid, *inputs, Stream.RESIDUAL)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert torch.equal(kernels.experts(experts, *inputs, Stream.RESIDUAL), expected)
    finally:
        torch.set_num_threads(before)
    experts.pool.close()


@torch.no_grad()
def test_plain_pytorch_gives_the_same_up_to_rounding(grid, tmp_path):
    # Its matrix products round by where in memory a matrix begins.
    experts = stored(store_of(grid, tmp_path / "store"), grid, 2)
    inputs = choose(20, grid)
    with kernels.use(experts="sparse"):
        expected = kernels.experts(grid, *inputs, Stream.RESIDUAL)
        torch.testing.assert_close(kernels.experts(experts, *inputs, Stream.RESIDUAL), expected)
    experts.pool.close()


@torch.no_grad()
def test_half_precision_runs_in_plain_pytorch(tmp_path):
    grid = MLPExperts(L, N, D, 13).to(torch.bfloat16)
    experts = stored(store_of(grid, tmp_path / "store"), grid, 2)
    inputs = choose(4, grid)
    assert kernels.experts.explain(experts, *inputs, Stream.RESIDUAL).name == "sparse"
    with kernels.use(experts="sparse"):
        expected = kernels.experts(grid, *inputs, Stream.RESIDUAL)
    torch.testing.assert_close(kernels.experts(experts, *inputs, Stream.RESIDUAL), expected)
    experts.pool.close()


@torch.no_grad()
def test_a_whole_grid_reads_each_expert_once_and_none_in_vain(grid, tmp_path):
    experts = stored(store_of(grid, tmp_path / "store"), grid, 2)
    hidden, active, weights = choose(20, grid)
    kernels.experts(experts, hidden, active, weights, Stream.RESIDUAL)
    stats = experts.pool.stats
    assert stats.num_reads == int(active.any(0).sum())
    assert stats.num_wasted == 0
    experts.pool.close()


def test_a_gradient_is_refused_in_one_line(grid, tmp_path):
    experts = stored(store_of(grid, tmp_path / "store"), grid, 2)
    hidden, *rest = choose(2, grid)
    for word in ("", "plain"):
        with kernels.use(word), pytest.raises(ValueError, match="experts in a store have no gradients"):
            kernels.experts(experts, hidden.requires_grad_(), *rest, Stream.RESIDUAL)
    experts.pool.close()


MODELS = {
    "mre": {"image_shape": (1, 8, 8), "num_classes": 4, "dim": 8, "num_layers": 3, "num_experts": 4},
    "top-k": {"image_shape": (1, 8, 8), "num_classes": 4, "dim": 8, "num_layers": 3, "num_experts": 4},
    "chain": {"image_shape": (1, 8, 8), "num_classes": 4, "dim": 8, "num_layers": 2, "num_experts": 4},
    "gpt-mre": {"dim": 16, "hidden": 24, "depth": 2, "num_heads": 2, "context": 16, "num_experts": 4},
    "gpt-planned": {"dim": 16, "hidden": 24, "depth": 2, "num_heads": 2, "context": 16, "num_experts": 4},
    "gpt-top-k": {"dim": 16, "hidden": 24, "depth": 2, "num_heads": 2, "context": 16, "num_experts": 4},
}


@pytest.fixture(params=MODELS)
def model(request, tmp_path):
    made = raytraced.build(request.param, **MODELS[request.param]).eval()
    raytraced.save(made, tmp_path / "store.safetensors", store=True)
    return made, tmp_path / "store.safetensors"


def inputs_of(model, rows):
    if model.name.startswith("gpt"):
        return torch.randint(0, 256, (rows, 9 if rows < 10 else 2))
    return torch.randint(0, 256, (rows, 1, 8, 8), dtype=torch.uint8)


def pool_of(model):
    (pool,) = {module.pool for module in model.modules() if isinstance(module, StoredExperts)}
    return pool


@pytest.fixture(params=[1, 2])
def num_threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def assert_same_bits(out, expected):
    assert torch.equal(out.logits, expected.logits)
    for route, other in zip(out.routes, expected.routes, strict=True):
        assert torch.equal(route.active, other.active)
        assert (route.rates is None) == (other.rates is None)
        assert route.rates is None or torch.equal(route.rates.nodes, other.rates.nodes)
    if expected.num_exits is not None:
        assert torch.equal(out.num_exits, expected.num_exits)


@pytest.mark.skipif(not kernels.available(), reason="the compiled kernels are not built")
@pytest.mark.parametrize("direct", [False, None])
def test_a_model_in_a_store_gives_the_same_bits_at_every_limit(model, num_threads, direct):
    whole, path = model
    size = open_store(path).run_bytes
    batches = [inputs_of(whole, rows) for rows in (1, 7, 65, 300)]
    with torch.no_grad():
        expected = [whole(inputs) for inputs in batches]
    for memory in (size, 3 * size, None):
        loaded = raytraced.load(path, memory=memory, direct=direct)
        for inputs, wanted in zip(batches, expected, strict=True):
            with torch.no_grad():
                assert_same_bits(loaded(inputs), wanted)
        pool_of(loaded).close()


@pytest.mark.skipif(not kernels.available(), reason="the compiled kernels are not built")
def test_an_answer_from_a_store_has_no_gradient_and_the_same_cost(model):
    whole, path = model
    loaded, inputs = raytraced.load(path, memory=open_store(path).run_bytes), inputs_of(whole, 7)
    expected, out = whole(inputs), loaded(inputs)
    assert_same_bits(out, expected)
    assert not out.logits.requires_grad
    parts = whole.cost(inputs, expected)
    for name, cost in loaded.cost(inputs, out).items():
        assert torch.equal(torch.as_tensor(cost.macs), torch.as_tensor(parts[name].macs))
        assert torch.equal(torch.as_tensor(cost.parameters), torch.as_tensor(parts[name].parameters))
    pool_of(loaded).close()


SHIPPED = ("mre-mnist", "mre-digits", "mre-cifar10", "mre-fashion-mnist", "mre-paper-fashion-mnist")


@pytest.mark.skipif(not kernels.available(), reason="the compiled kernels are not built")
@pytest.mark.parametrize("name", SHIPPED)
@torch.no_grad()
def test_a_shipped_image_model_gives_the_same_bits_from_a_store(tmp_path, name):
    whole = raytraced.load(name)
    raytraced.save(whole, tmp_path / "store.safetensors", store=True)
    loaded = raytraced.load(
        tmp_path / "store.safetensors", memory=3 * open_store(tmp_path / "store.safetensors").run_bytes
    )
    layer, router = loaded.layer, loaded.layer.router
    for rows in (1, 64, 65):
        images = torch.randint(0, 256, (rows, *whole.input_block.image_shape), dtype=torch.uint8)
        fused = kernels.raytrace.explain(layer.kernel_args(router), loaded.encode(images)).name
        assert fused == ("stored" if rows <= 64 else "steps")
        stop = torch.linspace(0.1, 1, rows)
        for options in ({}, {"max_experts": 3}, {"stop": stop}, {"exits": True}, {"select": "sample"}):
            answers = []
            for model in (loaded, whole):
                generator = torch.Generator().manual_seed(1)
                answers.append(model(images, **options, generator=generator))
            assert_same_bits(*answers)
        for options in ({}, {"stop": stop}, {"max_experts": 2}, {"mask": torch.arange(rows) % 3 > 0}):
            for confidence in (0, 0.9, [0.5, 0.99], 1):
                assert_same_bits(
                    loaded(images, confidence=confidence, **options), whole(images, confidence=confidence, **options)
                )
    assert pool_of(loaded).stats.num_wasted == 0
    pool_of(loaded).close()


LAYERS = (
    {"weighting": "unit", "estimator": "reinmax", "stop": 0.2},
    {"weighting": "relative", "input_rank": 3, "input_init_std": 0.5, "weight_scale": 1.5},
    {"weighting": "rates", "num_layers": 1},
    {"weighting": "rates-to-one", "num_experts": 9, "stop": "dominant"},
)


@pytest.mark.skipif(not kernels.available(), reason="the compiled kernels are not built")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["single", "double"])
@pytest.mark.parametrize("stream", ["residual", "skip-sum", "last"])
@pytest.mark.parametrize("options", LAYERS, ids=lambda options: options["weighting"])
def test_a_layer_in_a_store_is_rounded_as_the_compiled_calls_round(tmp_path, dtype, stream, options):
    sizes = {"num_layers": L, "num_experts": N} | options
    layer = RaytracedExperts(D, stream=stream, hidden=13, gate_init="normal", **sizes).to(dtype).eval()
    grid, head = layer.experts, torch.nn.Linear(D, 4).to(dtype)
    other = copy.deepcopy(layer)
    other.experts = stored(store_of(grid, tmp_path / "store"), grid, 2)
    other.requires_grad_(False)
    for rows, is_training in ((1, False), (40, False), (80, True)):
        hidden = torch.randn(rows, D, dtype=dtype)
        with torch.set_grad_enabled(is_training):  # with gradients, one call for any number of rows
            assert kernels.raytrace.explain(other.kernel_args(other.router), hidden).name == "stored"
            for call in ({}, {"max_experts": 2}, {"exits": True}, {"stop": torch.rand(rows)}):
                out, expected = other(hidden, **call), layer(hidden, **call)
                assert torch.equal(out.hidden, expected.hidden)
                assert torch.equal(out.route.rates.nodes, expected.route.rates.nodes)
                assert out.exits is None or torch.equal(out.exits, expected.exits)
    for thresholds in (0.3, 0.5, [0, 1], 1):
        policy, call = ExitPolicy(thresholds), Call(stop=torch.rand(80))
        with torch.no_grad():
            out, expected = (each.fused_early_exit(hidden, call, head, policy, None) for each in (other, layer))
        for name in ("logits", "num_exits"):
            assert torch.equal(getattr(out, name), getattr(expected, name))
        for name in ("active", "nodes", "num_active"):
            assert torch.equal(getattr(out.route, name), getattr(expected.route, name))
    other.experts.pool.close()


@pytest.mark.skipif(not kernels.available(), reason="the compiled kernels are not built")
def test_threads_that_share_a_model_get_the_same_bits(tmp_path):
    whole = raytraced.build("mre", **MODELS["mre"]).eval()
    raytraced.save(whole, tmp_path / "store.safetensors", store=True)
    loaded = raytraced.load(tmp_path / "store.safetensors", memory=3 * 4096)
    inputs = [inputs_of(whole, 5) for _ in range(4)]
    expected = [whole(each).logits for each in inputs]
    equal = [False] * 4

    def call(number):
        equal[number] = all(torch.equal(loaded(inputs[number]).logits, expected[number]) for _ in range(5))

    callers = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert equal == [True] * 4
    pool_of(loaded).close()


def test_a_loaded_store_has_its_card_and_no_weights_of_experts(model):
    whole, path = model
    loaded = raytraced.load(path)
    assert json.dumps(asdict(loaded.card)) == json.dumps(asdict(whole.card))
    assert {name for name, _ in loaded.named_parameters()} == {
        name for name, _ in whole.named_parameters() if ".weights." not in name and ".biases." not in name
    }
    assert copy.deepcopy(loaded) is not loaded
    with pytest.raises(ValueError, match="its experts are in a store, which is a file already"):
        raytraced.save(loaded, path.parent / "again.safetensors")
    pool_of(loaded).close()


def test_options_of_a_store_are_refused_for_other_files(model):
    whole, path = model
    raytraced.save(whole, path.parent / "model.safetensors")
    for options in ({"memory": "2 GB"}, {"direct": True}):
        with pytest.raises(ValueError, match=r"is not a store; `raytraced store .*` writes one"):
            raytraced.load(path.parent / "model.safetensors", **options)


def test_a_store_of_another_model_is_refused(tmp_path):
    whole = raytraced.build("mre", **MODELS["mre"])
    other = raytraced.build("mre", **MODELS["mre"] | {"num_experts": 5})
    whole.card = other.card
    raytraced.save(whole, tmp_path / "store.safetensors", store=True)
    with pytest.raises(ValueError, match=r"its experts do not fit model 'mre': found .*4.*expected .*5"):
        raytraced.load(tmp_path / "store.safetensors")


def test_a_limit_below_one_expert_is_refused_when_a_store_is_loaded(model):
    _, path = model
    with pytest.raises(ValueError, match=r"^memory=100 B: must be at least \d+\.\d KB, the size of one expert"):
        raytraced.load(path, memory="100 B")


def test_a_file_that_is_cut_while_a_model_uses_it_is_one_line_for_each_call(model):
    whole, path = model
    run_bytes = open_store(path).run_bytes
    loaded = raytraced.load(path, memory=run_bytes)
    os.truncate(path, open_store(path).runs[0].offset + 100)
    for _ in range(2):
        with pytest.raises(DamagedFileError, match=r"store\.safetensors: cut: ends inside expert") as error:
            loaded(inputs_of(whole, 7))
        assert "\n" not in str(error.value)
    assert not pool_of(loaded)._pool.plans
    pool_of(loaded).close()


def test_a_store_is_written_and_used_on_the_command_line(tmp_path, monkeypatch, capsys):
    whole = raytraced.build("gpt-mre", **MODELS["gpt-mre"])
    raytraced.save(whole, tmp_path / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    assert main(["store", "model.safetensors", "store.safetensors"]) == 0
    assert "experts of" in capsys.readouterr().out
    outputs = []
    for words in (["model.safetensors"], ["store.safetensors", "--memory", "10KB"], ["store.safetensors"]):
        assert main(["generate", words[0], "a", "--length", "5", "--json", "--device", "cpu", *words[1:]]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[1:] == outputs[:1] * 2


MISTAKES = {
    "store model.safetensors out": "output=out: must end in .safetensors",
    "store model.safetensors no/folder.safetensors": "its folder does not exist",
    "store model.safetensors model.safetensors": "is the model itself",
    "store store.safetensors again.safetensors": "its experts are in a store, which is a file already",
    "generate store.safetensors a --memory 1KB": "memory=1.0 KB: must be at least",
    "generate store.safetensors a --memory lots": "memory=lots: must be a number of bytes",
    "generate model.safetensors a --memory 1GB": "is not a store",
    "generate model.safetensors a --max-ms 5": "max_ms=5.0: is for models loaded from a store",
    "generate store.safetensors a --max-ms 0": "max_ms=0.0: must be a number of milliseconds above 0",
    "generate store.safetensors a --device meta": "must be cpu for a model whose experts are in a store",
}


@pytest.mark.parametrize(("command", "words"), MISTAKES.items(), ids=MISTAKES)
def test_a_mistake_on_the_command_line_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, capsys, command, words):
    whole = raytraced.build("gpt-mre", **MODELS["gpt-mre"])
    raytraced.save(whole, tmp_path / "model.safetensors")
    raytraced.save(whole, tmp_path / "store.safetensors", store=True)
    monkeypatch.chdir(tmp_path)
    assert main(command.split()) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "store.safetensors"]


def test_a_shared_folder_may_hold_a_store(tmp_path):
    whole = raytraced.build("mre", **MODELS["mre"])
    raytraced.save_pretrained(whole, tmp_path / "shared", store=True)
    loaded = raytraced.from_pretrained(tmp_path / "shared", memory="5 KB")
    assert pool_of(loaded).num_slots == 1
    assert num_parameters(loaded) == num_parameters(whole)
    pool_of(loaded).close()
