"""Random numbers as a pure function of (seed, row, step): draws do not depend on batch order, batch size or threads.

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") in 64-bit integer arithmetic; the compiled
kernels compute the same words. Axes: B batch, J blocks, K candidates (nodes, then the output node), W = 4 words of a block.
"""

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def philox(seed: Tensor, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """The counter-based generator Philox4x32-10.

    Args:
        seed: A 64-bit seed, a scalar of int64.
        counter: Four 32-bit counters as int64, of shapes that broadcast to (...).

    Returns:
        Four 32-bit words as int64 (..., W).
    """
    key0, key1 = seed & _LOW, (seed >> 32) & _LOW
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    for _ in range(10):
        # int64 products wrap modulo 2^64, which leaves the high and the low word correct.
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
    """Words -> float64 in the open interval (0, 1), multiples of 2^-24 that float32 represents exactly."""
    return ((words >> 9).double() + 0.5) * 2.0**-23


def uniform(seed: Tensor, rows_B: Tensor, step: int) -> Tensor:
    """Draw one uniform number per row.

    Args:
        seed: A 64-bit seed, a scalar of int64.
        rows_B: Row numbers (B,), int64.
        step: Step of the sequence.

    Returns:
        Numbers in (0, 1) (B,), float64.
    """
    low, high, zero = rows_B & _LOW, (rows_B >> 32) & _LOW, torch.zeros_like(rows_B)
    return _uniform(philox(seed, (low, high, zero + step // 4, zero))[:, step % 4])


def log_uniform(seed: Tensor, rows_B: Tensor, low: float, high: float) -> Tensor:
    """Draw one number per row whose logarithm is uniform.

    Args:
        seed: A 64-bit seed, a scalar of int64.
        rows_B: Row numbers (B,), int64.
        low: Lower end of the range, above 0.
        high: Upper end of the range, at least `low`.

    Returns:
        Numbers in low … high (B,), float64.
    """
    return low * (high / low) ** uniform(seed, rows_B, 0)


def exponential(seed: Tensor, rows_B: Tensor, step: int, num_candidates: int) -> Tensor:
    """Draw one standard exponential number per row and candidate.

    Args:
        seed: A 64-bit seed, a scalar of int64.
        rows_B: Row numbers (B,), int64.
        step: Step of the sequence.
        num_candidates: Number of candidates K.

    Returns:
        Numbers above 0 (B, K), float64.
    """
    low, high = (rows_B & _LOW)[:, None], ((rows_B >> 32) & _LOW)[:, None]
    block = 1 + torch.arange((num_candidates + 3) // 4, device=rows_B.device)
    words_BJW = philox(seed, (low, high, torch.full_like(low, step), block))
    return -_uniform(words_BJW).flatten(1)[:, :num_candidates].log()


class ReplayedGenerator:
    """A source of seeds that can be replayed: after `restart`, calls draw the same random numbers again.

    Args:
        source: The generator that the seeds come from, taken when they are first needed; None is PyTorch's global one.
    """

    def __init__(self, source: "RandomSource") -> None:
        check_generator(source)
        self.source, self.place, self.seeds = source, 0, list[Tensor]()

    def restart(self) -> "ReplayedGenerator":
        """Return to the first seed; returns this object."""
        self.place = 0
        return self

    def next_seed(self, device: torch.device) -> Tensor:
        """The next seed, a scalar of int64 on a device."""
        if self.place == len(self.seeds):
            self.seeds.append(new_seed(self.source, device))
        self.place += 1
        return self.seeds[self.place - 1].to(device)


RandomSource = torch.Generator | ReplayedGenerator | None
"""The source of random draws; None is PyTorch's global generator."""


def new_seed(source: RandomSource, device: torch.device) -> Tensor:
    """Take one 64-bit seed from a source.

    Args:
        source: A torch.Generator, a ReplayedGenerator, or None for PyTorch's global generator.
        device: Device of the result.

    Returns:
        A scalar of int64.
    """
    if isinstance(source, ReplayedGenerator):
        return source.next_seed(device)
    check_generator(source)
    place = device if source is None else source.device
    return torch.randint(2**63 - 1, (), generator=source, device=place).to(device)


def check_generator(source: RandomSource) -> None:
    """Raise a ValueError for anything that is not a source of draws, a bare seed for instance."""
    if source is not None and not isinstance(source, torch.Generator | ReplayedGenerator):
        raise ValueError(f"generator={source!r}: must be a torch.Generator, or None for PyTorch's global one")
