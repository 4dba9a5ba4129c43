"""Random numbers as a pure function of (seed, row, step): the same draws whatever the batch order, split or thread count.

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") in 64-bit integer arithmetic; the fused
kernel computes the same words. Axes: B batch, K candidates (nodes, then the output node), W = 4 words of a block.
"""

from collections.abc import Callable

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


def new_seed(generator: torch.Generator | None, device: torch.device) -> Tensor:
    """One 64-bit seed from a generator (PyTorch's global one where it is None)."""
    check_generator(generator)
    source = device if generator is None else generator.device
    return torch.randint(2**63 - 1, (), generator=generator, device=source).to(device)


def check_generator(generator: torch.Generator | None) -> None:
    """Refuse what draws cannot come from, a bare seed for instance."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ValueError(f"generator={generator!r}: must be a torch.Generator, or None for PyTorch's global one")


def fixed_draws(generator: torch.Generator | None) -> Callable[[], torch.Generator]:
    """A function that gives a generator in the same state at every call: calls that use it draw alike.

    Where there is none, a seed is taken from PyTorch's global one.
    """
    if generator is None:
        generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
    check_generator(generator)
    state = generator.get_state()

    def again() -> torch.Generator:
        generator.set_state(state)
        return generator

    return again
