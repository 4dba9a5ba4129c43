"""Keys and values of texts: of texts of one length together, or of texts that each have a length and a cache of their own.

Axes: B texts, T tokens, S tokens that may be attended to, D width, H heads, E = D / H width of a head.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

SMALL_MATRIX = 400  # entries


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

    def crop(self, length: int) -> None:
        """Forget all tokens but the first `length`."""
        for block, (keys, values) in self.blocks.items():
            self.blocks[block] = keys[:, :, :length], values[:, :, :length]


def window_start(length: int, start: int, context: int) -> int:
    """Where the part of a text begins that the next pass attends to.

    Once that part is longer than the context, it begins again at the last half of the context, so that positions stay those
    of training.

    Args:
        length: Number of tokens of the text.
        start: Where that part began so far.
        context: The most tokens that the model can attend to.
    """
    return start if length - start <= context else length - max(1, context // 2)


def place_before_last(length: int, start: int) -> int:
    """The place of the token before the last one of a text; of the last one itself if the part from `start` on is only it."""
    return max(length - 2, start)


def preceding(tokens: Tensor) -> Tensor:
    """The token before each token of texts (..., T); the first token of a text stands before itself."""
    return torch.cat((tokens[..., :1], tokens[..., :-1]), -1)


def tokens_before(tokens_BT: Tensor, mask_BS: Tensor | None, cache: "KVCache | TextCaches | None", slot: int) -> Tensor:
    """The token before each token (B, T); the first token of a text stands before itself.

    Args:
        tokens_BT: The tokens of this pass.
        mask_BS: False where there is padding, for all tokens so far; None: no padding.
        cache: A cache of keys and values, or of several texts; it then keeps the tokens as well.
        slot: The number under which the cache keeps them: one that no block has.
    """
    if isinstance(cache, TextCaches):
        return cache.tokens_before(tokens_BT, slot)
    all_BS, num = tokens_BT, tokens_BT.shape[1]
    if cache is not None:
        all_BS = kept_tokens(cache, tokens_BT, slot)
    before_BT = preceding(all_BS)[:, -num:]
    if mask_BS is not None:
        is_known_BT = torch.cat((torch.zeros_like(mask_BS[:, :1]), mask_BS[:, :-1]), 1)[:, -num:]
        before_BT = torch.where(is_known_BT, before_BT, tokens_BT)
    return before_BT


def kept_tokens(cache: KVCache, tokens_BT: Tensor, slot: int) -> Tensor:
    """All tokens so far (B, S). They are kept as keys of one entry: what crops or reorders a cache does so with them."""
    layers = getattr(cache, "layers", None)  # of a cache of transformers, which makes as many as there are blocks
    while layers and len(layers) <= slot:
        layers.append(type(layers[0])())
    tokens_B1T1 = tokens_BT[:, None, :, None]
    return cache.update(tokens_B1T1, tokens_B1T1, slot)[0][:, 0, :, 0]


class TextCaches:
    """The caches of several texts of different lengths, for one new token of each.

    Each text's matrix products and its attention are computed as if the text were alone: the order in which PyTorch sums
    depends on the number of rows, and a text must not depend on who else is in the batch.

    Args:
        caches: A cache per text, which holds (1, H, S, E).
    """

    def __init__(self, caches: Sequence[KVCache]) -> None:
        self.caches = caches

    def get_seq_length(self) -> int:
        """How many tokens the longest text has."""
        return max(cache.get_seq_length() for cache in self.caches)

    def positions(self, device: torch.device) -> Tensor:
        """The position of the new token of each text (B, 1)."""
        return torch.tensor([[cache.get_seq_length()] for cache in self.caches], device=device)

    def tokens_before(self, tokens_B1: Tensor, slot: int) -> Tensor:
        """The token before the new token of each text (B, 1)."""
        kept = [kept_tokens(cache, new_11, slot) for cache, new_11 in zip(self.caches, tokens_B1.split(1), strict=True)]
        return torch.cat([all_1S[:, max(0, all_1S.shape[1] - 2)][:, None] for all_1S in kept])

    def attend(self, queries_BHTE: Tensor, keys_BHTE: Tensor, values_BHTE: Tensor, block: int) -> Tensor:
        """Append the new token of each text, and mix the values of the text's tokens (B, H, 1, E)."""
        mixed = []
        parts = zip(self.caches, queries_BHTE.split(1), keys_BHTE.split(1), values_BHTE.split(1), strict=True)
        for cache, queries, new_keys, new_values in parts:
            keys, values = cache.update(new_keys, new_values, block)
            mixed.append(scaled_dot_product_attention(queries.clone(), keys, values))
        return torch.cat(mixed)


class NextTokens(TextCaches):
    """The cache of one text for several next tokens of it, each computed as if it alone had followed those before it.

    The tokens take the place of texts (B = number of tokens, T = 1): what PyTorch computes for a token is then, bit for bit,
    what it computes where tokens are read one by one, which a pass over several tokens of a text does not promise.

    Args:
        cache: The cache of the text, which holds (1, H, S, E).
        num_tokens: How many tokens follow.
    """

    def __init__(self, cache: KVCache, num_tokens: int) -> None:
        super().__init__([cache] * num_tokens)
        self.start = cache.get_seq_length()

    def get_seq_length(self) -> int:
        """How many tokens stand before the last one."""
        return self.start + len(self.caches) - 1

    def positions(self, device: torch.device) -> Tensor:
        """The position of each token (B, 1)."""
        return torch.arange(self.start, self.start + len(self.caches), device=device)[:, None]

    def attend(self, queries_BHTE: Tensor, keys_BHTE: Tensor, values_BHTE: Tensor, block: int) -> Tensor:
        """Append all tokens, and mix for each of them the values of the tokens up to it (B, H, 1, E)."""
        new_keys, new_values = (new_BHTE.transpose(0, 2) for new_BHTE in (keys_BHTE, values_BHTE))
        keys, values = self.caches[0].update(new_keys, new_values, block)
        mixed = []
        for number, queries in enumerate(queries_BHTE.split(1)):
            end = self.start + number + 1
            mixed.append(scaled_dot_product_attention(queries.clone(), keys[:, :, :end], values[:, :, :end]))
        return torch.cat(mixed)


def multiply_apart(x_B1K: Tensor, weight_OK: Tensor) -> Tensor:
    """What a linear layer without bias makes of each text's vector by itself (B, 1, O).

    A batch of products sums each row as the product of one row does, a product of several rows in another order. For small
    matrices PyTorch's batches have a loop of their own.
    """
    if weight_OK.numel() < SMALL_MATRIX:
        return torch.cat([linear(x_11K.clone(), weight_OK) for x_11K in x_B1K.split(1)])
    weight_KO = weight_OK.t()
    return torch.bmm(x_B1K, weight_KO.expand(len(x_B1K), *weight_KO.shape))
