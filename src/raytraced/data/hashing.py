"""Random bits as a pure function of counters: the only randomness of this package.

Legend: n samples.  A shuffle or a split depends on its own counters (seed, epoch, sample) and on nothing else:
neither on what was drawn before, nor on the number of ranks, nor on the version of NumPy or PyTorch.
"""

import numpy as np
from numpy.typing import NDArray

# One stream per purpose, so that no two share their bits; the tasks use the other numbers.
SHUFFLE, VALIDATION, TEST = 0, 4, 5


def random_bits(stream: int, seed: int, *counters: int | NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return 64 random bits for each entry of the counters, which broadcast against each other."""
    state = np.zeros(1, dtype=np.uint64)
    for counter in (stream, seed, *counters):
        state = state + np.asarray(counter).astype(np.uint64) + np.uint64(0x9E37_79B9_7F4A_7C15)
        # SplitMix64 finaliser (Steele, Lea and Flood, 2014): a bijection that decorrelates neighbouring states.
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
        state ^= state >> np.uint64(31)
    return state


def permutation(num: int, stream: int, seed: int, *counters: int) -> NDArray[np.int64]:
    """Return the numbers 0 … num-1 in random order (num,): samples sorted by their bits."""
    bits_n = random_bits(stream, seed, *counters, np.arange(num, dtype=np.int64))
    return np.argsort(bits_n, kind="stable").astype(np.int64)
