"""A language model: a decoder with one grid of experts, a layer of it per block, and one path per token through all blocks.

Axes: B batch, T tokens, n tokens without padding, S tokens that may be attended to, D width, H heads, E = D / H width of a
head, V vocabulary size, R width of what the router reads, L blocks, N experts per block.
"""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal, Self, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from raytraced.errors import require, require_one_of
from raytraced.layer import RoutedLayer, router_width
from raytraced.models.attention import Attention, causal_mask
from raytraced.models.caches import KVCache, TextCaches, multiply_apart, preceding
from raytraced.models.expert_pass import ExpertPass
from raytraced.models.generation import GenerationOptions, generate_texts
from raytraced.models.output import Model, Output, SampleLossFn, gathered, linear_cost, num_parameters
from raytraced.models.paths import Paths, PathTables, within_bytes
from raytraced.models.planning import known_words, plan_pass, plan_words, whole_numbers
from raytraced.models.sampling import Drawn
from raytraced.models.store_reading import byte_budgets, read_planned, time_limit
from raytraced.router import Call, Cost
from raytraced.rows import flat_stop
from raytraced.sequence import StopPerRow
from raytraced.store.budget import ByteBudget

RoutingInput = Literal["block", "token", "embedding", "first-block"]

ROUTING_DIM = 16  # default width of a routing embedding


class Block(nn.Module):
    """A block of the decoder without its experts: attention, and the norms before both parts."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.norm_attention, self.attention = nn.LayerNorm(dim), Attention(dim, num_heads)
        self.norm_experts = nn.LayerNorm(dim)

    def forward(
        self,
        x_BTD: Tensor,
        positions: Tensor,
        mask_BTS: Tensor | None,
        cache: KVCache | TextCaches | None,
        number: int,
        experts: ExpertPass,
    ) -> Tensor:
        """The residual stream (B, T, D) after the attention and the experts of this block, each added to it."""
        attended_BTD = self.attention(self.norm_attention(x_BTD), positions, mask_BTS, cache, number)
        x_BTD = x_BTD + attended_BTD
        return x_BTD + experts.update(number, self.norm_experts(x_BTD))


class GPT(Model):
    """A decoder with routed experts: pre-norm, rotary positions, output weights tied to the embedding.

    All blocks together have one grid of experts and one router: a layer of the grid is a block of the decoder, and attention
    stands between two layers. A router that plans (MRE, planned top-k) chooses a token's path through all blocks at once;
    any other router chooses in every block, by the vectors that reach its experts.

    `max_experts` counts the experts of all blocks together. What a block computes is the next block's input, so an answer
    with another budget is computed from the start.

    Args:
        make_layer: Makes the grid and its router; called once with `num_layers`, the number of blocks, and `routing_dim`.
        dim: Width of the hidden vectors.
        depth: Number of blocks, and of layers of the grid.
        num_heads: Number of attention heads.
        context: The most tokens that the model can attend to.
        vocab_size: Number of different tokens.
        tokenizer: A tokenizer as JSON text, kept with the model; None: tokens are bytes.
        routing_input: What the router reads: the vectors that reach each block's experts ("block"), for routers that do not
            plan; for those that do: a routing embedding of the token ("token"), the model's embedding ("embedding"), or the
            vectors that reach the first block's experts ("first-block"), which depend on the text before, too.
        routing_dim: Width of the routing embedding. Default: 16.
        path_tokens: How many tokens determine a path where the router reads tokens or their embeddings. With 2, every second
            block, from the second on, runs what the path of the token before has there; a text's first token has its own.
            Where `stop` or a path is drawn, both parts are drawn on their own. Experts that a budget leaves keep their weights.
    """

    gradient_checkpointing: bool = False
    """whether blocks are computed again in the backward pass of training, which takes more time and less memory"""
    layer_defaults: ClassVar = {"dim": 96, "hidden": 192, "num_hidden": 1, "weighting": "rates", "input_rank": 16}

    def __init__(
        self,
        make_layer: Callable[..., RoutedLayer],
        dim: int,
        depth: int = 2,
        num_heads: int = 4,
        context: int = 128,
        vocab_size: int = 256,
        tokenizer: str | None = None,
        routing_input: RoutingInput = "block",
        routing_dim: int | None = None,
        path_tokens: int = 1,
    ) -> None:
        super().__init__()
        counts = {"depth": depth, "num_heads": num_heads, "context": context, "vocab_size": vocab_size}
        counts |= {} if routing_dim is None else {"routing_dim": routing_dim}
        for name, value in counts.items():
            require(type(value) is int and value >= 1, name, repr(value), "must be a whole number, at least 1")
        require(dim % (2 * num_heads) == 0, "dim", dim, f"must be a multiple of 2 · num_heads={2 * num_heads}")
        require_one_of("routing_input", routing_input, get_args(RoutingInput))
        self.context, self.vocab_size, self.tokenizer = context, vocab_size, tokenizer
        rule = f"is the width of the routing embedding; leave it out with routing_input={routing_input}"
        require(routing_dim is None or routing_input == "token", "routing_dim", routing_dim, rule)
        self.routing_input: RoutingInput = routing_input
        default = ROUTING_DIM if routing_input == "token" else None
        self.routing_dim = default if routing_dim is None else router_width(dim, routing_dim)
        require(path_tokens in (1, 2) and type(path_tokens) is int, "path_tokens", repr(path_tokens), "must be 1 or 2")
        rule = f"paths depend on no single token with routing_input={routing_input}; leave it out"
        require(path_tokens == 1 or routing_input in ("token", "embedding"), "path_tokens", path_tokens, rule)
        self.path_tokens = path_tokens
        self.embedding = nn.Embedding(vocab_size, dim)
        # logits of about 1 at the start; the stream gets them times √D, vectors of about 1 in every entry
        nn.init.normal_(self.embedding.weight, std=dim**-0.5)
        self.routing_embedding = None if self.routing_dim is None else nn.Embedding(vocab_size, self.routing_dim)
        self.blocks = nn.ModuleList(Block(dim, num_heads) for _ in range(depth))
        self.layer = make_layer(num_layers=depth, routing_dim=self.routing_dim)
        if self.routing_embedding is not None:
            self.routing_embedding.requires_grad_(self.layer.router.learns)
        planned = routing_input != "block"
        rule = "must be token, embedding or first-block" if self.layer.router.plans else "must be block"
        router = type(self.layer.router).__name__
        require(planned == self.layer.router.plans, "routing_input", routing_input, f"{rule} with the router {router}")
        self.norm = nn.LayerNorm(dim)
        self.answers_along_the_way = self.layer.answers_along_the_way
        self.path_tables = PathTables()

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode; looked-up paths are computed anew."""
        self.path_tables.clear()
        return super().train(mode)

    def answer(
        self,
        encoded: Tensor,
        call: Call,
        mask: Tensor | None = None,
        sample_loss_fn: SampleLossFn | None = None,
        cache: KVCache | TextCaches | None = None,
        max_bytes: int | None = None,
        read_budgets: list[ByteBudget] | None = None,
        max_ms: float | None = None,
    ) -> Output:
        """Compute the logits of the token after each token; with a cache, tokens follow those that it holds.

        With `TextCaches`, each text has a length of its own, T is 1, and no text has an effect on another where the layer
        computes rows independently.

        Args:
            encoded: Tokens (B, T), or their embeddings (B, T, D).
            call: Options of the call.
            mask: (B, S), bool; False where there is padding. It covers all tokens, those of the cache first.
            sample_loss_fn: In training: logits -> loss of each text (B,).
            cache: Keys and values of the tokens before, to which those of these tokens are added. Default: none.
            max_bytes: A token runs the experts that are in memory, and the first of the others, by rank, that so many bytes
                hold.
            read_budgets: With `max_bytes`, one per text: what the tokens before read. Default: fresh ones.
            max_ms: Experts that have not arrived so many milliseconds after the call are left out; they are read by rank.

        Returns:
            Output with `logits` (B, T, V) and one route, whose leading shape is (B, T).
        """
        limit = None if max_ms is None else time_limit(self, max_ms)
        rule = "must be False (exit_loss 0): a block's output is the next block's input, not an answer"
        require(not call.exits, "exits", call.exits, rule)
        self.check(encoded, mask, cache)
        start = 0 if cache is None else cache.get_seq_length()
        positions_T = torch.arange(start, start + encoded.shape[1], device=encoded.device)
        positions = cache.positions(encoded.device) if isinstance(cache, TextCaches) else positions_T
        rows_B = torch.arange(len(encoded), device=encoded.device) if call.rows is None else call.rows
        rows_B = torch.zeros_like(rows_B) if isinstance(cache, TextCaches) else rows_B  # each draws as if it were alone
        stop = call.stop
        if isinstance(stop, Tensor) and stop.shape == (len(encoded),):  # a number per text holds for all of its tokens
            stop = stop[:, None].expand(encoded.shape[:2])
        call = call._replace(rows=rows_B[:, None] * self.context + positions, stop=stop)
        experts = ExpertPass(self.layer, call, None if mask is None else mask[:, start:])
        mask_BTS = causal_mask(positions_T, start, mask)
        x_BTD = self._embed(encoded) * self.embedding.embedding_dim**0.5
        if self.path_follows_token:
            experts.plan = plan_pass(self, encoded, mask, cache, experts)
        if max_bytes is not None:
            read_budgets = read_budgets or byte_budgets(self, max_bytes, len(encoded))
            texts_BT = torch.arange(len(encoded))[:, None].expand(encoded.shape[:2])
            experts.plan = within_bytes(experts.plan, experts.flat(texts_BT), read_budgets)
        with read_planned(self.layer.experts, experts.plan, limit):
            for number, block in enumerate(self.blocks):
                arguments = (x_BTD, positions, mask_BTS, cache, number, experts)
                if self._recomputes(cache) and experts.prepare(x_BTD):
                    # Not re-entrant: the router's losses leave the block by `experts`, not by its output.
                    x_BTD = checkpoint(block, *arguments, use_reentrant=False)
                else:
                    x_BTD = block(*arguments)
        last_BTD, weight_VD = self.norm(x_BTD), self.embedding.weight
        multiply = multiply_apart if isinstance(cache, TextCaches) else linear
        logits_BTV = multiply(last_BTD, weight_VD)
        return gathered(logits_BTV, [experts.output(x_BTD, limit.missed if limit else ())], sample_loss_fn)

    def _exit_early(
        self,
        inputs: Tensor,
        call: Call,
        confidence: Any,
        max_ms: float | None,
        exit_every: Any,
        mask: Tensor | None,
        **own: Any,
    ) -> Output:
        """A decoder has one answer; with `max_ms` alone, experts of a store that do not arrive in time are left out of it."""
        if confidence is not None or exit_every is not None:
            return super()._exit_early(inputs, call, confidence, max_ms, exit_every, mask, **own)
        return self.answer(self.encode(inputs), call, mask, max_ms=max_ms, **own)

    def _recomputes(self, cache: KVCache | TextCaches | None) -> bool:
        """Whether blocks run a second time in the backward pass, in place of keeping what they computed."""
        asked = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        rule = "leave it out with gradient_checkpointing: a block that runs twice would fill it twice"
        require(not asked or cache is None, "cache", type(cache).__name__, rule)
        return asked

    def encode(self, inputs: Tensor) -> Tensor:
        """Tokens as long numbers, whatever their type is, or embeddings as they are."""
        return inputs if inputs.is_floating_point() else whole_numbers("tokens", inputs)

    def _embed(self, tokens_BT: Tensor) -> Tensor:
        """The embeddings of tokens (B, T, D), or the vectors that were given in their place."""
        if tokens_BT.is_floating_point():
            return tokens_BT
        try:
            vectors_BTD: Tensor = self.embedding(tokens_BT)
        except IndexError as error:  # not checked before: that would wait for a GPU
            raise ValueError(f"tokens: some are not in 0 … {self.vocab_size - 1}, the vocabulary") from error
        return vectors_BTD

    @property
    def path_follows_token(self) -> bool:
        """Whether a token's path through all blocks is known when the token is known: it consists of rows of a table."""
        return self.routing_input in ("token", "embedding")

    @property
    def routing_weight(self) -> Tensor:
        """The embedding by which paths are planned (V, R)."""
        return (self.embedding if self.routing_embedding is None else self.routing_embedding).weight

    def routing_parameters(self) -> list[Tensor]:
        return [] if self.routing_embedding is None else [self.routing_embedding.weight]

    @torch.no_grad()
    def resize_routing_embedding(self) -> None:
        """Give the routing embedding as many rows as the vocabulary has words; new rows are drawn, others stay."""
        if self.routing_embedding is not None and len(self.routing_embedding.weight) != self.vocab_size:
            old_VR = self.routing_embedding.weight
            new_VR = torch.randn(self.vocab_size, old_VR.shape[1]).to(old_VR)
            num = min(len(old_VR), self.vocab_size)
            new_VR[:num] = old_VR[:num]
            self.routing_embedding = nn.Embedding.from_pretrained(new_VR, freeze=not old_VR.requires_grad)

    def routing_vectors(self, tokens_n: Tensor) -> Tensor:
        """What the router reads of tokens (n,): the routing embedding, or the embedding as the first block gets it (n, R)."""
        if self.routing_embedding is not None:
            vectors_nR: Tensor = self.routing_embedding(tokens_n)
            return vectors_nR
        return self._embed(tokens_n) * self.embedding.embedding_dim**0.5

    @torch.no_grad()
    def plan(
        self,
        tokens: Tensor,
        *,
        before: Tensor | None = None,
        stop: StopPerRow | None = None,
        max_experts: int | None = None,
        experts: float | None = None,
        effort: float | None = None,
    ) -> Paths:
        """Find the paths of tokens through all blocks; nothing runs.

        Args:
            tokens: Tokens of any shape (...).
            before: The token before each of them (...), where paths depend on two tokens. Default: the last axis is a text,
                whose first token stands before itself.
            stop: As for `forward`: a number, or a tensor like the tokens (...).
            experts, effort: As for `forward`.
            max_experts: At most this many experts per token, all blocks together. Default: no limit.

        Returns:
            Paths with `active` (..., L, N), `weights` (..., L, N), `nodes` (..., S) in order of activation, `num_active`
            (...) and `macs` (...); its `experts_by_block()` are the experts to fetch.
        """
        rule = "a token's path depends on the text before it; only with token or embedding is it known beforehand"
        require(self.path_follows_token, "routing_input", self.routing_input, f"{self.name}: {rule}")
        tokens = known_words("tokens", tokens, self.vocab_size)
        if before is None:
            before = preceding(tokens) if tokens.ndim else tokens
        else:
            require(self.path_tokens > 1, "before", "[…]", "is for paths that depend on two tokens; leave it out")
            before = known_words("before", before, self.vocab_size)
            rule = f"must be {tuple(tokens.shape)}, as tokens"
            require(before.shape == tokens.shape, "before", tuple(before.shape), rule)
        stop = flat_stop(self.resolve_budget(stop, experts, effort), tokens.shape)
        return plan_words(self, tokens, before, Call("greedy", max_experts, stop=stop))

    def paths(
        self,
        *,
        stop: StopPerRow | None = None,
        max_experts: int | None = None,
        experts: float | None = None,
        effort: float | None = None,
    ) -> Paths:
        """The table of all paths: one row for every word of the vocabulary.

        Where paths depend on two tokens, a row is the path of a word that follows itself: that of word b after word a has
        blocks 1, 3, … of row b and blocks 2, 4, … of row a.

        Args:
            stop, experts, effort: As for `forward`.
            max_experts: At most this many experts per token, all blocks together. Default: no limit.

        Returns:
            Paths with the leading shape (V,), as from `plan`.
        """
        words_V = torch.arange(self.vocab_size, device=self.embedding.weight.device)
        own = words_V if self.path_tokens > 1 else None
        return self.plan(words_V, before=own, stop=stop, max_experts=max_experts, experts=experts, effort=effort)

    def check(self, tokens_BT: Tensor, mask: Tensor | None, cache: KVCache | TextCaches | None) -> None:
        """Refuse an input that is not a batch of tokens or of embeddings, or that is too long."""
        if tokens_BT.ndim != 2 + tokens_BT.is_floating_point():
            raise ValueError(
                f"tokens are {tokens_BT.dtype} {tuple(tokens_BT.shape)}: must be whole numbers (batch, tokens)"
            )
        length = tokens_BT.shape[1] + (0 if cache is None else cache.get_seq_length())
        require(length <= self.context, "tokens", length, f"must be at most context={self.context}")
        fits = mask is None or mask.shape == (len(tokens_BT), length)
        rule = "must be torch.bool, False where there is padding"
        require(mask is None or getattr(mask, "dtype", None) == torch.bool, "mask", getattr(mask, "dtype", "[…]"), rule)
        if isinstance(cache, TextCaches):
            fits = mask is None and tokens_BT.shape[:2] == (len(cache.caches), 1)
            require(
                fits, "tokens", tuple(tokens_BT.shape), f"must be ({len(cache.caches)}, 1), one per cache, unmasked"
            )
        require(fits, "mask", getattr(mask, "shape", None), f"must be ({len(tokens_BT)}, {length}), all tokens so far")

    def cost(self, inputs: Tensor, out: Output) -> dict[str, Cost]:
        """What each token cost, by part; a path that depends on tokens alone is looked up and costs nothing."""
        head = Cost(self.embedding.weight.numel(), self.embedding.weight.numel() + num_parameters(self.norm))
        # the attention scores of a token, and the weighted sum of values, over all tokens up to its own
        attended_T = 2 * self.embedding.embedding_dim * torch.arange(1, inputs.shape[1] + 1, device=inputs.device)
        macs, parameters = 0 * attended_T, 0
        for block in self.blocks:
            assert isinstance(block, Block)
            parts = (linear_cost(block.attention.inputs), linear_cost(block.attention.output))
            macs = macs + attended_T + sum(int(part.macs) for part in parts)
            parameters += num_parameters(block)
        grid = self.layer.cost(out.routes[0])
        routing = Cost(0, 0) if self.path_follows_token else grid["routing"]
        return {"input": Cost(macs, parameters), "routing": routing, "experts": grid["experts"], "head": head}

    def generate(
        self,
        prompt: Tensor,
        num_tokens: int,
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        max_experts: int | None = None,
        stop: StopPerRow | None = None,
        experts: float | None = None,
        effort: float | None = None,
        generator: torch.Generator | None = None,
        cached: bool = True,
        max_bytes: int | None = None,
        max_ms: float | None = None,
        draft_experts: int | None = None,
        draft_tokens: int = 4,
    ) -> Iterator[Drawn]:
        """Continue texts, token by token.

        A text that fills the context goes on from its last half, so that positions stay those of training.

        Args:
            prompt: The texts so far (B, T).
            num_tokens: How many tokens to draw.
            temperature: Divides the logits; 0 takes the likeliest token.
            top_p: Draw from the likeliest tokens whose probabilities sum to this.
            max_experts: At most this many experts per token, all blocks together. Default: no limit.
            stop: How much the output node's rate counts: a number, or one per text (B,); smaller values run more experts.
                Default: the model's own.
            experts, effort: As for `forward`.
            generator: Source of random numbers. Default: PyTorch's global generator.
            cached: Whether to keep keys and values; False computes every window from the start, with the same result.
            max_bytes: Of a store: the most bytes that a token may read; its experts of higher rank are left out where they
                are not in memory. The same number gives the same text. Default: no limit.
            max_ms: Of a store: how many milliseconds a pass, over the prompt or over one token, waits for experts; those that
                have not arrived by then are left out. They are read in the order of rank, so the last ranks are missing. The
                text depends on the speed of the disk. Default: no limit.
            draft_experts: Draft tokens with at most this many experts each, and check several in one pass with the full
                budget (speculative decoding), for one text. With temperature 0 the text is the same as without drafts; else
                it has the same distribution, but a seed gives another text. Default: no drafts.
            draft_tokens: How many tokens are drafted before each check.

        Yields:
            Drawn with `tokens` (B,), `num_experts` (B,), and `paths` of these tokens where the token alone decides.
        """
        options = GenerationOptions(
            temperature=temperature,
            top_p=top_p,
            max_experts=max_experts,
            stop=stop,
            experts=experts,
            effort=effort,
            generator=generator,
            cached=cached,
            max_bytes=max_bytes,
            max_ms=max_ms,
            draft_experts=draft_experts,
            draft_tokens=draft_tokens,
        )
        return generate_texts(self, prompt, num_tokens, options)
