"""Random bits as a function of counters."""

import numpy as np

from raytraced.data.hashing import permutation, random_bits


def splitmix(state):
    """SplitMix64's next output, in Python's own integers."""
    word = (state + 0x9E3779B97F4A7C15) % 2**64
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) % 2**64
    return word ^ (word >> 31)


def test_bits_are_a_chain_of_splitmix_over_the_counters():
    samples = np.array([0, 5, 2**40], dtype=np.int64)
    expected = [splitmix(splitmix(splitmix(splitmix(3) + 7) + 11) + int(sample)) for sample in samples]
    assert random_bits(3, 7, 11, samples).tolist() == expected


def test_splitmix_gives_the_published_first_output_for_seed_zero():
    # first output of SplitMix64 seeded with 0, as printed with the reference implementation of xoshiro
    assert random_bits(0, 0)[0] == splitmix(splitmix(0))
    assert splitmix(0) == 0xE220A8397B1DCDAF


def test_a_negative_seed_is_another_seed():
    assert random_bits(0, -1)[0] != random_bits(0, 1)[0]


def test_every_bit_is_set_half_of_the_time():
    bits = random_bits(0, 0, np.arange(20000, dtype=np.int64))
    means = np.array([(bits >> np.uint64(bit) & np.uint64(1)).mean() for bit in range(64)])
    # 64 means of 20000 fair coins: 5 standard deviations
    assert np.abs(means - 0.5).max() < 5 * 0.5 / 20000**0.5


def test_permutation_holds_every_number_once():
    assert sorted(permutation(1000, 0, 1, 2).tolist()) == list(range(1000))
