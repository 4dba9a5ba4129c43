"""Texts that a decoder continues token by token.

Axes: B texts, T tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from raytraced.errors import require
from raytraced.models.caches import KVCache, place_before_last, window_start
from raytraced.models.drafting import Drafting, generate_drafted
from raytraced.models.planning import plan_words
from raytraced.models.sampling import Drawn, draw_token
from raytraced.models.store_reading import byte_budgets, following, read_ahead
from raytraced.router import Call
from raytraced.rows import flat_stop
from raytraced.sequence import StopPerRow
from raytraced.store.pool import ReadPlan

if TYPE_CHECKING:
    from raytraced.models.gpt import GPT


@dataclass(frozen=True)
class GenerationOptions:
    """The options of `GPT.generate`, which explains them."""

    temperature: float
    top_p: float
    max_experts: int | None
    stop: StopPerRow | None
    experts: float | None
    effort: float | None
    generator: torch.Generator | None
    cached: bool
    max_bytes: int | None
    max_ms: float | None
    draft_experts: int | None
    draft_tokens: int


class TextWindow:
    """Texts that grow token by token, and the part of them that the next pass reads.

    Args:
        prompt_BT: The texts so far.
        context: The most tokens that the model can attend to.
        cached: Whether keys and values are kept; False: every pass reads the whole window.
    """

    def __init__(self, prompt_BT: Tensor, context: int, cached: bool) -> None:
        self.text_BT, self.context, self.cached = prompt_BT, context, cached
        self.cache, self.start = KVCache(), 0

    @property
    def is_full(self) -> bool:
        """Whether the texts have more tokens than the model can attend to."""
        return self.next_start > self.start

    @property
    def begins(self) -> bool:
        """Whether the next pass reads the window from its start."""
        return not self.cached or not self.cache.get_seq_length()

    @property
    def next_start(self) -> int:
        """Where the next pass begins."""
        return window_start(self.text_BT.shape[1], self.start, self.context)

    def begin_again(self) -> None:
        """Go back to the last half of the context."""
        self.cache, self.start = KVCache(), self.next_start

    def pending(self) -> Tensor:
        """The tokens that the next pass reads (B, T)."""
        return self.text_BT[:, self.start + (self.cache.get_seq_length() if self.cached else 0) :]

    def before_last(self) -> Tensor:
        """The token before the last one of each text (B,); the last one itself where the next pass begins with it."""
        return self.text_BT[:, place_before_last(self.text_BT.shape[1], self.next_start)]

    def append(self, token_B: Tensor) -> None:
        """Add a token to each text."""
        self.text_BT = torch.cat((self.text_BT, token_B[:, None]), 1)


@torch.no_grad()
def generate_texts(model: "GPT", prompt_BT: Tensor, num_tokens: int, options: GenerationOptions) -> Iterator[Drawn]:
    """Continue texts; see `GPT.generate`."""
    check_sampling(options, prompt_BT)
    require(
        type(num_tokens) is int and num_tokens >= 0, "num_tokens", repr(num_tokens), "must be a whole number from 0 on"
    )
    stop = model.resolve_budget(options.stop, options.experts, options.effort)
    call = Call("greedy", options.max_experts, stop=flat_stop(stop, prompt_BT.shape[:1]))
    model.check(prompt_BT, None, None)
    if options.draft_experts is not None:
        yield from generate_drafted(model, prompt_BT, num_tokens, drafting_options(options, stop))
        return
    max_bytes, max_ms, grid = options.max_bytes, options.max_ms, model.layer.experts
    limits = {"max_bytes": max_bytes, "max_ms": max_ms}
    own: dict[str, Any] = {name: value for name, value in limits.items() if value is not None}
    window = TextWindow(prompt_BT, model.context, options.cached)
    ahead: ReadPlan | None = None
    try:
        for number in range(num_tokens):
            if window.is_full:
                window.begin_again()
            if max_bytes is not None and window.begins:
                own["read_budgets"] = byte_budgets(model, max_bytes, len(prompt_BT))
            if options.cached:
                own["cache"] = window.cache
            with following(grid, ahead):
                out = model(window.pending(), max_experts=options.max_experts, stop=stop, **own)
            token_B = draw_token(out.logits[:, -1], options.temperature, options.top_p, options.generator)
            window.append(token_B)
            paths = plan_words(model, token_B, window.before_last(), call) if model.path_follows_token else None
            # The next pass runs this token alone, unless it begins again, or there is none.
            is_next = options.cached and number < num_tokens - 1 and not window.is_full
            ahead = read_ahead(grid, paths, by_rank=max_ms is not None) if is_next and max_bytes is None else None
            yield Drawn(token_B, out.num_experts[:, -1], paths)
    finally:  # whoever reads the text may stop before its end
        if ahead is not None:
            ahead.close()


def check_sampling(options: GenerationOptions, prompt_BT: Tensor) -> None:
    """Refuse a temperature, a share of probability or a prompt from which nothing can be drawn."""
    require(options.temperature >= 0, "temperature", options.temperature, "must not be negative")
    require(0 < options.top_p <= 1, "top_p", options.top_p, "must lie in 0 … 1 (0 excluded)")
    require(prompt_BT.shape[-1] >= 1, "prompt", "''", "must have at least one token")


def drafting_options(options: GenerationOptions, stop: StopPerRow | None) -> Drafting:
    """The options of drafting; refuses those that do not go with it."""
    assert options.draft_experts is not None
    cached = None if options.cached else options.cached
    refused = {"max_bytes": options.max_bytes, "max_ms": options.max_ms, "cached": cached}
    for option, other in refused.items():
        require(other is None, option, other, "must be left out with draft_experts")
    return Drafting(
        options.draft_experts,
        options.draft_tokens,
        options.temperature,
        options.top_p,
        options.max_experts,
        stop,
        options.generator,
    )
