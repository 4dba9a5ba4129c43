"""A recorded route is followed exactly: the same experts in the same order, the outputs and the gradients of its first run."""

import json
from dataclasses import replace

import pytest
import torch

import raytraced as rt
from raytraced import kernels
from raytraced.cli.main import main
from raytraced.io.routes import ROUTES_FORMAT, load_routes, save_routes
from raytraced.io.saving import read_tensors, write_tensors
from raytraced.layer import routed_layer
from raytraced.models.registry import MODELS
from raytraced.replay import ordered_nodes
from raytraced.router import Choice, Router
from raytraced.sequence import Route

GRID = {"dim": 8, "num_layers": 3, "num_experts": 4}
OTHERS = [name for name in MODELS if name not in ("mre", "mre-paper", "multi-exit", "mlp-total", "mlp-avg", "dense")]


def make(**options):
    torch.manual_seed(0)
    return rt.RaytracedExperts(**GRID, **options)


def gradients(layer, hidden, **options):
    layer.zero_grad()
    hidden = hidden.clone().requires_grad_()
    out = layer(hidden, **options)
    torch.sin(out.hidden).sum().backward()
    return out, [hidden.grad, *(parameter.grad for parameter in layer.parameters())]


def assert_same(one, other, **tolerance):
    for left, right in zip(one, other, strict=True):
        assert (left is None) == (right is None)
        if left is not None:
            torch.testing.assert_close(left, right, **tolerance)


@pytest.mark.parametrize("engine", ["plain", None])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stop": 0.1},
        {"estimator": "reinmax", "train_select": "sample"},
        {"estimator": "straight-through", "train_select": "sample", "mask_gradient": "all"},
        {"weighting": "unit", "estimator": "reinmax"},
        {"input_rank": 0, "stream": "skip-sum", "stop": 0.2},
    ],
)
def test_outputs_and_gradients_are_those_of_the_first_run(options, engine):
    layer, hidden = make(**options), torch.randn(2, 9, 8)
    with kernels.use(engine or ""):
        first, expected = gradients(layer, hidden, generator=torch.Generator().manual_seed(3))
        again, found = gradients(layer, hidden, route=first.route)
    assert torch.equal(again.route.active, first.route.active)
    assert torch.equal(again.route.nodes, first.route.nodes)
    assert torch.equal(again.route.num_active, first.route.num_active)
    assert torch.equal(again.hidden, first.hidden)
    assert torch.equal(again.route.rates.nodes, first.route.rates.nodes)
    exact = (
        {"rtol": 0, "atol": 0} if engine is None else {"rtol": 1e-4, "atol": 1e-5}
    )  # plain: a one-hot sum, or a mask
    assert_same(found, expected, **exact)


@pytest.mark.skipif(not kernels.available(), reason=f"compiled kernels {kernels.why_not()}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weighting", ["unit", "rates-to-one", "rates", "relative"])
@pytest.mark.parametrize(("num_layers", "num_experts"), [(1, 5), (2, 3), (3, 8), (4, 9)])
def test_compiled_kernels_replay_bit_for_bit(num_layers, num_experts, weighting, dtype):
    torch.manual_seed(0)
    layer = rt.RaytracedExperts(
        6, num_layers, num_experts, weighting=weighting, estimator="reinmax", stop=0.3, train_select="sample"
    ).to(dtype)
    for batch in (1, 30, 100):  # of at most 64 rows one call does all, where no gradient is wanted
        hidden = torch.randn(batch, 6, dtype=dtype)
        first, expected = gradients(layer, hidden, generator=torch.Generator().manual_seed(3))
        again, found = gradients(layer, hidden, route=first.route)
        with torch.no_grad():
            quiet = layer(hidden, generator=torch.Generator().manual_seed(3))
            replayed = layer(hidden, route=quiet.route)
        for one, other in ((first, again), (quiet, replayed)):
            assert torch.equal(one.hidden, other.hidden)
            assert all(torch.equal(*rates) for rates in zip(one.route.rates, other.route.rates, strict=True))
            assert torch.equal(one.route.nodes, other.route.nodes)
        assert_same(found, expected, rtol=0, atol=0)


def test_a_route_is_followed_by_its_active_set_whatever_its_order_contains():
    active = torch.tensor([[[1.0, 0.0], [1.0, 1.0]], [[0.0, 1.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]])
    num_active = torch.tensor([3, 1, 0])
    nodes = torch.tensor([[3, 0, 2, -1], [0, 1, 2, 3], [1, -1, -1, -1]])
    assert ordered_nodes(Route(active, nodes, num_active, None)).tolist() == [
        [3, 0, 2, -1],
        [1, -1, -1, -1],
        [-1, -1, -1, -1],
    ]
    assert ordered_nodes(Route(active, None, num_active, None)).tolist()[0] == [0, 2, 3, -1]
    wrong = torch.tensor([[9, 9], [-7, 9], [0, 0]])  # neither of the grid nor active: only the active set counts
    assert ordered_nodes(Route(active, wrong, num_active, None)).tolist() == [[0, 2, 3], [1, -1, -1], [-1, -1, -1]]


def test_a_budget_and_an_early_stop_are_followed_with_the_gradients_of_their_draws():
    layer, hidden = make(estimator="reinmax", weighting="unit"), torch.randn(20, 8)
    with kernels.use("plain"):
        first, expected = gradients(layer, hidden, max_experts=2)
        again, found = gradients(layer, hidden, route=first.route)
    assert int(first.route.num_active.max()) == 2
    assert torch.equal(again.hidden, first.hidden)
    assert_same(found, expected, rtol=1e-5, atol=1e-6)


def test_a_route_is_followed_where_the_present_gates_would_choose_another():
    layer, hidden = make(stop=0.3).eval(), torch.randn(30, 8)
    recorded = layer(hidden).route
    with torch.no_grad():
        layer.router.gate["weight"].mul_(-1)
    assert not torch.equal(layer(hidden).route.active, recorded.active)
    out = layer(hidden, route=recorded)
    assert torch.equal(out.route.active, recorded.active)
    rates = layer.router.routing(layer.router.entry(hidden), recorded.active, layer.router.input_logits(hidden))
    torch.testing.assert_close(out.route.rates.nodes, rates.nodes)  # of the present gates
    assert layer(hidden, route=recorded).hidden.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_route_of_single_precision_is_followed_in_others(dtype):
    layer, hidden = make(stop=0.3).eval(), torch.randn(12, 8)
    first = layer(hidden)
    out = layer.to(dtype)(hidden.to(dtype), route=first.route)
    assert torch.equal(out.route.active != 0, first.route.active != 0)
    assert torch.equal(out.route.nodes, first.route.nodes)
    assert out.hidden.dtype == dtype
    torch.testing.assert_close(
        out.hidden.float(), first.hidden, rtol=1e-4, atol=0.1 if dtype == torch.bfloat16 else 1e-5
    )


def test_parts_of_a_batch_masks_and_other_engines_follow_the_same_route():
    layer, hidden = make(stop=0.3).eval(), torch.randn(4, 6, 8)
    first = layer(hidden)
    for part in (slice(0, 1), slice(1, 4)):
        route = Route(first.route.active[part], first.route.nodes[part], first.route.num_active[part], None)
        out = layer(hidden[part], route=route)
        assert torch.equal(out.route.active, route.active)
        torch.testing.assert_close(out.hidden, first.hidden[part], rtol=1e-5, atol=1e-6)
    with kernels.use("plain"):
        torch.testing.assert_close(layer(hidden, route=first.route).hidden, first.hidden, rtol=1e-5, atol=1e-6)
    mask = torch.rand(4, 6) < 0.5
    masked = layer(hidden, mask=mask)
    again = layer(hidden, mask=mask, route=first.route)
    torch.testing.assert_close(again.hidden, masked.hidden, rtol=1e-5, atol=1e-6)
    assert torch.equal(again.route.active, masked.route.active)


@pytest.mark.parametrize("name", OTHERS)
def test_baselines_weigh_a_recorded_set_by_their_own_rule(name):
    torch.manual_seed(0)
    model = rt.build(name, image_shape=(1, 4, 4), num_classes=3, **GRID)
    images = torch.rand(10, 1, 4, 4)
    for training in (False, True):
        model.train(training)
        first = model(images, generator=torch.Generator().manual_seed(1))
        again = model(images, routes=first.routes)
        assert torch.equal(again.routes[0].active.detach(), first.routes[0].active.detach())
        torch.testing.assert_close(again.logits, first.logits, rtol=1e-5, atol=1e-6)
    other = torch.zeros_like(first.routes[0].active)
    other[:, :, 1] = 1  # a set that no row chose
    forced = model(images, routes=Route(other, None, other.sum((1, 2)).long(), None))
    assert torch.equal(forced.routes[0].active.detach(), other)
    assert forced.logits.isfinite().all()


@pytest.mark.parametrize("name", ["mre", *OTHERS])
def test_a_layer_that_a_route_leaves_out_has_finite_outputs_and_gradients(name):
    torch.manual_seed(0)
    model = rt.build(name, image_shape=(1, 4, 4), num_classes=3, **GRID).eval()
    active = torch.zeros(3, model.layer.router.num_steps, 4)
    active[1, 0], active[2, -1, 0] = 1, 1
    route = Route(active, None, active.sum((1, 2)).long(), None)
    with kernels.use("plain"):
        out = model(torch.rand(3, 1, 4, 4), routes=route)
        out.logits.sum().backward()
    assert torch.equal(out.routes[0].active.detach(), active)
    assert out.logits.isfinite().all()
    assert all(one.grad is None or one.grad.isfinite().all() for one in model.parameters())


@pytest.mark.parametrize("engine", ["plain", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gradients_of_parts_of_a_batch_add_up_to_those_of_the_whole(dtype, engine):
    layer, hidden = make(stop=0.3).to(dtype), torch.randn(9, 8, dtype=dtype)
    with kernels.use(engine or ""):
        route = layer(hidden).route
        whole, expected = gradients(layer, hidden, route=route)
        parts = []
        for rows in torch.arange(9).split(4):
            given = Route(route.active[rows], route.nodes[rows], route.num_active[rows], None)
            out, found = gradients(layer, hidden[rows], route=given)
            torch.testing.assert_close(out.hidden, whole.hidden[rows], rtol=1e-5, atol=1e-6)
            parts.append([None if one is None else one.clone() for one in found])
    inputs, *parameters = zip(*parts, strict=True)
    sums = [None if one[0] is None else sum(one) for one in parameters]
    assert_same([torch.cat(inputs), *sums], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt-mre", "gpt-top-k"])
def test_a_language_model_follows_the_routes_of_its_tokens(name):
    torch.manual_seed(0)
    model = rt.build(name, dim=16, num_heads=2, hidden=16, num_experts=4, depth=3)
    tokens, mask = torch.randint(0, 256, (3, 10)), torch.arange(10) < torch.tensor([10, 7, 4])[:, None]
    for given in ({}, {"mask": mask}):
        for training in (False, True):
            model.train(training)
            first = model(tokens, **given)
            again = model(tokens, routes=first.routes, **given)
            assert torch.equal(again.routes[0].active.detach(), first.routes[0].active.detach())
            torch.testing.assert_close(again.logits, first.logits, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        for parameter in model.layer.router.parameters():
            parameter.mul_(-1)
    assert torch.equal(model(tokens, routes=first.routes).routes[0].active.detach(), first.routes[0].active.detach())


class Stubborn(Router):
    """A custom router that does not know of recorded routes."""

    def route(self, step, hidden_BD, draws):
        active_BN = (self.gate_logits(step, hidden_BD) > 0).float()
        return Choice(active_BN, active_BN)


def test_what_cannot_be_followed_is_one_clear_line():
    layer, hidden = make().eval(), torch.randn(5, 8)
    route = layer(hidden).route
    with pytest.raises(
        ValueError, match=r"^route: its active set has shape \(5, 3, 4\); must be \(4, 3, 4\): one for each"
    ):
        layer(hidden[:4], route=route)
    with pytest.raises(ValueError, match=r"^max_experts=2: must be left out with route, which says what runs$"):
        layer(hidden, route=route, max_experts=2)
    with pytest.raises(
        ValueError, match=r"^estimator=gumbel: a route has no random numbers, on which its gradient depends"
    ):
        make(estimator="gumbel")(hidden, route=route)
    with torch.no_grad():
        assert torch.equal(make(estimator="gumbel")(hidden, route=route).route.active, route.active)
    stubborn = routed_layer(Stubborn, **GRID)
    own = stubborn(hidden).route
    stubborn(hidden, route=own)
    with pytest.raises(
        ValueError, match=r"^route: Stubborn did not follow it; a custom router replays one if it passes"
    ):
        stubborn(hidden, route=own._replace(active=1 - own.active))
    model = rt.build("mre", image_shape=(1, 4, 4), num_classes=3, **GRID)
    with pytest.raises(ValueError, match=r"^confidence=0.9: must be left out with routes, which say what runs$"):
        model(torch.rand(5, 1, 4, 4), routes=route, confidence=0.9)
    with pytest.raises(ValueError, match=r"^routes=2 routes: must be one, as in Output.routes$"):
        model(torch.rand(5, 1, 4, 4), routes=(route, route))


def test_routes_are_saved_and_followed_by_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", "mre-digits", "--save-routes", "routes.safetensors", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    words = ("evaluate", "mre-digits", "--routes", "routes.safetensors", "--batch-size", "100", "--json")
    assert main([*words, "--save-routes", "again.safetensors"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["expert_load"] == first["expert_load"]
    assert again["accuracy"] == first["accuracy"]
    assert again["loss"] == pytest.approx(first["loss"], rel=1e-6)
    model = rt.load("mre-digits")
    num = first["num_samples"]
    one, two = (load_routes(name, model, "digits", "test", num) for name in ("routes.safetensors", "again.safetensors"))
    assert torch.equal(one.active, two.active)
    assert torch.equal(one.nodes, two.nodes)
    assert one.about == two.about | {"num_samples": num}

    def fails(*given):
        assert main(list(given)) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line.removeprefix("raytraced: ")

    wrong = fails(*words, "--split", "validation")
    assert wrong.startswith("routes.safetensors: has routes of 359 samples of digits, test; must be of ")
    small = rt.build("mre", image_shape=(1, 8, 8), num_classes=10, num_layers=2)
    with pytest.raises(ValueError, match=r"has routes of a grid of 4 × 8 experts; mre has a grid of 2 × 8$"):
        load_routes("routes.safetensors", small, "digits", "test", num)
    small.card = replace(model.card, model="mre-paper")
    with pytest.raises(ValueError, match=r"^routes.safetensors: has routes of the model mre; this one is mre-paper$"):
        load_routes("routes.safetensors", small, "digits", "test", num)
    with torch.no_grad():
        model.head.bias.add_(1)
    rt.save(model, "other.safetensors")
    assert main(["evaluate", "other.safetensors", "--routes", "routes.safetensors"]) == 0
    assert capsys.readouterr().err == "raytraced: routes.safetensors: was recorded with other weights\n"
    assert fails("evaluate", "mre-digits", "--save-routes", "routes.txt").startswith(
        "save_routes=routes.txt: must end in"
    )
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "routes.safetensors").read_bytes()[:-9])
    assert fails("evaluate", "mre-digits", "--routes", "cut.safetensors").startswith("cut.safetensors: cut or altered")
    assert_damaged_routes_are_one_line(tmp_path, fails)
    assert "foreign" in fails(
        "evaluate", "mre-digits", "--routes", str(rt.io.saving.PRETRAINED / "mre-mnist.safetensors")
    )


def assert_damaged_routes_are_one_line(folder, fails):
    """Files with a valid checksum that claim or hold something else than routes, and claims of any size."""
    tensors, text = read_tensors(folder / "routes.safetensors", ROUTES_FORMAT, "routes")
    about, nodes = json.loads(text), tensors["nodes"].clone()
    nodes[0, 0] = 5 if nodes[0, 0] != 5 else 6
    cases = {
        "huge": (tensors, json.dumps(about | {"shape": [10**6, 10**6, 10**6]})),
        "negative": (tensors, json.dumps(about | {"shape": [0, -4, -8]})),
        "infinite": (tensors, json.dumps(about | {"shape": [0, float("inf"), 8]})),
        "many": (tensors, json.dumps(about | {"num_samples": 10**15})),
        "list": (tensors, "[]"),
        "no text": (tensors, ""),
        "deep": (tensors, "[" * 100_000),
        "other nodes": (tensors | {"nodes": nodes}, text),
        "nodes outside": (tensors | {"nodes": nodes + 1000}, text),
        "float nodes": (tensors | {"nodes": nodes.float()}, text),
        "no ids": ({"active": tensors["active"]}, text),
        "other type": (tensors | {"active": tensors["active"].float()}, text),
    }
    for name, (values, claims) in cases.items():
        write_tensors(folder / "bad.safetensors", values, ROUTES_FORMAT, "routes", claims)
        line = fails("evaluate", "mre-digits", "--routes", "bad.safetensors")
        assert line.startswith("bad.safetensors: is not a file of routes"), (name, line)


def test_routes_of_tokens_are_saved_too(tmp_path):
    torch.manual_seed(0)
    model = rt.build("gpt-mre", dim=16, num_heads=2, hidden=16, num_experts=5, depth=2).eval()
    tokens = torch.randint(0, 256, (6, 7))
    parts = [(torch.tensor([4, 1, 0]), model(tokens[[4, 1, 0]]).routes[0])]
    parts.append((torch.tensor([2, 3, 5]), model(tokens[[2, 3, 5]]).routes[0]))
    save_routes(tmp_path / "routes.safetensors", model, "texts", "test", parts, 6)
    saved = load_routes(tmp_path / "routes.safetensors", model, "texts", "test", 6)
    whole = model(tokens)
    assert torch.equal(saved.active, whole.routes[0].active != 0)
    again = model(tokens, routes=saved.of(torch.arange(6)))
    torch.testing.assert_close(again.logits, whole.logits, rtol=1e-4, atol=1e-5)
