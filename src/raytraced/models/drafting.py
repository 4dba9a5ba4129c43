"""Draft with a prefix, verify with the whole: speculative decoding in which the model drafts for itself.

A few tokens are drafted with a small budget of experts, then one pass with the full budget computes the logits after each of
them. Drafts are kept up to the first one that the full budget would not have drawn; in place of that one, or after the last,
stands a token that the full budget draws. Leviathan et al., *Fast Inference from Transformers via Speculative Decoding*,
2023, show that the text has the distribution of the full budget.

A draft attends to the keys and values that the full budget computed for all tokens before the drafts, so that the prompt is
read once. What drafts write into the cache is removed before the check, what the check writes for refused drafts after it.

Axes: n drafted tokens, V vocabulary size.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from raytraced.errors import check_budget, require
from raytraced.models.caches import KVCache, NextTokens, place_before_last, window_start
from raytraced.models.planning import plan_words
from raytraced.models.sampling import Drawn, draw_token, kept_probabilities
from raytraced.router import Call
from raytraced.rows import flat_stop
from raytraced.sequence import StopPerRow

if TYPE_CHECKING:
    from raytraced.models.gpt import GPT


class Drafting(NamedTuple):
    """How tokens are drafted, and how they are drawn; as for `GPT.generate`."""

    draft_experts: int
    draft_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    max_experts: int | None = None
    stop: StopPerRow | None = None
    generator: torch.Generator | None = None


class Drafts(NamedTuple):
    """Tokens that were drafted one after the other."""

    tokens: list[int]
    probs: list[Tensor]  # (V,) each: the distribution that the token was drawn from; none with temperature 0


def generate_drafted(model: "GPT", prompt_1T: Tensor, num_tokens: int, options: Drafting) -> Iterator[Drawn]:
    """Continue one text: the same as `GPT.generate` with temperature 0, else of the same distribution."""
    check_drafting(model, prompt_1T, options)
    call = Call("greedy", options.max_experts, stop=flat_stop(options.stop, prompt_1T.shape[:1]))
    text: list[int] = prompt_1T[0].tolist()
    cache, start, end = KVCache(), 0, len(text) + num_tokens
    while len(text) < end:
        begin = window_start(len(text), start, model.context)
        if begin > start:
            cache, start = KVCache(), begin
        pending = text[start + cache.get_seq_length() :]
        drafts = Drafts([], [])
        if len(pending) == 1:  # a prompt, or a text that begins again, is read without drafts
            room = model.context - (len(text) - start)
            drafts = draft(model, pending[0], min(options.draft_tokens, end - len(text) - 1, room), cache, options)
        num_read, length = len(pending), cache.get_seq_length()
        logits_nV, experts_n = check_drafts(model, pending, drafts.tokens, cache, options)
        tokens = accept(logits_nV, drafts, options)
        cache.crop(length + num_read + len(tokens) - 1)
        for number, token in enumerate(tokens):
            text.append(token)
            before = text[place_before_last(len(text), window_start(len(text), start, model.context))]
            token_1, before_1 = (torch.tensor([one], device=prompt_1T.device) for one in (token, before))
            paths = plan_words(model, token_1, before_1, call) if model.path_follows_token else None
            yield Drawn(token_1, experts_n[number : number + 1], paths, number < len(tokens) - 1)


def check_drafting(model: "GPT", prompt_1T: Tensor, options: Drafting) -> None:
    """Refuse drafts that cannot be made."""
    num, most = options.draft_experts, options.max_experts
    check_budget(most)
    for name, value in (("draft_experts", num), ("draft_tokens", options.draft_tokens)):
        require(type(value) is int, name, repr(value), "must be a whole number")
    require(model.answers_along_the_way, "draft_experts", num, f"{model.name} has no smaller budget; leave it out")
    require(num >= 0, "draft_experts", num, "must not be negative")
    require(most is None or num < most, "draft_experts", num, f"must be below max_experts={most}")
    require(options.draft_tokens >= 1, "draft_tokens", options.draft_tokens, "must be at least 1")
    rule = f"drafts are for one text, not for {len(prompt_1T)}; leave it out"
    require(len(prompt_1T) == 1, "draft_experts", num, rule)


def draft(model: "GPT", token: int, num_tokens: int, cache: KVCache, options: Drafting) -> Drafts:
    """Draw tokens after a token with the small budget; the cache is left as it was."""
    drafts, length = Drafts([], []), cache.get_seq_length()
    device = model.embedding.weight.device
    for _ in range(num_tokens):
        tokens_11 = torch.tensor([[token]], device=device)
        logits_1V = model(tokens_11, max_experts=options.draft_experts, stop=options.stop, cache=cache).logits[:, -1]
        if options.temperature == 0:
            token = int(logits_1V.argmax())
        else:
            probs_V = drawn_from(logits_1V, options)[0]
            token = int(torch.multinomial(probs_V, 1, generator=options.generator))
            drafts.probs.append(probs_V)
        drafts.tokens.append(token)
    cache.crop(length)
    return drafts


def check_drafts(
    model: "GPT", pending: list[int], drafted: list[int], cache: KVCache, options: Drafting
) -> tuple[Tensor, Tensor]:
    """The logits after the pending tokens and after each draft (n + 1, V), with the full budget, and its experts (n + 1,)."""
    device = model.embedding.weight.device
    if not drafted:
        tokens_1T = torch.tensor([pending], device=device)
        out = model(tokens_1T, max_experts=options.max_experts, stop=options.stop, cache=cache)
        return out.logits[:, -1], out.num_experts[:, -1]
    tokens_n1 = torch.tensor([*pending, *drafted], device=device)[:, None]
    stop = options.stop.expand(len(tokens_n1)) if isinstance(options.stop, Tensor) else options.stop
    out = model(tokens_n1, max_experts=options.max_experts, stop=stop, cache=NextTokens(cache, len(tokens_n1)))
    return out.logits[:, -1], out.num_experts[:, -1]


def accept(logits_nV: Tensor, drafts: Drafts, options: Drafting) -> list[int]:
    """The drafts up to the first one that is refused, and a token drawn from what the full budget says there.

    A draft that was drawn with probability q and has probability p under the full budget is accepted with probability
    min(1, p / q); in place of a refused one a token is drawn from the positive part of p - q.
    """
    if options.temperature == 0:
        likeliest = logits_nV.argmax(-1).tolist()
        agreed = [one == other for one, other in zip(drafts.tokens, likeliest, strict=False)]
        num = agreed.index(False) if False in agreed else len(agreed)
        return [*drafts.tokens[:num], likeliest[num]]
    if not drafts.tokens:
        return [int(draw_token(logits_nV, options.temperature, options.top_p, options.generator))]
    full_nV = drawn_from(logits_nV, options)
    uniform_n = torch.rand(
        len(drafts.tokens), generator=options.generator, device=full_nV.device, dtype=full_nV.dtype
    ).tolist()
    for number, (token, draft_V) in enumerate(zip(drafts.tokens, drafts.probs, strict=True)):
        if uniform_n[number] * float(draft_V[token]) >= float(full_nV[number, token]):
            left_V = (full_nV[number] - draft_V).clamp_min(0)
            return [*drafts.tokens[:number], int(torch.multinomial(left_V, 1, generator=options.generator))]
    last = int(torch.multinomial(full_nV[-1], 1, generator=options.generator))
    return [*drafts.tokens, last]


def drawn_from(logits_nV: Tensor, options: Drafting) -> Tensor:
    """The distributions from which tokens are drawn, after temperature and top_p (n, V)."""
    kept_nV, order_nV = kept_probabilities(logits_nV, options.temperature, options.top_p)
    return torch.zeros_like(kept_nV).scatter(-1, order_nV, kept_nV / kept_nV.sum(-1, keepdim=True))
