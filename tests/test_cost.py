"""The account of cost: against what PyTorch executes, against a loop that redoes only what a step changes, by hand."""

import json
import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from raytraced import RaytracedExperts, Route, operations
from raytraced.commands.models import models
from raytraced.cost import measure, num_parameters, sample_cost
from raytraced.models.table import MODELS, build
from raytraced.operations import count_multiply_adds
from reference import candidate_probs, gate_weight


def small_options(name):
    grid = {"dim": 6, "num_layers": 3, "num_experts": 4}
    if name == "dense":
        return {"dim": 6, "num_blocks": 3}
    if name.startswith(("mlp", "multi")):
        return {"dim": 6, "num_layers": 3} | ({"confidence": 0.45} if name == "multi-exit" else {})
    return grid | {"chain": {"num_rounds": 3}, "mre": {"sight_rank": 0}}.get(name, {})


def make(name, image_shape=(1, 4, 4), **options):
    return build(name, image_shape=image_shape, num_classes=3, **options)


def executed_multiply_adds(model, images):
    """All that PyTorch executes, but for the plain routing network, which redoes every gate at every step.

    Where PyTorch sees it, that is: what compiled code multiplies it does not.
    """
    with operations.use("plain", experts="sparse"), FlopCounterMode(display=False) as counter, torch.no_grad():
        out = model(images)
    counts = counter.get_flop_counts()
    routing = counts.get(f"{type(model).__name__}.layer.router.routing", {})
    return out, (sum(counts["Global"].values()) - sum(routing.values())) // 2


def gates_alone(model, route):
    """What the gates of the routing network took, without the entry gate."""
    work, entry = model.layer.router.work(route), model.layer.router.gate
    return work.multiply_adds - entry.weight.numel(), work.parameters - num_parameters(entry)


@pytest.mark.parametrize("image_shape", [(1, 4, 4), (3, 8, 8)])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_accounted_for_is_what_pytorch_executes(name, image_shape):
    model = make(name, image_shape, **small_options(name)).eval()
    if name == "multi-exit":  # heads that differ in how sure they are
        for index, head in enumerate(model.heads):
            head.weight.data *= 0.3 + index
    images = 9 * torch.randn(23, *image_shape)  # so that samples differ in what they run
    out, executed = executed_multiply_adds(model, images)
    accounted = sample_cost(model, images, out).multiply_adds
    if name.startswith("mre"):
        accounted = accounted - gates_alone(model, out.routes[0])[0]
    # To the last one: experts run on their own rows alone, and no elementwise operation counts on either side.
    assert int(accounted.sum()) == executed
    if MODELS[name].adaptive and image_shape[0] == 1:
        assert len(sample_cost(model, images, out).multiply_adds.unique()) > 1


def lazy_sequence(routing, entry, num_steps):
    """The greedy sequence of one sample with gates evaluated only where an input changed: nodes, multiply-adds spent."""
    L, N = routing.num_layers, routing.num_experts
    split, active, nodes, spent = {}, [], [], 0

    def firing():
        """Inputs [layer][node] and the output's rate from the gates as last evaluated; sums and products of rates only."""
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
        for layer in range(choice // N, L - 1):  # the new node, then all active ones below, layer by layer
            for i in range(N):
                node = layer * N + i
                if node == choice or (node in active and layer > choice // N):
                    weight = gate_weight(routing, layer, i).detach()
                    split.setdefault(node, [0.0] * (N + 1))  # sends nothing before its gate is known
                    split[node] = torch.softmax(weight @ torch.stack(firing()[0][layer][i]), 0)
                    spent += weight.numel()
    return nodes, spent


def test_the_gates_charged_for_are_enough_to_find_the_sequence():
    model = make("mre", dim=6, num_layers=3, num_experts=4, sight_rank=0).double().eval()
    images = torch.randn(12, 1, 4, 4, dtype=torch.float64)
    with torch.no_grad():
        (route,) = model(images).routes
        entries = model.layer.router.entry(model.input_block(images))
    work, _ = gates_alone(model, route)
    for b, entry in enumerate(entries):
        nodes, spent = lazy_sequence(model.layer.router.routing, entry, 12)
        assert nodes == [k for k in route.nodes[b].tolist() if k >= 0]
        assert spent == int(work[b])
    assert len(work.unique()) > 2


def test_gates_that_see_are_charged_for_what_they_see():
    blind, seeing = (RaytracedExperts(5, 3, 2, sight_rank=rank) for rank in (0, 7))
    nodes = torch.tensor([[0, 2, 1, 4, -1, -1], [1, -1, -1, -1, -1, -1]])
    less, more = (layer.router.work(Route(None, nodes, None, None)) for layer in (blind, seeing))
    # 5·7 once, then 7 for each of the 3 outlets of an active gate: 3 and 1 of them, the last layer has none
    for a, b in zip(less, more, strict=True):
        assert (b - a).tolist() == [35 + 3 * 21, 35 + 1 * 21]


def test_a_new_node_is_charged_for_its_gate_and_those_below_it():
    layer = RaytracedExperts(
        5, 3, 2, sight_rank=0
    )  # a gate costs 3 in the first layer, 6 in the second, nothing in the third
    nodes = torch.tensor([[0, 2, 1, 4, -1, -1], [1, -1, -1, -1, -1, -1]])
    work, entry = layer.router.work(Route(None, nodes, None, None)), 5 * 2
    # node 0: 3; node 2, below: 6; node 1, above node 2: 3 + 6; node 4, in the last layer: 0
    assert work.multiply_adds.tolist() == [entry + 3 + 6 + 9 + 0, entry + 3]
    assert work.parameters.tolist() == [entry + 2 + 3 + 6 + 3, entry + 2 + 3]


@pytest.mark.parametrize(
    ("name", "options", "multiply_adds", "used_parameters"),
    [
        ("mlp-total", {}, 784 * 36 + 8 * 36**2 + 360, 39_286),
        ("mlp-avg", {}, 784 * 24 + 8 * 24**2 + 240, 23_890),
        ("dense", {"num_blocks": 2}, 784 * 16 + 2 * 3 * 256 + 160, 12_560 + 2 * 816 + 170),
        ("top-k", {}, 784 * 16 + 4 * 128 + 8 * 3 * 256 + 160, 39_386 - 24 * 816),
        ("aux-free", {"k": 3}, 784 * 16 + 4 * 128 + 12 * 3 * 256 + 160, 39_386 - 20 * 816),
        ("threshold", {"threshold": 1.0}, 784 * 16 + 4 * 128 + 32 * 3 * 256 + 160, 39_386),
    ],
)
def test_models_of_known_cost_cost_it(name, options, multiply_adds, used_parameters):
    cost = measure(build(name, image_shape=(1, 28, 28), num_classes=10, **options), torch.randn(8, 1, 28, 28))
    assert cost.multiply_adds == multiply_adds
    assert cost.used_parameters == used_parameters
    assert cost.experts * (3 * 256 if "mlp" not in name else (36 if "total" in name else 24) ** 2) == (
        cost.expert_multiply_adds
    )


def test_an_expert_that_runs_in_two_rounds_is_used_once():
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
    model = make("mre", dim=6, num_layers=3, num_experts=4, sight_rank=0).eval()
    images = torch.randn(20, 1, 4, 4)
    out = model(images)
    for b, count in enumerate(sample_cost(model, images, out).parameters.tolist()):
        parts = (model.input_block, model.layer.router.gate, model.head)
        expected = sum(map(num_parameters, parts))
        for layer in range(3):
            for _ in range(int(out.routes[0].active[b, layer].sum())):
                expected += 3 * 42 + (gate_weight(model.layer.router.routing, layer, 0).numel() if layer < 2 else 0)
        assert count == expected


def test_a_custom_expert_is_counted_as_it_runs():
    model = make("top-k", dim=6, num_layers=1, num_experts=2, k=1, expert=lambda: torch.nn.Linear(6, 6))
    assert measure(model, torch.randn(3, 1, 4, 4)).expert_multiply_adds == 36


@pytest.mark.parametrize("name", ["mre", "multi-exit", "top-any"])
def test_measuring_does_not_depend_on_the_batch_size_nor_change_the_model(name):
    model = make(name, **small_options(name))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    images = torch.randn(20, 1, 4, 4)
    assert measure(model, images, batch_size=7) == measure(model, images)
    assert model.training
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_measuring_nothing_is_refused():
    with pytest.raises(ValueError, match="inputs: none given"):
        measure(make("mre"), torch.zeros(0, 1, 4, 4))


def test_a_product_of_matrices_is_counted_by_pairs_of_numbers_that_meet():
    assert count_multiply_adds(lambda: torch.zeros(2, 3) @ torch.zeros(3, 5)) == 30


def test_the_table_of_models_has_them_all(capsys):
    models()
    text = capsys.readouterr().out
    assert all(f"\n{name} " in text for name in MODELS)
    assert "39,386" in text
    assert "19,360" in text
    models(json=True)
    rows = json.loads(capsys.readouterr().out)
    assert rows.keys() == MODELS.keys()
    assert rows["dense"]["multiply_adds"] == 784 * 16 + 4 * 768 + 160
    assert rows["mre"]["adaptive"] is rows["mre"]["anytime"] is True


def test_the_command_is_found_without_torch():
    code = "import sys; import raytraced.commands.models; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_padding_costs_nothing_and_changes_no_ones_cost():
    model = make("mre", **small_options("mre")).eval()
    images, mask = torch.randn(9, 1, 4, 4), torch.arange(9) % 3 > 0
    padded = sample_cost(model, images, model(images, mask=mask), mask)
    alone = sample_cost(model, images[mask], model(images[mask]))
    for with_padding, without in zip(padded, alone, strict=True):
        assert torch.equal(with_padding[mask], without.expand(6))
        assert not with_padding[~mask].any()
    assert torch.equal(padded.multiply_adds[mask], alone.multiply_adds)


@pytest.mark.parametrize("name", ["mre", "top-k", "chain"])
def test_tokens_cost_what_samples_do(name):
    model = make(name, **small_options(name)).eval()
    hidden = torch.randn(4, 3, 6)
    tokens, samples = model.layer(hidden).route, model.layer(hidden.flatten(0, 1)).route
    for part, work in model.layer.work(tokens).items():
        for of_tokens, of_samples in zip(work, model.layer.work(samples)[part], strict=True):
            if isinstance(of_tokens, torch.Tensor):
                assert torch.equal(of_tokens, of_samples.view(4, 3))
            else:
                assert of_tokens == of_samples
