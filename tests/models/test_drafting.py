"""Drafts with a small budget: the text of the full budget, bit for bit with temperature 0, else its distribution."""

import pytest
import torch

import raytraced
from raytraced.models.caches import KVCache, NextTokens
from raytraced.models.drafting import Drafting, Drafts, accept
from raytraced.models.gpt import GPT

SMALL = {"dim": 16, "hidden": 32, "num_experts": 3, "depth": 2, "num_heads": 2, "context": 12}


@pytest.fixture
def model() -> GPT:
    """An untrained model whose logits are large enough that tokens follow from the text, and experts that matter."""
    torch.manual_seed(0)
    made = raytraced.build("gpt-mre", **SMALL, vocab_size=8).eval()
    with torch.no_grad():
        made.embedding.weight.mul_(4)
        for weight in made.layer.experts.weights:
            weight.mul_(1.5)
    return made


def text_of(drawn) -> list[tuple[int, int]]:
    return [(int(one.tokens), int(one.num_experts)) for one in drawn]


@pytest.mark.parametrize(("num_prompts", "length"), [(1, 20), pytest.param(8, 60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("draft_tokens", [1, 3, 20])
@pytest.mark.parametrize("draft_experts", [0, 1, 2])
def test_the_likeliest_text_is_that_without_drafts_past_the_context_too(
    model, draft_experts, draft_tokens, num_prompts, length
):
    drafted, refused = 0, 0
    budgets = ({}, {"max_experts": 4}, {"stop": 0.3}, {"stop": torch.tensor([2.0])}) * num_prompts
    for seed, options in enumerate(budgets):
        prompt = torch.randint(8, (1, 5), generator=torch.Generator().manual_seed(seed))
        options = {"temperature": 0.0, **options}
        expected = list(model.generate(prompt, length, **options))
        found = list(model.generate(prompt, length, draft_experts=draft_experts, draft_tokens=draft_tokens, **options))
        assert text_of(found) == text_of(expected)
        assert all(
            torch.equal(one.paths.active, other.paths.active) for one, other in zip(found, expected, strict=True)
        )
        refused += sum(not one.drafted for one in found)
        drafted += sum(one.drafted for one in found)
    assert drafted > 0
    assert refused > len(budgets) * length / (draft_tokens + 1)  # some drafts were wrong, so the cache went back


@torch.no_grad()
def test_tokens_checked_together_have_the_bits_of_tokens_read_one_by_one(model):
    tokens = torch.randint(8, (1, 12), generator=torch.Generator().manual_seed(1))
    alone, together = KVCache(), KVCache()
    for cache in (alone, together):
        model(tokens[:, :4], cache=cache)
    expected = torch.cat([model(tokens[:, [place]], cache=alone).logits for place in range(4, 10)])
    model(tokens[:, 10:], max_experts=1, cache=together)  # drafts that are taken back
    together.crop(4)
    found = model(tokens[0, 4:10, None], cache=NextTokens(together, 6)).logits
    assert torch.equal(found, expected)
    for block in alone.blocks:
        assert all(torch.equal(*pair) for pair in zip(alone.blocks[block], together.blocks[block], strict=True))
    alone.crop(7)
    together.crop(7)
    assert together.get_seq_length() == 7
    assert torch.equal(model(tokens[:, 7:8], cache=together).logits, model(tokens[:, 7:8], cache=alone).logits)


def test_accepted_and_replaced_drafts_have_the_distribution_of_the_full_budget():
    generator = torch.Generator().manual_seed(0)
    full, drafted = (torch.tensor(one).double().log() for one in ([[0.5, 0.2, 0.3, 0.0]] * 2, [0.1, 0.6, 0.2, 0.1]))
    options, num, counts = Drafting(0, 1, generator=generator), 4_000, torch.zeros(4)
    kept = 0
    for _ in range(num):
        token = int(torch.multinomial(drafted.exp(), 1, generator=generator))
        tokens = accept(full, Drafts([token], [drafted.exp()]), options)
        counts[tokens[0]] += 1
        kept += len(tokens) - 1
    # five standard errors of a share of 4,000 are at most 5 · 0.5 / √4,000 = 0.04
    torch.testing.assert_close(counts / num, torch.tensor([0.5, 0.2, 0.3, 0.0]), rtol=0, atol=0.04)
    assert counts[3] == 0
    assert abs(kept / num - (0.1 + 0.2 + 0.2)) < 0.04  # Σ min(p, q)


@pytest.mark.parametrize(
    ("options", "num"),
    [
        ({"temperature": 4.0, "top_p": 0.9}, 300),
        pytest.param({"temperature": 4.0, "top_p": 0.9}, 600, marks=pytest.mark.slow),
        pytest.param({"temperature": 2.0}, 600, marks=pytest.mark.slow),
    ],
)
def test_drawn_texts_have_the_frequencies_of_the_exact_distribution(model, options, num):
    """Three tokens after a prompt: 512 texts, whose probabilities follow from the model's logits."""
    prompt = torch.tensor([[1, 5, 2]])
    texts = torch.cartesian_prod(*[torch.arange(8)] * 3)
    with torch.no_grad():
        logits = model(torch.cat((prompt.expand(512, -1), texts), 1)).logits[:, 2:5].double()
    probs = (logits / options["temperature"]).softmax(-1)
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    ranked = ranked * ((ranked.cumsum(-1) - ranked) < options.get("top_p", 1.0))
    probs = torch.zeros_like(probs).scatter(-1, order, ranked / ranked.sum(-1, keepdim=True))
    expected = probs.gather(-1, texts[..., None])[..., 0].prod(-1)
    generator, counts, drafted = torch.Generator().manual_seed(4), torch.zeros(512), 0
    for _ in range(num):
        found = list(model.generate(prompt, 3, draft_experts=1, draft_tokens=2, generator=generator, **options))
        counts[sum(int(one.tokens) * 8 ** (2 - place) for place, one in enumerate(found))] += 1
        drafted += sum(one.drafted for one in found)
    assert 0 < drafted < num  # accepted and refused: of a text, only the second token can be an accepted draft
    # Each text's count is binomial; 6 standard deviations and one text, for 512 counts at once.
    bound = 6 * (num * expected * (1 - expected)).sqrt() + 1
    assert bool(((counts - num * expected).abs() <= bound).all())
    assert not counts[expected == 0].any()
    # And the statistic of all of them together: χ² has mean d and variance 2 d; 5 standard deviations.
    likely = num * expected >= 5
    chi = ((counts - num * expected)[likely] ** 2 / (num * expected[likely])).sum()
    degrees = int(likely.sum())
    assert chi < degrees + 5 * (2 * degrees) ** 0.5


def test_what_cannot_be_drafted_is_refused_in_a_line(model):
    top_k = raytraced.build("gpt-top-k", **SMALL)
    one, two = torch.zeros(1, 3, dtype=torch.long), torch.zeros(2, 3, dtype=torch.long)
    cases = [
        (model, one, {"draft_experts": -1}, "draft_experts=-1: must not be negative"),
        (model, one, {"draft_experts": 2, "max_experts": 2}, "draft_experts=2: must be below max_experts=2"),
        (model, one, {"draft_experts": 1, "draft_tokens": 0}, "draft_tokens=0: must be at least 1"),
        (model, two, {"draft_experts": 1}, "draft_experts=1: drafts are for one text, not for 2; leave it out"),
        (model, one, {"draft_experts": 1, "cached": False}, "cached=False: must be left out with draft_experts"),
        (model, one, {"draft_experts": 1, "max_bytes": 5}, "max_bytes=5: must be left out with draft_experts"),
        (top_k, one, {"draft_experts": 1}, "draft_experts=1: gpt-top-k has no smaller budget; leave it out"),
    ]
    for given, prompt, options, text in cases:
        with pytest.raises(ValueError, match=text):
            next(given.generate(prompt, 3, **options))
