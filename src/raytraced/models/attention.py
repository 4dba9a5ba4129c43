"""Causal self-attention with rotary positions, over tokens of one call and those that a cache holds.

Axes: B batch, T tokens, S tokens that may be attended to, D width, H heads, E = D / H width of a head.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from raytraced.models.caches import KVCache, TextCaches, multiply_apart

BASE = 10_000.0  # of the rotary wavelengths


def rotate(heads_BHTE: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions, (T,) or (B, T): rotate each pair of entries by an angle proportional to the position."""
    half, dtype = heads_BHTE.shape[-1] // 2, torch.promote_types(heads_BHTE.dtype, torch.float32)
    waves_E2 = BASE ** -(torch.arange(half, device=positions.device, dtype=dtype) / half)
    angles = positions[..., None, :, None] * waves_E2  # (T, E / 2), or (B, 1, T, E / 2)
    cos, sin = angles.cos().to(heads_BHTE.dtype), angles.sin().to(heads_BHTE.dtype)
    one, other = heads_BHTE.chunk(2, -1)
    return torch.cat((one * cos - other * sin, one * sin + other * cos), -1)


def apply_linear(layer: nn.Linear, x_BTD: Tensor, cache: KVCache | TextCaches | None) -> Tensor:
    """A linear layer without bias; where texts have caches of their own, each text's vector is a product of its own."""
    if isinstance(cache, TextCaches):
        return multiply_apart(x_BTD, layer.weight)
    out: Tensor = layer(x_BTD)
    return out


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.inputs, self.output = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)

    def forward(
        self,
        x_BTD: Tensor,
        positions: Tensor,
        mask_BTS: Tensor | None,
        cache: KVCache | TextCaches | None,
        block: int,
    ) -> Tensor:
        """(B, T, D) -> (B, T, D); the mask says which tokens may be attended to, None: all earlier ones."""
        inputs = apply_linear(self.inputs, x_BTD, cache)
        queries, keys, values = inputs.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        queries, keys = rotate(queries, positions), rotate(keys, positions)
        if isinstance(cache, TextCaches):
            mixed_BHTE = cache.attend(queries, keys, values, block)
        else:
            if cache is not None:
                keys, values = cache.update(keys, values, block)
            # A single new token may attend to all.
            is_causal = mask_BTS is None and queries.shape[2] > 1
            mask = None if mask_BTS is None else mask_BTS[:, None]
            mixed_BHTE = scaled_dot_product_attention(queries, keys, values, mask, is_causal=is_causal)
        return apply_linear(self.output, mixed_BHTE.transpose(1, 2).flatten(2), cache)


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
