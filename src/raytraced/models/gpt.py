"""A language model: a decoder whose feed-forward parts are routed layers.

Axes: B batch, T tokens, S tokens that may be attended to, D width, H heads, E = D / H width of a head,
V vocabulary size.
"""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

from raytraced.errors import require
from raytraced.layer import Call, Cost, LayerOutput, RoutedLayer
from raytraced.models.output import Model, Output, SampleLossFn, gathered, linear_cost, num_parameters

BASE = 10_000.0  # of the rotary wavelengths


class KVCache:
    """The keys and values (B, H, S, E) of each block for the tokens so far.

    It has the methods of transformers' caches, any growing one of which can be used in its place.
    """

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[Tensor, Tensor]] = {}

    def get_seq_length(self) -> int:
        """How many tokens it holds."""
        return self.blocks[0][0].shape[2] if self.blocks else 0

    def update(self, keys: Tensor, values: Tensor, block: int) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens to a block; returns those of all tokens."""
        if block in self.blocks:
            before = self.blocks[block]
            keys, values = torch.cat((before[0], keys), 2), torch.cat((before[1], values), 2)
        self.blocks[block] = keys, values
        return keys, values


class Drawn(NamedTuple):
    """A token drawn for each text, and how many experts ran for its logits, all blocks together."""

    tokens: Tensor  # (B,)
    num_experts: Tensor  # (B,)


def rotate(heads_BHTE: Tensor, positions_T: Tensor) -> Tensor:
    """Rotary positions: rotate each pair of entries by an angle proportional to the position."""
    half, dtype = heads_BHTE.shape[-1] // 2, torch.promote_types(heads_BHTE.dtype, torch.float32)
    waves_E2 = BASE ** -(torch.arange(half, device=positions_T.device, dtype=dtype) / half)
    angles_TE2 = positions_T[:, None] * waves_E2
    cos, sin = angles_TE2.cos().to(heads_BHTE.dtype), angles_TE2.sin().to(heads_BHTE.dtype)
    one, other = heads_BHTE.chunk(2, -1)
    return torch.cat((one * cos - other * sin, one * sin + other * cos), -1)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.inputs, self.output = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)

    def forward(
        self, x_BTD: Tensor, positions_T: Tensor, mask_BTS: Tensor | None, cache: KVCache | None, block: int
    ) -> Tensor:
        """(B, T, D) -> (B, T, D); the mask says which tokens may be attended to, None: all earlier ones."""
        queries, keys, values = self.inputs(x_BTD).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        queries, keys = rotate(queries, positions_T), rotate(keys, positions_T)
        if cache is not None:
            keys, values = cache.update(keys, values, block)
        # A single new token may attend to all.
        is_causal = mask_BTS is None and queries.shape[2] > 1
        mask = None if mask_BTS is None else mask_BTS[:, None]
        mixed_BHTE = scaled_dot_product_attention(queries, keys, values, mask, is_causal=is_causal)
        out: Tensor = self.output(mixed_BHTE.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """Attention, then a routed layer, each on normalised vectors and added to the residual stream."""

    def __init__(self, layer: RoutedLayer, dim: int, num_heads: int) -> None:
        super().__init__()
        self.norm_attention, self.attention = nn.LayerNorm(dim), Attention(dim, num_heads)
        self.norm_layer, self.layer = nn.LayerNorm(dim), layer

    def forward(self, x_BTD: Tensor, *place: Any, **call: Any) -> tuple[Tensor, LayerOutput]:
        x_BTD = x_BTD + self.attention(self.norm_attention(x_BTD), *place)
        out: LayerOutput = self.layer(self.norm_layer(x_BTD), **call)
        # `update`, not `hidden`: the residual stream of the decoder holds vectors before the norm.
        return x_BTD + out.update, out


class GPT(Model):
    """A decoder with routed experts: pre-norm, rotary positions, output weights tied to the embedding.

    A budget holds per block: with `max_experts=2` a token runs at most two experts in each of them. A block's output is the
    next block's input, so an answer with another budget is computed from the start.

    Args:
        make_layer: Makes the routed layer of a block; called once per block.
        dim: Width of the hidden vectors.
        depth: Number of blocks.
        num_heads: Number of attention heads.
        context: The most tokens that the model can attend to.
        vocab_size: Number of different tokens.
        tokenizer: A tokenizer as JSON text, kept with the model; None: tokens are bytes.
    """

    layer_defaults: ClassVar = {"dim": 96, "hidden": 192, "num_hidden": 1, "weighting": "rates", "input_rank": 16}

    def __init__(
        self,
        make_layer: Callable[[], RoutedLayer],
        dim: int,
        depth: int = 2,
        num_heads: int = 4,
        context: int = 128,
        vocab_size: int = 256,
        tokenizer: str | None = None,
    ) -> None:
        super().__init__()
        counts = {"depth": depth, "num_heads": num_heads, "context": context, "vocab_size": vocab_size}
        for name, value in counts.items():
            require(type(value) is int and value >= 1, name, repr(value), "must be a whole number, at least 1")
        require(dim % (2 * num_heads) == 0, "dim", dim, f"must be a multiple of 2 · num_heads={2 * num_heads}")
        self.context, self.vocab_size, self.tokenizer = context, vocab_size, tokenizer
        self.embedding = nn.Embedding(vocab_size, dim)
        # logits of about 1 at the start; the stream gets them times √D, vectors of about 1 in every entry
        nn.init.normal_(self.embedding.weight, std=dim**-0.5)
        self.blocks = nn.ModuleList(Block(make_layer(), dim, num_heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.answers_along_the_way = self.routed_layers()[0].answers_along_the_way

    def answer(
        self,
        encoded: Tensor,
        call: Call,
        mask: Tensor | None = None,
        sample_loss_fn: SampleLossFn | None = None,
        cache: KVCache | None = None,
    ) -> Output:
        """Tokens (B, T) -> the logits (B, T, V) of the token after each; with a cache they follow the tokens it holds.

        In place of tokens their embeddings (B, T, D) may be given. A mask (B, S) covers all tokens, those of the cache first.
        """
        rule = "must be False (exit_loss 0): a block's output is the next block's input, not an answer"
        require(not call.exits, "exits", call.exits, rule)
        self.check(encoded, mask, cache)
        start = 0 if cache is None else cache.get_seq_length()
        positions_T = torch.arange(start, start + encoded.shape[1], device=encoded.device)
        rows_B = torch.arange(len(encoded), device=encoded.device) if call.rows is None else call.rows
        options = call._replace(rows=rows_B[:, None] * self.context + positions_T)._asdict()
        options["mask"] = None if mask is None else mask[:, start:]
        mask_BTS = causal_mask(positions_T, start, mask)
        x_BTD, layers = self.embed(encoded) * self.embedding.embedding_dim**0.5, []
        for number, block in enumerate(self.blocks):
            x_BTD, out = block(x_BTD, positions_T, mask_BTS, cache, number, **options)
            layers.append(out)
        return gathered(linear(self.norm(x_BTD), self.embedding.weight), layers, sample_loss_fn)

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """The embeddings of tokens (B, T, D), or the vectors that were given in their place."""
        if tokens_BT.is_floating_point():
            return tokens_BT
        try:
            vectors_BTD: Tensor = self.embedding(tokens_BT)
        except IndexError as error:  # not checked before: that would wait for a GPU
            raise ValueError(f"tokens: some are not in 0 … {self.vocab_size - 1}, the vocabulary") from error
        return vectors_BTD

    def check(self, tokens_BT: Tensor, mask: Tensor | None, cache: KVCache | None) -> None:
        """Refuse an input that is not a batch of tokens or of embeddings, or that is too long."""
        if tokens_BT.ndim != 2 + tokens_BT.is_floating_point():
            raise ValueError(
                f"tokens are {tokens_BT.dtype} {tuple(tokens_BT.shape)}: must be whole numbers (batch, tokens)"
            )
        length = tokens_BT.shape[1] + (0 if cache is None else cache.get_seq_length())
        require(length <= self.context, "tokens", length, f"must be at most context={self.context}")
        fits = mask is None or mask.shape == (len(tokens_BT), length)
        require(fits, "mask", getattr(mask, "shape", None), f"must be ({len(tokens_BT)}, {length}), all tokens so far")

    def cost(self, inputs: Tensor, out: Output) -> dict[str, Cost]:
        head = Cost(self.embedding.weight.numel(), self.embedding.weight.numel() + num_parameters(self.norm))
        # the attention scores of a token, and the weighted sum of values, over all tokens up to its own
        attended_T = 2 * self.embedding.embedding_dim * torch.arange(1, inputs.shape[1] + 1, device=inputs.device)
        total = {"input": Cost(0, 0), "routing": Cost(0, 0), "experts": Cost(0, 0), "head": head}
        for block, route in zip(self.blocks, out.routes, strict=True):
            assert isinstance(block, Block)
            own = [linear_cost(block.attention.inputs), linear_cost(block.attention.output)]
            own += [Cost(attended_T, num_parameters(block.norm_attention) + num_parameters(block.norm_layer))]
            for name, part in [*(("input", each) for each in own), *block.layer.cost(route).items()]:
                sums = total[name]
                total[name] = Cost(sums.macs + part.macs, sums.parameters + part.parameters)
        return total

    @torch.no_grad()
    def generate(
        self,
        prompt: Tensor,
        num_tokens: int,
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        max_experts: int | None = None,
        generator: torch.Generator | None = None,
        cached: bool = True,
    ) -> Iterator[Drawn]:
        """Continue texts, token by token.

        A text that fills the context goes on from its last half, so that positions stay those of training.

        Args:
            prompt: The texts so far (B, T).
            num_tokens: How many tokens to draw.
            temperature: Divides the logits; 0 takes the likeliest token.
            top_p: Draw from the likeliest tokens whose probabilities sum to this.
            max_experts: At most this many experts per token and block. Default: no limit.
            generator: Source of random numbers. Default: PyTorch's global generator.
            cached: Whether to keep keys and values; False computes every window from the start, with the same result.

        Yields:
            Drawn with `tokens` (B,) and `num_experts` (B,).
        """
        require(temperature >= 0, "temperature", temperature, "must not be negative")
        require(0 < top_p <= 1, "top_p", top_p, "must lie in 0 … 1 (0 excluded)")
        require(prompt.shape[-1] >= 1, "prompt", "''", "must have at least one token")
        text_BT, cache, start = prompt, KVCache(), 0
        self.check(prompt, None, None)
        for _ in range(num_tokens):
            if text_BT.shape[1] - start > self.context:
                cache, start = KVCache(), text_BT.shape[1] - max(1, self.context // 2)
            if cached:
                out = self(text_BT[:, start + cache.get_seq_length() :], max_experts=max_experts, cache=cache)
            else:
                out = self(text_BT[:, start:], max_experts=max_experts)
            token_B = draw_token(out.logits[:, -1], temperature, top_p, generator)
            text_BT = torch.cat((text_BT, token_B[:, None]), 1)
            yield Drawn(token_B, out.num_experts[:, -1])


def causal_mask(positions_T: Tensor, start: int, mask_BS: Tensor | None) -> Tensor | None:
    """Which tokens each token may attend to (B, T, S): itself and earlier ones, no padding; None: no mask is needed.

    Positions begin at `start`: reading the first of them from a GPU would wait for all of its queued work.
    """
    num = len(positions_T)
    if mask_BS is None and (start == 0 or num == 1):
        return None
    causal_1TS = torch.ones(1, num, start + num, dtype=torch.bool, device=positions_T.device).tril(start)
    if mask_BS is None:
        return causal_1TS
    # Padding attends to itself: a row of scores without any entry would be NaN.
    diagonal_1TS = causal_1TS & ~causal_1TS.tril(start - 1)
    return (causal_1TS & mask_BS[:, None]) | diagonal_1TS


def draw_token(logits_BV: Tensor, temperature: float, top_p: float, generator: torch.Generator | None = None) -> Tensor:
    """One token per row (B,), from the likeliest tokens whose probabilities sum to top_p; temperature 0: the likeliest."""
    if temperature == 0:
        return logits_BV.argmax(-1)
    logits_BV = logits_BV.double() - logits_BV.amax(-1, keepdim=True)  # at most 0: no temperature is too small for that
    probs_BV, order_BV = (logits_BV / temperature).softmax(-1).sort(stable=True, descending=True)
    before_BV = probs_BV.cumsum(-1) - probs_BV
    kept_BV = probs_BV * (before_BV < top_p)
    drawn_B1 = torch.multinomial(kept_BV, 1, generator=generator)
    return order_BV.gather(-1, drawn_B1)[:, 0]
