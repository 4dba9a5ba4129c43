"""Tokens drawn from logits.

Axes: B texts, V vocabulary size.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from raytraced.models.paths import Paths


class Drawn(NamedTuple):
    """A token drawn for each text, how many experts ran for its logits, and, where it is known, its own path."""

    tokens: Tensor  # (B,)
    num_experts: Tensor  # (B,), all blocks together
    paths: Paths | None = None  # (B, …), of the tokens drawn: which experts will run when these are read
    drafted: bool = False  # whether the token was drafted with a smaller budget, and accepted


def draw_token(logits_BV: Tensor, temperature: float, top_p: float, generator: torch.Generator | None = None) -> Tensor:
    """One token per row (B,), from the likeliest tokens whose probabilities sum to top_p; temperature 0: the likeliest."""
    if temperature == 0:
        return logits_BV.argmax(-1)
    kept_BV, order_BV = kept_probabilities(logits_BV, temperature, top_p)
    drawn_B1 = torch.multinomial(kept_BV, 1, generator=generator)
    return order_BV.gather(-1, drawn_B1)[:, 0]


def draw_each(kept_BV: Tensor, order_BV: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """One token per row (B,) of what `kept_probabilities` returns, each row drawn by a generator of its own.

    Each is the token that `torch.multinomial` draws for the row alone: it divides the probabilities by exponential numbers
    and takes the largest quotient. Only the numbers are drawn row by row here, in memory of their own.
    """
    numbers_BV = torch.stack([kept_BV.new_empty(kept_BV.shape[1]).exponential_(generator=one) for one in generators])
    drawn_B1 = (kept_BV / numbers_BV).argmax(-1, keepdim=True)
    return order_BV.gather(-1, drawn_B1)[:, 0]


def kept_probabilities(logits_BV: Tensor, temperature: float | Tensor, top_p: float | Tensor) -> tuple[Tensor, Tensor]:
    """The probabilities from which a token is drawn, the likeliest first and 0 beyond top_p (B, V), and whose they are."""
    logits_BV = logits_BV.double() - logits_BV.amax(-1, keepdim=True)  # at most 0: no temperature is too small for that
    probs_BV, order_BV = (logits_BV / temperature).softmax(-1).sort(stable=True, descending=True)
    before_BV = probs_BV.cumsum(-1) - probs_BV
    return probs_BV * (before_BV < top_p), order_BV
