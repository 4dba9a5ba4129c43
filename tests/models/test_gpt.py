"""The decoder: causal, positions by difference, the same with a cache and without, every router in its blocks."""

import pytest
import torch
from torch.nn.functional import cross_entropy

import raytraced
from raytraced.cost import num_parameters, sample_cost
from raytraced.models.attention import Attention, rotate
from raytraced.models.caches import KVCache
from raytraced.models.registry import MODELS
from raytraced.models.sampling import draw_each, draw_token, kept_probabilities

SMALL = {"dim": 16, "hidden": 8, "num_experts": 3, "depth": 2, "num_heads": 2, "context": 12}
ROUTERS = [name for name, info in MODELS.items() if info.model is None]


def build(name="mre", **options):
    torch.manual_seed(0)
    sizes = {key: value for key, value in SMALL.items() if name[:3] in ("den", "mlp") and key in ("dim", "depth")}
    sizes = SMALL if not sizes else sizes | {"num_heads": 2, "context": 12}
    return raytraced.build(f"gpt-{name}", **sizes | options).eval()


@pytest.fixture
def tokens():
    return torch.randint(256, (3, 12), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@pytest.mark.parametrize("name", ROUTERS)
def test_a_later_token_changes_no_earlier_answer(name, tokens):
    model, changed = build(name), tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before.logits[:, :7], after.logits[:, :7], rtol=0, atol=1e-5)
    assert torch.equal(before.num_experts[:, :7], after.num_experts[:, :7])
    assert not torch.allclose(before.logits[:, 7:], after.logits[:, 7:], atol=1e-3)


@pytest.mark.parametrize("name", ROUTERS)
def test_every_router_trains_in_its_blocks_and_survives_a_file(name, tokens, tmp_path):
    model = build(name).train()
    out = model(tokens, sample_loss_fn=lambda logits: cross_entropy(logits.mT, tokens, reduction="none").mean(-1))
    assert out.logits.shape == (3, 12, 256)
    assert len(out.routes) == 1
    assert out.routes[0].active.shape[:3] == (3, 12, 2 * model.layer.router.num_rounds)
    assert out.num_experts.shape == (3, 12)
    loss = cross_entropy(out.logits.flatten(0, 1), tokens.flatten()) + (0 if out.loss is None else out.loss)
    loss.backward()
    assert all(block.attention.inputs.weight.grad.any() for block in model.blocks)
    assert model.embedding.weight.grad.any()
    raytraced.save(model, tmp_path / "model.safetensors")
    loaded = raytraced.load(tmp_path / "model.safetensors")
    assert isinstance(loaded, raytraced.GPT)
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model.eval()(tokens).logits)


def test_a_policy_is_rewarded_by_the_loss_of_each_text(tokens):
    model = build("ada-k").train()
    one, other = (
        model(
            tokens, sample_loss_fn=lambda _, worse=worse: torch.tensor([0.0, worse, 1.0]), generator=torch.Generator()
        ).loss
        for worse in (0.0, 5.0)
    )
    assert one is not None
    assert not torch.equal(one, other)


def test_rotary_products_follow_from_the_difference_of_positions_alone():
    queries, keys = torch.randn(2, 3, 1, 8, dtype=torch.float64), torch.randn(2, 3, 1, 8, dtype=torch.float64)

    def product(one, other):
        turned = rotate(queries, torch.tensor([one])), rotate(keys, torch.tensor([other]))
        return (turned[0] * turned[1]).sum(-1)

    torch.testing.assert_close(product(3, 1), product(103, 101))
    torch.testing.assert_close(product(5, 5), (queries * keys).sum(-1))
    assert not torch.allclose(product(3, 1), product(1, 3))
    torch.testing.assert_close(rotate(queries, torch.tensor([9])).norm(dim=-1), queries.norm(dim=-1))


def test_attention_is_the_weighted_mean_that_it_says():
    attention, x = Attention(8, 2).double(), torch.randn(1, 5, 8, dtype=torch.float64)
    found = attention(x, torch.arange(5), None, None, 0)
    q, k, v = (attention.inputs(x)[0].view(5, 3, 2, 4)[:, part] for part in range(3))
    expected = torch.zeros(5, 2, 4, dtype=torch.float64)
    for head in range(2):
        waves = torch.tensor([1.0, 10_000**-0.5], dtype=torch.float64)
        turn = torch.polar(torch.ones(5, 2, dtype=torch.float64), torch.arange(5)[:, None] * waves)
        q_c, k_c = (torch.complex(each[:, head, :2], each[:, head, 2:]) * turn for each in (q, k))
        for t in range(5):
            scores = (q_c[t] * k_c[: t + 1].conj()).real.sum(-1) / 2
            expected[t, head] = scores.softmax(0) @ v[: t + 1, head]
    torch.testing.assert_close(found[0], attention.output(expected.flatten(1)), rtol=1e-6, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("name", ["mre", "top-k", "dense"])
def test_tokens_given_one_by_one_or_in_parts_get_the_answers_of_the_whole(name, tokens):
    model = build(name)
    whole = model(tokens)
    for cuts in ([1] * 12, [5, 1, 6], [12]):
        cache, parts = KVCache(), []
        for part in tokens.split(cuts, 1):
            parts.append(model(part, cache=cache))
        assert cache.get_seq_length() == 12
        torch.testing.assert_close(torch.cat([part.logits for part in parts], 1), whole.logits, rtol=0, atol=1e-5)
        assert torch.equal(torch.cat([part.num_experts for part in parts], 1), whole.num_experts)


@torch.no_grad()
def test_sampled_experts_are_the_same_with_a_cache(tokens):
    model, rows = build(), torch.tensor([5, 0, 9])

    def run(part, **options):
        return model(part, select="sample", rows=rows, generator=torch.Generator().manual_seed(2), **options)

    cache, whole = KVCache(), run(tokens)
    parts = [run(part, cache=cache).num_experts for part in tokens.split([4, 8], 1)]
    assert torch.equal(torch.cat(parts, 1), whole.num_experts)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"top_p": 0.5, "max_experts": 2}])
def test_generation_with_a_cache_is_generation_without(options, tokens):
    model = build()

    def text(cached):
        drawn = model.generate(tokens[:, :5], 30, generator=torch.Generator().manual_seed(3), cached=cached, **options)
        return [torch.stack(each, 1) for each in zip(*((one.tokens, one.num_experts) for one in drawn), strict=True)]

    (found, experts), (expected, expected_experts) = text(True), text(False)
    assert found.shape == (3, 30)  # three times past the context of 12
    assert torch.equal(found, expected)
    assert torch.equal(experts, expected_experts)
    assert bool((experts <= options.get("max_experts", 6)).all())


def test_draws_keep_to_the_likeliest():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().expand(4000, -1)
    generator = torch.Generator().manual_seed(0)
    share = torch.bincount(draw_token(logits, 1.0, 1.0, generator), minlength=4) / 4000
    torch.testing.assert_close(share, torch.tensor([0.5, 0.3, 0.15, 0.05]), rtol=0, atol=0.04)  # five standard errors
    assert draw_token(logits, 1.0, 0.79, generator).unique().tolist() == [0, 1]
    assert draw_token(logits, 1.0, 0.49, generator).unique().tolist() == [0]
    assert draw_token(logits, 0.0, 1.0).unique().tolist() == [0]
    assert torch.bincount(draw_token(logits, 0.1, 1.0, generator))[0] > 3950  # 0.5^10 against 0.3^10: 0.6 % are others


@pytest.mark.parametrize("vocab_size", [1, 7, 256, 333])
def test_rows_with_generators_of_their_own_draw_what_each_draws_alone(vocab_size):
    logits_BV = torch.randn(9, vocab_size, generator=torch.Generator().manual_seed(0))
    kept_BV, order_BV = kept_probabilities(logits_BV, 0.8, 0.9)
    together, alone = ([torch.Generator().manual_seed(seed) for seed in range(9)] for _ in range(2))
    for _ in range(5):  # one after the other: each takes as many numbers from its generator
        expected = [
            int(draw_token(logits_V[None], 0.8, 0.9, one)) for logits_V, one in zip(logits_BV, alone, strict=True)
        ]
        assert draw_each(kept_BV, order_BV, together).tolist() == expected


@torch.no_grad()
def test_a_texts_answer_and_draws_are_its_own_in_any_batch(tokens):
    model, rows = build(), torch.tensor([4, 11, 2])

    def run(part):
        return model(tokens[part], select="sample", rows=rows[part], generator=torch.Generator().manual_seed(7))

    whole = run(torch.arange(3))
    for part in ([1], [2, 0], [0, 1]):
        found = run(torch.tensor(part))
        assert torch.equal(found.routes[0].nodes, whole.routes[0].nodes[part])
        torch.testing.assert_close(found.logits, whole.logits[part], rtol=0, atol=1e-5)
    assert not torch.equal(whole.routes[0].active[0], whole.routes[0].active[1])


@torch.no_grad()
@pytest.mark.parametrize("name", ["mre", "top-k"])
def test_padding_is_not_attended_to_and_runs_nothing_wherever_it_stands(name, tokens):
    model = build(name)
    alone = model(tokens[:, :8])
    for start in (0, 4, 2):  # behind the text, before it, around it
        padded, mask = torch.full((3, 12), 77), torch.zeros(3, 12, dtype=torch.bool)
        padded[:, start : start + 8], mask[:, start : start + 8] = tokens[:, :8], True
        out = model(padded, mask=mask)
        # positions count by their differences only
        torch.testing.assert_close(out.logits[:, start : start + 8], alone.logits, rtol=0, atol=1e-4)
        assert not out.num_experts[~mask].any()
        assert out.logits.isfinite().all()


@torch.no_grad()
def test_every_budget_is_a_forward_of_its_own(tokens):
    model, generator = build(), torch.Generator().manual_seed(4)
    steps = list(raytraced.anytime(model, tokens, select="sample", generator=generator))
    assert 2 < len(steps) <= 7
    state = torch.Generator().manual_seed(4)
    answers = model(tokens, select="sample", budgets=(0, 1, 2), generator=state).answers
    for budget, answer in enumerate(answers):
        alone = model(tokens, select="sample", max_experts=budget, generator=torch.Generator().manual_seed(4))
        assert torch.equal(answer.logits, alone.logits)
        assert torch.equal(steps[budget].logits, alone.logits)
        assert bool((alone.num_experts <= budget).all())  # both blocks together
    with pytest.raises(ValueError, match="gpt-top-k: has one answer only"):
        next(build("top-k").prefixes(tokens))


@torch.no_grad()
def test_work_is_counted_from_the_matrices(tokens):
    model = build("dense", depth=3, hidden=8)
    cost = sample_cost(model, tokens, model(tokens))
    attention = [4 * 16 * 16 + 2 * 16 * (position + 1) for position in range(12)]
    assert cost.input_macs.tolist() == [[3 * each for each in attention]] * 3
    assert bool((cost.expert_macs == 3 * 2 * 16 * 8).all())
    assert bool((cost.head_macs == 16 * 256).all())
    assert bool((cost.parameters == num_parameters(model)).all())  # without routing everything takes part


def test_defaults_and_refusals():
    model = raytraced.build("gpt-mre")
    assert (model.context, len(model.blocks), model.card.options["dim"]) == (128, 2, 96)
    assert model.layer.experts.widths == (96, 192, 96)
    spec = {"depth": 2, "num_heads": 4, "context": 128, "vocab_size": 256, "path_tokens": 1}  # as they are today
    assert model.card.spec == spec | {"routing_input": "token", "routing_dim": 16}
    assert raytraced.build("gpt-top-k").card.spec == spec | {"routing_input": "block"}
    cases = {
        "dim=18: must be a multiple of 2 · num_heads=4": {"dim": 18, "num_heads": 2},
        "depth=0: must be a whole number, at least 1": {"depth": 0},
        "context='a': must be a whole number, at least 1": {"context": "a"},
        "model option num_head: gpt-mre has no such option; did you mean num_heads": {"num_head": 2},
        "num_layers=4: gpt-mre has one grid for all blocks, a layer of it per block; set depth instead": {
            "num_layers": 4
        },
        "routing_input='last': must be one of block, token": {"routing_input": "last"},
        "routing_input=block: must be token, embedding or first-block": {"routing_input": "block"},
        "routing_dim=8: is the width of the routing embedding": {"routing_input": "embedding", "routing_dim": 8},
        "routing_dim=0: must be a whole number, at least 1": {"routing_dim": 0},
    }
    for text, options in cases.items():
        with pytest.raises(ValueError, match=text.replace("·", ".")):
            raytraced.build("gpt-mre", **options)
    with pytest.raises(ValueError, match=r"model=gpt-mer: no such model; did you mean gpt-mre\?"):
        raytraced.build("gpt-mer")
    with pytest.raises(ValueError, match="model=gpt-multi-exit: no such model"):
        raytraced.build("gpt-multi-exit")
    small = build()
    for text, given in {
        "tokens=13: must be at most context=12": torch.zeros(1, 13, dtype=torch.long),
        "must be whole numbers": torch.zeros(1, 3),
        "must be whole": torch.zeros(3, dtype=torch.long),
    }.items():
        with pytest.raises(ValueError, match=text):
            small(given)
    for text, options in {"temperature": {"temperature": -1}, "top_p=0": {"top_p": 0}}.items():
        with pytest.raises(ValueError, match=text):
            next(small.generate(torch.zeros(1, 3, dtype=torch.long), 1, **options))


@torch.no_grad()
def test_every_token_of_every_text_has_draws_of_its_own():
    model, same = build(), torch.full((2, 12), 65)  # without differences, only the draws distinguish tokens
    nodes = model(same, select="sample", generator=torch.Generator().manual_seed(0)).routes[0].nodes
    assert not torch.equal(nodes[0], nodes[1])
    for shift in range(1, 6):
        assert not torch.equal(nodes[0, shift:], nodes[1, : 12 - shift])


@pytest.mark.parametrize("token", [-1, 256])
def test_a_token_beyond_the_vocabulary_is_refused_in_a_line(token):
    model = raytraced.build("gpt-mre", context=8, dim=8, num_heads=2, hidden=8, num_experts=2)
    with pytest.raises(ValueError, match="tokens: some are not in 0 … 255, the vocabulary"):
        model(torch.tensor([[3, token]]))
