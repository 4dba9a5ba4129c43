"""Paths that depend on two tokens: every second block runs what the path of the token before has there."""

import pytest
import torch

import raytraced
from raytraced import kernels
from raytraced.cli.main import main
from raytraced.cost import sample_cost
from raytraced.explore.packing import pack_model
from raytraced.models.caches import KVCache, TextCaches
from raytraced.models.paths import alternate, places
from raytraced.router import Choice
from raytraced.rows import unordered_route
from raytraced.sequence import Route

SMALL = {"dim": 16, "hidden": 8, "num_experts": 4, "depth": 3, "num_heads": 2, "context": 12}
SHARP = {"entry_scale": 8.0, "input_init_std": 2.0, "weighting": "relative", "weight_scale": 2.0, "stop": 0.2}
PLANNERS = [("mre", "token"), ("mre", "embedding"), ("planned", "embedding"), ("planned", "token"), ("hash", "token")]


def build(name="mre", path_tokens=2, **options):
    torch.manual_seed(0)
    sharp = SHARP if name == "mre" else {}
    return raytraced.build(f"gpt-{name}", path_tokens=path_tokens, **SMALL | sharp | options).eval()


def tokens(seed=1, num=12):
    return torch.randint(256, (3, num), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
@pytest.mark.parametrize(("name", "routing_input"), PLANNERS)
def test_every_second_block_is_that_of_the_token_before(name, routing_input):
    text = tokens()
    before = torch.cat((text[:, :1], text[:, :-1]), 1)
    table = build(name, path_tokens=1, routing_input=routing_input).paths()
    route = build(name, routing_input=routing_input)(text).routes[0]
    assert torch.equal(route.active[:, :, 0::2], table.active[text][:, :, 0::2])
    assert torch.equal(route.active[:, :, 1::2], table.active[before][:, :, 1::2])
    assert torch.equal(route.num_active, route.active.sum((-1, -2)).long())


@torch.no_grad()
def test_a_path_hangs_on_a_token_and_the_one_before_it_alone():
    model, text = build(), tokens()
    active = model(text).routes[0].active
    for place in range(12):
        changed = text.clone()
        changed[:, place] = (changed[:, place] + 1) % 256
        moved = (model(changed).routes[0].active != active).any(-1).any(-1).any(0).nonzero()[:, 0].tolist()
        assert set(moved) <= {place, place + 1}
        assert place in moved or place + 1 in moved


@torch.no_grad()
@pytest.mark.parametrize("routing_input", ["token", "embedding"])
def test_a_cache_of_any_kind_gives_what_a_whole_text_gives(routing_input):
    model, text = build(routing_input=routing_input), tokens()
    whole = model(text)
    cache = KVCache()
    parts = [model(part, cache=cache) for part in text.split([5, 1, 6], 1)]
    torch.testing.assert_close(torch.cat([part.logits for part in parts], 1), whole.logits, rtol=0, atol=1e-5)
    assert torch.equal(torch.cat([part.routes[0].active for part in parts], 1), whole.routes[0].active)
    cache.crop(7)
    again = model(text[:, 7:], cache=cache)
    torch.testing.assert_close(again.logits, whole.logits[:, 7:], rtol=0, atol=1e-5)
    caches = [KVCache() for _ in text]
    for one, own, length in zip(caches, text, (3, 4, 5), strict=True):
        model(own[None, :length], cache=one)
    news = torch.stack([own[length : length + 1] for own, length in zip(text, (3, 4, 5), strict=True)])
    together = model(news, cache=TextCaches(caches))
    for number, length in enumerate((3, 4, 5)):
        assert torch.equal(together.routes[0].active[number, 0], whole.routes[0].active[number, length])
        torch.testing.assert_close(together.logits[number, 0], whole.logits[number, length], rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_text_after_padding_is_the_text_alone():
    model, text = build(), tokens(num=8)
    padded = torch.cat((torch.zeros(3, 4, dtype=torch.long), text), 1)
    mask = torch.ones(3, 12, dtype=torch.bool)
    mask[:, :4] = False
    with_padding, alone = model(padded, mask=mask), model(text)
    assert torch.equal(with_padding.routes[0].active[:, 4:], alone.routes[0].active)
    cache = KVCache()
    model(padded[:, :4], mask=mask[:, :4], cache=cache)
    after = model(padded[:, 4:], mask=mask, cache=cache)
    assert torch.equal(after.routes[0].active, alone.routes[0].active)


@torch.no_grad()
def test_generation_with_a_cache_and_with_drafts_is_that_without():
    model, prompt = build(), tokens(num=5)[:1]

    def generate(**options):
        return [int(one.tokens) for one in model.generate(prompt, 20, temperature=0, **options)]

    plain = generate(cached=False)
    assert generate() == plain
    assert generate(draft_experts=2) == plain


@torch.no_grad()
@pytest.mark.parametrize(("name", "routing_input"), PLANNERS)
def test_a_plan_is_what_runs(name, routing_input):
    model, text = build(name, routing_input=routing_input), tokens()
    for budget in ({}, {"max_experts": 3}) if name == "mre" else ({},):
        route, plan = model(text, **budget).routes[0], model.plan(text, **budget)
        assert torch.equal(plan.active, route.active)
        assert torch.equal(plan.num_active, route.num_active)
        after = model.plan(text[:, 4], before=text[:, 3], **budget)
        assert torch.equal(after.active, route.active[:, 4])
        assert torch.equal(model.plan(text[0, 0], **budget).active, route.active[0, 0])
    table = model.paths()
    joined = table.active[text].clone()
    joined[:, 1:, 1::2] = table.active[text[:, :-1]][:, :, 1::2]
    assert torch.equal(model.plan(text).active, joined)


@torch.no_grad()
@pytest.mark.parametrize("context", [2, 3, 12])
def test_generation_knows_the_path_of_a_token_when_it_is_drawn(context):
    """Also where the context is full: the next pass begins again, and its first token stands before itself."""
    model, prompt = build(context=context), tokens(num=2)[:1]

    def ran(text, start):
        return model(text[:, start:]).routes[0].active[:, -1]

    for options in ({}, {"cached": False}, {"draft_experts": 2}):
        text, start = prompt, 0
        for drawn in model.generate(prompt, 9, temperature=0, **options):
            text = torch.cat((text, drawn.tokens[:, None]), 1)
            if text.shape[1] - start > context:
                start = text.shape[1] - max(1, context // 2)
            assert torch.equal(drawn.paths.active, ran(text, start)), (options, text.shape)


@torch.no_grad()
def test_a_budget_keeps_the_first_experts_of_both_orders():
    model, text = build(), tokens()
    whole = model.plan(text, stop=0.02)
    longest = int(whole.num_active.max())
    assert longest > 4
    for budget in (*range(longest + 2), 10**22):
        out = model(text, stop=0.02, max_experts=budget)
        (route,), plan = out.routes, model.plan(text, stop=0.02, max_experts=budget)
        assert torch.equal(route.num_active, whole.num_active.clamp(max=min(budget, 99)))
        assert torch.equal(route.active.sum((-1, -2)).long(), route.num_active)
        kept = whole.nodes[..., : min(budget, 99)]
        assert torch.equal(plan.nodes[..., : kept.shape[-1]], kept)
        assert torch.equal(plan.weights, whole.weights * plan.active)


@torch.no_grad()
def test_the_last_answer_along_the_way_is_that_of_the_whole_path():
    model, text = build(), tokens()
    *_, last = raytraced.anytime(model, text)
    assert torch.equal(last.num_active, model(text).num_experts)
    torch.testing.assert_close(last.logits, model(text).logits, rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_router_without_an_order_has_no_budget():
    for call in (lambda m: m(tokens(), max_experts=3), lambda m: m.plan(tokens(), max_experts=3)):
        with pytest.raises(ValueError, match="this router supports none of them"):
            call(build("planned"))


def test_orders_are_merged_in_turns():
    """One block of the token's own path, one of the token before; two experts each."""

    def choice(nodes):
        active = torch.zeros(1, 4)
        active[0, nodes] = 1
        active = active.view(1, 2, 2)
        return Choice(
            active, active * 3, None, Route(active, torch.tensor([[*nodes, -1]]), active.sum((1, 2)).long(), None)
        )

    own, before = choice([1, 2, 0]), choice([3, 0, 2])
    assert places(own.route.nodes, own.active.shape).flatten().tolist() == [2, 0, 1, 4]
    joined = alternate(own, before)
    assert joined.active.flatten().tolist() == [1, 1, 1, 1]
    assert joined.route.nodes.tolist() == [[1, 3, 0, 2]]
    fewer = alternate(own, before, 3)
    assert fewer.active.flatten().tolist() == fewer.weights.flatten().div(3).tolist() == [1, 1, 0, 1]
    assert fewer.route.num_active.tolist() == [3]
    without_order = own._replace(route=unordered_route(own.active))
    assert alternate(without_order, before).route is None


@torch.no_grad()
def test_it_costs_nothing_and_is_the_same_in_plain_pytorch():
    model, text = build(), tokens()
    fast = model(text)
    assert bool((sample_cost(model, text, fast).routing_macs == 0).all())
    model.path_tables.clear()
    with kernels.use("plain"):
        plain = model(text)
    assert torch.equal(fast.routes[0].nodes, plain.routes[0].nodes)
    torch.testing.assert_close(fast.logits, plain.logits, rtol=0, atol=1e-4)


def test_both_tokens_teach_the_gates():
    model, text = build(), torch.tensor([[3, 4]])
    model.train()(text).logits[:, 1].square().sum().backward()
    moved = model.routing_embedding.weight.grad.abs().sum(1).nonzero()[:, 0].tolist()
    assert moved == [3, 4]


def test_a_saved_model_keeps_it(tmp_path):
    model, text = build(), tokens()
    raytraced.save(model, tmp_path / "model.safetensors")
    loaded = raytraced.load(tmp_path / "model.safetensors")
    assert loaded.path_tokens == loaded.card.spec["path_tokens"] == 2
    assert torch.equal(loaded(text).logits, model(text).logits)


def test_bad_input_is_one_line():
    with pytest.raises(ValueError, match=r"^path_tokens=3: must be 1 or 2$"):
        build(path_tokens=3)
    for name, routing_input in (("mre", "first-block"), ("top-k", "block")):
        with pytest.raises(ValueError, match=r"^path_tokens=2: paths depend on no single token"):
            build(name, routing_input=routing_input)
    model = build(routing_input="embedding")
    with pytest.raises(ValueError, match=r"^path_tokens=2: must be 1 for embeddings in place of tokens"):
        model(torch.randn(1, 4, 16))
    plan = build().plan
    for before, message in (
        (tokens()[:, 1:], r"^before=\(3, 11\): must be \(3, 12\), as tokens$"),
        (tokens() + 256, r"^before=\[…\]: some are not in 0 … 255, the vocabulary$"),
        (tokens().float(), r"^before=torch.float32: must be whole numbers$"),
        ([1, 2, 3], r"^before=list: must be a tensor of whole numbers$"),
    ):
        with pytest.raises(ValueError, match=message):
            plan(tokens(), before=before)
    with pytest.raises(ValueError, match=r"^before=\[…\]: is for paths that depend on two tokens; leave it out$"):
        build(path_tokens=1).plan(tokens(), before=tokens())
    with pytest.raises(ValueError, match=r"^pairs: its paths depend on 2 tokens; the page runs those of one$"):
        pack_model("pairs", build())


def test_routes_that_no_model_can_follow_are_not_recorded(tmp_path, capsys):
    raytraced.save(build(), tmp_path / "model.safetensors")
    (tmp_path / "own.txt").write_bytes(b"to be, or not to be. " * 200)
    file = tmp_path / "routes.safetensors"
    words = [str(tmp_path / "model.safetensors"), "--data", str(tmp_path / "own.txt"), "--save-routes", str(file)]
    assert main(["evaluate", *words]) == 2
    message = f"save_routes={file}: no model can follow routes of path_tokens=2; leave it out"
    assert message in capsys.readouterr().err
    assert not file.exists()
