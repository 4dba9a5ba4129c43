"""A text that is continued token by token: what is computed next, drawing, log-probabilities, stop strings.

Axes: T tokens, V vocabulary, n texts.
"""

from codecs import getincrementaldecoder
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from raytraced.models.caches import KVCache, place_before_last, window_start
from raytraced.models.gpt import GPT
from raytraced.models.sampling import draw_each, draw_token, kept_probabilities
from raytraced.serve.models import Served


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, and when a text ends."""

    length: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[bytes, ...] = ()
    """strings that end the text; they are not part of it"""
    top_logprobs: int | None = None
    """how many of the likeliest tokens are stated with each token; None for no log-probabilities"""
    score_prompt: bool = False
    """whether the log-probabilities of the prompt's own tokens are computed first"""


@dataclass(frozen=True)
class GeneratedToken:
    """One token, and the text that is certain once it is drawn."""

    token: int
    experts: int
    text: str
    stop: str | None = None
    logprob: float | None = None
    top_logprobs: dict[int, float] | None = None

    def fields(self) -> dict[str, Any]:
        """The token as it is sent: without what was not asked for."""
        fields = {"text": self.text, "token": self.token, "experts": self.experts, "stop": self.stop}
        if self.logprob is not None:
            fields |= {"logprob": self.logprob, "top_logprobs": self.top_logprobs}
        return fields if self.stop else {name: value for name, value in fields.items() if name != "stop"}


class TextBuffer:
    """Bytes -> text, held back while they could begin a stop string or are part of a character.

    Args:
        stop: The stop strings.
    """

    def __init__(self, stop: tuple[bytes, ...]) -> None:
        self.stop, self.held = stop, b""
        self.decoder = getincrementaldecoder("utf-8")(errors="replace")

    def add(self, content: bytes) -> tuple[str, bool]:
        """The text that is certain, and whether a stop string was found."""
        self.held += content
        found = [place for place in map(self.held.find, self.stop) if place >= 0]
        if found:
            self.held = self.held[: min(found)]
            return self.flush(), True
        keep = max((overlap(self.held, stop) for stop in self.stop), default=0)
        certain, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return self.decoder.decode(certain), False

    def flush(self) -> str:
        """All that was held back."""
        certain, self.held = self.held, b""
        return self.decoder.decode(certain, final=True)


def overlap(content: bytes, stop: bytes) -> int:
    """The length of the longest end of `content` that is a beginning of `stop`."""
    most = min(len(content), len(stop) - 1)
    return next((length for length in range(most, 0, -1) if content.endswith(stop[:length])), 0)


class Continuation:
    """The tokens that follow a prompt; the same as those of `GPT.generate`. What computes them is the caller's.

    Args:
        served: The language model.
        prompt_1T: The prompt's tokens (1, T).
        sampling: How tokens are drawn.
        seed: Seed of the draws.
        max_experts: Largest number of experts per token, all blocks together.
        stop: How much the output node's rate counts.
    """

    def __init__(
        self,
        served: Served,
        prompt_1T: Tensor,
        sampling: Sampling,
        seed: int,
        max_experts: int | None,
        stop: float | None = None,
    ) -> None:
        assert isinstance(served.model, GPT)
        assert served.codec is not None
        self.model, self.codec, self.sampling, self.max_experts = served.model, served.codec, sampling, max_experts
        self.name, self.stop = served.name, stop
        self.generator = torch.Generator().manual_seed(seed)
        self.tokens: list[int] = prompt_1T[0].tolist()
        self.prompt_1T, self.cache, self.start = prompt_1T, KVCache(), 0
        self.num_drawn = 0
        self.buffer = TextBuffer(sampling.stop)

    def score_prompt(self) -> list[GeneratedToken]:
        """The prompt's own tokens with their log-probabilities; the first token has none."""
        out = self.model(self.prompt_1T, max_experts=self.max_experts, stop=self.stop)
        check_finite(self.name, out.logits)
        logprobs_TV = out.logits[0].float().log_softmax(-1)
        tokens, num_experts = self.prompt_1T[0].tolist(), out.num_experts[0].tolist()
        scored = []
        for place, (token, experts) in enumerate(zip(tokens, num_experts, strict=True)):
            text = self.codec.bytes_of[token].decode(errors="replace")
            if place == 0:
                scored.append(GeneratedToken(token, experts, text))
                continue
            row_V, num = logprobs_TV[place - 1], self.sampling.top_logprobs or 0
            scored.append(GeneratedToken(token, experts, text, None, float(row_V[token]), top_logprobs(row_V, num)))
        return scored

    def pending(self) -> list[int]:
        """The tokens that the model must read before the next one is drawn: one, or all of a new window."""
        start = window_start(len(self.tokens), self.start, self.model.context)
        if start > self.start:
            self.cache, self.start = KVCache(), start
        return self.tokens[self.start + self.cache.get_seq_length() :]

    def before_last(self) -> int:
        """The token before the last one, in the window of the pending tokens; the last one itself where it comes first."""
        return self.tokens[place_before_last(len(self.tokens), self.start)]

    def add(self, token: int, logits_V: Tensor, experts: int) -> GeneratedToken:
        """Append a token that was drawn from these logits."""
        sampling = self.sampling
        self.tokens.append(token)
        self.num_drawn += 1
        text, stopped = self.buffer.add(self.codec.bytes_of[token])
        logprob, top = None, None
        if sampling.top_logprobs is not None:
            logprobs_V = logits_V.float().log_softmax(-1)
            logprob, top = float(logprobs_V[token]), top_logprobs(logprobs_V, sampling.top_logprobs)
        generated = GeneratedToken(token, experts, text, "stop" if stopped else None, logprob, top)
        return self.finish(generated, "length") if not stopped and self.num_drawn == sampling.length else generated

    def finish(self, token: GeneratedToken, reason: str) -> GeneratedToken:
        """The same token as the last one, with all text that was held back."""
        return replace(token, text=token.text + self.buffer.flush(), stop=reason)


def draw_tokens(logits_nV: Tensor, texts: Sequence[Continuation]) -> list[int]:
    """One token per text, drawn as the text's options say; the same as `draw_token` for each of them."""
    drawn = [row for row, text in enumerate(texts) if text.sampling.temperature > 0]
    tokens_n = logits_nV.argmax(-1) if len(drawn) < len(texts) else logits_nV.new_empty(len(texts), dtype=torch.int64)
    if len(drawn) == 1:  # as often as not there is one text
        (row,) = drawn
        text = texts[row]
        sampling = text.sampling
        tokens_n[row] = draw_token(
            logits_nV[row : row + 1], sampling.temperature, sampling.top_p, text.generator
        ).squeeze(0)
    elif drawn:
        samplings = [texts[row].sampling for row in drawn]
        temperatures = logits_nV.new_tensor([[one.temperature] for one in samplings], dtype=torch.float64)
        top_ps = logits_nV.new_tensor([[one.top_p] for one in samplings], dtype=torch.float64)
        kept_nV, order_nV = kept_probabilities(logits_nV[drawn], temperatures, top_ps)
        tokens_n[drawn] = draw_each(kept_nV, order_nV, [texts[row].generator for row in drawn])
    tokens: list[int] = tokens_n.tolist()
    return tokens


class NotFiniteError(ArithmeticError):
    """A model whose answer is NaN or infinite."""


def check_finite(name: str, logits: Tensor) -> None:
    """Refuse an answer that is not finite."""
    if not bool(logits.isfinite().all()):
        raise NotFiniteError(f"{name}: its answer is not finite (NaN or infinity); train or download the model again")


def top_logprobs(logprobs_V: Tensor, num: int) -> dict[int, float]:
    """The likeliest tokens and their log-probabilities."""
    values, tokens = logprobs_V.topk(min(num, len(logprobs_V)))
    return dict(zip(tokens.tolist(), values.tolist(), strict=True))
