"""Random numbers as a pure function of (seed, row, step): the same draws whatever the batch order, split or thread count.

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") in 64-bit integer arithmetic; the fused
kernel computes the same words. Axes: B batch, K candidates (nodes, then the output node), W = 4 words of a block.
"""

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def philox(seed: Tensor, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """Four 32-bit words (..., W) for one 64-bit seed and four broadcastable 32-bit counters, all as int64."""
    key0, key1 = seed & _LOW, (seed >> 32) & _LOW
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    for _ in range(10):
        # int64 products wrap modulo 2^64, which is all that the high and the low word need.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _LOW) ^ c1 ^ key0,
            product1 & _LOW,
            ((product0 >> 32) & _LOW) ^ c3 ^ key1,
            product0 & _LOW,
        )
        key0, key1 = (key0 + _WEYL[0]) & _LOW, (key1 + _WEYL[1]) & _LOW
    return torch.stack((c0, c1, c2, c3), -1)


def _uniform(words: Tensor) -> Tensor:
    """Words -> float64 in the open interval (0, 1), on a grid of 2^-23 that float32 holds exactly too."""
    return ((words >> 9).double() + 0.5) * 2.0**-23


def uniform(seed: Tensor, rows_B: Tensor, step: int) -> Tensor:
    """One uniform number for each row at this step (B,)."""
    low, high, zero = rows_B & _LOW, (rows_B >> 32) & _LOW, torch.zeros_like(rows_B)
    return _uniform(philox(seed, (low, high, zero + step // 4, zero))[:, step % 4])


def exponential(seed: Tensor, rows_B: Tensor, step: int, num_candidates: int) -> Tensor:
    """One standard exponential number for each row and candidate at this step (B, K)."""
    low, high = (rows_B & _LOW)[:, None], ((rows_B >> 32) & _LOW)[:, None]
    block = 1 + torch.arange((num_candidates + 3) // 4, device=rows_B.device)
    words_BJW = philox(seed, (low, high, torch.full_like(low, step), block))
    return -_uniform(words_BJW).flatten(1)[:, :num_candidates].log()


class SameDraws:
    """A generator's seeds, taken when they are first asked for: every call that is given it draws alike."""

    def __init__(self, source: "DrawsFrom") -> None:
        check_generator(source)
        self.source, self.place, self.seeds = source, 0, list[Tensor]()

    def again(self) -> "SameDraws":
        """The same, from the first seed on."""
        self.place = 0
        return self

    def next_seed(self, device: torch.device) -> Tensor:
        """The seed that a call takes next."""
        if self.place == len(self.seeds):
            self.seeds.append(new_seed(self.source, device))
        self.place += 1
        return self.seeds[self.place - 1].to(device)


DrawsFrom = torch.Generator | SameDraws | None
"""where draws come from; None is PyTorch's global generator"""


def new_seed(source: DrawsFrom, device: torch.device) -> Tensor:
    """One 64-bit seed."""
    if isinstance(source, SameDraws):
        return source.next_seed(device)
    check_generator(source)
    place = device if source is None else source.device
    return torch.randint(2**63 - 1, (), generator=source, device=place).to(device)


def check_generator(source: DrawsFrom) -> None:
    """Refuse what draws cannot come from, a bare seed for instance."""
    if source is not None and not isinstance(source, torch.Generator | SameDraws):
        raise ValueError(f"generator={source!r}: must be a torch.Generator, or None for PyTorch's global one")
