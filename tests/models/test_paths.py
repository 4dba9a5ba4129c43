"""One path per token through the whole decoder: what it depends on, the table of paths, and budgets by a dial."""

import math
import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import cross_entropy

import raytraced
from raytraced import kernels
from raytraced.cost import sample_cost
from raytraced.models import planning
from raytraced.models.dial import find_stop
from raytraced.models.gpt import KVCache
from raytraced.models.paths import IN_USE, MOST_TABLES
from raytraced.router import Call

SMALL = {"dim": 16, "hidden": 8, "num_experts": 4, "depth": 3, "num_heads": 2, "context": 12}
SHARP = {"entry_scale": 8.0, "input_init_std": 2.0, "weighting": "relative", "weight_scale": 2.0, "stop": 0.2}
PLANNERS = [("mre", "token"), ("mre", "embedding"), ("planned", "embedding"), ("planned", "token"), ("hash", "token")]
DIAL = {
    "rows": [
        {"stop": 1.0, "experts": 3.0, "macs": 100.0, "loss": 2.0},
        {"stop": 0.25, "experts": 5.0, "macs": 150.0, "loss": 1.8},
        {"stop": 0.0625, "experts": 6.0, "macs": 200.0, "loss": 1.7},
    ]
}


def build(name="mre", **options):
    torch.manual_seed(0)
    sharp = SHARP if name == "mre" else {}
    return raytraced.build(f"gpt-{name}", **SMALL | sharp | options).eval()


def tokens(seed=1):
    return torch.randint(256, (3, 12), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
@pytest.mark.parametrize(("name", "routing_input"), [*PLANNERS, ("mre", "first-block"), ("top-k", "block")])
def test_no_later_token_moves_a_route_and_earlier_ones_only_where_the_router_reads_them(name, routing_input):
    model, text, changed = build(name, routing_input=routing_input), tokens(), tokens()
    changed[:, 7:] = (changed[:, 7:] + 1) % 256
    assert torch.equal(model(text).routes[0].active[:, :7], model(changed).routes[0].active[:, :7])
    changed = tokens()
    changed[:, :5] = (changed[:, :5] + 1) % 256
    same = torch.equal(model(text).routes[0].active[:, 5:], model(changed).routes[0].active[:, 5:])
    assert same == model.path_follows_token == (routing_input in ("token", "embedding"))


@torch.no_grad()
@pytest.mark.parametrize(("name", "routing_input"), PLANNERS)
def test_a_table_holds_the_computed_paths_bit_for_bit(name, routing_input):
    model, words = build(name, routing_input=routing_input), torch.arange(256)
    paths = model.paths()
    computed = model.layer.router.plan(model.routing_vectors(words), Call())
    assert torch.equal(paths.active, computed.active)
    assert torch.equal(paths.weights, computed.weights)
    assert torch.equal(paths.num_active, computed.active.sum((1, 2)).long())
    assert torch.equal(paths.macs, paths.num_active * 2 * 16 * 8)
    text, rows = tokens(), tokens().flatten()
    out = model(text)
    assert torch.equal(out.routes[0].active.flatten(0, 1), paths.active[rows])
    if name == "mre":
        longest = paths.nodes.shape[1]
        assert torch.equal(computed.route.nodes[:, :longest], paths.nodes)
        assert not (computed.route.nodes[:, longest:] >= 0).any()
    with torch.enable_grad():  # computed anew, since gradients need it
        torch.testing.assert_close(model(text).logits, out.logits, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("change", ["data", "parts of a vector", "a large table", "config"])
def test_a_table_follows_changes_that_count_no_version(change):
    sizes = {"vocab_size": 70_000} if change == "a large table" else {}
    model, other, text = build(**sizes), build(**sizes), tokens()
    for parameter in other.parameters():
        parameter.mul_(-1.1)
    before = model(text).logits
    if change == "config":
        other, config = build(), replace(model.layer.router.config, stop=0.01)
        model.layer.router.config = other.layer.router.config = config
    elif change == "parts of a vector":
        vector = torch.nn.utils.parameters_to_vector(model.parameters())
        torch.nn.utils.vector_to_parameters(vector, model.parameters())
        assert torch.equal(model(text).logits, before)
        vector.copy_(torch.nn.utils.parameters_to_vector(other.parameters()))
        torch.nn.utils.vector_to_parameters(vector, model.parameters())
    else:
        for mine, new in zip(model.parameters(), other.parameters(), strict=True):
            mine.data.copy_(new.data)
    assert not torch.equal(model(text).logits, before)
    assert torch.equal(model(text).logits, other(text).logits)
    assert torch.equal(model.plan(text).active, other.plan(text).active)


@torch.no_grad()
def test_options_of_other_routers_that_are_set_anew_are_followed():
    model, text = build("planned"), tokens()
    before = int(model(text).num_experts[0, 0])
    model.layer.router.k = 1
    assert int(model(text).num_experts[0, 0]) < before


def test_a_model_made_in_inference_mode_runs_there():
    with torch.inference_mode():
        model = build()
        assert torch.equal(model.plan(tokens()).active, model(tokens()).routes[0].active)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # attention under vmap
def test_models_without_values_and_stacks_of_models_are_planned_without_a_table():
    shapes = build().to("meta")(tokens().to("meta"))
    assert shapes.logits.shape == (3, 12, 256)
    models, text = [build(), build()], tokens()
    for parameter in models[1].parameters():
        parameter.mul_(-1.1)
    parameters, buffers = torch.func.stack_module_state(models)

    def call(values, others):
        return torch.func.functional_call(models[0], (values, others), (text,)).logits

    for logits, model in zip(torch.func.vmap(call)(parameters, buffers), models, strict=True):
        torch.testing.assert_close(logits, model(text).logits, rtol=0, atol=1e-5)


@torch.no_grad()
def test_more_dials_than_tables_are_computed_without_dropping_those_in_use(monkeypatch):
    model, (text,) = build(), tokens()[:1]
    stops = [0.1 + 0.01 * number for number in range(MOST_TABLES + 1)]
    expected = [build()(text[None], stop=stop).logits for stop in stops]
    made = []
    plan_vocabulary = planning.plan_vocabulary

    def count(model, call):
        made.append(call.stop)
        return plan_vocabulary(model, call)

    monkeypatch.setattr(planning, "plan_vocabulary", count)
    for _ in range(3):
        for stop, logits in zip(stops, expected, strict=True):
            assert torch.equal(model(text[None], stop=stop).logits, logits)
    assert len(made) == MOST_TABLES
    for _ in range(IN_USE + 1):  # the others are no longer in use
        model(text[None], stop=stops[0])
    model(text[None], stop=stops[-1])
    assert made[-1] == stops[-1]


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_bytes_of_any_type_are_tokens(dtype):
    model, text = build(), tokens() % 120
    assert torch.equal(model.plan(text.to(dtype)).active, model.plan(text).active)
    assert torch.equal(model(text.to(dtype)).logits, model(text).logits)
    every = torch.arange(256).to(torch.uint8)  # as many as there are words: no mask
    assert torch.equal(model.plan(every).active, model.paths().active)
    drawn = [[int(one.tokens[0]) for one in model.generate(each, 5, temperature=0)] for each in (text, text.to(dtype))]
    assert drawn[0] == drawn[1]


def test_wrong_types_are_one_line():
    model, text = build(), tokens()
    cases = {
        "tokens=torch.bool: must be whole numbers": lambda: model.plan(text > 5),
        "tokens=torch.complex64: must be whole numbers": lambda: model(text.to(torch.complex64)),
        "mask=torch.int64: must be torch.bool": lambda: model(text, mask=torch.ones_like(text)),
        "draft_experts=1.5: must be a whole number": lambda: next(model.generate(text[:1], 3, draft_experts=1.5)),
        "draft_tokens='2': must be a whole number": lambda: next(
            model.generate(text[:1], 3, draft_experts=1, draft_tokens="2")
        ),
        "max_experts='a': must be a whole number": lambda: next(
            model.generate(text[:1], 3, draft_experts=1, max_experts="a")
        ),
        "num_tokens=-1: must be a whole number": lambda: next(model.generate(text, -1)),
        "tokens=list: must be a tensor of whole numbers": lambda: model.plan([1, 2, 3]),
        "routing_dim=0: must be a whole number": lambda: build(routing_dim=0),
        "cache=[…]: must be left out with budgets": lambda: model(text, cache=KVCache(), budgets=(2,)),
    }
    for message, call in cases.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


@torch.no_grad()
def test_a_table_follows_its_parameters_and_the_dial():
    model, text = build(), tokens()
    before = model(text).routes[0].active
    assert not torch.equal(model(text, stop=0.01).routes[0].active, before)
    assert torch.equal(model(text).routes[0].active, before)
    model.routing_embedding.weight.mul_(-1)
    after = model(text).routes[0].active
    assert not torch.equal(after, before)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state["routing_embedding.weight"] *= -1
    model.load_state_dict(state, assign=True)
    assert torch.equal(model(text).routes[0].active, before)
    model.train().routing_embedding.weight.data.mul_(-1)
    assert torch.equal(model.eval()(text).routes[0].active, after)
    for budget in range(20):  # more tables than are kept
        assert int(model.paths(max_experts=budget).num_active.max()) <= budget


@torch.no_grad()
def test_a_plan_runs_nothing_and_is_what_runs(monkeypatch):
    model, text = build(), tokens()
    out = model(text)
    with monkeypatch.context() as patched:
        patched.setattr(kernels, "experts", None)
        plan = model.plan(text)
        assert torch.equal(model.paths().active[text], plan.active)
    assert torch.equal(plan.active, out.routes[0].active)
    assert torch.equal(plan.num_active, out.num_experts)
    fetched = plan.experts_by_block()
    assert [each.tolist() for each in fetched] == [
        sorted(set(out.routes[0].active[..., block, :].nonzero()[:, -1].tolist())) for block in range(3)
    ]
    single = model.plan(torch.tensor(65), max_experts=2)
    assert single.nodes.shape == (2,)
    assert single.num_active.tolist() == 2
    for wrong, message in ((torch.tensor([256]), "some are not in 0 … 255"), (torch.zeros(2), "must be whole numbers")):
        with pytest.raises(ValueError, match=message):
            model.plan(wrong)
    with pytest.raises(ValueError, match=r"routing_input=first-block: gpt-mre: a token's path depends on the text"):
        build(routing_input="first-block").plan(text)
    with pytest.raises(ValueError, match=r"routing_input=block: gpt-top-k: a token's path depends on the text"):
        build("top-k").paths()


@torch.no_grad()
@pytest.mark.parametrize("routing_input", ["token", "first-block"])
def test_a_stop_holds_per_call_per_text_and_per_token(routing_input):
    model, text = build(routing_input=routing_input), tokens()
    few, many = model(text, stop=4.0), model(text, stop=0.02)
    assert bool((few.num_experts <= many.num_experts).all())
    assert float(few.num_experts.float().mean()) < float(many.num_experts.float().mean())
    per_text = model(text, stop=torch.tensor([4.0, 0.02, 4.0]))
    assert torch.equal(per_text.num_experts[[0, 2]], few.num_experts[[0, 2]])
    assert torch.equal(per_text.num_experts[1], many.num_experts[1])
    stop = torch.where(torch.arange(12) % 2 == 0, 4.0, 0.02).expand(3, 12)
    mixed = model(text, stop=stop, mask=torch.ones(3, 12, dtype=torch.bool))
    if routing_input == "token":
        assert torch.equal(mixed.num_experts, few.num_experts.where(stop == 4.0, many.num_experts))
    cache, parts = KVCache(), []
    for part, own in zip(text.split([5, 7], 1), stop.split([5, 7], 1), strict=True):
        parts.append(model(part, stop=own, cache=cache).logits)
    torch.testing.assert_close(torch.cat(parts, 1), mixed.logits, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="stop"):
        model(text, stop=-1.0)
    with pytest.raises(ValueError, match="stop has shape"):
        model(text, stop=torch.ones(3, 11))


def test_generation_states_the_path_of_each_token_that_it_draws():
    model = build()
    drawn = list(model.generate(tokens()[:, :3], 6, stop=0.05, generator=torch.Generator().manual_seed(0)))
    table = model.paths(stop=0.05)
    for one, after in pairwise(drawn):
        assert torch.equal(one.paths.active, table.active[one.tokens])
        assert torch.equal(one.paths.num_active, after.num_experts)  # the token's experts run for the next logits
    top = build("top-k")
    assert next(top.generate(tokens()[:, :3], 1)).paths is None


@pytest.mark.parametrize("routing_input", ["token", "embedding", "first-block"])
@pytest.mark.parametrize(("depth", "num_experts"), [(1, 8), (2, 2), (4, 4)])
def test_the_gates_of_every_grid_learn(routing_input, depth, num_experts):
    model = build(routing_input=routing_input, depth=depth, num_experts=num_experts).train()
    text = tokens()
    before = {name: value.clone() for name, value in model.layer.router.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        cross_entropy(model(text).logits.flatten(0, 1), text.flatten()).backward()
        optimizer.step()
    for name, value in model.layer.router.named_parameters():
        assert not torch.equal(before[name], value), name
    if routing_input == "token":
        assert model.routing_embedding.weight.grad.abs().sum() > 0
    frozen = build("hash").train()
    cross_entropy(frozen(text).logits.flatten(0, 1), text.flatten()).backward()
    assert not frozen.routing_embedding.weight.requires_grad


@torch.no_grad()
def test_compiled_kernels_and_plain_pytorch_take_the_same_paths():
    model, text = build(depth=4), tokens()
    fast = model(text)
    model.path_tables.clear()
    with kernels.use("plain"):
        plain = model(text)
    assert torch.equal(fast.routes[0].nodes, plain.routes[0].nodes)
    torch.testing.assert_close(fast.logits, plain.logits, rtol=0, atol=1e-4)


@torch.no_grad()
def test_a_looked_up_path_costs_nothing():
    for options, is_free in (({}, True), ({"routing_input": "first-block"}, False)):
        model, text = build(**options), tokens()
        routing = sample_cost(model, text, model(text)).routing_macs
        assert bool((routing == 0).all()) == is_free


def test_a_budget_is_turned_into_a_stop_by_the_table():
    assert find_stop("m", DIAL, 3.0, None) == 1.0
    assert find_stop("m", DIAL, 6.0, None) == pytest.approx(0.0625)
    assert find_stop("m", DIAL, 4.0, None) == pytest.approx(0.5)  # halfway between 1 and 1/4, in logarithms
    assert find_stop("m", DIAL, None, 1.0) == pytest.approx(0.0625)
    assert find_stop("m", DIAL, None, 0.625) == pytest.approx(0.5)
    cases = [
        ({}, 4.0, None, "experts=4.0: the card of m has no table of budgets; run raytraced calibrate first"),
        (DIAL, 2.0, None, "experts=2: m runs at least 3 experts on average and at most 6, as calibrated"),
        (DIAL, 7.0, None, "experts=7: m runs at least 3 experts on average"),
        (DIAL, None, 0.4, "effort=0.4: m runs at least 0.5 of the full cost and at most 1"),
        (DIAL, None, 1.1, "effort=1.1: m runs at least 0.5"),
        (DIAL, 3.0, 0.5, "experts=3.0: give either experts or effort=0.5, not both"),
        (DIAL, math.nan, None, "experts=nan: must be a number"),
    ]
    for dial, experts, effort, message in cases:
        with pytest.raises(ValueError) as raised:
            find_stop("m", dial, experts, effort)
        assert str(raised.value).startswith(message)


@torch.no_grad()
def test_a_model_takes_budgets_from_its_card(tmp_path):
    model, text = build(), tokens()
    with pytest.raises(ValueError, match="no table of budgets; run raytraced calibrate first"):
        model(text, experts=4.0)
    model.card = replace(model.card, dial=DIAL)
    raytraced.save(model, tmp_path / "model.safetensors")
    loaded = raytraced.load(tmp_path / "model.safetensors")
    assert loaded.card.dial == DIAL
    expected = model(text, stop=0.5)
    assert torch.equal(loaded(text, experts=4.0).logits, expected.logits)
    assert torch.equal(loaded(text, effort=0.625).logits, expected.logits)
    assert torch.equal(loaded.plan(text, experts=4.0).num_active, expected.num_experts)
    with pytest.raises(ValueError, match="give either stop or a budget, not both"):
        model(text, experts=4.0, stop=0.5)
    for bad in ({"rows": [{"stop": 1.0}]}, {"rows": DIAL["rows"][::-1]}, {"rows": 3}):
        model.card = replace(model.card, dial=bad)
        with pytest.raises(ValueError, match="its card's dial is"):
            raytraced.save(model, tmp_path / "model.safetensors")


def test_cards_of_the_old_form_are_refused_in_one_line(tmp_path):
    model = build()
    model.card = replace(model.card, options=model.card.options | {"num_layers": 4})
    raytraced.save(model, tmp_path / "old.safetensors")
    with pytest.raises(ValueError, match="the form with a grid inside each block is gone") as raised:
        raytraced.load(tmp_path / "old.safetensors")
    assert "\n" not in str(raised.value)


@torch.no_grad()
def test_a_budget_is_for_greedy_choices_and_not_for_recorded_routes():
    model, text = build(), tokens()
    model.card = replace(model.card, dial=DIAL)
    with pytest.raises(ValueError, match=r"^experts=4\.0: must be left out with select=sample"):
        model(text, select="sample", experts=4.0)
    routes = model(text).routes
    with pytest.raises(ValueError, match=r"^effort=0\.9: must be left out with routes, which say what runs$"):
        model(text, routes=routes, effort=0.9)
