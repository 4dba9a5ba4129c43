"""The cost against what PyTorch executes, against a loop that recomputes only what a step changes, and by hand."""

import json
import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from raytraced import RaytracedExperts, Route, kernels
from raytraced.cli.models import models
from raytraced.cost import measure, num_parameters, sample_cost
from raytraced.kernels import count_macs
from raytraced.models.registry import MODELS, build
from reference import candidate_probs, gate_weight


def small_options(name):
    grid = {"dim": 6, "num_layers": 3, "num_experts": 4}
    if name == "dense":
        return {"dim": 6, "num_blocks": 3}
    if name.startswith(("mlp", "multi")):
        return {"dim": 6, "num_layers": 3} | ({"confidence": 0.45} if name == "multi-exit" else {})
    return grid | {"chain": {"num_rounds": 3}, "mre": {"input_rank": 0}}.get(name, {})


def make(name, image_shape=(1, 4, 4), **options):
    return build(name, image_shape=image_shape, num_classes=3, **options)


def executed_macs(model, images):
    """The output, and the multiply-adds that PyTorch counts on the plain path, which compiled code would hide.

    The routing network is left out: its plain version recomputes every gate at every step.
    """
    with kernels.use("plain", experts="sparse"), FlopCounterMode(display=False) as counter, torch.no_grad():
        out = model(images)
    counts = counter.get_flop_counts()
    routing = counts.get(f"{type(model).__name__}.layer.router.routing", {})
    return out, (sum(counts["Global"].values()) - sum(routing.values())) // 2


def gates_alone(model, route):
    """The cost of the routing network's gates, without the entry gate: multiply-adds and parameters (B,)."""
    cost, entry = model.layer.router.cost(route), model.layer.router.gate
    return cost.macs - entry.weight.numel(), cost.parameters - num_parameters(entry)


@pytest.mark.parametrize("image_shape", [(1, 4, 4), (3, 8, 8)])
@pytest.mark.parametrize("name", MODELS)
def test_the_cost_is_what_pytorch_executes(name, image_shape):
    model = make(name, image_shape, **small_options(name)).eval()
    if name == "multi-exit":  # heads with different confidence
        for index, head in enumerate(model.heads):
            head.weight.data *= 0.3 + index
    images = 9 * torch.randn(23, *image_shape)  # large, so that samples run different experts
    out, executed = executed_macs(model, images)
    counted = sample_cost(model, images, out).macs
    if name.startswith("mre"):
        counted = counted - gates_alone(model, out.routes[0])[0]
    # Exactly: experts run on their own rows only, and neither side counts elementwise operations.
    assert int(counted.sum()) == executed
    if MODELS[name].adaptive and image_shape[0] == 1:
        assert len(sample_cost(model, images, out).macs.unique()) > 1


def lazy_sequence(routing, entry, num_steps):
    """The greedy sequence of one sample that evaluates only gates whose inputs changed: its nodes and multiply-adds."""
    L, N = routing.num_layers, routing.num_experts
    split, active, nodes, macs = {}, [], [], 0

    def firing():
        """Inputs [layer][node] and the rate of the output node, by the gates as last evaluated."""
        inputs, output = [[[entry[i]] for i in range(N)]], torch.zeros((), dtype=entry.dtype)
        for layer in range(L):
            below = [[torch.zeros((), dtype=entry.dtype)] * N for _ in range(N)]
            for i in range(N):
                if layer * N + i not in active:
                    continue
                rate = sum(inputs[layer][i])
                shares = split[layer * N + i] if layer < L - 1 else [0.0] * N + [1.0]
                for j in range(N):
                    below[j][i] = rate * shares[j]
                output = output + rate * shares[N]
            inputs.append(below)
        return inputs, output

    for _ in range(num_steps):
        inputs, output = firing()
        probs = {k: float(sum(inputs[k // N][k % N])) for k in range(L * N) if k not in active} | {L * N: float(output)}
        probs = {k: p for k, p in probs.items() if p > 0}
        assert probs == pytest.approx(candidate_probs(routing, entry, nodes))
        choice = max(probs, key=lambda k: (probs[k], -k))
        if choice == L * N:
            break
        active.append(choice)
        nodes.append(choice)
        for layer in range(choice // N, L - 1):  # the new node, then the active nodes of later layers
            for i in range(N):
                node = layer * N + i
                if node == choice or (node in active and layer > choice // N):
                    weight = gate_weight(routing, layer, i).detach()
                    split.setdefault(node, [0.0] * (N + 1))  # sends nothing before its gate is evaluated
                    split[node] = torch.softmax(weight @ torch.stack(firing()[0][layer][i]), 0)
                    macs += weight.numel()
    return nodes, macs


def test_the_counted_gates_suffice_to_compute_the_sequence():
    model = make("mre", dim=6, num_layers=3, num_experts=4, input_rank=0).double().eval()
    images = torch.randn(12, 1, 4, 4, dtype=torch.float64)
    with torch.no_grad():
        (route,) = model(images).routes
        entries = model.layer.router.entry(model.input_block(images))
    cost, _ = gates_alone(model, route)
    for b, entry in enumerate(entries):
        nodes, macs = lazy_sequence(model.layer.router.routing, entry, 12)
        assert nodes == [k for k in route.nodes[b].tolist() if k >= 0]
        assert macs == int(cost[b])
    assert len(cost.unique()) > 2


def test_input_conditioned_gates_cost_their_two_maps():
    without, conditioned = (RaytracedExperts(5, 3, 2, input_rank=rank) for rank in (0, 7))
    nodes = torch.tensor([[0, 2, 1, 4, -1, -1], [1, -1, -1, -1, -1, -1]])
    less, more = (layer.router.cost(Route(None, nodes, None, None)) for layer in (without, conditioned))
    # 5·7 once, then 7 for each of the 3 outlets of an active gate: 3 gates and 1 gate; the last layer has none
    for a, b in zip(less, more, strict=True):
        assert (b - a).tolist() == [35 + 3 * 21, 35 + 1 * 21]


def test_a_new_node_costs_its_gate_and_the_active_gates_of_later_layers():
    # a gate costs 3 in the first layer, 6 in the second, nothing in the third
    layer = RaytracedExperts(5, 3, 2, input_rank=0)
    nodes = torch.tensor([[0, 2, 1, 4, -1, -1], [1, -1, -1, -1, -1, -1]])
    cost, entry = layer.router.cost(Route(None, nodes, None, None)), 5 * 2
    # node 0: 3; node 2, in the second layer: 6; node 1, before node 2: 3 + 6; node 4, in the last layer: 0
    assert cost.macs.tolist() == [entry + 3 + 6 + 9 + 0, entry + 3]
    assert cost.parameters.tolist() == [entry + 2 + 3 + 6 + 3, entry + 2 + 3]


@pytest.mark.parametrize(
    ("name", "options", "macs", "used_parameters"),
    [
        ("mlp-total", {}, 784 * 36 + 8 * 36**2 + 360, 39_286),
        ("mlp-avg", {}, 784 * 24 + 8 * 24**2 + 240, 23_890),
        ("dense", {"num_blocks": 2}, 784 * 16 + 2 * 3 * 256 + 160, 12_560 + 2 * 816 + 170),
        ("top-k", {}, 784 * 16 + 4 * 128 + 8 * 3 * 256 + 160, 39_386 - 24 * 816),
        ("aux-free", {"k": 3}, 784 * 16 + 4 * 128 + 12 * 3 * 256 + 160, 39_386 - 20 * 816),
        ("threshold", {"threshold": 1.0}, 784 * 16 + 4 * 128 + 32 * 3 * 256 + 160, 39_386),
    ],
)
def test_the_cost_of_fixed_models_is_the_one_computed_by_hand(name, options, macs, used_parameters):
    cost = measure(build(name, image_shape=(1, 28, 28), num_classes=10, **options), torch.randn(8, 1, 28, 28))
    assert cost.macs == macs
    assert cost.used_parameters == used_parameters
    assert cost.experts * (3 * 256 if "mlp" not in name else (36 if "total" in name else 24) ** 2) == (cost.expert_macs)


def test_the_parameters_of_an_expert_that_runs_twice_count_once():
    model = make("chain", dim=6, num_layers=1, num_experts=4, num_rounds=2, k=1).eval()
    images = torch.randn(40, 1, 4, 4)
    out = model(images)
    cost = sample_cost(model, images, out)
    (route,) = out.routes
    twice = (route.active[:, 0] == route.active[:, 1]).all(-1)
    assert 0 < twice.sum() < 40
    fixed = num_parameters(model.input_block) + num_parameters(model.head) + num_parameters(model.layer.router.gates)
    assert cost.experts.eq(2).all()
    assert torch.equal(cost.parameters, fixed + torch.where(twice, 1, 2) * 3 * 42)


def test_parameters_of_a_raytraced_model_are_those_of_its_active_nodes():
    model = make("mre", dim=6, num_layers=3, num_experts=4, input_rank=0).eval()
    images = torch.randn(20, 1, 4, 4)
    out = model(images)
    for b, count in enumerate(sample_cost(model, images, out).parameters.tolist()):
        parts = (model.input_block, model.layer.router.gate, model.head)
        expected = sum(map(num_parameters, parts))
        for layer in range(3):
            for _ in range(int(out.routes[0].active[b, layer].sum())):
                expected += 3 * 42 + (gate_weight(model.layer.router.routing, layer, 0).numel() if layer < 2 else 0)
        assert count == expected


def test_the_cost_of_a_custom_expert_is_measured():
    model = make("top-k", dim=6, num_layers=1, num_experts=2, k=1, expert=lambda: torch.nn.Linear(6, 6))
    assert measure(model, torch.randn(3, 1, 4, 4)).expert_macs == 36


@pytest.mark.parametrize("name", ["mre", "multi-exit", "top-any"])
def test_measuring_does_not_depend_on_the_batch_size_nor_change_the_model(name):
    model = make(name, **small_options(name))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    images = torch.randn(20, 1, 4, 4)
    assert measure(model, images, batch_size=7) == measure(model, images)
    assert model.training
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_measuring_without_inputs_is_refused():
    with pytest.raises(ValueError, match="inputs: is empty"):
        measure(make("mre"), torch.zeros(0, 1, 4, 4))


def test_a_matrix_product_costs_one_mac_per_product_of_two_numbers():
    assert count_macs(lambda: torch.zeros(2, 3) @ torch.zeros(3, 5)) == 30


def test_the_table_of_models_has_all_models(capsys):
    models()
    text = capsys.readouterr().out
    assert all(f"\n{name} " in text for name in MODELS)
    assert "39,386" in text
    assert "19,360" in text
    models(json=True)
    rows = json.loads(capsys.readouterr().out)
    assert rows.keys() == MODELS.keys()
    assert rows["dense"]["macs"] == 784 * 16 + 4 * 768 + 160
    assert rows["mre"]["adaptive"] is rows["mre"]["anytime"] is True


def test_the_command_models_is_imported_without_torch():
    code = "import sys; import raytraced.cli.models; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_padding_costs_nothing_and_changes_no_other_cost():
    model = make("mre", **small_options("mre")).eval()
    images, mask = torch.randn(9, 1, 4, 4), torch.arange(9) % 3 > 0
    padded = sample_cost(model, images, model(images, mask=mask), mask)
    alone = sample_cost(model, images[mask], model(images[mask]))
    for with_padding, without in zip(padded, alone, strict=True):
        assert torch.equal(with_padding[mask], without.expand(6))
        assert not with_padding[~mask].any()
    assert torch.equal(padded.macs[mask], alone.macs)


@pytest.mark.parametrize("name", ["mre", "top-k", "chain"])
def test_tokens_cost_as_much_as_samples(name):
    model = make(name, **small_options(name)).eval()
    hidden = torch.randn(4, 3, 6)
    tokens, samples = model.layer(hidden).route, model.layer(hidden.flatten(0, 1)).route
    for part, cost in model.layer.cost(tokens).items():
        for of_tokens, of_samples in zip(cost, model.layer.cost(samples)[part], strict=True):
            if isinstance(of_tokens, torch.Tensor):
                assert torch.equal(of_tokens, of_samples.view(4, 3))
            else:
                assert of_tokens == of_samples
